"""Options that the commands of `tformer bench` share."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from tformer.errors import InputError

MODEL, WORK, PEERS, HOW, RESULT = "Which model", "The work", "Compared with", "How", "Result"
MOST_BATCH = 2**16
MOST_SIZES = 32
"""Of a sweep."""
MOST_THREADS = 4096

Arch = Annotated[str | None, typer.Option("--arch", help="A family, for example gpt.", rich_help_panel=MODEL)]
Preset = Annotated[str | None, typer.Option("--preset", help="A shipped recipe of the family.", rich_help_panel=MODEL)]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A recipe of your own.", rich_help_panel=MODEL)
]
Run = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="The sizes of a run, not its weights.", rich_help_panel=MODEL),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override any key of the recipe.", rich_help_panel=MODEL),
]
BatchSizes = Annotated[
    str | None,
    typer.Option(
        "--batch-size", metavar="N,N,...", help="One, or several to sweep; the best is told.", rich_help_panel=WORK
    ),
]
Length = Annotated[
    int | None, typer.Option("--length", metavar="T", help="Tokens of an example.", rich_help_panel=WORK)
]
PromptLength = Annotated[
    int, typer.Option("--prompt-length", metavar="T", help="Tokens of each prompt.", rich_help_panel=WORK)
]
Texts = Annotated[int, typer.Option("--texts", metavar="N", help="How many.", rich_help_panel=WORK)]
NewTokens = Annotated[int, typer.Option("--new-tokens", metavar="N", help="Written to each.", rich_help_panel=WORK)]
Quantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        metavar="none|int8",
        help="Our matrices; none,int8 measures both.",
        rich_help_panel=WORK,
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="NAME", help="A library at the same work; may be repeated.", rich_help_panel=PEERS),
]
PeerPrecisions = Annotated[
    str | None,
    typer.Option("--peer-precision", metavar="P,P,...", help="Default: all that it has here.", rich_help_panel=PEERS),
]
Precision = Annotated[
    str, typer.Option("--precision", metavar="auto|fp32|bf16|fp16", help="Of ours.", rich_help_panel=HOW)
]
Compile = Annotated[bool, typer.Option("--compile", help="Ours through torch.compile.", rich_help_panel=HOW)]
Repeats = Annotated[
    int, typer.Option("--repeats", help="Timed rounds; quick ones go on for half a second.", rich_help_panel=HOW)
]
MaxSeconds = Annotated[float, typer.Option("--max-seconds", help="Limit for a measuring process.", rich_help_panel=HOW)]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Of everybody; default: as PyTorch has it.", rich_help_panel=HOW)
]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", rich_help_panel=HOW)]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.md", help="Write the report there too.", rich_help_panel=RESULT),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=RESULT)]


def batch_sizes_of(text: str | None) -> tuple[int, ...]:
    """`4,16` as numbers in the given order, each once; none for no text. Raises InputError for other words, for sizes
    that no machine takes and for a sweep without end."""
    if text is None:
        return ()
    listed = [word.strip() for word in text.split(",") if word.strip()]
    if not listed:
        raise InputError("--batch-size: found none, expected whole numbers separated by commas")
    for word in listed:
        if not word.isdecimal() or not 1 <= int(word) <= MOST_BATCH:
            raise InputError(f"--batch-size: found '{word}', expected whole numbers from 1 to {MOST_BATCH:,}")
    sizes = tuple(dict.fromkeys(map(int, listed)))
    if len(sizes) > MOST_SIZES:
        raise InputError(f"--batch-size: found {len(sizes)} sizes, expected {MOST_SIZES} at most")
    return sizes


def words(option: str, text: str) -> tuple[str, ...]:
    """Words between commas, each once. Raises InputError where there is no word."""
    listed = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not listed:
        raise InputError(f"{option}: found '{text}', expected a word, or several separated by commas")
    return listed


def require_positive(**values: float | None) -> None:
    """Raise InputError for a number that is not above 0, or infinite; None was not given."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise InputError(f"--{name.replace('_', '-')}: found {value}, expected more than 0")
        if value == inf:
            raise InputError(f"--{name.replace('_', '-')}: found {value}, expected a finite number")


def require_threads(threads: int | None) -> None:
    """Raise InputError for a number of threads that no machine has; None was not given."""
    require_positive(threads=threads)
    if threads is not None and threads > MOST_THREADS:
        raise InputError(f"--threads: found {threads}, expected {MOST_THREADS:,} at most")


def speed_flags(
    *, batch_size: str | None, peer: list[str] | None, peer_precision: str | None, **flags: Any
) -> dict[str, Any]:
    """What every command shares, checked, as fields of a `SpeedRequest`. Raises InputError."""
    positive = ("length", "repeats", "max_seconds")
    require_positive(**{name: flags[name] for name in positive if name in flags})
    require_threads(flags.get("threads"))
    return {
        **flags,
        "batch_sizes": batch_sizes_of(batch_size),
        "peers": peer or (),
        "peer_precisions": None if peer_precision is None else words("--peer-precision", peer_precision),
        "sets": flags.get("sets") or (),
    }
