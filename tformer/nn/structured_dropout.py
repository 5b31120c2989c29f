"""DropHead (arXiv 2004.13342), LayerDrop (arXiv 1909.11556), and the training step that schedules follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tformer.nn.dropout import outside_graphs
from tformer.nn.options import require, require_probability


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


# Shapes: gates [B, H, 1, 1].


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

    def forward(self, out_BHTv: Tensor) -> Tensor:
        """The heads' outputs times their gates; unchanged, and nothing drawn, in evaluation and at rate 0."""
        if not self.training or self.rate == 0.0:
            return out_BHTv
        gates = drop_heads(out_BHTv.shape[0], out_BHTv.shape[1], self.rate, out_BHTv.device)
        return out_BHTv * gates.to(out_BHTv.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}" if self.schedule is None else repr(self.schedule)


# Shapes: L layers.


LEARNED = ".layerdrop.logits"  # how the names of learned rates end in a model's state
BISECTIONS = 100
LEAST_CHANCE = 1.0e-6  # a layer that is all but always dropped and was kept does not outweigh all others
LEAST_SLOPE = 1.0e-12  # where every rate has come to rest at 0 or 1


@dataclass(frozen=True)
class LayerDropOptions:
    """`rate`: the probability of skipping a layer; the mean of all layers' where they are learned."""

    SHORTHAND: ClassVar[str] = "rate"  # what a bare number in a recipe means

    rate: float
    learned: bool = False  # a rate for each layer, trained with the weights

    def __post_init__(self) -> None:
        require_probability(rate=self.rate)
        require(self.rate > 0.0 or not self.learned, f"rate must be greater than 0 to be learned, found {self.rate}")


def solve_offset(logits: Sequence[float], mean: float) -> float:
    """The c for which the mean of σ(a_d + c) is `mean`, between 0 and 1, to the last bits."""
    middle = math.log(mean / (1.0 - mean))
    low, high = middle - max(logits), middle - min(logits)
    for _ in range(BISECTIONS):
        offset = (low + high) / 2.0
        if not low < offset < high:
            break
        if sum(_sigmoid(a + offset) for a in logits) < mean * len(logits):
            low = offset
        else:
            high = offset
    return (low + high) / 2.0


def constrained_rates(logits_L: Tensor, mean: float) -> Tensor:
    """p_d [L] with their mean at `mean`, differentiable in the logits."""
    offset = solve_offset(logits_L.tolist(), mean)
    rates_L = torch.sigmoid(logits_L + offset)
    slope = (rates_L * (1.0 - rates_L)).mean().detach().clamp_min(LEAST_SLOPE)
    share = rates_L.mean()
    # Newton's step from a solution: of no length (the difference is 0 to the bit), but with its gradient.
    return torch.sigmoid(logits_L + offset - (share - share.detach()) / slope)


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))  # the other form overflows
    return (1.0 if x >= 0.0 else small) / (1.0 + small)


class Draw(NamedTuple):
    """One forward's decisions.

    keep: of each layer.
    slack_L: zeros whose gradient is that of the learned rates; None where the rates are fixed.
    """

    keep: list[bool]
    slack_L: Tensor | None

    @partial(outside_graphs, recursive=False)
    def gated(self, layer: int, x: Tensor, run: Callable[[], Tensor], block: nn.Module) -> Tensor:
        """What a layer makes of `x`: the value of `run()`, or `x` itself when dropped, tied to the learned rate."""
        if self.slack_L is None:
            return run() if self.keep[layer] else x
        if self.keep[layer]:
            y = run()
            return y + self.slack_L[layer] * (y - x).detach()
        with torch.no_grad(), _evaluated(block):
            update = run() - x
        return x + self.slack_L[layer] * update


@contextmanager
def _evaluated(block: nn.Module) -> Iterator[None]:
    """Inside the `with`, a training `block` neither draws nor takes in statistics."""
    block.eval()
    try:
        yield
    finally:
        block.train()


class LayerDrop(nn.Module):
    """Decides at each forward which layers of a stack run.

    Args:
        rates: the probability of skipping, by layer.
        learned: train the rates; `rates` must then be equal, and their value stays the mean.

    `logits` [L] start at 0, every rate at the mean. They are a vector, so weight decay leaves them alone; they train at
    the optimizer's rate (`optimizer.groups` with `*.layerdrop.logits` gives them another).
    """

    def __init__(self, rates: Sequence[float], *, learned: bool = False) -> None:
        super().__init__()
        self.fixed = tuple(rates)
        self.logits: nn.Parameter | None = None
        if learned:
            assert len(set(rates)) == 1 and rates[0] > 0.0, "learned rates start equal, above 0"
            self.logits = nn.Parameter(torch.zeros(len(rates)))

    @property
    def learned(self) -> bool:
        return self.logits is not None

    def rates(self) -> list[float]:
        """The probability of skipping each layer, now."""
        if self.logits is None:
            return list(self.fixed)
        logits = self.logits.detach().tolist()
        offset = solve_offset(logits, self.fixed[0])
        return [_sigmoid(a + offset) for a in logits]

    @outside_graphs
    def forward(self) -> Draw | None:
        """The decisions of one forward pass; None, and nothing drawn, in evaluation and where all rates are 0."""
        if not self.training or not any(self.fixed):
            return None
        # On the host, whatever the device: which layers run must be known here.
        return self.decide(torch.rand(len(self.fixed), device="cpu").tolist())

    def decide(self, uniform: Sequence[float]) -> Draw:
        """The decisions that L numbers from U(0, 1) lead to."""
        rates = self.rates()
        keep = [u > rate or rate == 0.0 for u, rate in zip(uniform, rates, strict=True)]
        if self.logits is None or not torch.is_grad_enabled():
            return Draw(keep, None)
        rates_L = constrained_rates(self.logits, self.fixed[0])
        constant_L = rates_L.detach()
        chance_L = torch.where(torch.tensor(keep, device=rates_L.device), 1.0 - constant_L, constant_L)
        return Draw(keep, (constant_L - rates_L) / (2.0 * chance_L.clamp_min(LEAST_CHANCE)))

    def reset_parameters(self) -> None:
        """Every rate at the mean."""
        if self.logits is not None:
            nn.init.zeros_(self.logits)

    def extra_repr(self) -> str:
        return f"rates={[round(rate, 4) for rate in self.fixed]}, learned={self.learned}"
