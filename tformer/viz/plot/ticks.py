"""Round numbers for an axis, and how numbers are written on it."""

from __future__ import annotations

import math

FACTORS = (1.0, 2.0, 2.5, 5.0, 10.0)


def ticks(low: float, high: float, *, log: bool, most: int) -> list[float]:
    """Round numbers within low < high, about `most` of them at the most; powers of ten and some between, if log."""
    if log and math.log10(high / low) > 0.7:
        return _log_ticks(low, high, most)
    raw = (high - low) / max(most, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(factor for factor in FACTORS if factor * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor((high - first * step) / step + 1e-9) + 1
    return [float(f"{(first + n) * step:.12g}") for n in range(max(count, 0))]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = math.log10(high / low)
    every = max(1, math.ceil(decades / most))
    factors = (1, 2, 5) if 3 * decades <= most else (1, 3) if 2 * decades <= most else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
    return [value for value in found if low * 0.999 <= value <= high * 1.001]


def plain(value: float) -> str:
    """At most four digits that matter, or all of a whole number below a million: 16,384, 1.536M, 2.021, 6e-5."""
    for letter, size in (("G", 1e9), ("M", 1e6)):
        if size <= abs(value) < 1e13:
            return f"{value / size:,.4g}{letter}"
    if abs(value) < 1e6 and (value == round(value) or abs(value) >= 1e4):
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e-0", "e-").replace("e+", "e")
