"""`bench all`: the list of benchmarks for a CPU or a GPU, and one report of them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from typing import Any

import torch

from tformer import __version__
from tformer.bench.machine import environment_line
from tformer.bench.peers import choose_peers
from tformer.bench.quality import (
    QualityBench,
    QualityRow,
    quality_command,
    quality_document,
    quality_section,
    quality_title,
    run_quality,
)
from tformer.bench.report import FAIRNESS, Table, best_rows, document, lines, markdown, row_ratio, share_of_peak, tables
from tformer.bench.speed import (
    LENGTH_OPTIONS,
    Row,
    SpeedBench,
    SpeedRequest,
    peer_versions,
    resolve,
    run_speed,
)
from tformer.checkpoint.environment import describe_environment
from tformer.decoding.inference import require_quantize
from tformer.device import resolve_device
from tformer.errors import InputError, TformerError
from tformer.formatting import binary_bytes, ratio

TRANSFORMERS, X_TRANSFORMERS, CTRANSLATE2 = "transformers", "x-transformers", "ctranslate2"
NO_DROPOUT = tuple(
    f"model.{key}=0" for key in ("embedding.dropout", "decoder.dropout", "decoder.attention_dropout")
)  # as nanoGPT's own bench has it
BOTH = ("none", "int8")
QUICK_REPEATS, QUICK_SECONDS, QUICK_TEXTS = 3, 300.0, 1000


@dataclass(frozen=True)
class Case:
    """title: what is measured, for people; note: what they should know of how."""

    title: str
    request: SpeedRequest
    note: str = ""

    @property
    def command(self) -> str:
        return command_of(self.request)


def _case(title: str, work: str, arch: str, preset: str, **fields: Any) -> Case:
    return Case(title, SpeedRequest(work, arch=arch, preset=preset, **fields))


def _training(title: str, preset: str, batch_sizes: tuple[int, ...], length: int, **fields: Any) -> Case:
    case = _case(title, "train", "gpt", preset, batch_sizes=batch_sizes, length=length, **fields)
    return case if len(batch_sizes) > 1 else replace(case, note=_fixed(batch_sizes[0]))


def _fixed(batch_size: int) -> str:
    return f"a batch of {batch_size} belongs to the shape that is measured: nobody's is swept, formats are"


def _generation(title: str, preset: str, batch_size: int, **fields: Any) -> Case:
    options = {"new_tokens": 128}
    given = {"length": 16, "options": options, "peers": (TRANSFORMERS,), **fields}
    case = _case(title, "generate", "gpt", preset, batch_sizes=(batch_size,), **given)
    return replace(case, note=_fixed(batch_size))


CPU_CASES = (
    _training(
        "Training, 6 layers of width 384 (nanoGPT's baby shape)",
        "char",
        (16,),
        256,
        sets=NO_DROPOUT,
        peers=(TRANSFORMERS, X_TRANSFORMERS),
    ),
    _training("Training and its memory, GPT-2 of 124M", "small", (2,), 512, peers=(TRANSFORMERS,), repeats=5),
    _generation("Generation, GPT-2 of 124M, one text", "small", 1, quantize=BOTH),
    _generation("Generation, GPT-2 of 124M, eight texts", "small", 8, quantize=BOTH),
    _case(
        "Translation, 6 + 6 layers of width 512, beam 4",
        "translate",
        "transformer",
        "base",
        sets=("model.vocab_size=16000",),
        batch_sizes=(8, 32, 64),
        length=20,
        options={"new_tokens": 30, "beam": 4, "sentences": 64},
        quantize=BOTH,
        peers=(CTRANSLATE2, TRANSFORMERS),
        repeats=5,
    ),
    _case(
        "Classification of 10,000 short texts, 4 layers of width 512",
        "classify",
        "bert",
        "small",
        batch_sizes=(16, 32, 64),
        options={"texts": 10_000},
        peers=(TRANSFORMERS,),
        repeats=3,
        max_seconds=1800.0,
    ),
)

GPU_CASES = (
    _training("Training, GPT-2 of 124M", "small", (16, 32, 64), 1024, compile=True, peers=(TRANSFORMERS,)),
    _training("Training, GPT-2 of 350M", "medium", (8, 16, 32), 1024, compile=True, peers=(TRANSFORMERS,)),
    _training("Training, GPT-2 of 1.5B", "xl", (4, 8, 16), 1024, compile=True),
    _generation("Generation, GPT-2 of 124M, one text", "small", 1, precision="bf16"),
    _generation("Generation, GPT-2 of 1.5B, one text", "xl", 1, precision="bf16"),
)
"""The presets' own precision is what the device has: bf16."""

