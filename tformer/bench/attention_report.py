"""Report of `bench attention`: tables, exponents of growth, crossovers, CSV, JSON and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tformer.bench.attention import NOT_TRIED
from tformer.bench.machine import roofline_line
from tformer.bench.processes import OUT_OF_MEMORY, TOO_LONG
from tformer.bench.report import UNSTEADY, Table, bullets, ceilings_line, figures, markdown
from tformer.bench.speed import Row
from tformer.bench.workloads.attention import DENSE_MASKED, FULL, AttentionBench
from tformer.support.files import make_folders, write_file, write_text
from tformer.support.formatting import binary_bytes, csv_text, json_text, listed, ratio, short_seconds
from tformer.viz.figure import draw_panels
from tformer.viz.plot.series import Panel, make_series

LONG = 2048
"""Below this length, costs that do not grow with length hide the exponent."""

FILES = ("table.md", "table.csv", "table.json", "time.svg", "memory.svg")


def slope_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths over which an exponent is fitted: from `LONG` on if there are at least two, else all."""
    long = [length for length in lengths if length >= LONG]
    return long if len(long) >= 2 else list(lengths)


def log_log_slope(costs: Mapping[int, float]) -> float | None:
    """b of cost = a length^b by least squares on the logarithms: 1 is linear, 2 quadratic. None for fewer than two."""
    points = [(math.log(length), math.log(cost)) for length, cost in costs.items() if cost > 0]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    squares = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / squares


def crossover(costs: Mapping[int, float], reference: Mapping[int, float]) -> float | None:
    """The length from which `costs` stay below `reference`, interpolated on logarithmic axes.

    0: below at every common length; infinity: not below at the longest; None: no common length.
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


@dataclass(frozen=True)
class Summary:
    """One kind over all lengths. A value is None if too few lengths were measured.

    Attributes:
        time_slope, memory_slope: exponents of the length, fitted over `slope_lengths`.
        crossover: length from which it is faster than full attention; 0: at every length; infinity: at none.
        compared_at: the greatest length at which both were measured.
        speedup: full attention's time over this kind's there; memory_share: this kind's memory over that of
            dense-masked attention (at `masked_at`).
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


def summarize(bench: AttentionBench, rows: Sequence[Row]) -> list[Summary]:
    """A summary of each kind, in the order of the kinds."""
    full, masked = succeeded(rows, FULL), succeeded(rows, DENSE_MASKED)
    full_times = {length: row.seconds for length, row in full.items()}
    found = []
    for kind in bench.kinds:
        own = succeeded(rows, kind)
        times = {length: row.seconds for length, row in own.items()}
        lengths = slope_lengths(sorted(own))
        at, masked_at = max(own.keys() & full, default=None), max(own.keys() & masked, default=None)
        found.append(
            Summary(
                kind,
                tuple(lengths),
                log_log_slope({length: times[length] for length in lengths}),
                log_log_slope({length: _peak(own[length]) for length in lengths}),
                None if kind == FULL else crossover(times, full_times),
                at,
                None if at is None else full_times[at] / times[at],
                masked_at,
                None if masked_at is None else _peak(own[masked_at]) / max(1, _peak(masked[masked_at])),
            )
        )
    return found


def succeeded(rows: Sequence[Row], kind: str) -> dict[int, Row]:
    """The measured rows of a kind, by length."""
    return {row.length: row for row in rows if row.entry.name == kind and row.failed is None}


def _peak(row: Row) -> int:
    """Peak memory beyond the inputs."""
    return row.memory["peak_bytes"]


def tables(bench: AttentionBench, rows: Sequence[Row]) -> list[Table]:
    """Time, memory, and their growth."""
    by_place = {(row.entry.name, row.length): row for row in rows}
    headings = ("kind", *(f"{length:,}" for length in bench.lengths))

    def table(title: str, show: Callable[[Row], str]) -> Table:
        cells = [
            (kind, *(_reason(row) or show(row) for length in bench.lengths for row in [by_place[kind, length]]))
            for kind in bench.kinds
        ]
        return Table(title, headings, tuple(cells))

    return [
        table("Time of forward and backward, median", lambda row: short_seconds(row.seconds)),
        table("Peak memory beyond the inputs", lambda row: binary_bytes(_peak(row))),
        _summary_table(bench, summarize(bench, rows)),
    ]


def _reason(row: Row) -> str:
    """A short reason for a cell without a number; `notes` has the rest."""
    failed = row.failed or ""
    if failed.startswith(TOO_LONG):
        return failed
    return next((word for word in (OUT_OF_MEMORY, NOT_TRIED) if failed.startswith(word)), "failed" if failed else "")


