"""What a cell of `bench attention` says in the words of the other benches: rates, shares of ceilings, what binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tformer.bench.attention import AttentionBench, Cell, succeeded
from tformer.bench.attention_ceilings import bytes_read, flops, line_of
from tformer.bench.roofline import roofline_line
from tformer.bench.speed_report import ceilings_words

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
