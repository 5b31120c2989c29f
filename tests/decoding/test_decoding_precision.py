"""Models made ready for inference: packed ones write what they wrote before, 8-bit ones stay close."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.decoding.test_decoding_model import PROMPTS, VOCAB, tiny_model, tokens
from tformer.build import build_model
from tformer.decoding.generate import generate, inference
from tformer.decoding.precision import QUANTIZE, prepare_inference
from tformer.decoding.settings import GenerationSettings
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.nn.linear import Linear
from tformer.nn.products import PackedProduct, int8_is_possible, prepare_product
from tformer.recipe.model import Model

GREEDY = GenerationSettings(max_new_tokens=12, temperature=0.0)
IDS = torch.tensor([PROMPTS[0]])

packed = pytest.mark.skipif(prepare_product(torch.ones(2, 2), None, "none") is None, reason="no packed products here")
in_8_bits = pytest.mark.skipif(not int8_is_possible(torch.device("cpu")), reason="no 8-bit products here")


def build(heads: Any, **sections: Any) -> Transformer:
    torch.manual_seed(7)
    section = Model(d_model=24, max_seq_len=32, heads=heads, **sections)
    model = build_model(section, vocab_size=VOCAB).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ready(model: Transformer, dtype: torch.dtype, quantize: str = "none") -> Transformer:
    changed = copy.deepcopy(model)
    prepare_inference(changed, dtype, quantize=quantize)
    return changed


def stack(**attention: Any) -> dict[str, Any]:
    return {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 32}, "attention": attention or {"kind": "full"}}


@packed
@pytest.mark.parametrize("positions", ["rope", "alibi", "learned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_packed_model_writes_the_same_tokens(positions: str, dtype: torch.dtype) -> None:
    model = tiny_model(positions)
    model.compute_dtype = dtype
    before = generate(model, PROMPTS, GREEDY)
    prepare_inference(model, dtype)
    assert isinstance(model.decoder.blocks[0].self_attention.qkv.product, PackedProduct)
    assert tokens(generate(model, PROMPTS, GREEDY)) == tokens(before)


@in_8_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_8_bit_logits_are_close_and_written_with(dtype: torch.dtype) -> None:
    model = tiny_model()
    changed = ready(model, dtype, "int8")
    with inference(model), inference(changed):
        expected, found = model(IDS).logits, changed(IDS).logits
    assert found.dtype == torch.float32 and not torch.equal(found, expected)
    assert (found - expected).norm() < 0.06 * expected.norm()
    assert [len(ids) for [ids] in tokens(generate(changed, PROMPTS, GREEDY))] == [12] * len(PROMPTS)


@in_8_bits
def test_8_bit_texts_do_not_depend_on_the_texts_beside_them() -> None:
    model = ready(tiny_model(), torch.float32, "int8")
    with inference(model):
        rows = torch.randint(0, VOCAB, (5, 9))
        whole = model(rows).logits
        for row in range(5):
            torch.testing.assert_close(model(rows[row : row + 1]).logits[0], whole[row], atol=1e-3, rtol=1e-3)


@packed
@pytest.mark.parametrize("positions", ["rope", "alibi", "t5_bias", "shaw", "learned"])
@pytest.mark.parametrize("quantize", ["none", pytest.param("int8", marks=in_8_bits)])
def test_steps_of_few_rows_are_those_of_the_plain_model(positions: str, quantize: str) -> None:
    """Odd sizes, shared keys, values of another size than keys: all that the kernels for few rows meet."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "value_dim": 7}
    decoder = {"num_layers": 2, **sizes, "positions": {"kind": positions}, "feedforward": {"d_ff": 33}}
    model = build([{"kind": "lm"}], decoder=decoder)
    changed = copy.deepcopy(model)
    prepare_inference(changed, torch.bfloat16, quantize=quantize, rows=2)
    ids = torch.randint(0, VOCAB, (2, 9))
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, :2] = False  # padding on the left
    found, expected = _stepwise(changed, ids, mask), _stepwise(model, ids, mask)
    assert found.isfinite().all() and (found - expected).norm() < 0.06 * expected.norm()


