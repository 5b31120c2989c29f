"""`tformer bench classify`: short texts a second, beside other libraries."""

from __future__ import annotations

from tformer.cli.bench_options import (
    Arch,
    AsJson,
    BatchSizes,
    Compile,
    Config,
    Device,
    Length,
    MaxSeconds,
    Out,
    PeerPrecisions,
    Peers,
    Precision,
    Preset,
    Repeats,
    Run,
    Sets,
    Texts,
    Threads,
    require_positive,
    speed_flags,
)
from tformer.cli.bench_session import run_bench
from tformer.cli.command import examples

EPILOG = examples(
    "`tformer bench classify --arch bert --preset base --peer transformers`",
    "`tformer bench classify --arch bert --preset small --peer transformers --batch-size 16,32,64`",
    "`tformer bench classify --run runs/bert-classify-1 --texts 1000 --json`",
)


def classify(
    arch: Arch = None,
    preset: Preset = None,
    config: Config = None,
    run: Run = None,
    set_: Sets = None,
    batch_size: BatchSizes = None,
    texts: Texts = 10_000,
    length: Length = None,
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
    """Time the classification of short texts of varied lengths, as ids in memory; --length is that of the longest.

    We sort them by length and cut batches by their tokens, as `tformer classify` does; --batch-size is that of the
    others, which take texts in the given order and pad each batch to its longest.
    """
    require_positive(texts=texts)
    asked = speed_flags(
        work="classify",
        arch=arch,
        preset=preset,
        config=config,
        run=run,
        sets=set_,
        batch_size=batch_size,
        length=length,
        options={"texts": texts},
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
