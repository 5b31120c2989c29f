"""`bench all`: every case in turn, and one report of them with the machine, the versions, the date and the commands.

A library that is not installed is left out of its cases, a case that cannot be measured is said; the rest goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch

from tformer import __version__
from tformer.bench.cases import Case
from tformer.bench.environment import environment_line
from tformer.bench.peers import choose_peers
from tformer.bench.quality import QualityBench, QualityRow, run_quality
from tformer.bench.quality_report import quality_command, quality_document, quality_section, quality_title
from tformer.bench.speed import Row, SpeedBench, run_speed
from tformer.bench.speed_report import FAIRNESS, best_rows, document, lines, row_ratio, share_of_peak, tables
from tformer.bench.speed_request import SpeedRequest, peer_versions, resolve
from tformer.bench.table import Table, markdown, show_bytes, show_factor
from tformer.checkpoint.environment import describe_environment
from tformer.decoding.precision import require_quantize
from tformer.errors import InputError, TformerError
from tformer.training.precision import resolve_device


@dataclass(frozen=True)
class Told:
    """Who is told of progress: of a case as it begins (title, command, its number, how many there are), of rows, of
    notes, of seeds."""

    case: Callable[[str, str, int, int], None]
    row: Callable[[Row], None]
    note: Callable[[str], None]
    seed: Callable[[QualityRow], None]


@dataclass(frozen=True)
class Outcome:
    """A case, as it was measured: without libraries that are missing. bench: None where nothing could be asked."""

    case: Case
    bench: SpeedBench | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


Quality = tuple[QualityBench, tuple[QualityRow, ...]]
"""A time to quality, as it was measured."""


@dataclass(frozen=True)
class AllReport:
    markdown: str
    document: dict[str, Any]
    nothing_measured: bool


def run_all(
    cases: Sequence[Case],
    device: torch.device,
    *,
    told: Told,
    should_stop: Callable[[], bool],
    qualities: Sequence[QualityBench] = (),
) -> AllReport | None:
    """Every case, and then every time to quality; None when stopped."""
    outcomes: list[Outcome] = []
    machine, total = machine_line(device), len(cases) + len(qualities)
    for number, case in enumerate(cases, start=1):
        told.case(case.title, case.command, number, total)
        outcome = _measure(case, told, should_stop)
        if outcome is None:
            return None
        outcomes.append(outcome)
    reached: list[Quality] = []
    for number, bench in enumerate(qualities, start=len(cases) + 1):
        told.case(quality_title(bench), quality_command(bench), number, total)
        rows = run_quality(bench, told=told.seed, should_stop=should_stop)
        if rows is None:
            return None
        reached.append((bench, tuple(rows)))
    return report_of(outcomes, device, machine=machine, qualities=reached)


def _measure(case: Case, told: Told, should_stop: Callable[[], bool]) -> Outcome | None:
    request, missing = _with_what_is_there(case.request)
    notes = [*([case.note] if case.note else []), *missing]
    case = replace(case, request=request)
    try:
        bench, decided = resolve(request)
    except TformerError as error:
        told.note(error.message)
        return Outcome(case, None, (), (*notes, f"not measured: {error.message}"))
    for note in missing:
        told.note(note)
    rows = run_speed(bench, told=told.row, should_stop=should_stop)
    return None if rows is None else Outcome(case, bench, tuple(rows), (*notes, *decided))


def _with_what_is_there(request: SpeedRequest) -> tuple[SpeedRequest, list[str]]:
    """The request without libraries and formats that cannot take part, and why each cannot."""
    kept, formats, notes, device = [], [], [], resolve_device(request.device)
    for kind in request.quantize:
        try:
            require_quantize(kind, device)
        except InputError as error:
            notes.append(error.message)
        else:
            formats.append(kind)
    for name in request.peers:
        try:
            choose_peers(request.work, [name], None, device=device)
        except InputError as error:
            notes.append(error.message)
        else:
            kept.append(name)
    return replace(request, peers=tuple(kept), quantize=tuple(formats)), notes


def machine_line(device: torch.device) -> str:
    """PyTorch, processor and threads or GPU, memory."""
    line = environment_line(device, dtype="formats as told")
    return f"{line}, {show_bytes(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory"


def report_of(
    outcomes: Sequence[Outcome], device: torch.device, *, machine: str, qualities: Sequence[Quality] = ()
) -> AllReport:
    """The page and the document of what was measured."""
    environment = describe_environment(device=str(device), data_fingerprint=None)
    versions: dict[str, str] = {}
    for outcome in outcomes:
        versions |= {} if outcome.bench is None else peer_versions(outcome.bench)
    environment |= {"line": machine, "peers": versions}
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    head = [
        f"# Speed of tformer {__version__}",
        f"{date.today().isoformat()}. Machine: {machine}; Python {environment['python']}, {environment['platform']}.",
        f"Compared with: {libraries}.",
        FAIRNESS,
        markdown(summary(outcomes)),
    ]
    sections = [section(outcome) for outcome in outcomes]
    sections += [quality_section(bench, rows) for bench, rows in qualities]
    documents = [_document(outcome, environment) for outcome in outcomes]
    timed = [quality_document(bench, rows, environment={}, command=quality_command(bench)) for bench, rows in qualities]
    failures = [row.failed for outcome in outcomes for row in outcome.rows]
    failures += [row.failed for _, rows in qualities for row in rows]
    return AllReport(
        markdown="\n\n".join([*head, *sections]) + "\n",
        document={"environment": environment, "cases": documents, "quality": [_without_environment(d) for d in timed]},
        nothing_measured=all(failed is not None for failed in failures),
    )


def summary(outcomes: Sequence[Outcome]) -> Table:
    """A line for each case and format of ours: the best batch size, and how much faster than each other's best."""
    headings = ("", "tokens/s", "share of peak", "peak memory", "times as fast as")
    made: list[tuple[str, ...]] = []
    for outcome in outcomes:
        best = best_rows(outcome.rows)
        ours = [row for row in best if row.is_ours]
        if not ours:
            made.append((outcome.case.title, "not measured", "", "", ""))
        for row in ours:
            share = share_of_peak(row)
            against = [
                f"{other.entry.label} {show_factor(row_ratio(row, other))}" for other in best if not other.is_ours
            ]
            made.append(
                (
                    f"{outcome.case.title}: {row.entry.precision}, batch {row.batch_size}",
                    f"{row.tokens_per_second:,.0f}",
                    "" if share is None else f"{share:.0%}",
                    show_bytes(row.memory.get("peak_gpu_bytes", row.memory["peak_rss_bytes"])),
                    ", ".join(against),
                )
            )
    return Table("The best batch size of each:", headings, tuple(made))


def section(outcome: Outcome) -> str:
    """A case: its command, tables and lines."""
    parts = [f"## {outcome.case.title}", f"    {outcome.case.command}"]
    told = list(outcome.notes)
    if outcome.bench is not None:
        parts += map(markdown, tables(outcome.bench, outcome.rows))
        told += lines(outcome.rows)
    parts.append("\n".join(f"- {line}" for line in told))
    return "\n\n".join(part for part in parts if part)


def _document(outcome: Outcome, environment: dict[str, Any]) -> dict[str, Any]:
    named = {"title": outcome.case.title, "command": outcome.case.command, "notes": list(outcome.notes)}
    if outcome.bench is None:
        return {**named, "rows": []}
    found = document(outcome.bench, outcome.rows, environment=environment, command=outcome.case.command)
    return {**_without_environment(found), **named}


def _without_environment(document: dict[str, Any]) -> dict[str, Any]:
    """It is the whole report's."""
    return {name: value for name, value in document.items() if name != "environment"}
