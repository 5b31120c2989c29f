"""Reports of speed benchmarks: Markdown tables, the JSON document, and the lines below the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tformer.bench.machine import roofline_line
from tformer.bench.speed import WORKS, Entry, Row, SpeedBench
from tformer.support.formatting import binary_bytes, ratio

UNSTEADY = 0.2
"""A spread above this share of the median is mentioned."""

FAIRNESS = (
    "All libraries have the same sizes, numbers of tokens and threads, with random weights and ids; each runs in "
    "its own process, in alternating rounds; times are medians. Memory is the peak of the whole process. Rows "
    "named `tformer compiled`, as for training on a GPU, use torch.compile; the other libraries run eagerly."
)

FIGURES = (
    *("tokens_per_second", "step_ms", "flops", "bytes_read"),
    *("share_of_peak", "share_of_arithmetic", "share_of_bandwidth", "bound"),
)
"""Keys of a measured row in the document of every benchmark."""

SPEED_FIGURES = (
    *("examples_per_second", "spread", "repeats", "round_seconds", "share_of_data_sheet"),
    *("peak_rss_bytes", "peak_gpu_bytes", "expected_memory"),
)
"""Further keys in the document of a speed benchmark."""


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


def bullets(lines: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def figures(row: Row) -> dict[str, Any]:
    """The keys that a row of every benchmark has; None where nothing was measured or nothing is multiplied."""
    found: dict[str, Any] = dict.fromkeys(FIGURES)
    if row.failed is not None:
        return found
    found |= {"tokens_per_second": row.tokens_per_second, "step_ms": row.step_ms}
    if row.cost is not None and row.entry.precision:
        found |= {"flops": row.cost["flops"], "bytes_read": row.cost["bytes_read"]}
    line = row.roofline
    if line is not None:
        found |= {"share_of_peak": row.share_of_peak, "bound": line.bound}
        found |= {"share_of_arithmetic": line.arithmetic, "share_of_bandwidth": line.bandwidth}
    return found


def document(bench: SpeedBench, rows: Sequence[Row], *, environment: dict[str, Any], command: str) -> dict[str, Any]:
    """The JSON document of `--json`."""
    settings = {name: value for name, value in bench.to_json().items() if name not in ("recipe_yaml", "entries")}
    return {
        "command": command,
        "environment": environment,
        "settings": settings,
        "ceilings": [
            {"batch_size": row.batch_size, **row.ceilings}
            for row in _first_of_each_batch(rows)
            if row.ceilings is not None
        ],
        "rows": [_row_document(row, rows) for row in rows],
        "best": [
            {
                "name": row.entry.name,
                "precision": row.entry.precision or None,
                "batch_size": row.batch_size,
                "tokens_per_second": row.tokens_per_second,
                "ratios": ratios(row, best_rows(rows)),
            }
            for row in best_rows(rows)
        ],
    }


def _row_document(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """One row. Every row has all keys; what is unknown or does not apply is None."""
    found: dict[str, Any] = {
        "name": row.entry.name,
        "precision": row.entry.precision or None,
        "batch_size": row.batch_size,
        "failed": row.failed,
        "measured_alone": row.alone,
        **dict.fromkeys(SPEED_FIGURES),
        **figures(row),
        "ratios": {},
    }
    if row.failed is not None:
        return found
    found |= {
        "spread": row.spread,
        "repeats": row.repeats,
        "round_seconds": row.seconds,
        "share_of_data_sheet": row.share_of_data_sheet,
        **row.memory,
        "ratios": ratios(row, [other for other in rows if other.batch_size == row.batch_size]),
    }
    if row.cost is not None:
        found["examples_per_second"] = row.cost["examples"] / row.seconds
        if row.is_ours and row.cost["memory"]:
            found["expected_memory"] = dict(row.cost["memory"])
    return found


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """For each contender the row with the most tokens per second, in the order of the contenders."""
    best: dict[Entry, Row] = {}
    for row in rows:
        if row.failed is None:
            found = best.setdefault(row.entry, row)
            best[row.entry] = max(found, row, key=lambda row: row.tokens_per_second)
    return list(best.values())


def ratios(row: Row, others: Sequence[Row]) -> dict[str, float]:
    """How many times as fast as each other contender (`library precision`) this one is."""
    return {
        other.entry.label: row.tokens_per_second / other.tokens_per_second
        for other in others
        if other.failed is None and other.entry != row.entry
    }


def tables(bench: SpeedBench, rows: Sequence[Row]) -> list[Table]:
    """Every row; after several batch sizes also the best of each contender."""
    made = [_table(f"bench {bench.work}: {settings_line(bench)}", bench, rows)]
    if len(bench.batch_sizes) > 1 and best_rows(rows):
        made.append(_table("The best batch size of each", bench, best_rows(rows), any_batch=True))
    return made


def _table(title: str, bench: SpeedBench, rows: Sequence[Row], *, any_batch: bool = False) -> Table:
    on_gpu = any("peak_gpu_bytes" in row.memory for row in rows)
    step = f"ms per {WORKS[bench.work].step}"
    memory = "peak GPU memory" if on_gpu else "peak memory"
    ours = bench.entries[0]
    headings = ("", "batch", "tokens/s", step, "spread", memory, "share of peak", f"{ours.label}: times as fast")
    cells = (_cells(row, rows, len(headings), ours=ours, any_batch=any_batch) for row in rows)
    return Table(title, headings, tuple(cells))


def _cells(row: Row, rows: Sequence[Row], width: int, *, ours: Entry, any_batch: bool) -> tuple[str, ...]:
    named = (row.entry.label, str(row.batch_size))
    if row.failed is not None:
        return (*named, row.failed, *[""] * (width - 3))
    beside = (other for other in rows if any_batch or other.batch_size == row.batch_size)
    our_row = next((other for other in beside if other.entry == ours and other.failed is None), None)
    return (
        *named,
        f"{row.tokens_per_second:,.0f}",
        "" if row.step_ms is None else _milliseconds(row.step_ms),
        f"{row.spread:.0%}",
        binary_bytes(peak_bytes(row)),
        "" if row.share_of_peak is None else f"{row.share_of_peak:.0%}",
        "" if our_row is None or row.entry == ours else ratio(row_ratio(our_row, row)),
    )


def peak_bytes(row: Row) -> int:
    """On a GPU of its memory, else of the process."""
    return row.memory.get("peak_gpu_bytes", row.memory["peak_rss_bytes"])


def row_ratio(ours: Row, other: Row) -> float:
    """How many times as fast ours is."""
    return ours.tokens_per_second / other.tokens_per_second


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def settings_line(bench: SpeedBench) -> str:
    """Model, sizes and the workload's own options, in one line."""
    given = {name: value for name, value in bench.options.items() if value is not None}
    options = [f"{name.replace('_', ' ')} {value}" for name, value in given.items()]
    extra = ["tformer compiled"] if bench.compile else []
    return ", ".join([bench.model, f"length {bench.length}", *options, bench.device, *extra])


