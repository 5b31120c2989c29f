"""The step hook: who is told, in which order, and what."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from tformer.nn.step import Step, StepAware, begin_step, step_listeners

STEP = Step(number=3, max_steps=10, warmup_steps=2, seed=7)


class Listener(nn.Module):
    def __init__(self, told: list[tuple[str, Step]], name: str) -> None:
        super().__init__()
        self.told, self.name = told, name

    def begin_step(self, step: Step) -> None:
        self.told.append((self.name, step))


def test_every_module_with_the_method_is_told_in_the_order_of_modules() -> None:
    told: list[tuple[str, Step]] = []
    model = nn.Sequential(nn.Linear(2, 2), Listener(told, "first"), nn.Sequential(Listener(told, "second")))
    model.append(model[1])  # shared: told once
    begin_step(model, STEP)
    assert told == [("first", STEP), ("second", STEP)]
    assert [type(listener) for listener in step_listeners(model)] == [Listener, Listener]


def test_a_model_may_itself_listen_and_one_without_listeners_is_fine() -> None:
    told: list[tuple[str, Step]] = []
    begin_step(Listener(told, "model"), STEP)
    assert told == [("model", STEP)]
    assert step_listeners(nn.Linear(2, 2)) == [] and not isinstance(nn.Linear(2, 2), StepAware)


def test_a_step_is_what_it_was_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STEP.number = 4  # type: ignore[misc]
