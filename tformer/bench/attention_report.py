"""Report of `bench attention`: tables, exponents of growth, crossovers, CSV, JSON and curves."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tformer.bench.attention import (
    NOT_TRIED,
    AttentionBench,
    Cell,
    bytes_read,
    flops,
    line_of,
    succeeded,
)
from tformer.bench.machine import roofline_line
from tformer.bench.processes import (
    OUT_OF_MEMORY,
    TOO_LONG,
)
from tformer.bench.report import Table, ceilings_words, markdown
from tformer.bench.workloads.attention import (
    DENSE_MASKED,
    FULL,
)
from tformer.checkpoint.atomic import write_text
from tformer.checkpoint.run import make_folders
from tformer.formatting import binary_bytes, finite_or_none, ratio, short_seconds
from tformer.viz.curves import Curve, draw_curves

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


Found = Mapping[str, Any]
"""A `Ceilings` as a mapping, or {"failed": why}."""


def figures(bench: AttentionBench, cell: Cell, ceilings: Found | None) -> dict[str, Any]:
    """The keys that a row of every bench has; None where nothing was measured. A step is forward and backward."""
    tokens, measured = bench.batch_size * cell.length, cell.median is not None
    line = line_of(bench, cell, ceilings)
    return {
        "tokens_per_second": None if cell.median is None else tokens / cell.median,
        "step_ms": None if cell.median is None else 1000 * cell.median,
        "flops": flops(bench, cell.kind, cell.length) if measured else None,
        "bytes_read": bytes_read(bench, cell.kind, cell.length) if measured else None,
        "share_of_peak": None if line is None else line.share,
        "share_of_arithmetic": None if line is None else line.arithmetic,
        "share_of_bandwidth": None if line is None else line.bandwidth,
        "bound": None if line is None else line.bound,
    }


def lines(bench: AttentionBench, cells: Sequence[Cell], ceilings: Found | None) -> list[str]:
    """The ceilings, and what binds each kind at its greatest length; why there are none, where that is so."""
    if ceilings is None:
        return []
    if "failed" in ceilings:
        return [f"ceilings: {ceilings['failed']}"]
    told = [f"ceilings: {ceilings_words(ceilings)}"]
    for kind in bench.kinds:
        own = succeeded(cells, kind)
        line = line_of(bench, own[max(own)], ceilings) if own else None
        if line is not None:
            told.append(roofline_line(f"{kind} at {max(own):,}", line))
    return told


UNSTEADY = 0.2
"""A spread above this share of the median is told."""

FILES = ("table.md", "table.csv", "table.json", "time.svg", "memory.svg")


@dataclass(frozen=True)
class Summary:
    """One kind over all lengths. None: not known, for want of measurements.

    Attributes:
        time_slope, memory_slope: exponents of the length, fitted over `slope_lengths`.
        crossover: length from which on it is faster than full attention; 0: at every length; infinity: at none.
        compared_at: the greatest length that both were measured at.
        speedup: full attention's time over this kind's there; memory_share: this kind's memory over that of
            dense-masked attention there (`masked_at`).
    """

    kind: str
    slope_lengths: tuple[int, ...]
    time_slope: float | None
    memory_slope: float | None
    crossover: float | None
    compared_at: int | None
    speedup: float | None
    masked_at: int | None
    memory_share: float | None


def summarise(bench: AttentionBench, cells: Sequence[Cell]) -> list[Summary]:
    """A summary of each kind, in the order of the kinds."""
    return [_summary(kind, cells) for kind in bench.kinds]


def _summary(kind: str, cells: Sequence[Cell]) -> Summary:
    own, full, masked = (succeeded(cells, name) for name in (kind, FULL, DENSE_MASKED))
    lengths = slope_lengths(sorted(own))
    at = max(own.keys() & full, default=None)
    masked_at = max(own.keys() & masked, default=None)
    return Summary(
        kind,
        tuple(lengths),
        log_log_slope({length: _seconds(own[length]) for length in lengths}),
        log_log_slope({length: _bytes(own[length]) for length in lengths}),
        None if kind == FULL else crossover(_times(own), _times(full)),
        at,
        None if at is None else _seconds(full[at]) / _seconds(own[at]),
        masked_at,
        None if masked_at is None else _bytes(own[masked_at]) / max(1, _bytes(masked[masked_at])),
    )


def _seconds(cell: Cell) -> float:
    assert cell.median is not None
    return cell.median


def _bytes(cell: Cell) -> int:
    assert cell.peak_bytes is not None
    return cell.peak_bytes


def _times(cells: dict[int, Cell]) -> dict[int, float]:
    return {length: _seconds(cell) for length, cell in cells.items()}


def tables(bench: AttentionBench, cells: Sequence[Cell]) -> list[Table]:
    """Time, memory, and what follows from them."""
    by_place = {(cell.kind, cell.length): cell for cell in cells}
    headings = ("kind", *(f"{length:,}" for length in bench.lengths))

    def table(title: str, show: Any) -> Table:
        rows = [(kind, *(show(by_place[kind, length]) for length in bench.lengths)) for kind in bench.kinds]
        return Table(title, headings, tuple(rows))

    return [
        table("Time of forward and backward, median", lambda cell: _why(cell) or short_seconds(_seconds(cell))),
        table("Peak memory beyond the inputs", lambda cell: _why(cell) or binary_bytes(_bytes(cell))),
        _summary_table(bench, summarise(bench, cells)),
    ]


def _why(cell: Cell) -> str:
    """A short word for a cell that holds no number; `notes` has the rest."""
    failed = cell.failed or ""
    if failed.startswith(TOO_LONG):
        return failed
    return next((word for word in (OUT_OF_MEMORY, NOT_TRIED) if failed.startswith(word)), "failed" if failed else "")


def _summary_table(bench: AttentionBench, summaries: Sequence[Summary]) -> Table:
    longest = bench.lengths[-1]

    def at(length: int | None) -> str:
        return "" if length in (None, longest) else f" (at {length:,})"

    headings = [
        "kind",
        "slope of time",
        "slope of memory",
        "faster than full",
        f"speed at {longest:,}: full = 1 x",
        f"memory at {longest:,}: {DENSE_MASKED} = 1 x",
    ]
    rows = []
    for one in summaries:
        over = _range(one.slope_lengths) if one.slope_lengths else ""
        rows.append(
            (
                one.kind,
                "" if one.time_slope is None else f"{one.time_slope:.2f} ({over})",
                "" if one.memory_slope is None else f"{one.memory_slope:.2f}",
                show_crossover(one, bench),
                "" if one.speedup is None else ratio(one.speedup) + at(one.compared_at),
                "" if one.memory_share is None else ratio(one.memory_share) + at(one.masked_at),
            )
        )
    return Table("Growth with length T, as an exponent: cost ~ T^slope", tuple(headings), tuple(rows))


def _range(lengths: Sequence[int]) -> str:
    return f"{lengths[0]:,} to {lengths[-1]:,}"


def show_crossover(one: Summary, bench: AttentionBench) -> str:
    """From which length on a kind is faster than full attention, in words."""
    if one.crossover is None:
        return ""
    if one.crossover == 0:
        return f"from {bench.lengths[0]:,} or less"
    if math.isinf(one.crossover):
        return f"not up to {one.compared_at:,}"
    return f"from about {float(f'{one.crossover:.2g}'):,.0f}"


def notes(bench: AttentionBench, cells: Sequence[Cell]) -> list[str]:
    """What the tables have no room for."""
    found = [
        f"{cell.kind} at {cell.length:,}: {cell.failed}"
        for cell in cells
        if cell.failed not in (None, _why(cell)) and _why(cell) != NOT_TRIED
    ]
    unsteady = [cell for cell in cells if cell.spread is not None and cell.spread > UNSTEADY]
    if unsteady:
        places = ", ".join(f"{cell.kind} at {cell.length:,}" for cell in unsteady[:3])
        more = f" and {len(unsteady) - 3} more" if len(unsteady) > 3 else ""
        found.append(f"unsteady, the machine may be busy: times of {places}{more} spread over {UNSTEADY:.0%} or more")
    return found


def settings_line(bench: AttentionBench) -> str:
    """What was measured, in one line."""
    options = [f"{kind}.{name}={value}" for kind, values in bench.options.items() for name, value in values.items()]
    parts = [] if bench.model is None else [bench.model]
    parts += [f"batch {bench.batch_size}", f"{bench.heads} heads of {bench.head_dim}"]
    parts += [] if bench.kv_heads is None else [f"{bench.kv_heads} of keys and values"]
    parts += ["causal"] if bench.causal else []
    parts += ["compiled"] if bench.compile else []
    return ", ".join([*parts, *options])


def document(bench: AttentionBench, cells: Sequence[Cell], *, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything, for programs; seconds and bytes. environment: with `ceilings` where they were measured."""
    found = environment.get("ceilings")
    return {
        "environment": environment,
        "settings": bench.to_json(),
        "cells": [asdict(cell) | figures(bench, cell, found) for cell in cells],
        "summary": [asdict(one) | {"faster_than_full": show_crossover(one, bench)} for one in summarise(bench, cells)],
        "notes": notes(bench, cells),
    }


