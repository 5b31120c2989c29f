"""Successive halving: many variants are trained for a few steps, and the best of them for more and more.

Of n variants that would train for R steps, rung i = 0 .. K trains floor(n / eta^i) to step ceil(R / eta^(K - i)); the
best of a rung are those of the next one (arXiv 1502.07943; a bracket of Hyperband, 1603.06560, without its outer loop).
K = floor(log_eta n), or less where R has fewer steps than eta^K.

A variant goes on from its checkpoint, with the learning-rate schedule of all R steps. The alternative, a new training
with a schedule of the rung's own length, ranks learning rates more fairly after few steps, but costs (K + 1) / (1 + K -
K / eta) times as many steps, 4/3 for 27 variants and eta 3, and its last rung is another training than the grid's. Here
the variants of the last rung have the weights that the whole grid gives them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tformer.support.formatting import plural


@dataclass(frozen=True)
class Rung:
    """variants: how many are trained; steps: at which they stop; last: they train to their end and are evaluated."""

    variants: int
    steps: int
    last: bool


@dataclass(frozen=True)
class Ladder:
    """The rungs of one task. seeds: trainings of each variant; grid_steps: those of the whole grid."""

    task: str
    eta: int
    seeds: int
    rungs: tuple[Rung, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps of all trainings; less where one fails."""
        before = (0, *(rung.steps for rung in self.rungs))
        pairs = zip(self.rungs, before, strict=False)
        return self.seeds * sum(rung.variants * (rung.steps - start) for rung, start in pairs)

    @property
    def grid_steps(self) -> int:
        """Optimizer steps of the whole grid."""
        return self.seeds * self.rungs[0].variants * self.rungs[-1].steps

    @property
    def trainings(self) -> int:
        """Number of trainings, each to one rung."""
        return self.seeds * sum(rung.variants for rung in self.rungs)

    def describe(self) -> str:
        """The rungs and the budget in one line."""
        first, *others = self.rungs
        parts = [f"{plural(first.variants, 'variant')} to step {first.steps:,}"]
        parts += [f"{rung.variants:,} to {rung.steps:,}" for rung in others]
        share = f"{self.steps / self.grid_steps:.0%}"
        seeds = f", {plural(self.seeds, 'seed')} each" if self.seeds > 1 else ""
        return (
            f"successive halving, eta {self.eta}: {', '.join(parts)}{seeds}; {self.steps:,} steps, {share} of the "
            f"{self.grid_steps:,} of the whole grid"
        )

    def to_json(self) -> dict[str, Any]:
        rungs = [{"variants": rung.variants, "steps": rung.steps} for rung in self.rungs]
        return {"task": self.task, "eta": self.eta, "rungs": rungs, "steps": self.steps, "grid_steps": self.grid_steps}


def rungs_of(variants: int, *, max_steps: int, eta: int) -> tuple[Rung, ...]:
    """The rungs of this many variants that would train for `max_steps`; one rung where there are fewer than `eta`."""
    last = 0
    while eta ** (last + 1) <= min(variants, max_steps):
        last += 1
    return tuple(
        Rung(variants // eta**number, -(-max_steps // eta ** (last - number)), last=number == last)
        for number in range(last + 1)
    )


def best_variants(scores: Mapping[str, Sequence[float | None]], count: int) -> set[str]:
    """The names of the `count` variants with the lowest mean score; of equal ones the earlier.

    scores: over the seeds, lower is better; a variant with a score that is None or not finite, as of a training that
    failed, counts as worst, and none of them is taken.
    """

    def mean(name: str) -> float:
        values = [math.inf if score is None or not math.isfinite(score) else score for score in scores[name]]
        return sum(values) / len(values)

    able = [name for name in scores if mean(name) < math.inf]
    return set(sorted(able, key=mean)[:count])
