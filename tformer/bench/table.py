"""A table of texts, and how it looks in Markdown; and the units that its numbers are told in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """The first column holds names, the others numbers or why there are none."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(table: Table) -> str:
    """The title as a paragraph, and the table with its numbers flush right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---", *["---:"] * (len(table.headings) - 1)]
    return "\n".join([table.title, "", *map(line, [table.headings, rule, *table.rows])])


def show_seconds(seconds: float) -> str:
    """Three digits: 0.812 ms, 12.3 ms, 4.56 s."""
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1000, "ms")
    return f"{_three_digits(value)} {unit}"


def show_bytes(count: float) -> str:
    """Three digits: 0.5 MiB, 34.1 MiB, 1.25 GiB."""
    value, unit = (count / 2**30, "GiB") if count >= 2**30 else (count / 2**20, "MiB")
    return f"{_three_digits(value)} {unit}"


def show_factor(factor: float) -> str:
    """Three digits: 0.081 x, 11.4 x."""
    return f"{_three_digits(factor)} x"


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{decimals}f}"
