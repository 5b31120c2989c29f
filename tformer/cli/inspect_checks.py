"""Options of `tformer inspect` that do not go together, refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from tformer.errors import InputError, did_you_mean

MOST = 10**12  # of anything counted: more is a slip of the keyboard
MOST_SCORES = 2**48  # of one head that --shapes follows: beyond, a tensor's numbers cannot be counted
LAYOUTS = ("mermaid", "dot", "tree")
LAYOUT_SUFFIXES = {".mmd": "mermaid", ".mermaid": "mermaid", ".dot": "dot", ".gv": "dot"}


def layout_of(layout: str | None, output: Path | None) -> str | None:
    """As named, or by the suffix of the file."""
    if layout is not None and layout not in LAYOUTS:
        raise InputError(
            f"--layout: found '{layout}', expected mermaid, dot or tree", hint=did_you_mean(layout, LAYOUTS)
        )
    suffix = "" if output is None else output.suffix.lower()
    known = (*LAYOUT_SUFFIXES, ".txt", ".json", ".md")
    if output is not None and str(output) != "-" and suffix not in known:
        raise InputError(f"{output}: unknown suffix, expected one of {', '.join(known)}")
    by_suffix = LAYOUT_SUFFIXES.get(suffix)
    if by_suffix is not None and layout not in (None, by_suffix):
        raise InputError(f"--layout {layout} disagrees with {output}, which is for {by_suffix}")
    return layout or by_suffix


def check_views(
    run: str | None,
    arch: str | None,
    preset: str | None,
    config: Path | None,
    sets: list[str] | None,
    shapes: bool,
    text: str | None,
    layout: str | None,
    verify: bool,
    depth: int | None,
) -> None:
    """Refuse options that exclude each other or lack what they need. Raises InputError."""
    recipes = [("--arch", arch), ("--preset", preset), ("--config", config)]
    named = [option for option, value in recipes if value is not None]
    if run is not None and named:
        raise InputError(f"RUN and {named[0]} exclude each other: {run} has its own recipe")
    views = [("--shapes", shapes), ("--layout", layout is not None), ("--verify", verify)]
    chosen = [option for option, wanted in views if wanted]
    if len(chosen) > 1:
        raise InputError(f"{chosen[0]} and {chosen[1]} exclude each other")
    if verify and (named or sets):
        raise InputError(f"--verify checks files as they are: leave {named[0] if named else '--set'} out")
    if text is not None and not shapes:
        raise InputError("--text is for --shapes, which is missing")
    if text is not None and named:
        raise InputError(f"--text needs the tokenizer of a run: leave {named[0]} out", hint="or say --seq-len T")
    if depth is not None and (depth < 0 or chosen):
        raise InputError(f"--depth {depth}: it must be at least 0, and is for the tree of modules")


def check_counts(*counts: int | None) -> None:
    """Refuse sizes below one or absurd: batch, length, vocabulary, labels. Raises InputError."""
    names = ("--batch-size", "--seq-len", "--vocab-size", "--num-labels")
    for option, count in zip(names, counts, strict=True):
        if count is not None and count < 1:
            raise InputError(f"{option} must be at least 1, found {count}")
        if count is not None and count > MOST:
            raise InputError(f"{option} must be at most {MOST:,}, found {count:,}")


def check_trace(batch_size: int, source_length: int, target_length: int) -> None:
    """Refuse examples whose tensors would be too large even to be described. Raises InputError."""
    scores = batch_size * max(source_length, target_length) ** 2
    if scores > MOST_SCORES:
        raise InputError(
            f"--shapes: {batch_size:,} examples of {max(source_length, target_length):,} positions are too many to "
            f"follow: found {scores:,} scores a head, expected at most {MOST_SCORES:,}"
        )
