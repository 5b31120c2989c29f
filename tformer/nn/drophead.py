"""DropHead (2004.13342): whole attention heads are dropped while training, by the sample.

    gate_h = keep_h · H / Σ keep,   keep_h ~ Bernoulli(1 − p), at least one kept

The gates of a sample add up to H whatever was kept, so by symmetry E[gate_h] = 1: evaluation needs no correction. The
paper's schedule is V-shaped in the step t, with w warm-up steps out of N. It breaks up dominating heads early, leaves
the middle of training alone and regularises its end:

    p(t) = p_start (1 − t / w)           t ≤ w
    p(t) = p_end (t − w) / (N − w)       t > w
"""

# Shapes: gates [B, H, 1, 1].

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tformer.nn.options import require, require_probability
from tformer.nn.step import Step


@dataclass(frozen=True)
class DropHeadSchedule:
    """The V: from `start` down to 0 over the warm-up, then up to `rate` at the last step.

    warmup_steps: null: those of the learning rate.
    """

    SHORTHAND: ClassVar[str] = "rate"  # what a bare number in a recipe means

    rate: float
    start: float
    warmup_steps: int | None = None  # null: the schedule's

    def __post_init__(self) -> None:
        require_probability(rate=self.rate, start=self.start)
        least = 0 if self.warmup_steps is None else self.warmup_steps
        require(least >= 0, f"warmup_steps must be at least 0, found {self.warmup_steps}")


def scheduled_rate(schedule: DropHeadSchedule, step: Step) -> float:
    """p(t) of the V-shaped schedule; without a warm-up only its rising arm, with one of all steps only the falling."""
    warmup = step.warmup_steps if schedule.warmup_steps is None else schedule.warmup_steps
    if step.number <= warmup:
        return schedule.start * (1.0 - step.number / warmup)
    return schedule.rate * min(1.0, (step.number - warmup) / max(1, step.max_steps - warmup))


def drop_heads(batch: int, heads: int, rate: float, device: torch.device) -> Tensor:
    """Per-sample gates [B, H, 1, 1]: each head kept with probability 1 - rate, at least one, scaled by H / kept."""
    draw = torch.rand(batch, heads, device=device)
    kept = (draw >= rate) | (draw == draw.amax(dim=1, keepdim=True))
    return (kept * (heads / kept.sum(dim=1, keepdim=True))).view(batch, heads, 1, 1)


class DropHead(nn.Module):
    """Draws the gates of one attention.

    Args:
        rate: a constant probability, or a schedule; a schedule stands at its start until the first `begin_step`.

    Attributes:
        rate: the probability now.
    """

    def __init__(self, rate: float | DropHeadSchedule = 0.0) -> None:
        super().__init__()
        self.schedule = rate if isinstance(rate, DropHeadSchedule) else None
        self.rate = rate.start if isinstance(rate, DropHeadSchedule) else rate

    def begin_step(self, step: Step) -> None:
        """Move the rate along its schedule."""
        if self.schedule is not None:
            self.rate = scheduled_rate(self.schedule, step)

    def forward(self, batch: int, heads: int, device: torch.device) -> Tensor | None:
        """Gates [B, H, 1, 1] by which the heads' outputs are multiplied; None, and nothing drawn, when none drops."""
        if not self.training or self.rate == 0.0:
            return None
        return drop_heads(batch, heads, self.rate, device)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}" if self.schedule is None else repr(self.schedule)
