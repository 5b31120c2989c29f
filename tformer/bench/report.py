"""Reports of speed benchmarks: Markdown tables, the JSON document, and the lines below the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tformer.bench.machine import roofline_line
from tformer.bench.speed import ContenderSpec, Measurement, SpeedBench
from tformer.support.formatting import binary_bytes, ratio

UNSTEADY = 0.2
"""A spread above this share of the median is mentioned."""


@dataclass(frozen=True)
class ReportTable:
    """The first column holds names, the others numbers or why there are none."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(table: ReportTable) -> str:
    """The title as a paragraph, and the table with its numbers flush right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---", *["---:"] * (len(table.headings) - 1)]
    return "\n".join([table.title, "", *map(line, [table.headings, rule, *table.rows])])


def bullets(lines: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def row_line(row: Measurement) -> str:
    """A line on a measured row."""
    speed = row.failed if row.failed is not None else f"{row.tokens_per_second:,.0f} tokens/s"
    return f"{row.entry.label}, batch {row.batch_size}: {speed}"


# --- the JSON document ------------------------------------------------------------------------------------------------


def document(bench: SpeedBench, rows: Sequence[Measurement]) -> dict[str, Any]:
    """The JSON document of `--json`, without command and environment."""
    best = best_rows(rows)
    return {
        "settings": {name: value for name, value in asdict(bench).items() if name not in ("recipe_yaml", "entries")},
        "ceilings": [{"batch_size": size, **ceilings} for size, ceilings in _ceilings(rows).items()],
        "rows": [_row_document(row, rows) for row in rows],
        "best": [
            {
                "name": row.entry.name,
                "precision": row.entry.precision,
                "batch_size": row.batch_size,
                "tokens_per_second": row.tokens_per_second,
                "ratios": ratios(row, best),
            }
            for row in best
        ],
    }


def _row_document(row: Measurement, rows: Sequence[Measurement]) -> dict[str, Any]:
    """One row with all keys; None where a value is unknown or does not apply."""
    measured, cost, line = row.failed is None, row.cost, row.roofline
    memory = cost["memory"] if cost is not None and measured and row.is_ours else None
    return {
        "name": row.entry.name,
        "precision": row.entry.precision,
        "batch_size": row.batch_size,
        "failed": row.failed,
        "measured_alone": row.alone,
        "examples_per_second": cost["examples"] / row.seconds if cost is not None and measured else None,
        "spread": row.spread if measured else None,
        "repeats": row.repeats if measured else None,
        "round_seconds": row.seconds if measured else None,
        "share_of_data_sheet": row.share_of_data_sheet,
        "peak_rss_bytes": row.memory.get("peak_rss_bytes"),
        "peak_gpu_bytes": row.memory.get("peak_gpu_bytes"),
        "expected_memory": dict(memory) if memory else None,
        "tokens_per_second": row.tokens_per_second if measured else None,
        "step_ms": row.step_ms if measured else None,
        "flops": None if cost is None or not measured else cost["flops"],
        "bytes_read": None if cost is None or not measured else cost["bytes_read"],
        "share_of_peak": row.share_of_peak,
        "share_of_arithmetic": None if line is None else line.arithmetic,
        "share_of_bandwidth": None if line is None else line.bandwidth,
        "bound": None if line is None else line.bound,
        "ratios": ratios(row, [other for other in rows if other.batch_size == row.batch_size]) if measured else {},
    }


def best_rows(rows: Sequence[Measurement]) -> list[Measurement]:
    """For each contender the row with the most tokens per second, in the order of the contenders."""
    best: dict[ContenderSpec, Measurement] = {}
    for row in rows:
        if row.failed is None:
            best[row.entry] = max(best.get(row.entry, row), row, key=lambda row: row.tokens_per_second)
    return list(best.values())


def ratios(row: Measurement, others: Sequence[Measurement]) -> dict[str, float]:
    """Speed as a multiple of each other contender's (`library precision`)."""
    return {
        other.entry.label: row.tokens_per_second / other.tokens_per_second
        for other in others
        if other.failed is None and other.entry != row.entry
    }


