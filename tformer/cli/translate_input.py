"""What an encoder-decoder is given: sources line by line with the beginnings forced on their targets, checked.

A file is read once before the work begins, so that its line 90,000 is refused at once and not after an hour. What can
be read only once (standard input, a pipe) is checked as it comes.

Files come in windows of many batches, to be sorted by length inside; of standard input whatever has arrived is
answered, a batch at most, before the next line is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tformer.cli.classify_input import STANDARD_INPUT, line_blocks, name_of
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.sources.files import Errors
    from tformer.decoding.sentences import (
        Places,
        SentenceReader,
    )

WINDOW_BATCHES = 16
CHECKED_LINES = 1024


@dataclass(frozen=True)
class Lines:
    """Lines that follow each other; `first` is the number of the first of them, from 0."""

    first: int
    lines: list[str]  # as they were read
    sources: list[str]  # what the model reads: with the prefix of its task
    prefixes: list[str] | None  # the beginning of each target; None: none is forced
    places: Places | None = None  # what messages call them; None: their numbers


def prompt_line(text: str, *, task_prefix: str, prefix: str | None) -> Lines:
    """The one source of `--prompt`, with the beginning of its target."""
    from tformer.data.sources.pairs import with_prefix
    from tformer.decoding.sentences import Places

    places = Places(lambda row: "--prompt", lambda row: "--target-prefix")
    return Lines(0, [text], [with_prefix(task_prefix, text)], None if prefix is None else [prefix], places)


def line_windows(
    path: str,
    *,
    errors: Errors,
    batch_size: int,
    reader: SentenceReader,
    task_prefix: str = "",
    prefix: str | None = None,
    prefix_file: str | None = None,
) -> Iterator[Lines]:
    """The lines of a file or of standard input (`-`), each with the beginning of its target.

    prefix: of every target; prefix_file: with one a line.

    Raises InputError for what cannot be read, for a line of a file that `reader` would refuse (file and line), and for
    a prefix file that has not one line for each source.
    """
    from tformer.data.sources.pairs import with_prefix

    places = _places(path, prefix_file)
    prefixes = None if prefix_file is None else _lines(prefix_file, errors)
    reader.check_prefixes(prefixes or [prefix or ""], places=places)
    if path != STANDARD_INPUT and Path(path).is_file():
        counted = 0
        for lines in line_blocks(path, errors=errors, size=CHECKED_LINES):
            sources = [with_prefix(task_prefix, line) for line in lines]
            reader.check_sources(sources, first_row=counted, places=places)
            counted += len(lines)
        _require_one_each(path, counted, prefix_file, prefixes)
    size = batch_size if path == STANDARD_INPUT else batch_size * WINDOW_BATCHES
    done = 0
    for lines in line_blocks(path, errors=errors, size=size):
        end = done + len(lines)
        if prefixes is not None and end > len(prefixes):
            raise InputError(
                f"{name_of(path)} has more than the {len(prefixes):,} lines of {prefix_file}: expected one for each"
            )
        forced = [prefix] * len(lines) if prefix is not None else prefixes and prefixes[done:end]
        yield Lines(done, lines, [with_prefix(task_prefix, line) for line in lines], forced, places)
        done = end
    _require_one_each(path, done, prefix_file, prefixes)


def prompt_windows(path: str, *, errors: Errors, batch_size: int) -> Iterator[Lines]:
    """The same for prompts of a decoder alone: a batch of lines at a time, unchecked."""
    done = 0
    for prompts in line_blocks(path, errors=errors, size=batch_size):
        yield Lines(done, prompts, prompts, None)
        done += len(prompts)


def _lines(path: str, errors: Errors) -> list[str]:
    return [line for block in line_blocks(path, errors=errors, size=CHECKED_LINES) for line in block]


def _places(path: str, prefix_file: str | None) -> Places:
    from tformer.decoding.sentences import Places

    name = name_of(path)
    return Places(
        lambda row: f"{name}:{row + 1}",
        lambda row: "--target-prefix" if prefix_file is None else f"{prefix_file}:{row + 1}",
    )


def _require_one_each(path: str, counted: int, prefix_file: str | None, prefixes: list[str] | None) -> None:
    if prefixes is not None and len(prefixes) != counted:
        raise InputError(
            f"{name_of(path)} has {counted:,} lines, {prefix_file} {len(prefixes):,}: expected one for each"
        )
