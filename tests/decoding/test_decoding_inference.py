"""Models in the number formats of inference: bf16, packed and 8-bit products, and what `auto` chooses."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.decoding.random_models import PROMPTS, VOCAB, shaken, tiny_model, tokens
from tformer.build import build_model
from tformer.decoding import inference as inference_module
from tformer.decoding.compilation import prepare_decoding
from tformer.decoding.generate import generate
from tformer.decoding.inference import (
    QUANTIZE,
    _speedup_of_bf16_weights,
    can_quantize,
    cast_matrices,
    decoding_dtype,
    inference,
    inference_dtype,
    prepare_inference,
)
from tformer.decoding.settings import GenerationSettings
from tformer.kernels import library
from tformer.kernels.functions import find
from tformer.model import Transformer
from tformer.nn.linear import Linear
from tformer.nn.products import PackedProduct, prepare_product
from tformer.recipe.model import Model
from tformer.support.errors import InputError

GREEDY = GenerationSettings(max_new_tokens=12, temperature=0.0)
IDS = torch.tensor([PROMPTS[0]])

packed = pytest.mark.skipif(prepare_product(torch.ones(2, 2), None, "none") is None, reason="no packed products here")
in_bf16 = prepare_product(torch.ones(2, 2, dtype=torch.bfloat16), None, "none", kernels=find())
packed_in_bf16 = pytest.mark.skipif(not isinstance(in_bf16, PackedProduct), reason="bf16 is packed by the kernels here")
in_8_bits = pytest.mark.skipif(not can_quantize("int8", torch.device("cpu")), reason="no 8-bit products here")


def test_cast_matrices_rounds_what_training_rounds():
    """fp32 weights cast on each use (training) and matrices cast ahead (inference) give the same logits, bit by bit."""
    model = tiny_model("learned")
    ids = torch.tensor([PROMPTS[0]])
    with inference(model):
        model.compute_dtype = torch.bfloat16
        on_use = model(ids).logits
        cast_matrices(model, torch.bfloat16)
        assert torch.equal(model(ids).logits, on_use)
    assert model.decoder.blocks[0].self_attention.qkv.weight.dtype == torch.bfloat16
    assert model.heads["lm"].weight is model.embedding.weight
    [[completion]] = generate(model, [PROMPTS[0]], GenerationSettings(max_new_tokens=4, logprobs=True))
    assert len(completion.ids) == 4


@pytest.mark.parametrize(
    ("asked", "trained_in", "device", "expected"),
    [
        ("auto", "bf16", "cpu", torch.bfloat16),
        ("auto", "fp32", "cpu", torch.float32),
        ("auto", "fp16", "cpu", torch.float32),
        ("auto", "fp16", "cuda", torch.float16),
        ("auto", "auto", "cpu", torch.float32),
        ("fp32", "bf16", "cpu", torch.float32),
        ("bf16", "fp32", "cpu", torch.bfloat16),
    ],
)
def test_auto_precision_is_that_of_training(monkeypatch, asked, trained_in, device, expected):
    monkeypatch.setattr("tformer.decoding.inference.has_bf16_instructions", lambda: True)
    assert inference_dtype(asked, trained_in=trained_in, device=torch.device(device)) == expected


def test_a_bf16_model_generates_in_fp32_on_a_cpu_without_bf16_instructions(monkeypatch):
    monkeypatch.setattr("tformer.decoding.inference.has_bf16_instructions", lambda: False)
    assert inference_dtype("auto", trained_in="bf16", device=torch.device("cpu")) == torch.float32
    assert inference_dtype("auto", trained_in="bf16", device=torch.device("cuda")) == torch.bfloat16
    assert inference_dtype("bf16", trained_in="bf16", device=torch.device("cpu")) == torch.bfloat16  # as asked


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 instructions, and kernels."""
    if find() is None:
        pytest.skip("no compiler for kernels here")
    monkeypatch.setattr("tformer.decoding.inference.has_bf16_instructions", lambda: False)
    monkeypatch.setattr("tformer.nn.products._packs", lambda dtype: dtype == torch.float32)