def text(bench: AttentionBench, cells: Sequence[Cell], *, environment: dict[str, Any]) -> str:
    """The tables, and the lines under them, as Markdown."""
    told = "\n".join(f"- {line}" for line in lines(bench, cells, environment.get("ceilings")))
    return "\n\n".join(part for part in [*map(markdown, tables(bench, cells)), told] if part)


def write_report(bench: AttentionBench, cells: Sequence[Cell], out: Path, *, environment: dict[str, Any]) -> None:
    """`FILES`, each whole or not at all; pictures only of what was measured. Errors: StorageError."""
    make_folders(out)
    parts = [f"# Attention: time and memory against length\n\n{environment['line']}; {settings_line(bench)}"]
    parts += [text(bench, cells, environment=environment)]
    parts += ["\n".join(f"- {note}" for note in notes(bench, cells))]
    write_text(out / "table.md", "\n\n".join(part for part in parts if part) + "\n")
    write_text(out / "table.csv", _csv(cells))
    found = json.dumps(
        finite_or_none(document(bench, cells, environment=environment)), ensure_ascii=False, allow_nan=False
    )
    write_text(out / "table.json", found + "\n")
    if any(cell.failed is None for cell in cells):
        _draw(bench, cells, out)


def _csv(cells: Sequence[Cell]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [field.name for field in fields(Cell)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(cell) for cell in cells)
    return stream.getvalue()


def _draw(bench: AttentionBench, cells: Sequence[Cell], out: Path) -> None:
    for name, label, value in (
        ("time", "milliseconds, forward and backward", lambda cell: _seconds(cell) * 1000),
        ("memory", "peak MiB beyond the inputs", lambda cell: _bytes(cell) / 2**20),
    ):
        curves = [
            Curve(kind, [(length, value(cell)) for length, cell in sorted(succeeded(cells, kind).items())])
            for kind in bench.kinds
        ]
        draw_curves(
            curves,
            out / f"{name}.svg",
            title=f"Attention: {name} against length ({settings_line(bench)})",
            x_label="length, positions",
            y_label=label,
            log_x=True,
            log_y=True,
        )
