"""Bounds of the numbers that users give: flags, keywords in Python and keys of recipes, by the name of the option.

What a number means sets its own limits where it is used (a share is at most 1); these are those of arithmetic and size.
"""

from __future__ import annotations

from typing import Any, NamedTuple


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
LEAST = {
    **dict.fromkeys(("batch_size", "seq_len", "max_length", "max_tokens", "max_new_tokens", "vocab_size"), 1),
    **dict.fromkeys(("num_labels", "top", "keep", "last", "max_examples", "max_trials", "stop_at_step", "workers"), 1),
    **dict.fromkeys(("seeds", "draws", "max_steps", "num_samples", "beam_size", "n_best"), 1),
    **dict.fromkeys(("seed", "min_new_tokens", "max_restarts", "length_margin", "coverage_penalty"), 0),
    "eta": 2,
}
"""The least value of flags, keywords and settings; recipes have those of their schema."""


def expected_of(name: str, value: object) -> str | None:
    """What a number of this name must be, in words; None for one that is within its bounds, and for no number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value == 0:
        return None
    least, most, why = BOUNDS.get(name, COUNT if isinstance(value, int) else FLOAT)
    if least <= abs(value) <= most:
        return None
    if value != value or abs(value) == float("inf"):
        return "a finite number"
    if abs(value) < least:
        return f"0 or at least {least:.3g} ({why})"
    return ("at most " if value > 0 else "at least -") + (
        f"{most:,}" if isinstance(value, int) else f"{most:g} ({why})"
    )


def out_of_bounds(name: str, given: Any) -> str | None:
    """What is wrong with a flag, keyword or setting, such as "must be at least 1, found 0"; None if nothing is."""
    for value in given if isinstance(given, list | tuple) else (given,):
        is_low = isinstance(value, int | float) and value < LEAST.get(name, value)
        if expected := f"at least {LEAST[name]}" if is_low else expected_of(name, value):
            return f"must be {expected}, found {value}"
    return None
