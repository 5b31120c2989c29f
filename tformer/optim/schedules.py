"""Learning-rate schedules: pure functions from the step to a factor that multiplies every learning rate.

t counts optimizer steps from 1, w = warmup_steps, n = decay_steps, m = min_ratio, d = d_model.

    warm-up          t / (w + 1) while t <= w          of every kind except the first three, which define their own
    noam             d^-1/2 min(t^-1/2, t w^-3/2)      arXiv 1706.03762, eq. 3; multiplies optimizer.lr like all others
    inverse_sqrt     min(t / w, (w / t)^1/2)           1 at the end of warm-up
    truncated_rsqrt  min(1, (w / t)^1/2)               T5 (arXiv 1910.10683, 3.1.2): w^1/2 / max(t, w)^1/2
    cosine           m + (1 - m) (1 + cos(pi p)) / 2   p = (t - 1 - w) / (n - w), at most 1
    linear           1 - (1 - m) p
    constant         1
    wsd              1, then linear to m over the last decay_fraction of the n steps      arXiv 2404.06395
    timed            1, then straight lines between points (finished steps, factor), which a training by time sets
    plateau          1, times `factor` (down to m) after more than `patience` validations without a better loss

Warm-up and cosine are nanoGPT's, whose iterations count from 0 (it = t - 1): lr (it + 1) / (w + 1), then the cosine
with n = lr_decay_iters and m = min_lr / lr. After step n a schedule stays at its floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol


class ScheduleSection(Protocol):
    """The recipe's `schedule` section, or anything with its fields."""

    kind: str
    warmup_steps: int
    decay_steps: int | None
    min_ratio: float
    decay_fraction: float
    factor: float
    patience: int

    @property
    def points(self) -> Sequence[tuple[int, float]] | None: ...


@dataclass(frozen=True)
class Horizon:
    """Settings shared by the formulas."""

    warmup_steps: int
    decay_steps: int
    min_ratio: float = 0.0
    decay_fraction: float = 0.2
    d_model: int = 1
    points: Sequence[tuple[int, float]] = ()


def noam(step: int, horizon: Horizon) -> float:
    warmup = max(1, horizon.warmup_steps)
    return horizon.d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def inverse_sqrt(step: int, horizon: Horizon) -> float:
    warmup = max(1, horizon.warmup_steps)
    return min(step / warmup, math.sqrt(warmup / step))


def truncated_rsqrt(step: int, horizon: Horizon) -> float:
    return min(1.0, math.sqrt(max(1, horizon.warmup_steps) / step))


def cosine(step: int, horizon: Horizon) -> float:
    wave = 0.5 * (1.0 + math.cos(math.pi * _progress(step, horizon, start=horizon.warmup_steps)))
    return _warmup(step, horizon) * (horizon.min_ratio + wave * (1.0 - horizon.min_ratio))


def linear(step: int, horizon: Horizon) -> float:
    progress = _progress(step, horizon, start=horizon.warmup_steps)
    return _warmup(step, horizon) * (1.0 - (1.0 - horizon.min_ratio) * progress)


def constant(step: int, horizon: Horizon) -> float:
    return _warmup(step, horizon)


def wsd(step: int, horizon: Horizon) -> float:
    start = max(horizon.warmup_steps, (1.0 - horizon.decay_fraction) * horizon.decay_steps)
    return _warmup(step, horizon) * (1.0 - (1.0 - horizon.min_ratio) * _progress(step, horizon, start=start))


def timed(step: int, horizon: Horizon) -> float:
    return _warmup(step, horizon) * line_at(horizon.points, step - 1)


def line_at(points: Sequence[tuple[int, float]], finished: int) -> float:
    """The factor after this number of finished steps: 1 before the first point, straight lines between the points."""
    factor = 1.0
    for (start, high), (end, low) in pairwise(points):
        if finished >= start:
            factor = high + (low - high) * min(1.0, (finished - start) / (end - start))
    return factor


SCHEDULES: dict[str, Callable[[int, Horizon], float]] = {
    "noam": noam,
    "inverse_sqrt": inverse_sqrt,
    "truncated_rsqrt": truncated_rsqrt,
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
    "wsd": wsd,
    "timed": timed,
    "plateau": constant,  # times the factor of `Plateau`
}
READS_VALIDATION_LOSS = frozenset({"plateau"})

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]


def _warmup(step: int, horizon: Horizon) -> float:
    return min(1.0, step / (horizon.warmup_steps + 1))


def _progress(step: int, horizon: Horizon, *, start: float) -> float:
    """Progress of the decay: 0 during warm-up and until `start`, 1 from `decay_steps` on."""
    length = horizon.decay_steps - start
    if step <= horizon.warmup_steps:
        return 0.0
    return min(1.0, max(0.0, (step - 1 - start) / length)) if length > 0 else 1.0


@dataclass
class Plateau:
    """State of the plateau schedule. A loss that is not finite counts as not better."""

    factor: float
    patience: int
    floor: float
    best: float = math.inf
    bad_count: int = 0
    scale: float = 1.0

    def observe(self, loss: float) -> None:
        """Update the state with the loss of one validation."""
        if loss < self.best:
            self.best, self.bad_count = loss, 0
            return
        self.bad_count += 1
        if self.bad_count > self.patience:
            self.scale, self.bad_count = max(self.floor, self.scale * self.factor), 0


class LrSchedule:
    """A formula with its settings; only `plateau` has state."""

    def __init__(self, formula: Callable[[int, Horizon], float], horizon: Horizon, plateau: Plateau | None) -> None:
        self._formula, self._horizon, self._plateau = formula, horizon, plateau

    def scale(self, step: int) -> float:
        """The factor of the learning rates at step `step`, counted from 1."""
        if step < 1:
            raise ValueError(f"steps count from 1, found {step}")
        scale = self._formula(step, self._horizon)
        return scale if self._plateau is None else scale * self._plateau.scale

    def follow(self, points: Sequence[tuple[int, float]]) -> None:
        """Go along these lines from now on (`timed`)."""
        self._horizon = replace(self._horizon, points=points)

    def observe(self, loss: float) -> None:
        """Pass on a validation loss, lower is better; only `plateau` reads it."""
        if self._plateau is not None:
            self._plateau.observe(loss)

    def state(self) -> dict[str, Any]:
        """State for resuming, as JSON: empty, or best (null before the first validation), bad_count and scale."""
        plateau = self._plateau
        if plateau is None:
            return {}
        best = plateau.best if math.isfinite(plateau.best) else None
        return {"best": best, "bad_count": plateau.bad_count, "scale": plateau.scale}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        if self._plateau is not None and state:
            self._plateau.best = math.inf if state["best"] is None else float(state["best"])
            self._plateau.bad_count, self._plateau.scale = int(state["bad_count"]), float(state["scale"])


def build_schedule(section: ScheduleSection, *, total_steps: int, d_model: int) -> LrSchedule:
    """The schedule of a recipe's section; `decay_steps` falls back to `total_steps`, the whole training."""
    horizon = Horizon(
        warmup_steps=section.warmup_steps,
        decay_steps=section.decay_steps or total_steps,
        min_ratio=section.min_ratio,
        decay_fraction=section.decay_fraction,
        d_model=d_model,
        points=section.points or (),
    )
    reads_loss = section.kind in READS_VALIDATION_LOSS
    plateau = Plateau(section.factor, section.patience, section.min_ratio) if reads_loss else None
    return LrSchedule(SCHEDULES[section.kind], horizon, plateau)
