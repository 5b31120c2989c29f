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
    ratios,
    row_line,
    tables,
)
from tformer.bench.speed import Row, resolve, run_speed
from tformer.checkpoint.logs import describe_environment
from tformer.decoding.inference import require_quantize
from tformer.support import __version__
from tformer.support.device import machine_memory, resolve_device
from tformer.support.errors import InputError, TformerError
from tformer.support.formatting import binary_bytes, ratio

NO_DROPOUT = tuple(
    f"model.{key}=0" for key in ("embedding.dropout", "decoder.dropout", "decoder.attention_dropout")
)  # as nanoGPT's own bench has it
QUICK_REPEATS, QUICK_SECONDS, QUICK_TEXTS = 3, 300.0, 1000

CHAR, SMALL, MEDIUM, XL = (ModelOptions(arch="gpt", preset=preset) for preset in ("char", "small", "medium", "xl"))
TRANSFORMERS, LLAMA_CPP, CTRANSLATE2 = ("transformers",), ("transformers", "llama.cpp"), ("ctranslate2", "transformers")

Cases = dict[str, SpeedOptions]
"""Benchmarks of `bench all` by their titles."""

CPU_CASES: Cases = {
    "Training, 6 layers of width 384 (nanoGPT's baby shape)": TrainOptions(
        model=CHAR, sets=NO_DROPOUT, batch_size="16", length=256, peer=TRANSFORMERS
    ),
    "Training and its memory, GPT-2 of 124M": TrainOptions(
        model=SMALL, batch_size="2", length=512, peer=TRANSFORMERS, repeats=5
    ),
    "Generation, GPT-2 of 124M, one text": GenerateOptions(
        model=SMALL, batch_size="1", quantize="none,int8", peer=LLAMA_CPP
    ),
    "Generation, GPT-2 of 124M, eight texts": GenerateOptions(
        model=SMALL, batch_size="8", quantize="none,int8", peer=LLAMA_CPP
    ),
    "Translation, 6 + 6 layers of width 512, beam 4": TranslateOptions(
        model=ModelOptions(arch="transformer", preset="base"),
        sets=("model.vocab_size=16000",),
        batch_size="8,32,64",
        length=20,
        quantize="none,int8",
        peer=CTRANSLATE2,
        repeats=5,
    ),
    "Classification of 10,000 short texts, 4 layers of width 512": ClassifyOptions(
        model=ModelOptions(arch="bert", preset="small"),
        batch_size="16,32,64",
        peer=TRANSFORMERS,
        repeats=3,
        max_seconds=1800.0,
    ),
}
GPU_CASES: Cases = {
    "Training, GPT-2 of 124M": TrainOptions(
        model=SMALL, batch_size="16,32,64", length=1024, compile=True, peer=TRANSFORMERS
    ),
    "Training, GPT-2 of 350M": TrainOptions(
        model=MEDIUM, batch_size="8,16,32", length=1024, compile=True, peer=TRANSFORMERS
    ),
    "Training, GPT-2 of 1.5B": TrainOptions(model=XL, batch_size="4,8,16", length=1024, compile=True),
    "Generation, GPT-2 of 124M, one text": GenerateOptions(
        model=SMALL, batch_size="1", precision="bf16", peer=TRANSFORMERS
    ),
    "Generation, GPT-2 of 1.5B, one text": GenerateOptions(
        model=XL, batch_size="1", precision="bf16", peer=TRANSFORMERS
    ),
}
"""The presets' own precision is what the device has: bf16."""


def cases_for(device: torch.device) -> Cases:
    """The cases of a kind of device."""
    return GPU_CASES if device.type == "cuda" else CPU_CASES


