"""`bench all`: the list of benchmarks for a CPU or a GPU, and one report of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch

from tformer.bench.machine import environment_line
from tformer.bench.options import (
    ClassifyOptions,
    GenerateOptions,
    ModelOptions,
    ProductOptions,
    SpeedOptions,
    TrainOptions,
    TranslateOptions,
    words_of,
)
from tformer.bench.peers import choose_peers
from tformer.bench.report import (
    FAIRNESS,
    Table,
    best_rows,
    bullets,
    document,
    lines,
    markdown,
    peak_bytes,
    row_ratio,
    tables,
)
from tformer.bench.speed import Row, SpeedBench, resolve, run_speed
from tformer.checkpoint.logs import describe_environment
from tformer.decoding.inference import require_quantize
from tformer.support import __version__
from tformer.support.device import machine_memory, resolve_device
from tformer.support.errors import InputError, TformerError
from tformer.support.formatting import binary_bytes, ratio

TRANSFORMERS, CTRANSLATE2, LLAMA_CPP = "transformers", "ctranslate2", "llama.cpp"
NO_DROPOUT = tuple(
    f"model.{key}=0" for key in ("embedding.dropout", "decoder.dropout", "decoder.attention_dropout")
)  # as nanoGPT's own bench has it
QUICK_REPEATS, QUICK_SECONDS, QUICK_TEXTS = 3, 300.0, 1000


@dataclass(frozen=True)
class Case:
    """One benchmark of `bench all`.

    title: its heading; note: a remark on the options; options: `products` is among the fields.
    """

    title: str
    options: Any
    note: str = ""


def _case(title: str, options: SpeedOptions) -> Case:
    sizes = options.batch_sizes
    note = f"the batch size is fixed at {sizes[0]}, as part of the measured shape"
    return Case(title, options, note if len(sizes) == 1 else "")


def _gpt(preset: str) -> ModelOptions:
    return ModelOptions(arch="gpt", preset=preset)


CPU_CASES = (
    _case(
        "Training, 6 layers of width 384 (nanoGPT's baby shape)",
        TrainOptions(model=_gpt("char"), sets=NO_DROPOUT, batch_size="16", length=256, peer=(TRANSFORMERS,)),
    ),
    _case(
        "Training and its memory, GPT-2 of 124M",
        TrainOptions(model=_gpt("small"), batch_size="2", length=512, peer=(TRANSFORMERS,), repeats=5),
    ),
    _case(
        "Generation, GPT-2 of 124M, one text",
        GenerateOptions(model=_gpt("small"), batch_size="1", quantize="none,int8", peer=(TRANSFORMERS, LLAMA_CPP)),
    ),
    _case(
        "Generation, GPT-2 of 124M, eight texts",
        GenerateOptions(model=_gpt("small"), batch_size="8", quantize="none,int8", peer=(TRANSFORMERS, LLAMA_CPP)),
    ),
    _case(
        "Translation, 6 + 6 layers of width 512, beam 4",
        TranslateOptions(
            model=ModelOptions(arch="transformer", preset="base"),
            sets=("model.vocab_size=16000",),
            batch_size="8,32,64",
            length=20,
            quantize="none,int8",
            peer=(CTRANSLATE2, TRANSFORMERS),
            repeats=5,
        ),
    ),
    _case(
        "Classification of 10,000 short texts, 4 layers of width 512",
        ClassifyOptions(
            model=ModelOptions(arch="bert", preset="small"),
            batch_size="16,32,64",
            peer=(TRANSFORMERS,),
            repeats=3,
            max_seconds=1800.0,
        ),
    ),
)

COMPILED, BF16 = ProductOptions(compile=True), ProductOptions(precision="bf16")
GPU_CASES = (
    _case(
        "Training, GPT-2 of 124M",
        TrainOptions(model=_gpt("small"), batch_size="16,32,64", length=1024, products=COMPILED, peer=(TRANSFORMERS,)),
    ),
    _case(
        "Training, GPT-2 of 350M",
        TrainOptions(model=_gpt("medium"), batch_size="8,16,32", length=1024, products=COMPILED, peer=(TRANSFORMERS,)),
    ),
    _case(
        "Training, GPT-2 of 1.5B", TrainOptions(model=_gpt("xl"), batch_size="4,8,16", length=1024, products=COMPILED)
    ),
    _case(
        "Generation, GPT-2 of 124M, one text",
        GenerateOptions(model=_gpt("small"), batch_size="1", products=BF16, peer=(TRANSFORMERS,)),
    ),
    _case(
        "Generation, GPT-2 of 1.5B, one text",
        GenerateOptions(model=_gpt("xl"), batch_size="1", products=BF16, peer=(TRANSFORMERS,)),
    ),
)
"""The presets' own precision is what the device has: bf16."""


def cases_for(device: torch.device, *, quick: bool = False, threads: int | None = None) -> tuple[Case, ...]:
    """The cases of a kind of device. quick: one batch size of several, fewer rounds and texts."""
    chosen = GPU_CASES if device.type == "cuda" else CPU_CASES
    placed = [
        _with(case, products=replace(case.options.products, device=str(device)), threads=threads) for case in chosen
    ]
    return tuple(_quick(case) if quick else case for case in placed)


