"""`tformer bench translate`: beam search of an encoder-decoder, beside other libraries'."""

from __future__ import annotations

from typing import Annotated

import typer

from tformer.cli.bench_options import (
    WORK,
    Arch,
    AsJson,
    BatchSizes,
    Compile,
    Config,
    Device,
    MaxSeconds,
    NewTokens,
    Out,
    PeerPrecisions,
    Peers,
    Precision,
    Preset,
    Quantize,
    Repeats,
    Run,
    Sets,
    Threads,
    require_positive,
    speed_flags,
    words,
)
from tformer.cli.bench_session import run_bench
from tformer.cli.command import examples

EPILOG = examples(
    "`tformer bench translate --preset base --set model.vocab_size=16000 --peer ctranslate2`",
    "`tformer bench translate --preset tiny --batch-size 64 --beam 1 --quantize none,int8 --json`",
    "`tformer bench translate --run runs/transformer-tiny-1 --peer transformers --peer-precision bf16`",
)


def translate(
    arch: Arch = None,
    preset: Preset = None,
    config: Config = None,
    run: Run = None,
    set_: Sets = None,
    batch_size: BatchSizes = None,
    source_length: Annotated[
        int | None, typer.Option("--source-length", metavar="T", help="Tokens of a source.", rich_help_panel=WORK)
    ] = None,
    new_tokens: NewTokens = 30,
    beam: Annotated[int, typer.Option("--beam", metavar="B", help="Hypotheses.", rich_help_panel=WORK)] = 4,
    sentences: Annotated[
        int, typer.Option("--sentences", metavar="N", help="Sources of a round.", rich_help_panel=WORK)
    ] = 64,
    quantize: Quantize = "none",
    peer: Peers = None,
    peer_precision: PeerPrecisions = None,
    precision: Precision = "auto",
    compile_: Compile = False,
    repeats: Repeats = 10,
    max_seconds: MaxSeconds = 600.0,
    threads: Threads = None,
    device: Device = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time beam search on random sources, exactly so many new tokens for each, as `tformer generate` searches.

    Batches of 16, 32 and 64 sources are swept and the best is told. ctranslate2 is measured in every compute type that
    it has on this machine, with our model exported to it; transformers with a Marian model of the same sizes.
    """
    require_positive(source_length=source_length, new_tokens=new_tokens, beam=beam, sentences=sentences)
    asked = speed_flags(
        work="translate",
        arch=arch,
        preset=preset,
        config=config,
        run=run,
        sets=set_,
        batch_size=batch_size,
        length=source_length,
        quantize=words("--quantize", quantize),
        options={"new_tokens": new_tokens, "beam": beam, "sentences": sentences},
        peer=peer,
        peer_precision=peer_precision,
        precision=precision,
        compile=compile_,
        repeats=repeats,
        max_seconds=max_seconds,
        threads=threads,
        device=device,
    )
    run_bench(asked, out=out, as_json=as_json)
