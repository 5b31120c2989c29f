"""Time and peak memory of attention alone against the length, for each kind: forward and backward, no projections.

    python -m tests.benchmarks.attention --kinds sliding_window,bigbird --set sliding_window.window=512 --out costs

softmax(q k^T) v or what a kind has in its place, then the gradients of q, k, v and of the kind's own parameters.
Queries, keys and values lie in memory as projections leave them, [B, T, H, h]. Every kind at every length has its own
process. Lengths are measured in rising order, all kinds at each, so that kinds which are compared are measured close
in time; a kind that runs out of memory or time is not tried at greater ones. `full` and `dense-masked` (full attention
under a T x T mask, which a kind with a pattern must beat) stand beside the kinds, `transformers-sdpa` and
`transformers-eager` with `--peer transformers`.

Shape legend: B batch, T positions, H heads, h head_dim, D = H h.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.memory import PeakMemory
from tests.benchmarks.transformers_peer import ATTENTION_FUNCTIONS, Attention
from tformer.bench.machine import environment_line
from tformer.bench.options import whole_numbers, words_of
from tformer.bench.processes import OUT_OF_MEMORY, TOO_LONG, RacedRow, race
from tformer.bench.report import ReportTable, markdown
from tformer.bench.workloads import SEED, Contender, synchronize
from tformer.cli.process import StopFlag
from tformer.nn.attention import (
    ATTENTION,
    AttentionContext,
    AttentionSizes,
    FullAttentionOptions,
    Mechanism,
    ProjectionOptions,
)
from tformer.nn.attention.context import AttentionInputs
from tformer.recipe.yaml_text import parse_value
from tformer.support.device import DTYPES, resolve_device
from tformer.support.errors import InputError, TformerError
from tformer.support.files import make_folders, write_file, write_text
from tformer.support.formatting import binary_bytes, json_text, ratio, short_seconds
from tformer.viz.figure import draw_panels
from tformer.viz.plot.series import MetricPanel, make_series

FULL, DENSE_MASKED = "full", "dense-masked"
"""The references: full attention as the model computes it, and with a T x T mask."""

LENGTHS = "512,1024,2048,4096,8192,16384"
MAX_LENGTH = 2**24
LONG = 2048
"""Below this length, costs that do not grow with length hide the exponent."""

SHORT_LENGTH = 128  # positions of a first call that loads code
SLOW_SECONDS = 1.0  # a first call that takes longer is enough warm-up
ROUND_SECONDS = 0.01  # quick calls are repeated within a round, so that waking the process does not count


@dataclass(frozen=True)
class DenseMaskedOptions(FullAttentionOptions):
    """Full attention under the band of a sliding window, as a T x T mask: the baseline for memory."""

    window: int = 256  # visible keys in all, without the query's own


KINDS: dict[str, type[ProjectionOptions]] = {
    FULL: ATTENTION[FULL],
    DENSE_MASKED: DenseMaskedOptions,
    **{kind: options for kind, options in ATTENTION.items() if kind != FULL},
}
"""Our kinds and their options."""

PEERS = {f"transformers-{name}": name for name in ATTENTION_FUNCTIONS}
"""Other attention functions by name."""


@dataclass(frozen=True)
class AttentionBench:
    """What to measure; it travels to the measuring process as JSON."""

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    options: Mapping[str, Mapping[str, Any]]
    batch_size: int = 1
    heads: int = 4
    head_dim: int = 64
    causal: bool = False
    dtype: str = "fp32"
    device: str = "cpu"
    compile: bool = False

    def mechanism(self, kind: str, length: int) -> Mechanism:
        """One of `kinds` with random parameters. ValueError when its options and the sizes do not fit together."""
        sizes = AttentionSizes(
            d_model=self.heads * self.head_dim,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            max_seq_len=length,
            causal=self.causal,
        )
        if kind in PEERS:
            return Attention(sizes, PEERS[kind]).train()
        options = KINDS[kind](**self.options.get(kind, {}))
        mechanism = options.mechanism(options, sizes)
        mechanism.reset_parameters(0.02)
        return mechanism.train()


class AttentionContender(Contender):
    """One attention kind at one length; the contender of the measuring process.

    Order: a short call loads code; inputs are made; memory is measured from here over the first call at full length, so
    that masks and tables that a kind makes in its first call count too; then rounds are timed.
    """

    def __init__(self, *, bench: Mapping[str, Any], kind: str, length: int) -> None:
        self.bench, self.kind, self.length = AttentionBench(**bench), kind, length
        self.device = torch.device(self.bench.device)

    def prepare(self) -> None:
        torch.manual_seed(SEED)
        self._make_call(min(self.length, SHORT_LENGTH))()
        self._call = self._make_call(self.length)
        memory = PeakMemory(self.device)
        start = time.perf_counter()
        self._call()
        self._peak_bytes = memory.bytes()  # on a GPU this waits for the call
        self._first_seconds = time.perf_counter() - start
        self._calls = 1

    def warm_up(self) -> None:
        if self._first_seconds > SLOW_SECONDS:
            return
        self.run()
        start = time.perf_counter()
        self.run()
        self._calls = math.ceil(ROUND_SECONDS / (time.perf_counter() - start))

    def run(self) -> int:
        for _ in range(self._calls):
            self._call()
            synchronize(self.device)
        return self._calls * self.bench.batch_size * self.length

    def peak_memory(self) -> dict[str, int]:
        return {**super().peak_memory(), "peak_bytes": self._peak_bytes}

    def _make_call(self, length: int) -> Callable[[], None]:
        bench = self.bench
        mechanism = bench.mechanism(self.kind, self.length).to(self.device)
        if bench.compile and self.kind not in PEERS:
            mechanism.compile(dynamic=False)
        shape = (bench.batch_size, length, bench.heads, bench.head_dim)
        inputs = [  # queries, keys, values, gradient
            torch.randn(shape, device=self.device, dtype=DTYPES[bench.dtype]) for _ in range(4)
        ]
        window = DenseMaskedOptions(**bench.options.get(self.kind, {})).window if self.kind == DENSE_MASKED else None
        return forward_and_backward(mechanism, inputs, window, causal=bench.causal)


def forward_and_backward(
    mechanism: Mechanism, inputs_BTHh: list[Tensor], window: int | None, *, causal: bool
) -> Callable[[], None]:
    """A call that goes forward and back; with a `window` under a dense mask of that band, made by the first call."""
    *qkv_BTHh, grad_BTHh = inputs_BTHh
    batch, length, heads, head_dim = grad_BTHh.shape
    trained = [*(x.requires_grad_() for x in qkv_BTHh), *mechanism.parameters()]
    positions = torch.arange(length, device=grad_BTHh.device).unsqueeze(0)
    stream_BTD = torch.zeros(1, dtype=grad_BTHh.dtype, device=grad_BTHh.device).expand(batch, length, heads * head_dim)
    widths = sum(x.shape[2] for x in qkv_BTHh) * head_dim
    weight = torch.zeros(widths, stream_BTD.shape[-1], dtype=grad_BTHh.dtype, device=grad_BTHh.device)
    project = partial(F.linear, weight=weight)  # of tables of positions
    mask: Tensor | None = None

    def call_once() -> None:
        nonlocal mask
        if window is not None and mask is None:
            mask = band_mask(length, window, causal=causal, device=grad_BTHh.device)
        context = AttentionContext(positions, positions, causal=causal, mask=mask, is_causal=causal and mask is None)
        q, k, v = (x.transpose(1, 2) for x in qkv_BTHh)
        out_BHTh, _ = mechanism(AttentionInputs(q, k, v, context, mechanism.scale, x_BTD=stream_BTD, project=project))
        torch.autograd.grad(out_BHTh, trained, grad_BTHh.transpose(1, 2), allow_unused=True)

    return call_once


def band_mask(length: int, window: int, *, causal: bool, device: torch.device) -> Tensor:
    """bool [1, 1, T, T]: a query sees `window` keys beside its own, half on each side (causal: all before)."""
    before, after = (window, 0) if causal else (window // 2, window // 2)
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril_(after).triu_(-before)[None, None]


@dataclass(frozen=True)
class Cell:
    """One kind at one length: seconds of a call, memory beyond the inputs, or why there are none."""

    kind: str
    length: int
    seconds: float = 0.0
    spread: float = 0.0
    repeats: int = 0
    peak_bytes: int = 0
    failed: str | None = None


def run(
    bench: AttentionBench,
    *,
    repeats: int,
    max_seconds: float,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> list[Cell]:
    """A cell for each kind and length. Each is measured alone: it may need the memory of the whole machine."""
    cells: list[Cell] = []
    given_up: dict[str, str] = {}
    limits: dict[str, Any] = {"max_seconds": max_seconds, "should_stop": should_stop}
    for length in bench.lengths:
        for kind in bench.kinds:
            if kind in given_up:
                cells.append(Cell(kind, length, failed=given_up[kind]))
                continue
            place = {"bench": asdict(bench), "kind": kind, "length": length}
            [raced] = race(f"{__spec__.name}:AttentionContender", [place], repeats=repeats, **limits)
            cell = cell_of(bench, kind, length, raced)
            if (cell.failed or "").startswith((OUT_OF_MEMORY, TOO_LONG)):
                given_up[kind] = "not tried"
            cells.append(cell)
            result = cell.failed or f"{short_seconds(cell.seconds)}, {binary_bytes(cell.peak_bytes)}"
            say(f"{len(cells)} of {len(bench.kinds) * len(bench.lengths)}  {kind} at {length:,}: {result}")
    return cells


def cell_of(bench: AttentionBench, kind: str, length: int, raced: RacedRow) -> Cell:
    if "failed" in raced:
        return Cell(kind, length, failed=raced["failed"])
    calls = raced["tokens"] // (bench.batch_size * length)  # in a round
    peak = raced["memory"]["peak_bytes"]
    return Cell(kind, length, raced["seconds"] / calls, raced["spread"], raced["repeats"], peak)


# --- report -----------------------------------------------------------------------------------------------------------


def log_log_slope(costs: Mapping[int, float]) -> float | None:
    """b of cost = a length^b by least squares on the logarithms, from length `LONG` on if two lengths are as long.

    1 is linear, 2 quadratic; None for fewer than two lengths.
    """
    long = {length: cost for length, cost in costs.items() if length >= LONG}
    points = [(math.log(n), math.log(cost)) for n, cost in (long if len(long) > 1 else costs).items() if cost > 0]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    squares = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / squares


def crossover(costs: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """From which common length `costs` stay below `reference`, interpolated on logarithmic axes, in words."""
    common = sorted(costs.keys() & reference)
    if not common:
        return ""
    above = [math.log(costs[length] / reference[length]) for length in common]
    if above[-1] >= 0:
        return f"not up to {common[-1]:,}"
    last = max((index for index, value in enumerate(above) if value >= 0), default=None)
    if last is None:
        return f"from {common[0]:,} or less"
    x, next_x = math.log(common[last]), math.log(common[last + 1])
    at = math.exp(x + (next_x - x) * above[last] / (above[last] - above[last + 1]))
    return f"from about {float(f'{at:.2g}'):,.0f}"


def tables(bench: AttentionBench, cells: Sequence[Cell]) -> list[ReportTable]:
    """Time, memory, and their growth."""
    headings = ("kind", *(f"{length:,}" for length in bench.lengths))

    def table(title: str, show: Callable[[Cell], str]) -> ReportTable:
        shown = ((kind, *(c.failed or show(c) for c in cells if c.kind == kind)) for kind in bench.kinds)
        return ReportTable(title, headings, tuple(shown))

    return [
        table("Time of forward and backward, median", lambda cell: short_seconds(cell.seconds)),
        table("Peak memory beyond the inputs", lambda cell: binary_bytes(cell.peak_bytes)),
        _growth(bench, cells),
    ]


def measured(cells: Sequence[Cell], kind: str) -> dict[int, Cell]:
    return {cell.length: cell for cell in cells if cell.kind == kind and cell.failed is None}


def _growth(bench: AttentionBench, cells: Sequence[Cell]) -> ReportTable:
    longest = bench.lengths[-1]
    full, masked = measured(cells, FULL), measured(cells, DENSE_MASKED)

    def factor(costs: Mapping[int, float], over: Mapping[int, float]) -> str:
        at = max(costs.keys() & over, default=None)
        if at is None:
            return ""
        return ratio(costs[at] / max(over[at], 1e-12)) + ("" if at == longest else f" (at {at:,})")

    rows = []
    for kind in bench.kinds:
        own = measured(cells, kind)
        seconds = {length: cell.seconds for length, cell in own.items()}
        memory = {length: float(cell.peak_bytes) for length, cell in own.items()}
        full_seconds = {length: cell.seconds for length, cell in full.items()}
        masked_memory = {length: max(1.0, cell.peak_bytes) for length, cell in masked.items()}
        slopes = [log_log_slope(seconds), log_log_slope(memory)]
        rows.append(
            (
                kind,
                *("" if slope is None else f"{slope:.2f}" for slope in slopes),
                "" if kind == FULL else crossover(seconds, full_seconds),
                factor(full_seconds, seconds),
                factor(memory, masked_memory),
            )
        )
    headings = ("kind", "slope of time", "slope of memory", "faster than full", f"speed at {longest:,}: full = 1 x")
    headings = (*headings, f"memory at {longest:,}: {DENSE_MASKED} = 1 x")
    return ReportTable("Growth with length T, as an exponent: cost ~ T^slope", headings, tuple(rows))


def write_report(bench: AttentionBench, cells: Sequence[Cell], out: Path, *, text: str) -> None:
    """Write `table.md`, `table.json`, and curves of time and memory where these are above 0."""
    make_folders(out)
    write_text(out / "table.md", text)
    write_text(out / "table.json", json_text({"settings": asdict(bench), "cells": [asdict(cell) for cell in cells]}))
    plots: tuple[tuple[str, str, Callable[[Cell], float]], ...] = (
        ("time", "milliseconds, forward and backward", lambda cell: cell.seconds * 1000),
        ("memory", "peak MiB beyond the inputs", lambda cell: cell.peak_bytes / 2**20),
    )
    for name, label, value in plots:
        curves = [
            make_series(number, kind, [(length, value(cell)) for length, cell in measured(cells, kind).items()])
            for number, kind in enumerate(bench.kinds)
        ]
        if any((curve.y > 0).any() for curve in curves):
            picture = draw_panels(
                [MetricPanel(label, curves)],
                "svg",
                title=f"Attention: {name}",
                x_label="length",
                log_x=True,
                log_y=True,
            )
            write_file(out / f"{name}.svg", [picture])


# --- the command line -------------------------------------------------------------------------------------------------


def read_settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by kind from each `KIND.OPTION=VALUE`."""
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, _, value = text.partition("=")
        kind, _, option = path.partition(".")
        if kind not in KINDS or option not in KINDS[kind].__dataclass_fields__:
            raise InputError(f"--set: found '{text}', expected KIND.OPTION=VALUE with an option of a kind")
        settings.setdefault(kind, {})[option] = parse_value(value, name=f"--set {path}")
    return settings