def _quick(case: Case) -> Case:
    options = case.options
    sizes = options.batch_sizes
    fewer = {"texts": QUICK_TEXTS} if "texts" in options.own else {}
    return _with(
        case,
        batch_size=str(sizes[len(sizes) // 2]),
        repeats=min(options.repeats, QUICK_REPEATS),
        max_seconds=min(options.max_seconds, QUICK_SECONDS),
        **fewer,
    )


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, options=replace(case.options, **changes))


@dataclass(frozen=True)
class Progress:
    """Called as `bench all` goes on: when a case begins (title, command, its number, how many there are), with each
    row, and with each note on what cannot be measured."""

    on_case: Callable[[str, str, int, int], None]
    on_row: Callable[[Row], None]
    on_note: Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A case as measured, without libraries that are missing. bench: None where its request was refused."""

    case: Case
    bench: SpeedBench | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SuiteReport:
    markdown: str
    document: dict[str, Any]
    nothing_measured: bool


def run_all(
    cases: Sequence[Case],
    device: torch.device,
    *,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> SuiteReport | None:
    """Measure every case; None when stopped.

    Libraries that are not installed are left out of their cases; what cannot be measured is reported as such.
    """
    outcomes: list[Outcome] = []
    machine = machine_line(device)
    for number, case in enumerate(cases, start=1):
        progress.on_case(case.title, case.options.command, number, len(cases))
        outcome = _measure(case, progress, should_stop)
        if outcome is None:
            return None
        outcomes.append(outcome)
    return report_of(outcomes, device, machine=machine)


def _measure(case: Case, progress: Progress, should_stop: Callable[[], bool]) -> Outcome | None:
    case, missing = _with_what_is_available(case)
    notes = [*([case.note] if case.note else []), *missing]
    try:
        bench, decided = resolve(case.options)
    except TformerError as error:
        progress.on_note(error.message)
        return Outcome(case, None, (), (*notes, f"not measured: {error.message}"))
    for note in missing:
        progress.on_note(note)
    rows = run_speed(bench, on_row=progress.on_row, should_stop=should_stop)
    return None if rows is None else Outcome(case, bench, tuple(rows), (*notes, *decided))


def _with_what_is_available(case: Case) -> tuple[Case, list[str]]:
    """The case without libraries and formats that this machine lacks, and a note for each."""
    options, notes = case.options, []

    def usable(names: Sequence[str], require: Callable[[str], object]) -> tuple[str, ...]:
        found = []
        for name in names:
            try:
                require(name)
            except InputError as error:
                notes.append(error.message)
            else:
                found.append(name)
        return tuple(found)

    device = resolve_device(options.products.device)
    formats = usable(words_of("--quantize", options.quantize), lambda kind: require_quantize(kind, device))
    peers = usable(options.peer, lambda name: choose_peers(options.work, [name], None, device=device))
    changes = {"quantize": ",".join(formats)} if options.quantize != "none" else {}
    return _with(case, peer=peers, **changes), notes


def machine_line(device: torch.device) -> str:
    """PyTorch, processor and threads or GPU, and memory, in one line."""
    line = environment_line(device, dtype="formats as named")
    return f"{line}, {binary_bytes(machine_memory())} of memory"


def report_of(outcomes: Sequence[Outcome], device: torch.device, *, machine: str) -> SuiteReport:
    """The Markdown page and the JSON document of what was measured."""
    environment = describe_environment(device=str(device), data_fingerprint=None)
    versions: dict[str, str] = {}
    for outcome in outcomes:
        versions |= {} if outcome.bench is None else outcome.bench.peer_versions
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
    documents = [_document(outcome, environment) for outcome in outcomes]
    failures = [row.failed for outcome in outcomes for row in outcome.rows]
    return SuiteReport(
        markdown="\n\n".join([*head, *sections]) + "\n",
        document={"environment": environment, "cases": documents},
        nothing_measured=all(failed is not None for failed in failures),
    )


def summary(outcomes: Sequence[Outcome]) -> Table:
    """A line for each case and format of ours: the best batch size, and the speed against each peer's best."""
    headings = ("", "tokens/s", "share of peak", "peak memory", "times as fast as")
    made: list[tuple[str, ...]] = []
    for outcome in outcomes:
        best = best_rows(outcome.rows)
        ours = [row for row in best if row.is_ours]
        if not ours:
            made.append((outcome.case.title, "not measured", "", "", ""))
        for row in ours:
            against = [f"{other.entry.label} {ratio(row_ratio(row, other))}" for other in best if not other.is_ours]
            made.append(
                (
                    f"{outcome.case.title}: {row.entry.precision}, batch {row.batch_size}",
                    f"{row.tokens_per_second:,.0f}",
                    "" if row.share_of_peak is None else f"{row.share_of_peak:.0%}",
                    binary_bytes(peak_bytes(row)),
                    ", ".join(against),
                )
            )
    return Table("The best batch size of each:", headings, tuple(made))


def section(outcome: Outcome) -> str:
    """One case as Markdown: its command, tables and lines."""
    parts = [f"## {outcome.case.title}", f"    {outcome.case.options.command}"]
    below = list(outcome.notes)
    if outcome.bench is not None:
        parts += map(markdown, tables(outcome.bench, outcome.rows))
        below += lines(outcome.rows)
    return "\n\n".join(part for part in [*parts, bullets(below)] if part)


def _document(outcome: Outcome, environment: dict[str, Any]) -> dict[str, Any]:
    named = {"title": outcome.case.title, "command": outcome.case.options.command, "notes": list(outcome.notes)}
    if outcome.bench is None:
        return {**named, "rows": []}
    found = document(outcome.bench, outcome.rows, environment=environment, command=outcome.case.options.command)
    return {**_without_environment(found), **named}


def _without_environment(document: dict[str, Any]) -> dict[str, Any]:
    """The whole report has one environment."""
    return {name: value for name, value in document.items() if name != "environment"}
