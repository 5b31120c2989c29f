"""LayerDrop (1909.11556): whole layers are skipped while training, so that shallower models can be cut out afterwards.

    keep_d = [u_d > p_d],   u_d ~ U(0, 1) afresh at every forward;   a kept layer is not rescaled        (fairseq's)

Data-driven rates (the paper's third pruning strategy) learn one logit a_d per layer under a fixed mean rate p:

    p_d = σ(a_d + c(a)),   c(a) such that mean_d p_d = p;   q_d = 1 − p_d is the probability of keeping layer d

c is found by bisection without a gradient; a Newton step from there adds dc/da_d = −σ'_d / Σ_e σ'_e, the implicit
derivative, so that gradients are those of rates that keep their mean.

In the stream a layer f stands behind a gate z_d, 1 where kept and 0 where dropped, with output x + z_d (f(x) − x). With
L(z) the loss, the exact gradient is dE[L]/dq_d = E[L(z_d = 1) − L(z_d = 0)], the mean slope ∂L/∂z_d over z_d from 0 to
1. It is estimated by the trapezoidal rule, from the slope at whichever end was drawn:

    straight-through:  z_d + ½ (q_d − stop(q_d)) / stop(chance of what was drawn: q_d if kept, p_d if dropped)

whose expected gradient is ½ E[∂L/∂z_d at 1] + ½ E[∂L/∂z_d at 0]. That is exact, and the estimator unbiased, where L is
at most quadratic in each gate alone (multilinear losses included); elsewhere its bias is the trapezoid's, third order
in z_d. The slope at z_d = 1 alone will not do: the network has adapted to the layers that run, so it is near 0 there
and often points the wrong way. Values are those of plain LayerDrop; the slope of a dropped layer costs its forward
pass, without a gradient and in evaluation mode, so it draws nothing.
(The paper scores layers by their activations; here a rate belongs to the layer, which is what pruning needs.)
"""

# Shapes: L layers.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tformer.nn.eager import outside_graphs
from tformer.nn.options import require, require_probability

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