def _stepwise(model: Transformer, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits after a prompt as long as the mask, and after each further token."""
    with inference(model):
        cache = model.new_cache(len(ids), ids.shape[1], dtype=model.compute_dtype)
        told = [model(ids[:, : mask.shape[1]], attention_mask=mask, cache=cache).logits_at(-1)]
        told += [model(ids[:, at : at + 1], cache=cache).logits_at(-1) for at in range(mask.shape[1], ids.shape[1])]
    return torch.stack(told)


KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full", "qk_norm": True},
    "additive": {"kind": "additive"},
    "linformer": {"kind": "linformer", "rank": 4},
    "performer": {"kind": "performer"},
    "sliding_window": {"kind": "sliding_window", "window": 4, "global_tokens": 1, "global_projections": True},
    "bigbird": {"kind": "bigbird", "block": 4},
}


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=packed), pytest.param("int8", marks=in_8_bits)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_attention_reads_weights_that_were_let_go(kind: str, quantize: str) -> None:
    heads = [{"kind": "masked_lm"}, {"kind": "classifier", "num_labels": 3}, {"kind": "replaced_token"}]
    model = build(heads, encoder=stack(**KINDS[kind]), embedding={"size": 16})
    changed = ready(model, torch.float32, quantize)
    tolerance = 1e-4 if quantize == "none" else 0.15
    ids = torch.randint(0, VOCAB, (2, 16))
    with inference(model), inference(changed):
        before, after = model(ids), changed(ids)
        for name in model.heads:
            expected, found = before.head(name), after.head(name)
            assert found.isfinite().all() and (found - expected).norm() < tolerance * (expected.norm() + 1), name


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=packed), pytest.param("int8", marks=in_8_bits)])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": [{"kind": "lm"}], "decoder": stack(), "tie": {"output": True}},
        {"heads": [{"kind": "lm", "bias": True, "softcap": 5.0}], "decoder": stack(), "tie": {"output": False}},
        {"heads": [{"kind": "lm"}], "decoder": stack(), "embedding": {"fixnorm": True}},
        {"heads": [{"kind": "lm"}], "decoder": stack(), "embedding": {"size": 12}},
        {"heads": [{"kind": "masked_lm"}], "encoder": stack()},
        {"heads": [{"kind": "masked_lm", "transform": False}], "encoder": stack()},
    ],
    ids=["tied", "own, bias, softcap", "fixnorm", "narrow embeddings", "masked_lm", "masked_lm, no transform"],
)
def test_the_loss_is_that_of_the_logits_that_are_written_with(options: dict[str, Any], quantize: str) -> None:
    model = build(**options)
    [name] = model.heads
    labels = torch.randint(0, VOCAB, (1, 6))
    with inference(model):
        expected = float(model(IDS).loss_terms(name, labels).loss)
        changed = ready(model, torch.float32, quantize)
        after = changed(IDS)
        logits = after.head(name)[0]
        own = torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum")
        chunks = torch.cat(list(after.logit_chunks(name, labels >= 0)))
        loss = after.loss_terms(name, labels).loss
    torch.testing.assert_close(loss, own)
    torch.testing.assert_close(chunks, logits)
    assert float(own) == pytest.approx(expected, rel=1e-4 if quantize == "none" else 0.1)


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=packed), pytest.param("int8", marks=in_8_bits)])
def test_weights_are_let_go_and_still_counted(quantize: str) -> None:
    model = tiny_model()
    table, count = model.embedding.weight, sum(parameter.numel() for parameter in model.parameters())
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    kept = table.clone()
    prepare_inference(model, torch.float32, quantize=quantize)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert layers and all(layer.weight.isnan().all() for layer in layers)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert model.embedding.weight is model.heads["lm"].weight and torch.equal(model.embedding.weight, kept)


def test_an_unknown_kind_of_weights_is_refused_with_the_choices() -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="--quantize: found 'int4'") as raised:
        prepare_inference(model, torch.float32, quantize="int4")
    assert raised.value.hint is not None and all(kind in raised.value.hint for kind in QUANTIZE)


def test_8_bits_are_refused_elsewhere_than_on_a_cpu() -> None:
    model = tiny_model().to("meta")
    with pytest.raises(InputError, match="--quantize int8 needs a CPU") as raised:
        prepare_inference(model, torch.float32, quantize="int8")
    assert raised.value.hint is not None and "--device cpu" in raised.value.hint


@in_8_bits
def test_8_bits_are_refused_beside_fp16() -> None:
    with pytest.raises(InputError, match="found fp16"):
        prepare_inference(tiny_model(), torch.float16, quantize="int8")


@packed
def test_fp16_keeps_the_plain_products() -> None:
    model: Any = ready(tiny_model(), torch.float16)
    assert model.decoder.blocks[0].self_attention.qkv.product is None and model.heads["lm"].product is None
