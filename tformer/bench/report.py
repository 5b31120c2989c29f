"""Reports of speed benchmarks: JSON document, tables, and the lines below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tformer.bench.machine import (
    Ceilings,
    Roofline,
    roofline,
    roofline_line,
)
from tformer.bench.speed import WORKS, Entry, Row, SpeedBench
from tformer.formatting import binary_bytes, ratio


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


UNSTEADY = 0.2
"""A spread above this share of the median is told."""

FAIRNESS = (
    "Same sizes, same numbers of tokens, random weights and ids, no text; a process for each, rounds in turn, the same "
    "number of threads; medians. Memory is the peak of the whole process. Where `tformer compiled` is said, as of "
    "training on a GPU, tformer goes through torch.compile and the other libraries run eagerly."
)

KEYS = (
    *("tokens_per_second", "step_ms", "examples_per_second", "spread", "repeats", "round_seconds"),
    *("peak_rss_bytes", "peak_gpu_bytes", "expected_memory", "flops", "bytes_read"),
    *("share_of_peak", "share_of_data_sheet", "share_of_arithmetic", "share_of_bandwidth", "bound"),
)
"""Of what is measured, in a row of the document."""


def document(bench: SpeedBench, rows: Sequence[Row], *, environment: dict[str, Any], command: str) -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    settings = {name: value for name, value in bench.to_json().items() if name not in ("recipe_yaml", "entries")}
    return {
        "command": command,
        "environment": environment,
        "settings": settings,
        "ceilings": [
            {"batch_size": row.batch_size, **row.ceilings} for row in _one_each_batch(rows) if row.ceilings is not None
        ],
        "rows": [_entry(row, rows) for row in rows],
        "best": [_best_entry(row, rows) for row in best_rows(rows)],
    }


def _entry(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """One row of the document. Every row of every bench has all keys; what is not known or does not apply is None."""
    found: dict[str, Any] = {
        "name": row.entry.name,
        "precision": row.entry.precision or None,
        "batch_size": row.batch_size,
        "failed": row.failed,
        "measured_alone": row.alone,
        **dict.fromkeys(KEYS),
        "ratios": {},
    }
    if row.failed is not None:
        return found
    found |= {
        "tokens_per_second": row.tokens_per_second,
        "spread": row.spread,
        "repeats": row.repeats,
        "round_seconds": row.seconds,
        **row.memory,
        "ratios": ratios(row, [other for other in rows if other.batch_size == row.batch_size]),
    }
    if row.cost is None:
        return found
    found |= {
        "step_ms": 1000 * row.seconds / row.cost["steps"],
        "examples_per_second": row.cost["examples"] / row.seconds,
    }
    own = line_of(row)
    if own is not None:
        found |= {"flops": row.cost["flops"], "bytes_read": row.cost["bytes_read"]}
        found |= {"share_of_peak": share_of_peak(row), "share_of_data_sheet": share_of_data_sheet(row)}
        found |= {"share_of_arithmetic": own.arithmetic, "share_of_bandwidth": own.bandwidth, "bound": own.bound}
    if row.is_ours and row.cost["memory"]:
        found["expected_memory"] = dict(row.cost["memory"])
    return found


def _best_entry(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "name": row.entry.name,
        "precision": row.entry.precision or None,
        "batch_size": row.batch_size,
        "tokens_per_second": row.tokens_per_second,
        "ratios": ratios(row, best_rows(rows)),
    }


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each contender the row with the most tokens a second, in the order of the contenders."""
    best: dict[Any, Row] = {}
    for row in rows:
        if row.failed is None:
            found = best.setdefault(row.entry, row)
            best[row.entry] = max(found, row, key=lambda one: one.tokens_per_second)
    return list(best.values())


def ratios(row: Row, others: Sequence[Row]) -> dict[str, float]:
    """How many times as fast as each other contender (`library precision`) this one is."""
    return {
        other.entry.label: row.tokens_per_second / other.tokens_per_second
        for other in others
        if other.failed is None and other.entry != row.entry
    }


def line_of(row: Row) -> Roofline | None:
    """Shares of the ceilings of the contender's own number format."""
    return (
        None
        if row.ceilings is None
        else _against(row, _measured(row).arithmetic(row.entry.precision), row.ceilings["bytes_per_second"])
    )


def share_of_peak(row: Row) -> float | None:
    """Of the nearer ceiling, the best measured format's: so that all contenders are compared with the same machine."""
    if row.ceilings is None:
        return None
    found = _against(row, _measured(row).best, row.ceilings["bytes_per_second"])
    return None if found is None else found.share


def share_of_data_sheet(row: Row) -> float | None:
    """The same of what a known GPU's maker says; None without."""
    sheet = None if row.ceilings is None else row.ceilings["data_sheet"]
    found = None if sheet is None else _against(row, sheet["bf16_flops"], sheet["bytes_per_second"])
    return None if found is None else found.share


def _measured(row: Row) -> Ceilings:
    """As they were before they went through JSON."""
    assert row.ceilings is not None
    return Ceilings(**row.ceilings)


