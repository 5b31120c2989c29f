"""`tformer bench tokenize`: text to ids, beside other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tformer.cli.bench_options import (
    WORK,
    Arch,
    AsJson,
    BatchSizes,
    Config,
    MaxSeconds,
    Out,
    Peers,
    Preset,
    Repeats,
    Run,
    Sets,
    Threads,
    require_positive,
    speed_flags,
)
from tformer.cli.bench_session import run_bench
from tformer.cli.command import examples
from tformer.errors import InputError

EPILOG = examples(
    "`tformer bench tokenize --peer transformers`",
    "`tformer bench tokenize --data builtin:python-stdlib --set tokenizer.train.model=wordpiece`",
    "`tformer bench tokenize --tokenizer tokenizer.json --data corpus.txt --megabytes 50 --json`",
)


def tokenize(
    arch: Arch = None,
    preset: Preset = None,
    config: Config = None,
    run: Run = None,
    set_: Sets = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json, not trained here.", rich_help_panel=WORK),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="PATH", help="Default: text that comes with Python.", rich_help_panel=WORK),
    ] = None,
    megabytes: Annotated[
        float, typer.Option("--megabytes", metavar="N", help="So much of it.", rich_help_panel=WORK)
    ] = 4.0,
    batch_size: BatchSizes = None,
    peer: Peers = None,
    repeats: Repeats = 10,
    max_seconds: MaxSeconds = 600.0,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time text to ids, in the pieces of 64K characters that training cuts text into.

    The vocabulary is that of the recipe, trained on the same text beforehand, or with --tokenizer or --run one that
    there is. --batch-size counts pieces; a step of the report is a batch of them. Nothing is multiplied: no ceiling
    applies, and `share_of_peak` is null.
    """
    require_positive(megabytes=megabytes)
    if run is not None and tokenizer is not None:
        raise InputError("--run and --tokenizer exclude each other", hint="a run has its own tokenizer")
    given = run or tokenizer
    asked = speed_flags(
        work="tokenize",
        arch=arch,
        preset=preset,
        config=config,
        run=run,
        sets=set_,
        batch_size=batch_size,
        options={"data": data, "megabytes": megabytes, "tokenizer": None if given is None else str(given)},
        peer=peer,
        peer_precision=None,
        repeats=repeats,
        max_seconds=max_seconds,
        threads=threads,
        device="cpu",
    )
    run_bench(asked, out=out, as_json=as_json)
