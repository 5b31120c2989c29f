"""Pairwise test cases: rows in which any two values of any two parameters occur together at least once.

A fault that shows only for one combination of two values is still caught, with far fewer rows than the full grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(**parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The rows, in the order of the parameters; deterministic, the first row holds every first value.

    @pytest.mark.parametrize(("rows", "inner", "bias"), pairwise(rows=[1, 2, 8], inner=[31, 64], bias=[False, True]))
    """
    sizes = [len(values) for values in parameters.values()]
    columns = range(len(sizes))
    uncovered = {
        (a, i, b, j) for a, b in combinations(columns, 2) for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    chosen = [(0,) * len(sizes)]
    uncovered -= _pairs(chosen[0])
    candidates = list(product(*map(range, sizes)))
    while uncovered:
        best = max(candidates, key=lambda row: len(_pairs(row) & uncovered))
        chosen.append(best)
        uncovered -= _pairs(best)
    values = list(parameters.values())
    return [tuple(values[column][index] for column, index in enumerate(row)) for row in chosen]


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}