def lines(rows: Sequence[Row]) -> list[str]:
    """Ceilings, what bounds each of our rows, expected memory, and notes on the quality of the measurement."""
    found = [
        f"ceilings, batch {row.batch_size}: {ceilings_line(row.ceilings)}"
        for row in _first_of_each_batch(rows)
        if row.ceilings is not None
    ]
    for row in rows:
        line = row.roofline if row.is_ours and row.failed is None else None
        if line is not None:
            text = roofline_line(f"{row.entry.label}, batch {row.batch_size}", line)
            sheet = row.share_of_data_sheet
            found.append(text if sheet is None else f"{text}; {sheet:.0%} of the data sheet")
            found += _memory_line(row)
    alone = [f"{row.entry.label}, batch {row.batch_size}" for row in rows if row.alone]
    if alone:
        found.append(f"measured alone, because memory was too small for all at once: {'; '.join(alone)}")
    unsteady = [row for row in rows if row.failed is None and row.spread > UNSTEADY]
    if unsteady:
        found.append(f"{len(unsteady)} of {len(rows)} spread by more than {UNSTEADY:.0%}: this machine was not quiet")
    return found


def ceilings_line(ceilings: Mapping[str, Any]) -> str:
    """Rates of products and of reading, and a known GPU's data sheet. ceilings: a `Ceilings` as a mapping."""
    product = " x ".join(f"{size}" for size in ceilings["product"])
    rates = ", ".join(f"{name} {_giga(rate)}FLOP/s" for name, rate in ceilings["flops_per_second"].items())
    text = f"{rates} (product {product}), memory read at {_giga(ceilings['bytes_per_second'])}B/s"
    sheet = ceilings["data_sheet"]
    if sheet is not None:
        text += f"; data sheet: bf16 {_giga(sheet['bf16_flops'])}FLOP/s, {_giga(sheet['bytes_per_second'])}B/s"
        text += f" ({sheet['source']})"
    return text


def _giga(rate: float) -> str:
    if rate >= 1e13:
        return f"{rate / 1e12:,.1f} T"
    return f"{rate / 1e9:,.3g} G" if rate < 1e11 else f"{rate / 1e9:,.0f} G"


def _memory_line(row: Row) -> list[str]:
    assert row.cost is not None
    if not row.cost["memory"]:
        return []
    parts = {name.removesuffix("_bytes"): count for name, count in row.cost["memory"].items()}
    total = parts.pop("total")
    listed = ", ".join(f"{name} {binary_bytes(count)}" for name, count in parts.items())
    return [f"expected memory: {binary_bytes(total)} ({listed}), beside that of Python and PyTorch"]


def _first_of_each_batch(rows: Sequence[Row]) -> list[Row]:
    """The first measured row of each batch size."""
    found: dict[int, Row] = {}
    for row in rows:
        if row.failed is None:
            found.setdefault(row.batch_size, row)
    return list(found.values())


def report(bench: SpeedBench, rows: Sequence[Row], *, line: str, command: str) -> str:
    """One benchmark as Markdown: the command, the tables, the lines."""
    parts = [f"    {command}", line, *map(markdown, tables(bench, rows)), bullets(lines(rows))]
    return "\n\n".join(part for part in parts if part)
