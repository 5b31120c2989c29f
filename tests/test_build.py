"""Recipe → modules: published parameter counts, contradictions named, per-layer overrides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tformer.build import build_model, count_parameters, resolve_sizes
from tformer.recipe.model import Model
from tformer.support.errors import InputError

GPT2 = {"positions": {"kind": "learned"}, "feedforward": {"activation": "gelu_tanh"}}
LLAMA = {
    "positions": {"kind": "rope"},
    "attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
    "norm": {"kind": "rmsnorm"},
}


def section(**values: Any) -> Model:
    return Model.model_validate(values)


def gpt(layers: int, width: int, heads: int, **values: Any) -> Model:
    return section(
        d_model=width,
        max_seq_len=values.pop("max_seq_len", 1024),
        vocab_size=50257,
        decoder={"num_layers": layers, "num_heads": heads, **GPT2},
    )


def llama(layers: int, width: int, hidden: int, tied: bool) -> Model:
    feedforward = {"d_ff": hidden, "gated": True, "activation": "silu", "bias": False}
    return section(
        d_model=width,
        max_seq_len=8192,
        vocab_size=128256,
        tie={"output": tied},
        decoder={"num_layers": layers, "num_heads": 32, "num_kv_heads": 8, **LLAMA, "feedforward": feedforward},
    )


def original(width: int, heads: int, hidden: int) -> Model:
    stack = {
        "num_layers": 6,
        "num_heads": heads,
        "positions": {"kind": "sinusoidal"},
        "feedforward": {"d_ff": hidden, "activation": "relu"},
        "norm": {"place": "post"},
        "final_norm": False,
    }
    return section(
        d_model=width, vocab_size=37000, embedding={"scale": True}, encoder=stack, decoder=stack, heads=[{"kind": "lm"}]
    )


@pytest.mark.parametrize(
    ("model", "published"),
    [
        pytest.param(gpt(12, 768, 12), 124_439_808, id="gpt2"),
        pytest.param(gpt(24, 1024, 16), 354_823_168, id="gpt2-medium"),
        pytest.param(gpt(36, 1280, 20), 774_030_080, id="gpt2-large"),
        pytest.param(gpt(48, 1600, 25), 1_557_611_200, id="gpt2-xl"),
        pytest.param(gpt(96, 12288, 96, max_seq_len=2048), 174_604_259_328, id="gpt3-175b"),
        pytest.param(llama(16, 2048, 8192, True), 1_235_814_400, id="llama-3.2-1b"),
        pytest.param(llama(32, 4096, 14336, False), 8_030_261_248, id="llama-3.1-8b"),
        pytest.param(original(512, 8, 2048), 63_082_496, id="transformer-base"),
        pytest.param(original(1024, 16, 4096), 214_245_376, id="transformer-big"),
    ],
)
def test_published_parameter_counts(model: Model, published: int) -> None:
    assert count_parameters(model) == published


def test_bert_base_count_with_pooler_without_heads() -> None:
    stack = {"num_layers": 12, "num_heads": 12, "norm": {"place": "post", "eps": 1e-12}, "final_norm": False}
    bert = section(
        d_model=768,
        max_seq_len=512,
        vocab_size=30522,
        embedding={"norm": True, "token_types": 2},
        encoder=stack,
        heads=[{"kind": "classifier", "num_labels": 2}],
    )
    projection = 768 * 2 + 2
    assert count_parameters(bert) - projection == 109_482_240


def test_vit_base_16_count_with_its_classifier() -> None:
    vit = section(
        d_model=768,
        patches={"image_size": 224, "size": 16},
        encoder={"num_layers": 12, "num_heads": 12, "norm": {"eps": 1e-12}},
        heads=[{"kind": "classifier", "num_labels": 1000, "pooler": False}],
    )
    assert count_parameters(vit) == 86_567_656


def test_counting_allocates_nothing() -> None:
    model = build_model(gpt(96, 12288, 96), device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def small(**values: Any) -> dict[str, Any]:
    return {"d_model": 32, "max_seq_len": 16, "vocab_size": 11, **values}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (small(decoder={"num_heads": 5}), "model.decoder.num_heads: 5 heads do not divide d_model 32"),
        (small(decoder={"num_heads": 4, "num_kv_heads": 3}), "num_kv_heads: 3 key/value heads do not divide 4"),
        (
            {**small(decoder={"num_heads": 1, "positions": {"kind": "sinusoidal"}}), "d_model": 7},
            "model.decoder.positions: d_model must be even for sinusoidal positions, found 7",
        ),
        (small(decoder={"positions": {"kind": "rope"}, "head_dim": 5}), "model.decoder.positions: .*even.*5"),
        (small(decoder={"positions": {"kind": "patch2d"}}), "model.decoder.positions: patch2d needs model.patches"),
        (small(decoder={}, patches={}), "model.patches: images need an encoder"),
        (small(encoder={}, patches={"image_size": 30}), "model.patches.size: 16 does not divide image_size 30"),
        ({"d_model": 32, "decoder": {}}, "model.vocab_size: not given"),
        (small(decoder={"num_layers": 2, "layers": {2: {"dropout": 0.1}}}), "model.decoder.layers.2: .* 2 layers"),
        (small(decoder={"layers": {0: {"droput": 0.1}}}), "model.decoder.layers.0.droput"),
        (small(decoder={"layers": {0: {"attention": {"qknorm": True}}}}), "model.decoder.layers.0.attention.qknorm"),
        (small(decoder={"layers": {0: {"dropout": 2.0}}}), "model.decoder.layers.0.dropout"),
        (small(decoder={"layers": {0: {"attention": 3}}}), "model.decoder.layers.0.attention: expected a mapping"),
        (
            small(decoder={"layers": {2: {"positions": {"kind": "rope"}}}}),
            "layers.2.positions: found rope beside learned: learned positions serve the whole stack",
        ),
        (
            small(decoder={"positions": {"kind": "rope"}, "layers": {1: {"positions": {"kind": "t5_bias"}}}}),
            "layers.1.positions: found t5_bias beside rope: t5_bias positions serve",
        ),
        (
            small(decoder={"positions": {"kind": "rope"}, "layers": {1: {"positions": {"clip": 3}}}}),
            "layers.1.positions.clip: unknown option",
        ),
        (
            small(decoder={"residual": "parallel", "norm": {"place": "post"}}),
            "model.decoder.residual: found parallel, expected sequential with norm.place post",
        ),
        (
            small(encoder={}, decoder={"residual": "parallel_one_norm"}),
            "model.decoder.residual: found parallel_one_norm, expected sequential with cross-attention",
        ),
        (
            small(encoder={"norm": {"place": "post"}, "layers": {0: {"attention_norm": False}}}),
            "model.encoder.attention_norm: found false, expected true with norm.place post and residual sequential",
        ),
        (small(decoder={"layer_groups": 7}), "model.decoder.layer_groups: found 7, expected at most 6"),
        (
            small(decoder={"layer_groups": 2, "layers": {4: {"dropout": 0.1}}}),
            "model.decoder.layers: layer 4 has the weights of layer 3",
        ),
        (small(decoder={}, heads=[{"kind": "lm"}, {"kind": "lm"}]), "model.heads.1: a second head of kind 'lm'"),
        (small(encoder={}, heads=[{"kind": "classifier"}]), r"model.heads.0 \(classifier\): .*num_labels"),
        (
            small(encoder={}, decoder={"d_model": 16}),
            r"model.tie.source_target: .*\[11, 32\] and \[11, 16\]",
        ),
        (small(encoder={}, decoder={}, target_vocab_size=13), "model.tie.source_target"),
    ],
)
def test_contradictions_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(section(**values), device="meta")


def test_misspelt_layer_option_gets_a_hint() -> None:
    with pytest.raises(InputError) as caught:
        build_model(section(**small(decoder={"layers": {0: {"droput": 0.1}}})), device="meta")
    assert "dropout" in str(caught.value.hint)


def test_per_layer_overrides_change_that_layer_only() -> None:
    overrides = {1: {"feedforward": {"d_ff": 24, "gated": True}, "dropout": 0.3, "attention": {"qk_norm": True}}}
    values = small(decoder={"num_layers": 3, "dropout": 0.1, "layers": overrides})
    blocks = build_model(section(**values)).decoder.blocks
    assert [block.feedforward.up.weight.shape[0] for block in blocks] == [128, 48, 128]
    assert [block.dropout for block in blocks] == [0.1, 0.3, 0.1]
    assert [block.self_attention.qk_norm for block in blocks] == [False, True, False]


@pytest.mark.parametrize(("groups", "owners"), [(1, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 3, 3]), (5, [0, 1, 2, 3, 4])])
def test_layers_of_a_group_have_the_same_weights(groups: int, owners: list[int]) -> None:
    """The shared model is the one with separate layers whose weights are copies (ALBERT)."""
    shared = build_model(section(**small(decoder={"num_layers": 5, "layer_groups": groups}))).eval()
    separate = build_model(section(**small(decoder={"num_layers": 5}))).eval()
    separate.load_state_dict(shared.state_dict())
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(shared(ids).logits, separate(ids).logits)
    assert section(**small(decoder={"num_layers": 5, "layer_groups": groups})).decoder.owners == owners
    layer = sum(parameter.numel() for parameter in shared.decoder.blocks[0].parameters())
    assert separate.num_parameters() - shared.num_parameters() == (5 - groups) * layer
    tied = {f"decoder.blocks.{n}.feedforward.up.weight": f"decoder.blocks.{owner}.feedforward.up.weight"
            for n, owner in enumerate(owners) if n != owner}  # fmt: skip
    assert tied.items() <= shared.tied_names().items()


def test_defaults_of_sizes() -> None:
    model = section(**small(decoder={"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "value_dim": 10}))
    assert tuple(resolve_sizes(model, "decoder")) == (32, 4, 2, 6, 10)
    assert tuple(resolve_sizes(section(**small(decoder={"num_heads": 4})), "decoder")) == (32, 4, 4, 8, 8)


def test_the_sections_vocabulary_goes_first() -> None:
    assert build_model(section(**small(decoder={})), vocab_size=99).embedding.weight.shape == (11, 32)
    unset = section(**{**small(decoder={}), "vocab_size": None})
    assert build_model(unset, vocab_size=99).embedding.weight.shape == (99, 32)


def test_stacks_of_different_widths_need_tables_of_their_own() -> None:
    values = small(encoder={"num_layers": 1}, decoder={"num_layers": 1, "d_model": 16}, tie={"source_target": False})
    model = build_model(section(**values))
    ids = torch.randint(0, 11, (2, 4))
    assert model(ids, decoder_input_ids=ids[:, :3]).hidden.shape == (2, 3, 16)


def test_building_is_reproducible() -> None:
    torch.manual_seed(0)
    first = build_model(section(**small(decoder={}))).state_dict()
    torch.manual_seed(0)
    second = build_model(section(**small(decoder={}))).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_decoder_beside_an_encoder_may_have_fewer_positions() -> None:
    stack = {"num_layers": 1, "num_heads": 2, "positions": {"kind": "learned", "offset": 2}}
    values = {"d_model": 8, "vocab_size": 11, "max_seq_len": 16, "max_target_len": 6, "encoder": stack}
    model = build_model(section(**values, decoder=stack))
    rows = [side.positions_of(0).weight.shape[0] for side in (model.encoder, model.decoder)]
    assert (rows, model.longest_target) == ([18, 8], 6)
    source = torch.ones(1, 16, dtype=torch.long)
    assert model(source, decoder_input_ids=source[:, :6]).logits.shape == (1, 6, 11)
    with pytest.raises(ValueError, match="the model has 6 learned positions, the input needs 7"):
        model(source, decoder_input_ids=source[:, :7])
    with pytest.raises(ValueError, match="max_target_len: only for models with an encoder and a decoder"):
        section(**{**values, "heads": [{"kind": "masked_lm"}]})


@torch.no_grad()
def test_a_convolution_beside_a_layer_reads_neither_padding_nor_another_document() -> None:
    encoder = {"num_layers": 1, "num_heads": 2, "positions": {"kind": "none"}, "convolution": 3}
    values: dict[str, Any] = {"d_model": 8, "vocab_size": 11, "heads": [{"kind": "masked_lm"}]}
    model = build_model(section(**values, encoder=encoder)).eval()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    padded = model(torch.tensor([[9, 9, 3, 4, 5, 6, 7, 9]]), attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]]))
    torch.testing.assert_close(padded.hidden[:, 2:7], model(ids).hidden)
    packed = model(ids, document_ids=torch.tensor([[0, 0, 0, 1, 1]])).hidden
    torch.testing.assert_close(packed, torch.cat([model(ids[:, :3]).hidden, model(ids[:, 3:]).hidden], dim=1))
    changed = model(torch.tensor([[3, 4, 5, 6, 8]])).hidden
    assert not torch.equal(changed[:, 3], model(ids).hidden[:, 3])
    for side, width, message in (("decoder", 3, "expected 0: a token would"), ("encoder", 4, "expected an odd number")):
        kind = "lm" if side == "decoder" else "masked_lm"
        with pytest.raises(InputError, match=f"model.{side}.convolution: found {width}, {message}"):
            build_model(section(**{**values, "heads": [{"kind": kind}], side: {**encoder, "convolution": width}}))
