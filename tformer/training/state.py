"""State of a training run between steps, as JSON: step, cursor, best score, running sums, loss scale."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator, AllowInfNan, ConfigDict, TypeAdapter, ValidationError, with_config
from torch import Tensor

from tformer.support.bounds import mistake_of
from tformer.support.errors import InputError

Count = Annotated[int, Ge(0), Lt(1 << 62)]
STRICT = ConfigDict(extra="forbid", strict=True)


def _keys(**types: Any) -> AfterValidator:
    """Check of the state of a part: a dict with exactly these keys, or an empty one."""
    adapters = {
        name: TypeAdapter(type_, config=ConfigDict(strict=True, allow_inf_nan=False)) for name, type_ in types.items()
    }

    def check(values: dict[str, Any]) -> dict[str, Any]:
        if values and values.keys() != types.keys():
            raise ValueError(f"expected the keys {', '.join(types)}")
        return {name: adapters[name].validate_python(value) for name, value in values.items()}

    return AfterValidator(check)


@with_config(STRICT)
@dataclass
class RunningSums:
    """Sums since the last log line. They are saved, so that a resumed run writes the same line."""

    loss: float = 0.0
    steps: Count = 0
    grad_norm: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)  # unweighted; empty for a loss of one term

    def add(self, *, loss: float, grad_norm: float, terms: dict[str, float]) -> None:
        self.loss += loss
        self.grad_norm += grad_norm
        for name, value in terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value
        self.steps += 1


@with_config(STRICT)
@dataclass
class TrainerState:
    """State of a run. `step` is the number of finished optimizer steps; `cursor` names the next batch."""

    step: Count = 0
    tokens: Count = 0
    cursor: Annotated[dict[str, Any], _keys(epoch=Count, window=Count, batch=Count)] = field(default_factory=dict)
    best_score: Annotated[float, AllowInfNan(False)] | None = None  # lower is better
    best_loss: Annotated[float, AllowInfNan(False)] | None = None  # of that validation: the lower of equal scores wins
    best_step: Count | None = None
    bad_validations: Count = 0
    skipped_steps: Count = 0
    validated: bool = True  # False: the validation at `step` was interrupted and runs first on resume
    finished: bool = False
    schedule: Annotated[dict[str, Any], _keys(best=float | None, bad_count=Count, scale=Annotated[float, Ge(0)])] = (
        field(default_factory=dict)
    )
    scaler: Annotated[dict[str, Any], _keys(scale=Annotated[float, Gt(0)], finite_steps=Count)] = field(
        default_factory=dict
    )
    sums: RunningSums = field(default_factory=RunningSums)
    data_fingerprint: str = ""
    # [sequences, tokens] of one step, the unit of the cursor
    global_batch: list[Count | None] = field(default_factory=list)
    seconds: Annotated[float, Ge(0)] = 0.0
    spent: Annotated[float, Ge(0)] = 0.0  # seconds of whole commands, of a training by time

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any], *, name: str = "trainer.json") -> TrainerState:
        """The inverse of `to_json`. Raises InputError for unknown keys and for values that no training writes."""
        try:
            state = TypeAdapter(cls).validate_json(json.dumps(document))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or part[:1].islower())
            raise InputError(f"{name} is damaged: {key}: {mistake_of(first)}") from None
        if state.step and not state.cursor:
            raise InputError(
                f"{name} is damaged: cursor: expected the data position after step {state.step}, found none"
            )
        if (epoch := state.cursor.get("epoch", 0)) > state.step:
            raise InputError(f"{name} is damaged: cursor: expected at most epoch {state.step}, the step, found {epoch}")
        return state


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
        if state:  # none before the first step
            self.scale, self.finite_steps = float(state["scale"]), int(state["finite_steps"])
