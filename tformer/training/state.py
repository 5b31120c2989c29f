"""State of a training run between steps, as JSON: step, cursor, best score, running sums, loss scale."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tformer.errors import InputError


@dataclass
class RunningSums:
    """Sums since the last log line. They are saved, so that a resumed run writes the same line."""

    loss: float = 0.0
    steps: int = 0
    grad_norm: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)  # unweighted; empty for a loss of one term

    def add(self, *, loss: float, grad_norm: float, terms: dict[str, float]) -> None:
        self.loss += loss
        self.grad_norm += grad_norm
        for name, value in terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value
        self.steps += 1


@dataclass
class TrainerState:
    """State of a run. `step` is the number of finished optimizer steps; `cursor` names the next batch."""

    step: int = 0
    tokens: int = 0
    cursor: dict[str, Any] = field(default_factory=dict)
    best_score: float | None = None  # lower is better
    best_step: int | None = None
    bad_validations: int = 0
    skipped_steps: int = 0
    validated: bool = True  # False: the validation at `step` was interrupted and runs first on resume
    finished: bool = False
    schedule: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    sums: RunningSums = field(default_factory=RunningSums)
    data_fingerprint: str = ""
    # [sequences, tokens] of one step, the unit of the cursor
    global_batch: list[int | None] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TrainerState:
        """The inverse of `to_json`. Errors: unknown or missing keys (a checkpoint of another version)."""
        names = {entry.name for entry in dataclasses.fields(cls)}
        if not names >= document.keys():
            raise InputError(f"trainer.json has unknown keys {sorted(document.keys() - names)}", hint="upgrade tformer")
        values = dict(document)
        values["sums"] = RunningSums(**values.get("sums", {}))
        return cls(**values)


class LossScaler:
    """Dynamic loss scaling for fp16: doubled after `GROWTH_STEPS` finite steps, halved after one that is not."""

    GROWTH_STEPS = 2000

    def __init__(self, *, enabled: bool) -> None:
        self.scale = 2.0**16 if enabled else 1.0
        self.enabled = enabled
        self.finite_steps = 0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self.enabled else loss

    def unscale_(self, gradients: list[Tensor]) -> None:
        if self.enabled:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, *, finite: bool) -> None:
        if not self.enabled:
            return
        if not finite:
            self.scale, self.finite_steps = max(1.0, self.scale / 2), 0
            return
        self.finite_steps += 1
        if self.finite_steps % self.GROWTH_STEPS == 0:
            self.scale *= 2

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale, self.finite_steps = float(state["scale"]), int(state["finite_steps"])
