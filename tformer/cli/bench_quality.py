"""`tformer bench quality`: seconds to a validation loss, by the clock, over seeds."""

from __future__ import annotations

import shlex
import sys
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from tformer.cli.bench_options import HOW, MODEL, WORK, AsJson, Device, Threads, require_positive, require_threads
from tformer.cli.bench_report import show_tables
from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit_json
from tformer.errors import InputError, visible

if TYPE_CHECKING:
    from tformer.bench.quality import QualityRow

EPILOG = examples(
    "`tformer bench quality --preset char-12s --data train.txt --valid val.txt --target 1.88`",
    "`tformer bench quality --preset char-6m --data train.txt --valid val.txt --target 1.4697 --seeds 1,2,3`",
    "`tformer bench quality --preset char --data train.txt --valid val.txt --target 1.4697 --device cuda --json`",
)
MOST_SEED = 2**31 - 1


def quality(
    arch: Annotated[str, typer.Option("--arch", help="A family.", rich_help_panel=MODEL)] = "gpt",
    preset: Annotated[
        str, typer.Option("--preset", help="A shipped recipe of the family.", rich_help_panel=MODEL)
    ] = "char-12s",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override any key of the recipe.", rich_help_panel=MODEL),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH", help="Text to train on; needed.", rich_help_panel=WORK)
    ] = None,
    valid: Annotated[
        str | None,
        typer.Option("--valid", metavar="PATH", help="Text to validate on, whole; needed.", rich_help_panel=WORK),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            metavar="LOSS",
            help="Stop at the first validation that reaches it. Default: train to the end.",
            rich_help_panel=WORK,
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="N,N,...", help="A training for each.", rich_help_panel=WORK)
    ] = "1,2,3",
    threads: Threads = None,
    device: Device = "auto",
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", help="Limit for one training.", rich_help_panel=HOW)
    ] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Time `tformer train` from the start of its process to a validation loss, for each seed.

    Every seed is the command as it is typed, in a process and with a cache of its own: starting, the tokenizer,
    tokenising and validating count. Reported are the seconds, the loss on the whole validation text at that point, and
    mean ± standard deviation. A target that is missed is said; the training then went to its end.
    """
    require_positive(max_seconds=max_seconds)
    require_threads(threads)
    if data is None or valid is None:
        missing = "--data" if data is None else "--valid"
        raise InputError(f"{missing}: found none, expected a file with text", hint="--data train.txt --valid val.txt")
    if target is not None and not (isfinite(target) and target > 0):
        raise InputError(f"--target: found {target}, expected a loss above 0")
    with StopFlag() as flag:
        import torch

        from tformer.bench.machine import environment_line
        from tformer.bench.quality import (
            QualityBench,
            check,
            quality_document,
            quality_table,
            run_quality,
        )
        from tformer.checkpoint.logs import describe_environment
        from tformer.device import resolve_device

        where = resolve_device(device)
        bench = QualityBench(
            arch=arch,
            preset=preset,
            data=data,
            valid=valid,
            target=target,
            seeds=_seeds(seeds),
            sets=tuple(set_ or ()),
            device=str(where),
            threads=threads,
            max_seconds=max_seconds,
        )
        check(bench)
        line = environment_line(where, dtype=f"{arch}/{preset}")
        console.print(visible(line), markup=False)
        torch.set_num_threads(1)  # this process only waits
        rows = run_quality(bench, on_row=tell_seed, should_stop=flag.should_stop)
        if rows is None:
            raise flag.interrupted("interrupted")
        environment = {"line": line, **describe_environment(device=str(where), data_fingerprint=None)}
    if as_json:
        command = shlex.join(["tformer", *sys.argv[1:]])
        emit_json(quality_document(bench, rows, environment=environment, command=command))
    else:
        show_tables([quality_table(bench, rows)])
    if all(row.failed is not None for row in rows):
        raise typer.Exit(1)


def _seeds(text: str) -> tuple[int, ...]:
    """In the given order, each once."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdecimal() or int(word) > MOST_SEED:
            raise InputError(f"--seeds: found '{word}', expected whole numbers from 0 to {MOST_SEED:,}")
    if not words:
        raise InputError(f"--seeds: found '{text}', expected whole numbers", hint="--seeds 1,2,3")
    return tuple(dict.fromkeys(map(int, words)))


def tell_seed(row: QualityRow) -> None:
    """A line for each seed as it is known."""
    told = row.failed
    if told is None:
        loss = "no validation" if row.loss is None else f"loss {row.loss:.4f}"
        told = f"{loss} after {row.seconds:.1f} s" + (", target not reached" if row.reached is False else "")
    console.print(f"seed {row.seed}: {visible(told)}", markup=False)
