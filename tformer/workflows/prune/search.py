"""Search on valid (LayerDrop, arXiv 1909.11556, section 3.2): the subset of layers with the best validation.

All subsets are measured where they are few; else layers leave one at a time, each time the one whose absence hurts
least (greedy backward elimination): N + (N - 1) + ... + (r + 1) measurements for r of N layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import combinations

from tformer.workflows.prune.layers import LayerChoice

Score = tuple[float, ...]
"""What is compared: lower is better, in order."""

Measure = Callable[[tuple[int, ...]], Score]
"""The score of a stack that has these of its layers alone."""


def search_layers(num_layers: int, num_kept: int, measure: Measure, *, max_trials: int) -> LayerChoice:
    """The best subset found; of equal ones the first, which keeps the earlier layers."""
    everything = tuple(range(num_layers))
    if num_kept == num_layers:
        return LayerChoice(num_layers, everything, "search")
    if math.comb(num_layers, num_kept) <= max_trials:
        subsets = list(combinations(everything, num_kept))
        return LayerChoice(num_layers, _best(subsets, measure), "search", "exhaustive", len(subsets))
    kept, evaluations = everything, 0
    while len(kept) > num_kept:
        subsets = list(combinations(kept, len(kept) - 1))
        evaluations += len(subsets)
        kept = _best(subsets, measure)
    note = f"{math.comb(num_layers, num_kept):,} subsets are more than --max-trials {max_trials}: greedy elimination"
    return LayerChoice(num_layers, kept, "search", "greedy", evaluations, note)


def num_trials(num_layers: int, num_kept: int, *, max_trials: int) -> int:
    """How many measurements `search_layers` will make."""
    subsets = math.comb(num_layers, num_kept) if num_kept < num_layers else 0
    return subsets if subsets <= max_trials else sum(range(num_kept + 1, num_layers + 1))


def _best(subsets: Iterable[tuple[int, ...]], measure: Measure) -> tuple[int, ...]:
    return min(subsets, key=lambda subset: tuple(math.inf if math.isnan(part) else part for part in measure(subset)))