def _ceilings(rows: Sequence[Measurement]) -> dict[int, Mapping[str, Any]]:
    """The ceilings of each batch size at which something was measured."""
    found: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if row.failed is None and row.ceilings is not None:
            found.setdefault(row.batch_size, row.ceilings)
    return found


# --- tables and lines -------------------------------------------------------------------------------------------------


def tables(bench: SpeedBench, rows: Sequence[Measurement]) -> list[ReportTable]:
    """Every row; after several batch sizes also the best of each contender."""
    options = [f"{name.replace('_', ' ')} {value}" for name, value in bench.options.items()]
    extra = ["tformer compiled"] if bench.compile else []
    settings = ", ".join([bench.model, f"length {bench.length}", *options, bench.device, *extra])
    made = [_table(f"bench {bench.work}: {settings}", bench, rows)]
    if len(bench.batch_sizes) > 1 and best_rows(rows):
        made.append(_table("The best batch size of each", bench, best_rows(rows), any_batch=True))
    return made


def _table(title: str, bench: SpeedBench, rows: Sequence[Measurement], *, any_batch: bool = False) -> ReportTable:
    ours = bench.entries[0]
    memory = "peak GPU memory" if any("peak_gpu_bytes" in row.memory for row in rows) else "peak memory"
    columns = ("tokens/s", f"ms per {bench.workload.step}", "spread", memory, "share of peak")
    cells = []
    for row in rows:
        named = (row.entry.label, str(row.batch_size))
        if row.failed is not None:
            cells.append((*named, row.failed, *[""] * len(columns)))
            continue
        beside = [other for other in rows if any_batch or other.batch_size == row.batch_size]
        our_row = next((other for other in beside if other.entry == ours and other.failed is None), None)
        step = row.step_ms
        cells.append(
            (
                *named,
                f"{row.tokens_per_second:,.0f}",
                "" if step is None else f"{step:,.0f}" if step >= 100 else f"{step:,.3g}",
                f"{row.spread:.0%}",
                binary_bytes(peak_bytes(row)),
                "" if row.share_of_peak is None else f"{row.share_of_peak:.0%}",
                "" if our_row is None or row.entry == ours else ratio(ratios(our_row, [row])[row.entry.label]),
            )
        )
    return ReportTable(title, ("", "batch", *columns, f"{ours.label}: times as fast"), tuple(cells))


def peak_bytes(row: Measurement) -> int:
    """Peak memory of the GPU if the work ran on one, else of the process."""
    return row.memory.get("peak_gpu_bytes", row.memory["peak_rss_bytes"])


def lines(rows: Sequence[Measurement]) -> list[str]:
    """Ceilings, what bounds each of our rows, expected memory, and notes on how steady the measurement was."""
    found = [f"ceilings, batch {size}: {ceilings_line(ceilings)}" for size, ceilings in _ceilings(rows).items()]
    for row in rows:
        line, sheet = row.roofline if row.is_ours else None, row.share_of_data_sheet
        if line is None or row.cost is None:
            continue
        text = roofline_line(f"{row.entry.label}, batch {row.batch_size}", line)
        found.append(text if sheet is None else f"{text}; {sheet:.0%} of the data sheet")
        if row.cost["memory"]:
            parts = {name.removesuffix("_bytes"): count for name, count in row.cost["memory"].items()}
            total = parts.pop("total")
            listed = ", ".join(f"{name} {binary_bytes(count)}" for name, count in parts.items())
            found.append(f"expected memory: {binary_bytes(total)} ({listed}), beside that of Python and PyTorch")
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


def report(bench: SpeedBench, rows: Sequence[Measurement], *, line: str, command: str) -> str:
    """One benchmark as Markdown: the command, the tables, the lines."""
    parts = [f"    {command}", line, *map(markdown, tables(bench, rows)), bullets(lines(rows))]
    return "\n\n".join(part for part in parts if part)
