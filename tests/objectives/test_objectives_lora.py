"""Every objective with adapters: only these and the heads over labels change, and they merge into one equal model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.objectives.cases import KINDS, batch_of, make, model_of, step
from tformer.build import add_adapters
from tformer.nn.lora import ADAPTER, projections
from tformer.objectives import OBJECTIVES
from tformer.recipe.sections import Lora


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replaced_token"])  # which trains two models
def test_an_objective_trains_adapters_and_heads_over_labels_alone(kind: str, dora: bool) -> None:
    model, merged, objective, batch = model_of(kind), model_of(kind), make(kind), batch_of(kind)
    heads = [OBJECTIVES[each].head for each in kind.split(",")]
    section: Any = SimpleNamespace(heads=heads)
    add_adapters(model, section, Lora(rank=3, alpha=3, dora=dora))
    for linear, _ in projections(model).values():
        linear.adapter.start_from(linear.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses = []
    for _ in range(8):
        losses.append(step(objective, model, [batch])[0])
        optimizer.step()
    assert losses[-1] < losses[0]
    state = model.state_dict()
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    assert not changed & model.base_names and any(ADAPTER in name for name in changed)
    own = tuple(f"heads.{head.kind}." for head in heads if head.label_kind or head.labels_tokens)
    assert all(ADAPTER in name or name.startswith(own) for name in changed)
    if OBJECTIVES[kind.split(",")[0]].compares_base:  # a merged model has no base to compare with
        return
    for name, (linear, _) in projections(model).items():
        state[f"{name}.weight"] = linear.adapter.merged(linear.weight)
    merged.load_state_dict({name: state[name] for name in merged.state_dict()})
    assert step(objective, merged, [batch])[0] == pytest.approx(step(objective, model, [batch])[0], rel=1e-4)
