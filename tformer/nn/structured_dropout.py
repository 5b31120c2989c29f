"""DropHead (arXiv 2004.13342), LayerDrop (arXiv 1909.11556), and the training step that schedules follow.

DropHead drops whole attention heads while training, for each sample:

    gate_h = keep_h · H / Σ keep,   keep_h ~ Bernoulli(1 − p), at least one kept

The gates of a sample add up to H, so by symmetry E[gate_h] = 1: evaluation needs no correction. The paper's schedule is
V-shaped in the step t, with w warm-up steps out of N. Early it breaks up dominating heads, in the middle it does
nothing, and at the end it regularizes:

    p(t) = p_start (1 − t / w)           t ≤ w
    p(t) = p_end (t − w) / (N − w)       t > w

LayerDrop skips whole layers while training, so that shallower models can be cut out afterwards:

    keep_d = [u_d > p_d],   u_d ~ U(0, 1), redrawn in every forward;   a kept layer is not rescaled        (as fairseq)

Learned rates (the paper's third pruning strategy). Each layer has a logit a_d; the mean rate p is fixed:

    p_d = σ(a_d + c(a)),   c(a) such that mean_d p_d = p;   q_d = 1 − p_d is the probability of keeping layer d

c is found by bisection, without a gradient. A Newton step from there has length 0, but carries the implicit derivative
dc/da_d = −σ'_d / Σ_e σ'_e, so gradients are those of rates that keep their mean.

Their gradient. A layer f has a gate z_d, 1 if kept and 0 if dropped, and the output x + z_d (f(x) − x). With L(z) the
loss, the exact gradient is dE[L]/dq_d = E[L(z_d = 1) − L(z_d = 0)]: the mean slope ∂L/∂z_d over z_d from 0 to 1. The
trapezoidal rule estimates it from the slope at the end that was drawn:

    straight-through:  z_d + ½ (q_d − stop(q_d)) / stop(probability of the draw: q_d if kept, p_d if dropped)

Its expectation is ½ E[∂L/∂z_d at 1] + ½ E[∂L/∂z_d at 0]. That is exact if L is at most quadratic in each gate alone;
else the bias is that of the trapezoid, third order in z_d. The slope at z_d = 1 alone would not do: the network has
adapted to the layers that run, so that slope is near 0 and often has the wrong sign. The slope of a dropped layer costs
its forward pass, without a gradient and in evaluation mode, so it draws nothing. (The paper scores layers by their
activations; here a rate belongs to the layer, which is what pruning needs.)

Shapes: gates [B, H, 1, 1]; L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tformer.nn.dropout import outside_graphs
from tformer.nn.options import require, require_probability


@dataclass(frozen=True, slots=True)
class TrainingStep:
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
    """A module that changes with the training step (DropHead's schedule, Performer's redrawn features).

    It draws from `step.seed`, which is equal on every process, and never from torch's global generator, so that adding
    such a module does not change the dropout of others.
    """

    def begin_step(self, step: TrainingStep) -> None: ...


def step_listeners(model: nn.Module) -> list[StepAware]:
    """The modules of `model` that have a `begin_step`, in the order of `model.modules()`."""
    return [module for module in model.modules() if isinstance(module, StepAware)]


@dataclass(frozen=True)
class DropHeadSchedule:
    """V-shaped schedule: from `start` down to 0 over the warm-up, then up to `rate` at the last step.

    warmup_steps: of this schedule; null: those of the learning rate.
    """

    SHORTHAND: ClassVar[str] = "rate"  # the field that a bare number in a recipe sets

    rate: float  # rate at the last step
    start: float  # rate at the first step
    warmup_steps: int | None = None  # steps from `start` down to 0; null: those of the learning rate

    def __post_init__(self) -> None:
        require_probability(rate=self.rate, start=self.start)
        least = 0 if self.warmup_steps is None else self.warmup_steps
        require(least >= 0, f"warmup_steps must be at least 0, found {self.warmup_steps}")


def scheduled_rate(schedule: DropHeadSchedule, step: TrainingStep) -> float:
    """p(t) of the V-shaped schedule; without a warm-up only its rising arm, with one of all steps only the falling."""
    warmup = step.warmup_steps if schedule.warmup_steps is None else schedule.warmup_steps
    if step.number <= warmup:
        return schedule.start * (1.0 - step.number / warmup)
    return schedule.rate * min(1.0, (step.number - warmup) / max(1, step.max_steps - warmup))


class SharedDraws:
    """Random numbers of a micro-batch that several processes share, equal to the numbers that one process would draw.

    One process draws from torch's global generator. Here that generator differs from process to process, for plain
    dropout, so these numbers have a separate generator: every process draws for all rows and uses those of its rows.

    Args:
        seed: of the micro-batch, equal on every process.
        rows: the places of this process's rows in the micro-batch.
        num_rows: rows of the whole micro-batch.
        device: of the model; numbers are drawn there and on the CPU.
    """

    def __init__(self, seed: int, *, rows: slice, num_rows: int, device: torch.device) -> None:
        self.rows, self.num_rows = rows, num_rows
        self._generators = {name: torch.Generator(name).manual_seed(seed) for name in {"cpu", str(device)}}

    @outside_graphs
    def equal(self, count: int) -> Tensor:
        """[count] numbers from U(0, 1) on the CPU, the same in every process."""
        return torch.rand(count, generator=self._generators["cpu"])

    @outside_graphs
    def of_rows(self, columns: int, device: torch.device, sizes: Sequence[int] | None = None) -> Tensor:
        """Numbers from U(0, 1) for this process's rows, [n, columns]; `sizes`: number of lines of each row."""
        sizes = [1] * self.num_rows if sizes is None else list(sizes)
        drawn = torch.rand(sum(sizes), columns, generator=self._generators[str(device)], device=device)
        return torch.cat(drawn.split(sizes)[self.rows])

    def repeated(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Context managers of a checkpointed block's two forwards: both draw the same numbers."""
        generators = list(self._generators.values())
        first = [generator.get_state() for generator in generators]

        @contextmanager
        def second() -> Iterator[None]:
            current = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, first, strict=True):
                generator.set_state(state)
            try:
                yield
            finally:
                for generator, state in zip(generators, current, strict=True):
                    generator.set_state(state)

        return nullcontext(), second()


