"""Every change of form leaves the logits as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interop.parity import padding, tokens
from tformer.build import build_model
from tformer.interop.equivalences import Rewrite, changed, step_for
from tformer.model import Transformer
from tformer.recipe.model import Model

STACK: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "feedforward": {"d_ff": 12}, "norm": {"eps": 0.02}}
SINES = {"positions": {"kind": "sinusoidal", "layout": "interleaved"}}
BARE = {
    "attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
    "feedforward": {"d_ff": 12, "bias": False},
    "norm": {"kind": "layernorm", "learned": False},
}


def make(**values: Any) -> Model:
    return Model.model_validate({"d_model": 8, "max_seq_len": 16, "vocab_size": 23, **values})


def randomized(model: Model) -> dict[str, Tensor]:
    """Owners only, every number random, norm gains around 1."""
    built = build_model(model)
    generator, tied = torch.Generator().manual_seed(0), built.tied_names()
    weights = {}
    for name, tensor in built.state_dict().items():
        if name not in tied:
            noise = torch.randn(tensor.shape, generator=generator) * 0.3
            weights[name] = noise + (1.0 if name.endswith("norm.weight") else 0.0)
    return weights


def loaded(model: Model, weights: dict[str, Tensor]) -> Transformer:
    built = build_model(model).eval()
    missing, unexpected = built.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) == set(built.tied_names())
    return built


def inputs(model: Model) -> dict[str, Tensor]:
    if model.patches is not None:
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))}
    found = {"input_ids": tokens(2, 9, vocabulary=23), "attention_mask": padding(9, 9, 6)}
    if model.encoder is not None and model.decoder is not None:
        rows = model.target_vocab_size or 23
        found |= {"decoder_input_ids": tokens(2, 7, vocabulary=rows), "decoder_attention_mask": padding(7, 5, 7)}
    return found


def assert_equal_logits(model: Model, *differences: tuple[str, Any, Any]) -> Model:
    """Applies the changes that these differences ask for; every head gives what it gave. Returns the new section."""
    weights = randomized(model)
    before = dict(weights)
    changed_model, changed_weights = model, weights
    for path, ours, theirs in differences:
        step = step_for(changed_model, path, ours, theirs)
        assert isinstance(step, Rewrite), path
        changed_model, changed_weights = step.apply(changed_model, changed_weights)
    assert all(weights[name] is before[name] for name in before), "the weights that were given stay as they are"
    first, second = loaded(model, weights), loaded(changed_model, changed_weights)
    real = inputs(model).get("decoder_attention_mask", inputs(model).get("attention_mask"))
    with torch.no_grad():
        ours_out, theirs_out = first(**inputs(model)), second(**inputs(model))
        for head in first.heads:
            expected = first.heads[head](ours_out.hidden, real)
            found = second.heads[head](theirs_out.hidden, real)
            keep = real.bool() if real is not None and expected.dim() > 2 else ...
            torch.testing.assert_close(found[keep], expected[keep], rtol=1e-5, atol=1e-5)
            assert expected.std() > 1e-3
    return changed_model


LAYOUTS = tuple((f"model.{side}.positions.layout", "interleaved", "halves") for side in ("encoder", "decoder"))
TRANSLATORS = {
    "one table for all": {"embedding": {"scale": True}},
    "own output": {"tie": {"output": False}, "heads": [{"kind": "lm", "bias": True}]},
    "two vocabularies": {"tie": {"source_target": False}, "target_vocab_size": 19},
    "norms of embeddings, post-norm": {"embedding": {"norm": True}},
}


@pytest.mark.parametrize("case", TRANSLATORS)
@pytest.mark.parametrize("place", ["pre", "post"])
def test_interleaved_sinusoids_become_halves_in_both_stacks(case: str, place: str) -> None:
    stack = {**STACK, **SINES, "norm": {"place": place}, "final_norm": place == "pre"}
    model = make(encoder=stack, decoder={**stack, "num_layers": 1}, **TRANSLATORS[case])
    after = assert_equal_logits(model, LAYOUTS[0])  # one step changes both
    assert after == changed(changed(model, "model.encoder.positions.layout", "halves"), *_halves("decoder"))


def _halves(side: str) -> tuple[str, str]:
    return f"model.{side}.positions.layout", "halves"


def test_another_layout_alone_is_another_function() -> None:
    """What the reordering of weights is for."""
    model = make(encoder={**STACK, **SINES}, decoder={**STACK, **SINES})
    other = changed(changed(model, *_halves("encoder")), *_halves("decoder"))
    weights = randomized(model)
    with torch.no_grad():
        first, second = (loaded(section, weights)(**inputs(model)).logits for section in (model, other))
    assert (first - second).abs().max() > 0.1


def test_sinusoids_beside_positions_of_another_kind() -> None:
    learned = {**STACK, "positions": {"kind": "learned"}}
    assert_equal_logits(make(encoder={**STACK, **SINES}, decoder=learned), LAYOUTS[0])


@pytest.mark.parametrize(
    "heads",
    [
        [{"kind": "masked_lm"}, {"kind": "next_sentence"}],
        [{"kind": "classifier", "num_labels": 3}],
        [{"kind": "classifier", "num_labels": 3, "pooler": False}],
        [{"kind": "regression"}],
        [{"kind": "replaced_token"}],
        [{"kind": "token_classifier", "num_labels": 3}, {"kind": "pooler"}],
        [{"kind": "span", "transform": True}],
        [{"kind": "multiple_choice"}],
    ],
    ids=lambda heads: heads[0]["kind"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_every_head_follows_a_reordered_stream(heads: list[dict[str, Any]], tied: bool) -> None:
    values = {"embedding": {"norm": True, "token_types": 2}, "tie": {"output": tied}}
    assert_equal_logits(make(encoder={**STACK, **SINES}, heads=heads, **values), LAYOUTS[0])


@pytest.mark.parametrize(
    "values", [{}, {"num_kv_heads": 1}, {"head_dim": 6}, {"num_kv_heads": 1, "value_dim": 3}], ids=str
)
def test_interleaved_rope_becomes_halves(values: dict[str, Any]) -> None:
    rope = {**STACK, "positions": {"kind": "rope", "layout": "interleaved"}, **values}
    assert_equal_logits(make(decoder=rope), LAYOUTS[1])


def test_a_missing_bias_is_a_bias_of_zeros() -> None:
    model = make(decoder={**STACK, **BARE, "norm": {"bias": False}}, heads=[{"kind": "lm"}])
    missing = ("attention.qkv_bias", "attention.out_bias", "feedforward.bias", "norm.bias")
    paths = [*(f"model.decoder.{option}" for option in missing), "model.heads.lm.bias"]
    assert_equal_logits(model, *((path, False, True) for path in paths))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_norm_without_gain_is_a_norm_with_gain_one(kind: str) -> None:
    values = {"embedding": {"norm": True}, "heads": [{"kind": "masked_lm"}]}
    stack = {**STACK, "norm": {"kind": kind, "learned": False}}
    assert_equal_logits(make(encoder=stack, **values), ("model.encoder.norm.learned", False, True))


def test_no_token_types_are_types_of_zeros() -> None:
    assert_equal_logits(make(encoder=STACK, heads=[{"kind": "masked_lm"}]), ("model.embedding.token_types", 0, 2))


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ({"embedding": {"size": 4}}, ("model.encoder.positions.layout", "interleaved", "halves")),
        ({}, ("model.encoder.positions.layout", "interleaved", "fairseq")),
        ({}, ("model.encoder.norm.eps", 1e-6, 1e-5)),
        ({}, ("model.encoder.attention.qkv_bias", True, False)),
    ],
    ids=["factorized embeddings", "other wavelengths", "eps", "a bias less"],
)
def test_what_is_no_change_of_form_has_no_step(values: dict[str, Any], difference: tuple[str, Any, Any]) -> None:
    assert step_for(make(encoder={**STACK, **SINES}, **values), *difference) is None


def test_a_stack_with_other_sinusoids_cannot_share_a_reordered_stream() -> None:
    model = make(encoder={**STACK, **SINES}, decoder={**STACK, "positions": {"kind": "sinusoidal", "layout": "halves"}})
    assert step_for(model, *LAYOUTS[0]) is None


def test_of_the_section_alone_no_weights_are_made() -> None:
    model = make(decoder={**STACK, **BARE})
    step = step_for(model, "model.decoder.feedforward.bias", False, True)
    assert step is not None and step.apply(model, {})[1] == {}