def bench_of(asked: argparse.Namespace) -> AttentionBench:
    """The benchmark of a command line; `full` is always measured, first."""
    kinds = KINDS if asked.kinds is None else (FULL, *words_of("--kinds", asked.kinds))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"--kinds: unknown kind '{unknown[0]}', expected some of {', '.join(KINDS)}")
    bench = AttentionBench(
        kinds=tuple(dict.fromkeys([*kinds, *(PEERS if asked.peer else ())])),
        lengths=tuple(sorted(whole_numbers("--lengths", asked.lengths, least=1, most=MAX_LENGTH))),
        options=read_settings(asked.set),
        batch_size=asked.batch_size,
        heads=asked.num_heads,
        head_dim=asked.head_dim,
        causal=asked.causal,
        dtype=asked.precision,
        device=str(resolve_device(asked.device)),
        compile=asked.compile,
    )
    if bench.causal and asked.kinds is None:
        able = tuple(kind for kind in bench.kinds if kind in PEERS or KINDS[kind].mechanism.causal)
        return replace(bench, kinds=able)
    return bench


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kinds", help=f"of {', '.join(KINDS)}; all by default")
    made.add_argument("--lengths", default=LENGTHS)
    made.add_argument("--set", action="append", default=[], metavar="KIND.OPTION=VALUE", help="as in a recipe")
    made.add_argument("--peer", choices=["transformers"])
    made.add_argument("--causal", action="store_true")
    made.add_argument("--compile", action="store_true")
    made.add_argument("--precision", choices=list(DTYPES), default="fp32")
    made.add_argument("--device", default="auto")
    made.add_argument("--batch-size", type=int, default=1)
    made.add_argument("--num-heads", type=int, default=4)
    made.add_argument("--head-dim", type=int, default=64)
    made.add_argument("--repeats", type=int, default=10)
    made.add_argument("--max-seconds", type=float, default=120.0, help="of one kind at one length")
    made.add_argument("--out", type=Path, help="folder for table.md, table.json, time.svg and memory.svg")
    return made


def main() -> None:
    asked = parser().parse_args()
    bench = bench_of(asked)
    with StopFlag() as flag:
        cells = run(
            bench,
            repeats=asked.repeats,
            max_seconds=asked.max_seconds,
            say=lambda line: print(line, file=sys.stderr),
            should_stop=flag.should_stop,
        )
    line = f"{environment_line(torch.device(bench.device), dtype=bench.dtype)}, batch {bench.batch_size}"
    head = f"{line}, {bench.heads} heads of {bench.head_dim}{', causal' if bench.causal else ''}"
    text = "\n\n".join([head, *map(markdown, tables(bench, cells))]) + "\n"
    if asked.out is not None:
        write_report(bench, cells, asked.out, text=text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        sys.exit(f"error: {error.message}")
