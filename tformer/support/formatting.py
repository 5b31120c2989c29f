"""Numbers, sizes, durations and texts in the form in which people and JSON read and write them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SI_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
MAX_DIGITS = 18  # of a whole number that a user writes: it fits 64 bits
TOKEN_SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
"""Signs for the white space of a token, where tokens are shown one by one."""


def python_value(value: Any) -> Any:
    """The same value, with numbers and arrays of numpy or torch as Python's numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def finite_or_none(value: Any) -> Any:
    """The same value for JSON, at any depth: `python_value`, and NaN and infinity become None."""
    value = python_value(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    return [finite_or_none(item) for item in value] if isinstance(value, list | tuple) else value


def finite_number(value: object) -> float | None:
    """The value, if it is a finite number that a float can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -sys.float_info.max <= value <= sys.float_info.max else None


def whole_number(text: str) -> int | None:
    """The number that a text of digits spells; None for another text, and for more than `MAX_DIGITS`."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None


# --- counts and sizes -------------------------------------------------------------------------------------------------


def amount(value: float, unit: str = "") -> str:
    """Three digits and an SI prefix: 1.23 GB, 875 M."""
    power = 0
    while value >= 999.5 and power < len(SI_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = f"{value:.0f}" if power == 0 and value == int(value) else f"{value:.3g}"
    return f"{digits} {SI_PREFIXES[power]}{unit}".rstrip()


def short_count(count: int) -> str:
    """1,234,567 as 1.23M."""
    for factor, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{suffix}"
    return str(count)


def short_rate(per_second: float) -> str:
    """12,345 as 12.3k, 950.2 as 950."""
    return f"{per_second / 1000:.1f}k" if per_second >= 1000 else f"{per_second:.0f}"


def ratio(value: float) -> str:
    """Three digits: 0.081 x, 11.4 x."""
    return f"{_three_digits(value)} x"


def decimal_bytes(count: int) -> str:
    """1.2 GB, 34.5 MB, 6.7 kB or 89 B."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def counted(done: float, total: float | None, unit: str) -> str:
    """How far work is: 12 of 40 steps, 0.5 MB of 1.1 MB (unit B), 1,234 pairs."""
    if unit == "B":
        return decimal_bytes(round(done)) + (f" of {decimal_bytes(round(total))}" if total else "")
    return f"{done:,.0f}" + (f" of {total:,.0f}" if total else "") + (f" {unit}" if unit else "")


def binary_bytes(count: float) -> str:
    """Three digits: 0.5 MiB, 34.1 MiB, 1.25 GiB."""
    value, unit = (count / 2**30, "GiB") if count >= 2**30 else (count / 2**20, "MiB")
    return f"{_three_digits(value)} {unit}"


def mebibytes(count: float) -> str:
    """Whole MiB without the unit: 1,234."""
    return f"{count / 2**20:,.0f}"


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{decimals}f}"


# --- durations --------------------------------------------------------------------------------------------------------


def short_seconds(seconds: float) -> str:
    """Three digits: 0.812 ms, 12.3 ms, 4.56 s."""
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1000, "ms")
    return f"{_three_digits(value)} {unit}"


def clock(seconds: float) -> str:
    """3:05 or 2:03:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """4.2s, 3:05 or 2:03:05."""
    return f"{seconds:.1f}s" if seconds < 60 else clock(seconds)


def minutes_and_seconds(seconds: float) -> str:
    """3 min 5 s, or 5 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# --- texts ------------------------------------------------------------------------------------------------------------


def plural(count: float, noun: str) -> str:
    """`1 epoch`, `2 epochs`: a count and a noun whose plural ends in s."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:,g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """The first names with commas between them, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def shortened(text: str, limit: int) -> str:
    """The text, or its first `limit` characters and `...`."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def fitted(text: str, width: int, ending: str = "...") -> str:
    """The text in at most `width` characters: where it is longer, its end is replaced by the ending."""
    return text if len(text) <= width else text[: width - len(ending)] + ending


def columns_of(text: str) -> int:
    """Columns of a terminal that the text takes: letters of East Asian scripts take two, combining marks none."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" and not unicodedata.combining(letter) for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


def without_middle(text: str, width: int) -> str:
    """The text in at most `width` characters, without its middle: names often differ at both ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many parts before it as make it unique."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    depths = [1] * len(parts)
    while True:
        names = ["/".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        taken = Counter(names)
        clashing = [n for n, name in enumerate(names) if taken[name] > 1 and depths[n] < len(parts[n])]
        if not clashing:
            return names
        for n in clashing:
            depths[n] += 1


def short_hash(sha256: str) -> str:
    """The first 16 digits of a hash."""
    return f"{sha256[:16]}..."


def as_one_line(text: str) -> str:
    r"""The text on one line: newline and carriage return become `\n` and `\r`."""
    return text.replace("\n", "\\n").replace("\r", "\\r")


def as_cell(text: str) -> str:
    r"""The text in one cell of a line: tab, newline and carriage return become `\t`, `\n` and `\r`."""
    return as_one_line(text.replace("\t", "\\t"))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows of values as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def json_text(document: Any, **layout: Any) -> str:
    """A record as JSON with a newline, by `finite_or_none`; layout: options of `json.dumps`, such as `indent`."""
    return json.dumps(finite_or_none(document), **{"ensure_ascii": False, **layout}, allow_nan=False) + "\n"


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> list[str]:
    """Rows of text with columns two spaces apart; columns with a heading (first row) in `right` are right-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for heading, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


SECONDS_IN_WORDS = 150  # from here on durations are in minutes


def in_words(seconds: float) -> str:
    """A duration to read: 40 s, 3 min 50 s, 2 h 5 min."""
    if seconds < SECONDS_IN_WORDS:
        return f"{max(1, round(seconds))} s"
    minutes, rest = divmod(round(seconds / 10) * 10, 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h" + (f" {minutes} min" if minutes else "")


_KINDS: tuple[tuple[type, str], ...] = (
    (type(None), "null"),
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "a text"),
    (list, "a list"),
    (dict, "an object"),
)


def kind_of(value: object) -> str:
    """The kind of a JSON value, for a message; the type's name for other values."""
    return next((words for kind, words in _KINDS if isinstance(value, kind)), type(value).__name__)


def describe(value: Any) -> str:
    """A value for a message: short, in YAML's spelling, text marked as text."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        shown = fitted(value, 60)
        return f"the text {shown!r}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
