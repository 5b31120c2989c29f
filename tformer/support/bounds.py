"""Bounds of values, declared beside their types, and one check of them for flags, keywords and settings.

top: Annotated[Positive | None, option("--top-k", help="...")] = None
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

from tformer.support.formatting import describe


class Bound(NamedTuple):
    """Bounds of a number's absolute value: 0, or from `least` to `most`; `why` is the reason."""

    least: float
    most: float
    why: str


class Must(NamedTuple):
    """A condition on a value, as code and in words. Recipes use the bounds of `annotated_types`."""

    holds: Callable[[Any], bool]
    words: str


def at_least(least: float, off: str = "") -> Must:
    return Must(lambda value: value >= least, f"at least {least}{off}")


def within(least: float, most: float) -> Must:
    return Must(lambda value: least <= value <= most, f"{least} to {most:,}")


def above_0(most: float) -> Must:
    return Must(lambda value: 0 < value <= most, f"above 0 and at most {most:,}")


FLOAT = Bound(2.0**-149, 3.4e38, "float32 holds no other number")
COUNT = Bound(1, 10**12, "no training has more steps, tokens or ids")
SEED = Bound(1, 2**63 - 1, "a seed has 64 bits")

Positive = Annotated[int, at_least(1)]
NonNegative = Annotated[int, at_least(0)]
Seed = Annotated[int, SEED, at_least(0)]
Share = Annotated[float, Must(lambda value: 0 < value < 1, "above 0 and below 1")]
Port = Annotated[int, within(0, 2**16 - 1)]


def expected_of(value: object, facts: Iterable[Any] = ()) -> str | None:
    """The bound of its declaration, or else of its type, that a number violates; None if it is right or no number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value == 0:
        return None
    own = (fact for fact in facts if isinstance(fact, Bound))
    least, most, why = next(own, COUNT if isinstance(value, int) else FLOAT)
    if least <= abs(value) <= most:
        return None
    if value != value or abs(value) == float("inf"):
        return "a finite number"
    if abs(value) < least:
        return f"0 or at least {least:.3g} ({why})"
    return ("at most " if value > 0 else "at least -") + (
        f"{most:,}" if isinstance(value, int) else f"{most:g} ({why})"
    )


def out_of_bounds(given: Any, facts: Iterable[Any]) -> str | None:
    """The fault of a value by its declaration, such as "must be at least 1, found 0"; None if it is right."""
    if given is None:
        return None
    facts = tuple(facts)
    for fact in facts:
        if isinstance(fact, Must) and given == given and not fact.holds(given):
            return f"must be {fact.words}, found {given}"
    for value in given if isinstance(given, list | tuple) else (given,):
        if expected := expected_of(value, facts):
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
