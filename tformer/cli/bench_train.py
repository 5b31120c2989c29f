"""`tformer bench train`: optimizer steps, beside other libraries' training loops."""

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
    Threads,
    speed_flags,
)
from tformer.cli.bench_session import run_bench
from tformer.cli.command import examples

EPILOG = examples(
    "`tformer bench train --arch gpt --preset char --batch-size 16 --peer transformers`",
    "`tformer bench train --arch gpt --preset small --length 512 --batch-size 2 --peer transformers --out train.md`",
    "`tformer bench train --arch roberta --preset base --batch-size 4,8,16 --json`",
)


def train(
    arch: Arch = None,
    preset: Preset = None,
    config: Config = None,
    run: Run = None,
    set_: Sets = None,
    batch_size: BatchSizes = None,
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
    """Time optimizer steps: forward, backward, clipping, update, on random ids, as `tformer train` does them.

    Reported are tokens and milliseconds, peak memory, and the share of what the machine can multiply, measured at the
    start of the same run at the model's own shape. With --peer the same work is done by another library, in turn with
    ours.
    """
    asked = speed_flags(
        work="train",
        arch=arch,
        preset=preset,
        config=config,
        run=run,
        sets=set_,
        batch_size=batch_size,
        length=length,
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
