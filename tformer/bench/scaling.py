"""How a cost grows with length, and from which length on one thing is cheaper than another."""

from __future__ import annotations

import math
from collections.abc import Mapping

LONG = 2048
"""Costs that do not grow with length hide the slope below this length."""


def slope_lengths(lengths: list[int]) -> list[int]:
    """The lengths to fit a slope over: those from `LONG` where there are two, else all."""
    long = [length for length in lengths if length >= LONG]
    return long if len(long) >= 2 else lengths


def log_log_slope(costs: Mapping[int, float]) -> float | None:
    """b of cost = a length^b by least squares on the logarithms: 1 is linear, 2 quadratic. None for fewer than two."""
    points = [(math.log(length), math.log(cost)) for length, cost in costs.items() if cost > 0]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    squares = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / squares


def crossover(costs: Mapping[int, float], reference: Mapping[int, float]) -> float | None:
    """The length from which on `costs` stay below `reference`, between lengths interpolated on logarithmic axes.

    0: below at every length that both have; infinity: not below at the longest; None: no length in common.
    """
    ratios = [
        (math.log(length), math.log(costs[length] / reference[length])) for length in sorted(costs.keys() & reference)
    ]
    if not ratios:
        return None
    if ratios[-1][1] >= 0:
        return math.inf
    above = [index for index, (_, ratio) in enumerate(ratios) if ratio >= 0]
    if not above:
        return 0.0
    (x, ratio), (next_x, next_ratio) = ratios[above[-1]], ratios[above[-1] + 1]
    return math.exp(x + (next_x - x) * ratio / (ratio - next_ratio))