def _summary_table(bench: AttentionBench, summaries: Sequence[Summary]) -> Table:
    longest = bench.lengths[-1]

    def at(length: int | None) -> str:
        return "" if length in (None, longest) else f" (at {length:,})"

    headings = (
        "kind",
        "slope of time",
        "slope of memory",
        "faster than full",
        f"speed at {longest:,}: full = 1 x",
        f"memory at {longest:,}: {DENSE_MASKED} = 1 x",
    )
    rows = []
    for found in summaries:
        over = f"{found.slope_lengths[0]:,} to {found.slope_lengths[-1]:,}" if found.slope_lengths else ""
        rows.append(
            (
                found.kind,
                "" if found.time_slope is None else f"{found.time_slope:.2f} ({over})",
                "" if found.memory_slope is None else f"{found.memory_slope:.2f}",
                show_crossover(found, bench),
                "" if found.speedup is None else ratio(found.speedup) + at(found.compared_at),
                "" if found.memory_share is None else ratio(found.memory_share) + at(found.masked_at),
            )
        )
    return Table("Growth with length T, as an exponent: cost ~ T^slope", headings, tuple(rows))


def show_crossover(found: Summary, bench: AttentionBench) -> str:
    """From which length a kind is faster than full attention, in words."""
    if found.crossover is None:
        return ""
    if found.crossover == 0:
        return f"from {bench.lengths[0]:,} or less"
    if math.isinf(found.crossover):
        return f"not up to {found.compared_at:,}"
    return f"from about {float(f'{found.crossover:.2g}'):,.0f}"


def lines(bench: AttentionBench, rows: Sequence[Row], ceilings: Mapping[str, Any]) -> list[str]:
    """The ceilings, or why they are missing; and what bounds each kind at its greatest length."""
    if "failed" in ceilings:
        return [f"ceilings: {ceilings['failed']}"]
    found = [f"ceilings: {ceilings_line(ceilings)}"]
    for kind in bench.kinds:
        own = succeeded(rows, kind)
        line = own[max(own)].roofline if own else None
        if line is not None:
            found.append(roofline_line(f"{kind} at {max(own):,}", line))
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """Full reasons of failures, and unsteady times."""
    found = [
        f"{row.entry.name} at {row.length:,}: {row.failed}"
        for row in rows
        if row.failed not in (None, _reason(row)) and _reason(row) != NOT_TRIED
    ]
    unsteady = [row for row in rows if row.spread > UNSTEADY]
    if unsteady:
        places = listed([f"{row.entry.name} at {row.length:,}" for row in unsteady], 3)
        found.append(f"unsteady, the machine may be busy: times of {places} spread over {UNSTEADY:.0%} or more")
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


def document(bench: AttentionBench, rows: Sequence[Row], *, environment: dict[str, Any]) -> dict[str, Any]:
    """The JSON document; seconds and bytes. environment: with `ceilings`."""
    return {
        "environment": environment,
        "settings": asdict(bench),
        "cells": [cell(row) | figures(row) for row in rows],
        "summary": [
            asdict(found) | {"faster_than_full": show_crossover(found, bench)} for found in summarize(bench, rows)
        ],
        "notes": notes(rows),
    }


def cell(row: Row) -> dict[str, Any]:
    """One kind at one length: a line of the CSV; numbers are None where nothing was measured."""
    measured = row.failed is None
    return {
        "kind": row.entry.name,
        "length": row.length,
        "median": row.seconds if measured else None,
        **{name: getattr(row, name) if measured else None for name in ("minimum", "spread", "repeats")},
        "peak_bytes": row.memory.get("peak_bytes"),
        "peak_rss_bytes": row.memory.get("peak_rss_bytes"),
        "failed": row.failed,
    }


def write_report(bench: AttentionBench, rows: Sequence[Row], out: Path, *, environment: dict[str, Any]) -> None:
    """Write `FILES`, each whole or not at all; pictures only of costs above 0. Errors: StorageError."""
    make_folders(out)
    parts = [f"# Attention: time and memory against length\n\n{environment['line']}; {settings_line(bench)}"]
    parts += map(markdown, tables(bench, rows))
    parts += [bullets(lines(bench, rows, environment["ceilings"])), bullets(notes(rows))]
    write_text(out / "table.md", "\n\n".join(part for part in parts if part) + "\n")
    cells = [cell(row) for row in rows]
    write_text(out / "table.csv", csv_text([cells[0], *(each.values() for each in cells)]))
    write_text(out / "table.json", json_text(document(bench, rows, environment=environment)))
    plots: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
        ("time", "milliseconds, forward and backward", lambda row: row.seconds * 1000),
        ("memory", "peak MiB beyond the inputs", lambda row: _peak(row) / 2**20),
    )
    for name, label, value in plots:
        curves = [
            make_series(number, kind, [(length, value(row)) for length, row in sorted(succeeded(rows, kind).items())])
            for number, kind in enumerate(bench.kinds)
        ]
        if not any((curve.y > 0).any() for curve in curves):
            continue  # nothing was measured, or so little memory that it shows as 0
        title = f"Attention: {name} against length ({settings_line(bench)})"
        picture = draw_panels(
            [Panel(label, curves)], "svg", title=title, x_label="length, positions", log_x=True, log_y=True
        )
        write_file(out / f"{name}.svg", [picture])
