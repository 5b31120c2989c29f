"""Taps: every inner tensor can be read and replaced, in every family, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_model import every_position, make, padded, tokens
from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model

STACK: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 24}}


def encoder(**changes: Any) -> dict[str, Any]:
    return {"encoder": {**STACK, **changes}}


def decoder(**changes: Any) -> dict[str, Any]:
    return {"decoder": {**STACK, **changes}}


GLOBAL = {"kind": "sliding_window", "window": 4, "global_tokens": 2, "global_projections": True}
GEMMA = {"kind": "rmsnorm", "place": "sandwich", "unit_offset": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": decoder(positions={"kind": "learned"}),
    "llama": decoder(num_kv_heads=2, positions={"kind": "rope"}, attention={"kind": "full", "qk_norm": True},
                     feedforward={"d_ff": 24, "gated": True, "activation": "silu"}),
    "bert": {**encoder(norm={"place": "post"}, final_norm=False, positions={"kind": "learned"}),
             "embedding": {"token_types": 2, "norm": True, "size": 8}},
    "t5": encoder(positions={"kind": "t5_bias"}, num_layers=1)
    | decoder(positions={"kind": "t5_bias"}, value_dim=5, num_layers=1),
    "bart": {**encoder(positions={"kind": "sinusoidal"}, num_layers=1), **decoder(num_heads=2),
             "embedding": {"scale": True}, "tie": {"source_target": True, "output": True}},
    "vit": {**encoder(), "patches": {"image_size": 8, "size": 4, "channels": 2, "cls": True},
            "heads": [{"kind": "classifier", "num_labels": 3}]},
    "gemma": decoder(norm=GEMMA, attention={"softcap": 2.0, "qk_norm": "unit_offset"}, positions={"kind": "alibi"},
                     residual_multiplier=0.5),
    "opt-350m": {**decoder(norm={"place": "post"}), "embedding": {"size": 8, "project": "first", "norm": True}},
    "target norm": {**decoder(positions={"kind": "learned"}), "embedding": {"norm": True, "target_norm": "tokens"}},
    "olmo": decoder(norm={"kind": "rmsnorm", "place": "res_post"}, attention={"qk_norm": "width"}, num_kv_heads=2),
    "phi": decoder(attention={"qk_norm": "layernorm"}, positions={"kind": "rope", "share": 0.5}),
    "stablelm": decoder(attention={"qk_norm": "groupnorm"}, num_kv_heads=2),
    "bloom": decoder(positions={"kind": "alibi"}),
    "shaw": encoder(positions={"kind": "shaw"}),
    "additive": encoder(attention={"kind": "additive"}),
    "disentangled": encoder(attention={"kind": "disentangled", "buckets": 8, "max_distance": 20}),
    "deberta": encoder(norm={"place": "post"}, layers={0: {"convolution": 3}}),
    "longformer": encoder(attention=GLOBAL),
    "bigbird": encoder(attention={"kind": "bigbird", "block": 2}),
    "linformer": encoder(attention={"kind": "linformer", "rank": 6}),
    "performer": encoder(attention={"kind": "performer"}),
    "fixnorm": {**encoder(), "embedding": {"fixnorm": True, "convolution": 3}},
}  # fmt: skip


def model_of(family: str) -> Transformer:
    torch.manual_seed(1)
    sections = Model.model_validate({"d_model": 16, "max_seq_len": 16, "vocab_size": 11, **FAMILIES[family]})
    return build_model(sections, device="cpu").eval()


def inputs_of(family: str) -> dict[str, Tensor]:
    if family == "vit":
        return {"pixel_values": torch.rand(2, 2, 8, 8)}
    ids, mask = padded(torch.randint(1, 11, (2, 5)), 2, "right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family == "bert":
        inputs["token_type_ids"] = (torch.arange(7) > 3).long().expand(2, 7)
    return inputs | ({"decoder_input_ids": torch.randint(1, 11, (2, 4))} if family in ("t5", "bart") else {})


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tap_is_replaced_exactly(family: str) -> None:
    """By its own value without any change; by zeros with one. Linformer and Performer form weights for the tap only."""
    model, inputs = model_of(family), inputs_of(family)
    for name in model.tap_names():
        tapped = model(**inputs, taps={name})
        assert tapped.taps.keys() == {name}
        value = tapped.taps[name]
        same = model(**inputs, replace={name: value.clone()})
        if family in ("linformer", "performer") and name.endswith("weights"):
            torch.testing.assert_close(same.hidden, tapped.hidden)
        else:
            assert torch.equal(same.hidden, tapped.hidden), name
        zeros = model(**inputs, taps={name}, replace={name: torch.zeros_like})
        assert not zeros.taps[name].any() and not torch.equal(zeros.hidden, tapped.hidden), name


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_all_taps_are_replaced_together(family: str) -> None:
    model, inputs = model_of(family), inputs_of(family)
    tapped = model(**inputs, taps=model.tap_names())
    same = model(**inputs, replace=dict.fromkeys(model.tap_names(), torch.clone))
    torch.testing.assert_close(same.hidden, tapped.hidden)
    assert family in ("linformer", "performer") or torch.equal(same.hidden, tapped.hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_an_encoder_beside_a_decoder_is_read_by_cross_attention(family: str) -> None:
    read = [name for name, declared in model_of(family).taps() if "read by every cross-attention" in declared.meaning]
    assert read == (["encoder.final_norm"] if family in ("t5", "bart") else [])


@torch.no_grad()
def test_what_follows_is_computed_from_the_replacement() -> None:
    model, inputs = model_of("gpt"), inputs_of("gpt")
    other = model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)}, taps={"decoder.0.hidden"})
    moved = model(**inputs, replace={"decoder.0.hidden": other.taps["decoder.0.hidden"]})
    torch.testing.assert_close(moved.hidden, other.hidden)
    heads = "decoder.0.self_attention.heads"
    halved = model(**inputs, taps=[heads], replace={"decoder.0.self_attention.weights": lambda weights: weights / 2})
    torch.testing.assert_close(halved.taps[heads], model(**inputs, taps=[heads]).taps[heads] / 2)


def test_gradients_reach_a_replacement() -> None:
    model, inputs = model_of("bert"), inputs_of("bert")
    new = torch.randn(2, 7, 16, requires_grad=True)
    model(**inputs, replace={"encoder.0.hidden": new}).hidden.sum().backward()
    assert new.grad is not None and model.embedding.weight.grad is None


@torch.no_grad()
def test_a_decoding_step_takes_replacements_as_a_whole_pass_does() -> None:
    model, ids = model_of("llama"), tokens(2, 6) % 11
    replace = {"decoder.1.self_attention.heads": lambda heads: 2.0 * heads}
    cache = model.new_cache(2, 6)
    steps = [model(part, cache=cache, replace=replace).hidden for part in ids.split([4, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids, replace=replace).hidden)


def test_replacements_that_do_not_fit_are_refused() -> None:
    model, inputs = model_of("bart"), inputs_of("bart")
    for replace, message in (
        ({"decoder.0.hiden": torch.zeros(1)}, r"unknown tap 'decoder.0.hiden'; nearest: decoder.0.hidden"),
        ({"decoder.0.hidden": torch.zeros(2, 3, 16)}, r"replace 'decoder.0.hidden': found torch.float32 \[2, 3, 16\]"),
        ({"decoder.0.hidden": torch.Tensor.double}, r"found torch.float64 .* expected torch.float32 \[2, 4, 16\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**inputs, replace=replace)
    memory = model(**inputs).encoder_hidden
    with pytest.raises(ValueError, match=r"replace 'encoder\.0\.hidden': this forward pass does not compute it"):
        model(
            decoder_input_ids=inputs["decoder_input_ids"],
            encoder_hidden=memory,
            replace={"encoder.0.hidden": torch.clone},
        )


@every_position
def test_taps_change_nothing_and_explain_the_output(positions: dict[str, Any]) -> None:
    model, ids = make(stack={"positions": positions}), tokens(2, 6)
    plain, tapped = model(ids), model(ids, taps=model.tap_names())
    torch.testing.assert_close(tapped.hidden, plain.hidden, atol=1e-5, rtol=1e-5)
    assert set(tapped.taps) == set(model.tap_names())
    weights = tapped.taps["decoder.1.self_attention.weights"]
    assert weights.shape == (2, 4, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    assert (weights.triu(1) == 0).all()
    normed = model.decoder.final_norm(tapped.taps["decoder.1.hidden"])
    torch.testing.assert_close(normed, tapped.hidden)
    assert plain.taps == {}


def test_cross_attention_weights_have_their_tap() -> None:
    model = make("both")
    source, mask = padded(tokens(2, 5), 2, "right")
    name = "decoder.0.cross_attention.weights"
    weights = model(source, attention_mask=mask, decoder_input_ids=tokens(2, 3), taps={name}).taps[name]
    assert weights.shape == (2, 4, 3, 7)
    assert (weights[..., 5:] == 0).all()
    assert "encoder.1.self_attention.weights" in model.tap_names()


def test_an_unknown_tap_names_its_neighbours() -> None:
    with pytest.raises(ValueError, match=r"decoder\.0\.self_attention\.weights"):
        make()(tokens(1, 3), taps={"decoder.0.self_attention.weight"})
