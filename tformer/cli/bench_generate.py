"""`tformer bench generate`: tokens a second of greedy decoding, beside other libraries'."""

from __future__ import annotations

from tformer.cli.bench_options import (
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
    PromptLength,
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
    "`tformer bench generate --arch gpt --preset small --peer transformers`",
    "`tformer bench generate --arch gpt --preset small --batch-size 1,8 --quantize none,int8`",
    "`tformer bench generate --run runs/gpt-tiny-1 --prompt-length 8 --new-tokens 64 --json`",
)


def generate(
    arch: Arch = None,
    preset: Preset = None,
    config: Config = None,
    run: Run = None,
    set_: Sets = None,
    batch_size: BatchSizes = None,
    prompt_length: PromptLength = 16,
    new_tokens: NewTokens = 128,
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
    """Time greedy decoding of random prompts: reading them, and the same number of steps for each row.

    Reported are tokens and milliseconds a step, and the share of the memory's read rate: a step of few rows has to read
    every matrix once, and that is what bounds it. With --peer the same work is done by another library, in turn with
    ours.
    """
    require_positive(prompt_length=prompt_length, new_tokens=new_tokens)
    asked = speed_flags(
        work="generate",
        arch=arch,
        preset=preset,
        config=config,
        run=run,
        sets=set_,
        batch_size=batch_size,
        length=prompt_length,
        quantize=words("--quantize", quantize),
        options={"new_tokens": new_tokens},
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