def drop_heads(
    batch: int, heads: int, rate: float, device: torch.device, *, shared: SharedDraws | None = None
) -> Tensor:
    """Per-sample gates [B, H, 1, 1]: each head kept with probability 1 - rate, at least one, scaled by H / kept."""
    draw = torch.rand(batch, heads, device=device) if shared is None else shared.of_rows(heads, device)
    kept = (draw >= rate) | (draw == draw.amax(dim=1, keepdim=True))
    return (kept * (heads / kept.sum(dim=1, keepdim=True))).view(batch, heads, 1, 1)


class DropHead(nn.Module):
    """Multiplies the heads of one attention by random gates.

    Args:
        rate: a constant probability, or a schedule, which is at its start until the first `begin_step`.

    Attributes:
        rate: the probability now.
        shared: draws of several processes; None: torch's global generator.
    """

    def __init__(self, rate: float | DropHeadSchedule = 0.0) -> None:
        super().__init__()
        self.shared: SharedDraws | None = None
        self.schedule = rate if isinstance(rate, DropHeadSchedule) else None
        self.rate = rate.start if isinstance(rate, DropHeadSchedule) else rate

    def begin_step(self, step: TrainingStep) -> None:
        """Move the rate along its schedule."""
        if self.schedule is not None:
            self.rate = scheduled_rate(self.schedule, step)

    def forward(self, out_BHTv: Tensor) -> Tensor:
        """The heads' outputs times their gates; in evaluation and at rate 0 unchanged, without a draw."""
        if not self.training or self.rate == 0.0:
            return out_BHTv
        gates = drop_heads(out_BHTv.shape[0], out_BHTv.shape[1], self.rate, out_BHTv.device, shared=self.shared)
        return out_BHTv * gates.to(out_BHTv.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}" if self.schedule is None else repr(self.schedule)


LEARNED = ".layerdrop.logits"  # ending of the names of learned rates in a model's state
BISECTIONS = 100
LEAST_CHANCE = 1.0e-6  # bounds the weight of a layer that was kept although it is dropped almost always
LEAST_SLOPE = 1.0e-12  # for rates that are all close to 0 or 1


@dataclass(frozen=True)
class LayerDropOptions:
    """`rate`: the probability of skipping a layer, or the mean over layers of learned ones."""

    SHORTHAND: ClassVar[str] = "rate"  # the field that a bare number in a recipe sets

    rate: float  # probability of skipping a layer
    learned: bool = False  # a rate for each layer, trained with the weights

    def __post_init__(self) -> None:
        require_probability(rate=self.rate)
        require(self.rate > 0.0 or not self.learned, f"rate must be greater than 0 to be learned, found {self.rate}")


def solve_offset(logits: Sequence[float], mean: float) -> float:
    """Solve mean(σ(a_d + c)) = `mean` for c by bisection, to the last bits; 0 < `mean` < 1."""
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
    # Newton's step from a solution: its length is exactly 0, but it carries the gradient.
    return torch.sigmoid(logits_L + offset - (share - share.detach()) / slope)


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))  # the other form overflows
    return (1.0 if x >= 0.0 else small) / (1.0 + small)


class Draw(NamedTuple):
    """The layers that one forward pass keeps.

    keep: for each layer.
    slack_L: zeros with the gradient of the learned rates; None if the rates are fixed.
    """

    keep: list[bool]
    slack_L: Tensor | None

    @partial(outside_graphs, recursive=False)
    def gated(self, layer: int, x: Tensor, run: Callable[[], Tensor], block: nn.Module) -> Tensor:
        """The output of a layer: `run()`, or `x` itself if dropped; connected to the learned rate."""
        if self.slack_L is None:
            return run() if self.keep[layer] else x
        if self.keep[layer]:
            y = run()
            return y + self.slack_L[layer] * (y - x).detach()
        block.eval()  # it draws nothing and updates no statistics
        try:
            with torch.no_grad():
                update = run() - x
        finally:
            block.train()
        return x + self.slack_L[layer] * update


class LayerDrop(nn.Module):
    """Decides in each forward pass which layers of a stack run.

    Args:
        rates: the probability of skipping, by layer.
        learned: train the rates; `rates` must then be equal, and their value stays the mean.

    `logits` [L] start at 0, every rate at the mean. They are a vector, so weight decay leaves them alone; they train at
    the optimizer's rate (`optimizer.groups` with `*.layerdrop.logits` gives them another).

    Attributes:
        shared: draws of several processes; None: torch's global generator.
    """

    def __init__(self, rates: Sequence[float], *, learned: bool = False) -> None:
        super().__init__()
        self.fixed = tuple(rates)
        self.shared: SharedDraws | None = None
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
        """The decisions of one forward pass; None, without a draw, in evaluation and where all rates are 0."""
        if not self.training or not any(self.fixed):
            return None
        # Drawn on the CPU for every device: the Python loop over the layers branches on the result.
        count = len(self.fixed)
        draw_L = torch.rand(count, device="cpu") if self.shared is None else self.shared.equal(count)
        return self.decide(draw_L.tolist())

    def decide(self, uniform: Sequence[float]) -> Draw:
        """The draw for L numbers from U(0, 1)."""
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