def placed(case: SpeedOptions, device: torch.device, *, quick: bool, threads: int | None) -> SpeedOptions:
    """A case on a device. quick: one batch size of several, fewer rounds and texts."""
    case = replace(case, device=str(device), threads=threads)
    if not quick:
        return case
    sizes = case.batch_sizes
    fewer: dict[str, Any] = {"texts": QUICK_TEXTS} if isinstance(case, ClassifyOptions) else {}
    return replace(
        case,
        batch_size=str(sizes[len(sizes) // 2]),
        repeats=min(case.repeats, QUICK_REPEATS),
        max_seconds=min(case.max_seconds, QUICK_SECONDS),
        **fewer,
    )


@dataclass(frozen=True)
class SuiteReport:
    markdown: str
    document: dict[str, Any]
    nothing_measured: bool


def run_all(
    cases: Cases,
    device: torch.device,
    *,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
    quick: bool = False,
    threads: int | None = None,
) -> SuiteReport:
    """Measure every case on a device. Raises Interrupted.

    Libraries that are not installed are left out of their cases; what cannot be measured is reported as such.

    Args:
        say: called with a line as each case begins, for each row, and for each note on what cannot be measured.
    """
    summary: list[tuple[str, ...]] = []  # a line for each case and format of ours
    sections: list[str] = []
    documents: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    measured = False
    machine = f"{environment_line(device, dtype='formats as named')}, {binary_bytes(machine_memory())} of memory"
    for number, (title, full) in enumerate(cases.items(), start=1):
        asked = placed(full, device, quick=quick, threads=threads)
        say(f"{number} of {len(cases)}  {title}: {asked.command}")
        case, missing = _with_what_is_available(asked)
        sizes, notes = full.batch_sizes, missing
        if len(sizes) == 1:
            notes = [f"the batch size is fixed at {sizes[0]}, as part of the measured shape", *missing]
        rows: list[Row] = []
        found: dict[str, Any] = {"rows": []}
        parts = [f"## {title}", f"    {case.command}"]
        try:
            bench, decided = resolve(case)
        except TformerError as error:
            say(f"  note: {error.message}")
            below = notes = [*notes, f"not measured: {error.message}"]
        else:
            for note in missing:
                say(f"  note: {note}")
            rows = run_speed(bench, on_row=lambda row: say(f"  {row_line(row)}"), should_stop=should_stop)
            notes, versions = [*notes, *decided], versions | bench.peer_versions
            found, below = document(bench, rows), [*notes, *lines(rows)]
            parts += map(markdown, tables(bench, rows))
        summary += _summary(title, rows)
        sections.append("\n\n".join(part for part in [*parts, bullets(below)] if part))
        documents.append({"command": case.command, **found, "title": title, "notes": notes})
        measured = measured or any(row.failed is None for row in rows)
    environment = describe_environment(device=str(device), data_fingerprint=None)
    environment |= {"line": machine, "peers": versions}
    head = [
        f"# Speed of tformer {__version__}",
        f"{date.today().isoformat()}. Machine: {machine}; Python {environment['python']}, {environment['platform']}.",
        f"Compared with: {', '.join(f'{name} {version}' for name, version in versions.items()) or 'none'}.",
        FAIRNESS,
        markdown(
            Table(
                "The best batch size of each:",
                ("", "tokens/s", "share of peak", "peak memory", "times as fast as"),
                tuple(summary),
            )
        ),
    ]
    return SuiteReport(
        markdown="\n\n".join([*head, *sections]) + "\n",
        document={"environment": environment, "cases": documents},
        nothing_measured=not measured,
    )


def _with_what_is_available(case: SpeedOptions) -> tuple[SpeedOptions, list[str]]:
    """The case without libraries and formats that this machine lacks, and a note for each."""
    device, notes = resolve_device(case.device), []

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

    formats = usable(words_of("--quantize", case.quantize), lambda kind: require_quantize(kind, device))
    peers = usable(case.peer, lambda name: choose_peers(case.work, [name], None, device=device))
    changes: dict[str, Any] = {"quantize": ",".join(formats)} if case.quantize != "none" else {}
    return replace(case, peer=peers, **changes), notes


def _summary(title: str, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """For each format of ours the best batch size, and the speed against each peer's best."""
    best = best_rows(rows)
    peers = [row for row in best if not row.is_ours]
    found: list[tuple[str, ...]] = [
        (
            f"{title}: {row.entry.precision}, batch {row.batch_size}",
            f"{row.tokens_per_second:,.0f}",
            "" if row.share_of_peak is None else f"{row.share_of_peak:.0%}",
            binary_bytes(peak_bytes(row)),
            ", ".join(f"{label} {ratio(times)}" for label, times in ratios(row, peers).items()),
        )
        for row in best
        if row.is_ours
    ]
    return found or [(title, "not measured", "", "", "")]