@pytest.mark.usefixtures("without_bf16")
def test_such_a_cpu_holds_weights_in_bf16_and_computes_in_fp32() -> None:
    model = tiny_model()
    expected = copy.deepcopy(model)
    for module in expected.modules():
        if isinstance(module, Linear):
            module.weight.data = module.weight.data.bfloat16().float()
    head = expected.heads["lm"]
    head.weight = torch.nn.Parameter(head.weight.detach().bfloat16().float())
    table = model.embedding.weight
    prepare_inference(model, torch.bfloat16, rows=2)
    assert model.compute_dtype == torch.float32 and table.dtype == torch.bfloat16
    expected.embedding.weight.data = model.embedding.weight.detach().float()
    with inference(model), inference(expected):
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize(("speedup", "expected"), [(1.8, torch.bfloat16), (1.0, torch.float32)])
def test_auto_holds_weights_in_bf16_where_that_is_measured_to_be_faster_and_says_so(
    speedup: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.decoding.inference._speedup_of_bf16_weights", lambda *_: speedup)
    monkeypatch.setattr("tformer.decoding.inference.WORTH_A_BUILD", 1)
    given: dict[str, Any] = {"trained_in": "fp32", "model": tiny_model(), "quantize": "none", "rows": 1}
    dtype, note = decoding_dtype("auto", **given)
    assert dtype == expected and (note is not None) == (speedup > 1.2)
    assert note is None or ("1.8 times" in note and "--precision fp32" in note)
    for change in ({"rows": None}, {"rows": 100}, {"quantize": "int8"}):
        assert decoding_dtype("auto", **(given | change)) == (torch.float32, None)
    assert decoding_dtype("fp32", **given) == (torch.float32, None)
    assert decoding_dtype("bf16", **given) == (torch.bfloat16, None)


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize("rows", [1, 16])
def test_the_measurement_multiplies_one_small_weight_a_few_times_and_once_per_process(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does is counted: less than 50 ms on one thread for 50 million numbers and 1.3 billion operations."""
    work = {"prepared": 0, "read": 0, "operations": 0}
    prepare = inference_module.prepare_product

    def counting(weight: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        product = prepare(weight, *arguments, **named) or partial(torch.nn.functional.linear, weight=weight)
        work["prepared"] += weight.numel()

        def call(x: torch.Tensor) -> torch.Tensor:
            work["read"] += weight.numel()
            work["operations"] += 2 * weight.numel() * x.shape[0]
            return product(x)

        return call

    monkeypatch.setattr(inference_module, "prepare_product", counting)
    _speedup_of_bf16_weights.cache_clear()
    kernels = find()
    assert 0.1 < _speedup_of_bf16_weights(kernels, rows) < 20
    assert work["prepared"] <= 13e6 and work["read"] <= 50e6 and work["operations"] <= 1.3e9
    after = dict(work)
    _speedup_of_bf16_weights(kernels, rows)
    assert work == after
    _speedup_of_bf16_weights.cache_clear()


@pytest.fixture
def without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which no kernels were built, and no compiler is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    for name in ("CC", "TFORMER_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    library.forget()
    yield
    library.forget()


def note_of_decoding(parameters: int, **options: Any) -> str | None:
    model = build([{"kind": "lm"}], decoder={"num_layers": 1, "num_heads": 2}, vocab_size=parameters // 24)
    given: dict[str, Any] = {"compile": "auto", "quantize": "none", "rows": 1}
    return prepare_decoding(model, torch.float32, **(given | options))


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux")
@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_a_large_model_says_once_what_would_make_it_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    note = note_of_decoding(2**22)
    assert note is not None and "no C compiler" in note and "sudo apt install gcc" in note and "\n" not in note
    assert note_of_decoding(2**22 - 2**18) is None
    monkeypatch.setenv("TFORMER_KERNELS", "off")  # chosen: a compiler would change nothing
    library.forget()
    assert note_of_decoding(2**22) is None


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux")
def test_without_proc_a_large_model_says_why_it_is_slower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "MAPS", tmp_path / "none")
    monkeypatch.setattr(library, "lacks_compiler", lambda: False)
    library.forget()
    note = note_of_decoding(2**22)
    library.forget()
    assert note is not None and "/proc" in note and "slower" in note


@pytest.mark.skipif(find() is None, reason="no compiler for kernels here")
def test_with_a_compiler_nothing_is_said() -> None:
    assert note_of_decoding(2**22) is None


def build(heads: Any, *, vocab_size: int = VOCAB, **sections: Any) -> Transformer:
    torch.manual_seed(7)
    section = Model(d_model=24, max_seq_len=32, heads=heads, **sections)
    model = build_model(section, vocab_size=vocab_size).eval()
    return shaken(model, 0.1)


def ready(model: Transformer, dtype: torch.dtype, quantize: str = "none") -> Transformer:
    changed = copy.deepcopy(model)
    prepare_inference(changed, dtype, quantize=quantize)
    return changed


def stack(**attention: Any) -> dict[str, Any]:
    return {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 32}, "attention": attention or {"kind": "full"}}


@packed
@pytest.mark.parametrize("positions", ["rope", "alibi", "learned"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=packed_in_bf16)], ids=["fp32", "bf16"]
)
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


@pytest.mark.skipif(find() is None, reason="no compiler for kernels here")
def test_a_model_that_took_a_step_by_the_kernels_can_be_copied() -> None:
    model, ids = tiny_model("learned"), torch.tensor([PROMPTS[0]])
    for module in (model, *(block.self_attention.mechanism for block in model.decoder.layers)):
        module.kernels = find()
    expected = _stepwise(model, ids, torch.ones(1, 3, dtype=torch.long))
    assert torch.equal(_stepwise(copy.deepcopy(model), ids, torch.ones(1, 3, dtype=torch.long)), expected)


KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full", "qk_norm": True},
    "additive": {"kind": "additive"},
    "disentangled": {"kind": "disentangled", "buckets": 8, "max_distance": 20},
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
    with pytest.raises(InputError, match="--quantize: found 'int2'") as raised:
        prepare_inference(model, torch.float32, quantize="int2")
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


# --- whether 8 and 4 bits pay ----------------------------------------------------------------------------------------


@in_8_bits
@pytest.mark.parametrize(
    ("seconds", "said"),
    [((1.0, 3.0), "3.0 times as long"), ((1.0, 1.0), "about as long"), ((2.0, 1.0), None)],
)
def test_quantizing_says_when_it_does_not_pay(
    seconds: tuple[float, float], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(inference_module, "_seconds_of_products", lambda *given: asked.append(given) or seconds)
    note = prepare_inference(tiny_model(), torch.float32, quantize="int8", rows=2)
    assert (note is None) if said is None else (note is not None and said in note and "--quantize int8" in note)
    assert 0 < len(asked) <= inference_module.PROBED_SHAPES and len({shape for _, shape, *_ in asked}) == len(asked)
    asked.clear()
    assert prepare_inference(tiny_model(), torch.float32) is None and not asked


@in_8_bits
def test_products_are_measured_once_per_shape() -> None:
    measure = inference_module._seconds_of_products
    before = measure.cache_info().misses
    for _ in range(2):
        prepare_inference(tiny_model(), torch.float32, quantize="int8", rows=3)
    first = measure.cache_info().misses - before
    prepare_inference(tiny_model(), torch.float32, quantize="int8", rows=3)
    assert first > 0 and measure.cache_info().misses - before == first
