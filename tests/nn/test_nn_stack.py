"""Stacks: LayerDrop, activation checkpointing, per-layer positions."""

from __future__ import annotations

import itertools

import pytest
import torch

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model

IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def make(**stack: object) -> Transformer:
    torch.manual_seed(0)
    decoder = {"num_layers": 3, "num_heads": 2, "positions": {"kind": "rope"}, **stack}
    return build_model(Model.model_validate({"d_model": 16, "max_seq_len": 8, "vocab_size": 11, "decoder": decoder}))


def hidden_of_layers(model: Transformer) -> list[torch.Tensor]:
    names = ["decoder.embedding", *(f"decoder.{layer}.hidden" for layer in range(3))]
    taps = model(IDS, taps=names).taps
    return [taps[name] for name in names]


def test_layerdrop_skips_whole_layers_without_rescaling() -> None:
    model = make(layerdrop=0.5)
    kept = []
    for seed in range(60):
        torch.manual_seed(seed)
        states = hidden_of_layers(model)
        kept += [not torch.equal(before, after) for before, after in itertools.pairwise(states)]
    assert 0.35 < sum(kept) / len(kept) < 0.65


def test_layerdrop_is_off_in_evaluation() -> None:
    model = make(layerdrop=0.9).eval()
    states = hidden_of_layers(model)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(states))
    plain = make().eval()
    assert torch.equal(model(IDS).hidden, plain(IDS).hidden)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_gives_equal_gradients(dropout: float) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = make(dropout=dropout, attention_dropout=dropout)
        model.decoder.checkpointing = checkpointing
        torch.manual_seed(1)
        model(IDS).logits.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)


def test_checkpointing_recomputes_only_with_gradients() -> None:
    model = make().eval()
    model.decoder.checkpointing = True
    with torch.no_grad():
        assert torch.isfinite(model(IDS).hidden).all()


def test_shaw_has_tables_per_layer_and_t5_one_for_all() -> None:
    shaw = make(positions={"kind": "shaw", "clip": 2})
    assert len({id(shaw.decoder.positions_of(layer).keys) for layer in range(3)}) == 3
    t5 = make(positions={"kind": "t5_bias"})
    assert len({id(t5.decoder.positions_of(layer)) for layer in range(3)}) == 1


def test_final_norm_is_optional() -> None:
    assert make(final_norm=False).decoder.final_norm is None
    model = make(final_norm=False).eval()
    out = model(IDS, taps=["decoder.2.hidden"])
    assert torch.equal(out.hidden, out.taps["decoder.2.hidden"])