def _against(row: Row, flops_per_second: float, bytes_per_second: float) -> Roofline | None:
    if row.cost is None:
        return None
    return roofline(
        row.cost["flops"],
        row.cost["bytes_read"],
        row.seconds,
        flops_per_second=flops_per_second,
        bytes_per_second=bytes_per_second,
    )


def tables(bench: SpeedBench, rows: Sequence[Row]) -> list[Table]:
    """Every row; after a sweep of batch sizes the best of each contender."""
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
    beside = (one for one in rows if any_batch or one.batch_size == row.batch_size)
    our_row = next((one for one in beside if one.entry == ours and one.failed is None), None)
    share = share_of_peak(row)
    steps = None if row.cost is None else row.cost["steps"]
    memory = row.memory.get("peak_gpu_bytes", row.memory["peak_rss_bytes"])
    return (
        *named,
        f"{row.tokens_per_second:,.0f}",
        "" if steps is None else _milliseconds(1000 * row.seconds / steps),
        f"{row.spread:.0%}",
        binary_bytes(memory),
        "" if share is None else f"{share:.0%}",
        "" if our_row is None or row.entry == ours else ratio(row_ratio(our_row, row)),
    )


def row_ratio(ours: Row, other: Row) -> float:
    return ours.tokens_per_second / other.tokens_per_second


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def settings_line(bench: SpeedBench) -> str:
    """Model, sizes and the work's own options, in one line."""
    given = {name: value for name, value in bench.options.items() if value is not None}
    options = [f"{name.replace('_', ' ')} {value}" for name, value in given.items()]
    extra = ["tformer compiled"] if bench.compile else []  # the others are not
    return ", ".join([bench.model, f"length {bench.length}", *options, bench.device, *extra])


def lines(rows: Sequence[Row]) -> list[str]:
    """Ceilings, and what binds each of our rows; what a reader should know of the measurement."""
    told: list[str] = []
    for row in _one_each_batch(rows):
        if row.ceilings is not None:
            told.append(ceilings_line(row))
    for row in rows:
        found = line_of(row) if row.failed is None else None
        if found is not None and row.is_ours:
            sheet = share_of_data_sheet(row)
            line = roofline_line(f"{row.entry.label}, batch {row.batch_size}", found)
            told.append(line if sheet is None else f"{line}; {sheet:.0%} of the data sheet")
            told += _memory_line(row)
    alone = [f"{row.entry.label}, batch {row.batch_size}" for row in rows if row.alone]
    if alone:
        told.append(f"measured alone, for memory was too small for all at once: {'; '.join(alone)}")
    unsteady = [row for row in rows if row.failed is None and row.spread > UNSTEADY]
    if unsteady:
        told.append(f"{len(unsteady)} of {len(rows)} spread by more than {UNSTEADY:.0%}: this machine was not quiet")
    return told


def ceilings_line(row: Row) -> str:
    """What the machine did at most just before the rows of one batch size were timed."""
    assert row.ceilings is not None
    return f"ceilings, batch {row.batch_size}: {ceilings_words(row.ceilings)}"


def ceilings_words(ceilings: Mapping[str, Any]) -> str:
    """Rates of products and of reading, and a known GPU's data sheet. ceilings: a `Ceilings` as a mapping."""
    product = " x ".join(f"{size}" for size in ceilings["product"])
    rates = ", ".join(f"{name} {_giga(rate)}FLOP/s" for name, rate in ceilings["flops_per_second"].items())
    words = f"{rates} (product {product}), memory read at {_giga(ceilings['bytes_per_second'])}B/s"
    sheet = ceilings["data_sheet"]
    if sheet is not None:
        words += f"; data sheet: bf16 {_giga(sheet['bf16_flops'])}FLOP/s, {_giga(sheet['bytes_per_second'])}B/s"
        words += f" ({sheet['source']})"
    return words


def _giga(rate: float) -> str:
    return (
        f"{rate / 1e12:,.1f} T" if rate >= 1e13 else f"{rate / 1e9:,.3g} G" if rate < 1e11 else f"{rate / 1e9:,.0f} G"
    )


def _memory_line(row: Row) -> list[str]:
    assert row.cost is not None
    if not row.cost["memory"]:
        return []
    parts = {name.removesuffix("_bytes"): count for name, count in row.cost["memory"].items()}
    total = parts.pop("total")
    words = ", ".join(f"{name} {binary_bytes(count)}" for name, count in parts.items())
    return [f"memory that it should need: {binary_bytes(total)} ({words}), and what Python and PyTorch take"]


def _one_each_batch(rows: Sequence[Row]) -> list[Row]:
    """The first measured row of each batch size."""
    found: dict[int, Row] = {}
    for row in rows:
        if row.failed is None:
            found.setdefault(row.batch_size, row)
    return list(found.values())


def report(bench: SpeedBench, rows: Sequence[Row], *, line: str, command: str) -> str:
    """One case as Markdown: the command, the tables, the lines."""
    parts = [f"    {command}", line, *map(markdown, tables(bench, rows)), "\n".join(f"- {one}" for one in lines(rows))]
    return "\n\n".join(part for part in parts if part)
