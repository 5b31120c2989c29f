"""`bench attention`: what each attention kind costs at each length, one process per cell of the table.

Lengths are gone through in rising order, all kinds at each, so that kinds which are compared were measured close in
time. A kind that fails at a length for want of memory or time is not tried at greater ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tformer.bench.attention_cell import make_mechanism, sizes_of
from tformer.bench.attention_peers import ATTENTION_PEERS
from tformer.bench.isolate import OUT_OF_MEMORY, TOO_LONG, run_isolated
from tformer.errors import InputError


@dataclass(frozen=True)
class AttentionBench:
    """What to measure.

    Attributes:
        kinds: the other libraries' ways are among them, last. options: of each, by name.
        kv_heads: None: as many as heads.
        max_seconds: of one cell, starting Python included.
        model: whose attention it is, where it is a model's.
        compile: our kinds go through torch.compile.
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    options: Mapping[str, Mapping[str, Any]]
    batch_size: int = 1
    heads: int = 4
    head_dim: int = 64
    causal: bool = False
    dtype: str = "fp32"
    device: str = "cpu"
    repeats: int = 10
    max_seconds: float = 120.0
    kv_heads: int | None = None
    model: str | None = None
    compile: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cell:
    """One kind at one length: seconds of forward and backward, or why there are none.

    peak_bytes: above the inputs; peak_rss_bytes: of the whole process.
    """

    kind: str
    length: int
    median: float | None = None
    minimum: float | None = None
    spread: float | None = None
    repeats: int | None = None
    peak_bytes: int | None = None
    peak_rss_bytes: int | None = None
    failed: str | None = None


NOT_TRIED = "not tried"

Measured = Callable[[Cell, int, int], None]
"""Called after each cell, with its number and how many there are."""


def check(bench: AttentionBench) -> None:
    """Refuse options that suit no length. Errors: InputError, with the words of the kind."""
    longest = sizes_of(
        heads=bench.heads,
        head_dim=bench.head_dim,
        length=bench.lengths[-1],
        causal=bench.causal,
        kv_heads=bench.kv_heads,
    )
    for kind in bench.kinds:
        if kind in ATTENTION_PEERS:
            continue
        try:
            with torch.device("meta"):
                make_mechanism(kind, bench.options[kind], longest)
        except ValueError as error:
            raise InputError(f"{kind}.{error}", hint=f"--set {kind}.OPTION=VALUE, or leave {kind} out") from None


def bench_attention(bench: AttentionBench, *, measured: Measured, should_stop: Callable[[], bool]) -> list[Cell] | None:
    """Every cell, by length and kind; None when stopped."""
    cells: list[Cell] = []
    given_up: dict[str, Cell] = {}
    total = len(bench.kinds) * len(bench.lengths)
    for length in bench.lengths:
        for kind in bench.kinds:
            if kind in given_up:
                cell = Cell(kind, length, failed=f"{NOT_TRIED}: {given_up[kind].failed} at {given_up[kind].length:,}")
            else:
                found = _measure(bench, kind, length, should_stop)
                if found is None:
                    return None
                cell = found
                if (cell.failed or "").startswith((OUT_OF_MEMORY, TOO_LONG)):
                    given_up[kind] = cell
            cells.append(cell)
            measured(cell, len(cells), total)
    return cells


def _measure(bench: AttentionBench, kind: str, length: int, should_stop: Callable[[], bool]) -> Cell | None:
    arguments: dict[str, Any] = {
        "kind": kind,
        "length": length,
        "options": dict(bench.options[kind]),
        "batch_size": bench.batch_size,
        "heads": bench.heads,
        "head_dim": bench.head_dim,
        "causal": bench.causal,
        "dtype": bench.dtype,
        "device": bench.device,
        "repeats": bench.repeats,
        "max_seconds": bench.max_seconds,
    }
    # What is as usual is not said.
    arguments |= {} if bench.kv_heads is None else {"kv_heads": bench.kv_heads}
    arguments |= {"compile": True} if bench.compile else {}
    found = run_isolated("attention", arguments, max_seconds=bench.max_seconds, should_stop=should_stop)
    return None if found is None else Cell(kind, length, **found)


def succeeded(cells: Sequence[Cell], kind: str) -> dict[int, Cell]:
    """The measured cells of a kind, by length."""
    return {cell.length: cell for cell in cells if cell.kind == kind and cell.failed is None}
