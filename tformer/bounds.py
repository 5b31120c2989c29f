"""Bounds of the numbers that users give: flags, keywords in Python and keys of recipes, by the name of the option.

What a number means sets its own limits where it is used (a share is at most 1); these are those of arithmetic and size.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """The absolute value of a number: 0, or between `least` and `most`; `why` says what other numbers would do."""

    least: float
    most: float
    why: str


FLOAT = Bound(2.0**-149, 3.4e38, "float32 holds no other number")
COUNT = Bound(1, 10**12, "no training has more steps, tokens or ids")
SEED = Bound(1, 2**63 - 1, "a seed has 64 bits")
ROWS = Bound(1, 2**16, "each takes a row of a batch, and its memory")
LENGTH = Bound(1, 2**30, "each token takes memory")
PENALTY = Bound(1e-30, 1e30, "logits times it, or divided by it, must be finite in float32")

BOUNDS = {
    "seed": SEED,
    **dict.fromkeys(("num_samples", "beam_size", "n_best", "beam_groups"), ROWS),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens"), LENGTH),
    **dict.fromkeys(("repetition_penalty", "diversity_penalty", "coverage_penalty"), PENALTY),
}
"""Numbers that have other bounds than their type: FLOAT, or COUNT of an int."""
FINITE = "a finite number"


def expected_of(name: str, value: object) -> str | None:
    """What a number of this name must be, in words; None for one that is within its bounds, and for no number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value == 0:
        return None
    least, most, why = BOUNDS.get(name, COUNT if isinstance(value, int) else FLOAT)
    if least <= abs(value) <= most:
        return None
    if value != value or abs(value) == float("inf"):
        return FINITE
    if abs(value) < least:
        return f"0 or at least {least:.3g} ({why})"
    return ("at most " if value > 0 else "at least -") + (
        f"{most:,}" if isinstance(value, int) else f"{most:g} ({why})"
    )
