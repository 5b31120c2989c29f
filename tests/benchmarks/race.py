"""Speed of tformer beside other libraries at the same work, in alternating rounds:

    python -m tests.benchmarks.race generate --arch gpt --preset small --peer transformers --peer llama.cpp

The first word is the work: train, generate or translate with the options of `tformer bench`, or classify with `--texts`
and `--length`. Models of the other libraries have the sizes of ours (layers, width, heads, inner width, vocabulary) in
the library's own architecture, random weights, and the library's best settings.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from tests.benchmarks.classification import CLASSIFIER, Classification, ClassifyOptions
from tests.benchmarks.peers import PEERS, choose_peers
from tformer.bench.machine import environment_line
from tformer.bench.options import BenchGenerateOptions, BenchTrainOptions, BenchTranslateOptions, SpeedOptions, words_of
from tformer.bench.report import document, report, row_line
from tformer.bench.speed import Measurement, SpeedBench, resolve, run_speed
from tformer.bench.workloads import OURS
from tformer.checkpoint.logs import describe_environment
from tformer.cli.command import OptionsCommand
from tformer.cli.process import StopFlag
from tformer.support.errors import TformerError
from tformer.support.files import write_text
from tformer.support.formatting import json_text
from tformer.support.options import Panel

FAIRNESS = (
    "All libraries have the same sizes, numbers of tokens and threads, with random weights and ids; each runs in "
    "its own process, in alternating rounds; times are medians. Memory is the peak of the whole process. Rows "
    "named `tformer compiled`, as for training on a GPU, use torch.compile; the other libraries run eagerly."
)
OPTIONS: tuple[type[SpeedOptions], ...] = (
    BenchTrainOptions,
    BenchGenerateOptions,
    BenchTranslateOptions,
    ClassifyOptions,
)
BESIDE = Panel("Compared with")


@dataclass(frozen=True)
class PeerOptions:
    """The libraries beside tformer."""

    peer: Annotated[tuple[str, ...], BESIDE("--peer", metavar="NAME", help="A library; may be repeated.")] = ()
    peer_precision: Annotated[
        str | None,
        BESIDE("--peer-precision", metavar="P,P,...", help="Their number formats.", default="all that they have here"),
    ] = None


@dataclass(frozen=True)
class Race:
    """What is measured, before it is.

    Attributes:
        command: the words after `python -m`.
        versions: of the other libraries.
    """

    command: str
    options: SpeedOptions
    bench: SpeedBench
    versions: dict[str, str]
    notes: list[str]

    @property
    def line(self) -> str:
        machine = environment_line(torch.device(self.bench.device), dtype=self.bench.precision)
        return ", ".join([machine, *(f"{name} {version}" for name, version in self.versions.items())])

    def run(self, say: Callable[[str], None], should_stop: Callable[[], bool]) -> list[Measurement]:
        torch.set_num_threads(1)  # this process only waits
        # Of converted models, also those of a contender that was killed.
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TMPDIR=folder):
            return run_speed(self.bench, on_row=lambda row: say(row_line(row)), should_stop=should_stop)

    def markdown(self, rows: Sequence[Measurement]) -> str:
        return report(self.bench, rows, line=self.line, command=self.command)

    def document(self, rows: Sequence[Measurement]) -> dict[str, Any]:
        machine = describe_environment(device=self.bench.device, data_fingerprint=None)
        environment = {"line": self.line, "peers": self.versions, **machine}
        return {"command": self.command, "environment": environment, **document(self.bench, rows)}


def prepare(words: Sequence[str], *, may_lack: bool = False) -> Race:
    """The race of a command line. Raises InputError.

    may_lack: leave out libraries that are not installed, and say so in the notes.
    """
    options, peers = _parse(words)
    if isinstance(options, ClassifyOptions):
        bench, notes = resolve(replace(options, sets=(*CLASSIFIER, *options.sets)), Classification)
    else:
        bench, notes = resolve(options)
    precisions = None if peers.peer_precision is None else words_of("--peer-precision", peers.peer_precision)
    entries = list(bench.entries)
    for name in dict.fromkeys(peers.peer):
        try:
            entries += choose_peers(options.work, name, precisions, torch.device(bench.device))
        except TformerError as error:
            if not may_lack:
                raise
            notes.append(error.message)
    libraries = dict.fromkeys(entry.name for entry in entries if entry.name != OURS)
    return Race(
        command=shlex.join(["tests.benchmarks.race", *words]),
        options=options,
        bench=replace(bench, entries=tuple(entries)),
        versions={name: PEERS[options.work, name].version for name in libraries},
        notes=notes,
    )


def _parse(words: Sequence[str]) -> tuple[SpeedOptions, PeerOptions]:
    chosen: list[Any] = []

    def choose(both: Any) -> None:
        """Speed of tformer beside other libraries."""
        chosen.append(both)

    app = typer.Typer(no_args_is_help=True)
    for options in OPTIONS:
        parts = [("bench", options, options()), ("peers", PeerOptions, PeerOptions())]
        both = make_dataclass(options.__name__, parts, frozen=True)
        app.command(options.work)(OptionsCommand(choose, both).for_typer())
    app(list(words), standalone_mode=False, prog_name="python -m tests.benchmarks.race")
    if not chosen:  # --help
        sys.exit()
    return chosen[0].bench, chosen[0].peers


def main(words: Sequence[str]) -> None:
    race = prepare(words)
    for note in [*race.notes, race.line]:
        print(note, file=sys.stderr)
    with StopFlag() as flag:
        rows = race.run(lambda line: print(line, file=sys.stderr), flag.should_stop)
    text = f"{race.markdown(rows)}\n\n{FAIRNESS}\n"
    if race.options.out is not None:
        write_text(race.options.out, text)
    print(json_text(race.document(rows)) if race.options.as_json else text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TformerError as error:
        sys.exit(f"error: {error.message}")