SEEDS = (1, 2, 3)
QUALITY = {
    "cpu": (("char-12s", 1.88), ("char-6m", 1.4697)),
    "cuda": (("char", 1.4697),),
}
"""Presets by characters, and the validation loss on tinyshakespeare that each is timed to."""


def quality_for(
    device: torch.device, *, data: str, valid: str, quick: bool = False, threads: int | None = None
) -> tuple[QualityBench, ...]:
    """Times to quality on a kind of device. quick: the first preset, one seed."""
    found = [
        QualityBench(
            preset=preset,
            data=data,
            valid=valid,
            target=target,
            seeds=SEEDS[:1] if quick else SEEDS,
            device=str(device),
            threads=threads,
        )
        for preset, target in QUALITY[device.type]
    ]
    return tuple(found[:1] if quick else found)


def cases_for(device: torch.device, *, quick: bool = False, threads: int | None = None) -> tuple[Case, ...]:
    """The cases of a kind of device. quick: one batch size of a sweep, fewer rounds and texts."""
    chosen = GPU_CASES if device.type == "cuda" else CPU_CASES
    placed = [_with(case, device=str(device), threads=threads) for case in chosen]
    return tuple(_quick(case) if quick else case for case in placed)


def _quick(case: Case) -> Case:
    request = case.request
    sizes = request.batch_sizes
    options = dict(request.options)
    if "texts" in options:
        options["texts"] = QUICK_TEXTS
    return _with(
        case,
        batch_sizes=(sizes[len(sizes) // 2],),
        options=options,
        repeats=min(request.repeats, QUICK_REPEATS),
        max_seconds=min(request.max_seconds, QUICK_SECONDS),
    )


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, request=replace(case.request, **changes))


def command_of(request: SpeedRequest) -> str:
    """The command that asks for the same; defaults are left out."""
    words = ["tformer", "bench", request.work]
    for name in ("arch", "preset"):
        value = getattr(request, name)
        words += [] if value is None else [f"--{name}", value]
    for text in request.sets:
        words += ["--set", text]
    if request.batch_sizes:
        words += ["--batch-size", ",".join(map(str, request.batch_sizes))]
    if request.length is not None:
        words += [LENGTH_OPTIONS.get(request.work, "--length"), str(request.length)]
    words += _options(request.options)
    if tuple(request.quantize) != _DEFAULTS["quantize"]:
        words += ["--quantize", ",".join(request.quantize)]
    for name in request.peers:
        words += ["--peer", name]
    words += ["--compile"] if request.compile else []
    for name in ("precision", "repeats", "max_seconds", "threads", "device"):
        value = getattr(request, name)
        if value != _DEFAULTS[name]:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _options(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


_DEFAULTS = {field.name: field.default for field in fields(SpeedRequest)}


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
    return f"{line}, {binary_bytes(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory"


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
            against = [f"{other.entry.label} {ratio(row_ratio(row, other))}" for other in best if not other.is_ours]
            made.append(
                (
                    f"{outcome.case.title}: {row.entry.precision}, batch {row.batch_size}",
                    f"{row.tokens_per_second:,.0f}",
                    "" if share is None else f"{share:.0%}",
                    binary_bytes(row.memory.get("peak_gpu_bytes", row.memory["peak_rss_bytes"])),
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
