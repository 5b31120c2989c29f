"""Bounds of numbers, by the name of the flag, keyword, setting or key of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tformer.support.decoding import Bound, fact_of, least_of
from tformer.support.formatting import describe

FLOAT = Bound(2.0**-149, 3.4e38, "float32 holds no other number")
COUNT = Bound(1, 10**12, "no training has more steps, tokens or ids")
SEED = Bound(1, 2**63 - 1, "a seed has 64 bits")

LEAST = {
    **dict.fromkeys(("batch_size", "seq_len", "max_length", "max_tokens", "vocab_size", "top", "keep", "last"), 1),
    **dict.fromkeys(("max_examples", "max_trials", "stop_at_step", "max_steps", "workers", "limit"), 1),
    **dict.fromkeys(("seeds", "dimensions"), 1),
    **dict.fromkeys(("seed", "max_restarts"), 0),
}
"""The least value of flags and keywords, other than settings of decoding; recipes have those of their schema."""


def bound_of(name: str, value: float) -> Bound:
    """The bound of a setting, else of its type."""
    own = SEED if name == "seed" else fact_of(name, Bound)
    return own or (COUNT if isinstance(value, int) else FLOAT)


def expected_of(name: str, value: object) -> str | None:
    """The bound that a number violates, in words; None if it is within its bounds or no number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value == 0:
        return None
    least, most, why = bound_of(name, value)
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
    """The fault of a flag, keyword or setting, such as "must be at least 1, found 0"; None if it is right."""
    for value in given if isinstance(given, list | tuple) else (given,):
        least = LEAST.get(name, least_of(name))
        is_low = least is not None and isinstance(value, int | float) and value < least
        if expected := f"at least {least}" if is_low else expected_of(name, value):
            return f"must be {expected}, found {value}"
    return None


# pydantic's errors.

EXPECTED: dict[str, str] = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "too_long": "at most {max_length} values",
    "too_short": "at least {min_length} values",
    "string_too_long": "at most {max_length} characters",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "path_type": "a path",
    "union_tag_invalid": "a kind of {expected_tags}",
    "union_tag_not_found": "a kind",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "dataclass_type": "a mapping",
}
"""The expected value, by the type of the error; its `ctx` holds the limit."""
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
MISSING_KEY = ("missing", "missing_argument")


def expected_by(entry: Mapping[str, Any]) -> str:
    """The value that pydantic expected, in plain words."""
    return EXPECTED.get(entry["type"], "another value").format(**entry.get("ctx", {}))


def mistake_of(entry: Mapping[str, Any]) -> str:
    """One of pydantic's errors in plain words."""
    kind, facts = entry["type"], entry.get("ctx", {})
    if kind == "value_error":
        return str(facts["error"])
    if kind in MISSING_KEY or kind in UNKNOWN_KEY:
        return "missing" if kind in MISSING_KEY else "unknown key"
    return f"found {describe(facts.get('tag', entry['input']))}, expected {expected_by(entry)}"
