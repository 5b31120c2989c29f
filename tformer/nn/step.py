"""The training step as modules may know it: what changes with time hears of each optimizer step before its forwards.

A module that has a method `begin_step(step)` is told (DropHead's schedule, Performer's redrawn features); it draws what
it draws from `step.seed`, which is equal on every process, and never from torch's global generator, so that adding such
a module leaves the dropout of all others as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step.

    Attributes:
        number: 1 for the first step.
        max_steps: where training ends.
        warmup_steps: of the learning rate; 0 without warm-up.
        seed: of this step, equal on every process.
    """

    number: int
    max_steps: int
    warmup_steps: int
    seed: int


@runtime_checkable
class StepAware(Protocol):
    """A module that changes with the training step."""

    def begin_step(self, step: Step) -> None: ...


def step_listeners(model: nn.Module) -> list[StepAware]:
    """The modules of `model` that want to hear of steps, in the order of `model.modules()`."""
    return [module for module in model.modules() if isinstance(module, StepAware)]


def begin_step(model: nn.Module, step: Step) -> None:
    """Tell every listener in `model` that `step` begins."""
    for listener in step_listeners(model):
        listener.begin_step(step)
