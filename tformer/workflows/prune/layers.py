"""Choice of the layers that stay in a pruned model (LayerDrop, arXiv 1909.11556, section 3.2).

    every-other   of N layers r stay; p = 1 - r/N; layers at depth d (from 0) with d = 0 mod floor(1/p) are removed
    learned       the r layers with the lowest learned drop rates stay
    search        the subset of r layers with the best validation score

For p > 1/2 the first formula would remove every layer, and for some smaller p it removes too many or too few; then r
evenly spaced layers stay: floor((i + 1/2) N / r) for i < r. A search scores all subsets where there are few; else it
removes one layer at a time, always the one with the least damage (greedy backward elimination).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from tformer.model import Transformer
from tformer.support.errors import InputError

SIDES = ("encoder", "decoder")


def stacks_of(model: Transformer, asked: str | None) -> tuple[str, ...]:
    """The stacks to prune, as chosen with --stack. Raises InputError for one that the model does not have."""
    present = tuple(side for side in SIDES if getattr(model, side) is not None)
    wanted = present if asked is None else SIDES if asked == "both" else (asked,)
    missing = [side for side in wanted if side not in present]
    if missing:
        raise InputError(f"--stack {asked}: the model has no {missing[0]}, only the {present[0]}")
    return wanted


@dataclass(frozen=True)
class LayerChoice:
    """The layers of one stack that are kept, in order, and how they were chosen.

    Attributes:
        strategy: named, every-other, search or learned.
        method: of a search: exhaustive, or greedy.
        evaluations: of a search: number of subsets that were measured.
        note: a remark for the user; empty: none.
    """

    num_layers: int
    kept: tuple[int, ...]
    strategy: str
    method: str | None = None
    evaluations: int = 0
    note: str = ""

    @property
    def dropped(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.kept)


def num_kept(num_layers: int, *, keep: int | None, rate: float | None, side: str) -> int:
    """Number of layers that stay: `keep`, or what is left after removing the share `rate` (rounded, at least one)."""
    if keep is None:
        assert rate is not None
        return max(1, num_layers - math.floor(num_layers * rate + 0.5))
    if keep > num_layers:
        raise InputError(
            f"--keep {keep}: the {side} has {num_layers} layer{'s' * (num_layers != 1)}",
            hint="--stack names the stack to prune; the numbers apply to each",
        )
    return keep


def named_layers(
    num_layers: int, *, keep: Sequence[int] | None = None, drop: Sequence[int] | None = None, side: str
) -> LayerChoice:
    """The layers in `keep`, or those not in `drop`.

    Raises:
        InputError: a layer that the stack does not have, a layer named twice, or no layer left.
    """
    option, named = ("--keep-layers", keep) if keep is not None else ("--drop-layers", drop)
    assert named is not None
    for layer in named:
        if not 0 <= layer < num_layers:
            raise InputError(f"{option}: the {side} has no layer {layer}: its layers are 0 to {num_layers - 1}")
    if len(set(named)) < len(named):
        twice = next(layer for layer in named if list(named).count(layer) > 1)
        raise InputError(f"{option}: layer {twice} is named twice")
    kept = [layer for layer in range(num_layers) if (layer in named) == (keep is not None)]
    if not kept:
        raise InputError(f"{option}: no layer of the {side} is left, expected at least one")
    return LayerChoice(num_layers, tuple(kept), "named")


def every_other(num_layers: int, num_kept: int) -> LayerChoice:
    """The layers of the formula where it leaves `num_kept`, else evenly spaced ones, with a note."""
    removed = num_layers - num_kept
    if not removed:
        return LayerChoice(num_layers, tuple(range(num_layers)), "every-other")
    step = num_layers // removed  # floor(1/p)
    kept = tuple(layer for layer in range(num_layers) if layer % step)
    if len(kept) == num_kept:
        return LayerChoice(num_layers, kept, "every-other")
    note = (
        f"every-other leaves {len(kept)} of {num_layers} layers at p = {removed / num_layers:.3g}: "
        f"{num_kept} evenly spaced ones are kept instead"
    )
    return LayerChoice(num_layers, evenly_spaced(num_layers, num_kept), "every-other", note=note)


def evenly_spaced(num_layers: int, num_kept: int) -> tuple[int, ...]:
    """The layers in the middles of `num_kept` equal parts of the stack."""
    return tuple((2 * part + 1) * num_layers // (2 * num_kept) for part in range(num_kept))


def lowest_rates(rates: Sequence[float], num_kept: int) -> LayerChoice:
    """The layers with the lowest learned drop rates; among equal ones the earlier."""
    order = sorted(range(len(rates)), key=lambda layer: (rates[layer], layer))
    return LayerChoice(len(rates), tuple(sorted(order[:num_kept])), "learned")


Score = tuple[float, ...]
"""Compared in order; lower is better."""

Measure = Callable[[tuple[int, ...]], Score]
"""The score of a stack with only these layers."""


def search_layers(num_layers: int, num_kept: int, measure: Measure, *, max_trials: int) -> LayerChoice:
    """The best subset of layers; among equal ones the first, which keeps the earlier layers."""
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
    """Number of measurements that `search_layers` makes."""
    subsets = math.comb(num_layers, num_kept) if num_kept < num_layers else 0
    return subsets if subsets <= max_trials else sum(range(num_kept + 1, num_layers + 1))


def _best(subsets: Iterable[tuple[int, ...]], measure: Measure) -> tuple[int, ...]:
    return min(subsets, key=lambda subset: tuple(math.inf if math.isnan(part) else part for part in measure(subset)))
