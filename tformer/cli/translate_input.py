"""What an encoder-decoder is given: sources line by line with the beginnings forced on their targets, checked.

A file is read once before the work begins, so that its line 90,000 is refused at once and not after an hour. What can
be read only once (standard input, a pipe) is checked as it comes.

Files come in windows of many batches, to be sorted by length inside; of standard input whatever has arrived is
answered, a batch at most, before the next line is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tformer.cli.classify_input import STANDARD_INPUT, line_blocks, name_of
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.text import Errors
    from tformer.tokenizer import Tokenizer

WINDOW_BATCHES = 16
CHECKED_LINES = 1024
SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class Lines:
    """Sources that follow each other; `first` is the number of the first of them, from 0."""

    first: int
    sources: list[str]
    prefixes: list[str] | None  # the beginning of each target; None: none is forced


class Checks:
    """What a model can take: sources and forced beginnings that its contexts hold, made of tokens that it knows.

    Args:
        limit: tokens that the context holds.
        start_tokens: how many of them the decoder begins with.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer, *, limit: int, start_tokens: int) -> None:
        from tformer.data.template import single_template

        self.source, self.target, self.limit, self.start_tokens = source, target, limit, start_tokens
        self._special = single_template(source).num_special

    def sources(self, texts: Sequence[str], *, places: Sequence[str]) -> None:
        """Raise InputError for a text that is too long; `places` is what errors call each of them."""
        for text, ids, place in zip(texts, self.source.encode_batch(texts), places, strict=True):
            length = len(ids) + self._special
            if text and length > self.limit:
                raise InputError(
                    f"{place}: the source has {length:,} tokens, the model's context holds {self.limit:,}",
                    hint="shorten it, or part it into sentences, one a line",
                )

    def prefix(self, text: str, *, place: str) -> None:
        """Raise InputError for a beginning with unknown tokens, or one that leaves no room to go on."""
        ids = self.target.encode(text)
        unknown = self.target.special.unk
        if unknown is not None and unknown in ids:
            culprit = next((word for word in text.split() if unknown in self.target.encode(word)), text)
            raise InputError(
                f"{place}: the target prefix has tokens that the model does not know: '{_short(culprit)}'",
                hint="an unknown token cannot be forced: spell it as the training data did",
            )
        if len(ids) > (room := self.limit - self.start_tokens):
            raise InputError(
                f"{place}: the target prefix has {len(ids):,} tokens, the model's context has room for {room:,}"
            )


def line_windows(
    path: str, *, errors: Errors, batch_size: int, checks: Checks, prefix: str | None, prefix_file: str | None
) -> Iterator[Lines]:
    """The lines of a file or of standard input (`-`), each with the beginning of its target.

    prefix: of every target; prefix_file: with one a line.

    Raises InputError for what cannot be read, for a line that fails a check (file and line), and for a prefix file
    that has not one line for each source.
    """
    if prefix is not None:
        checks.prefix(prefix, place="--target-prefix")
    prefixes = None if prefix_file is None else _prefixes(prefix_file, errors, checks)
    again = path != STANDARD_INPUT and Path(path).is_file()
    if again:
        counted = 0
        for sources in line_blocks(path, errors=errors, size=CHECKED_LINES):
            checks.sources(sources, places=_places(path, counted, len(sources)))
            counted += len(sources)
        if prefixes is not None and len(prefixes) != counted:
            raise InputError(f"{path} has {counted:,} lines, {prefix_file} {len(prefixes):,}: expected one for each")
    size = batch_size if path == STANDARD_INPUT else batch_size * WINDOW_BATCHES
    done = 0
    for sources in line_blocks(path, errors=errors, size=size):
        end = done + len(sources)
        if not again:
            checks.sources(sources, places=_places(path, done, len(sources)))
            if prefixes is not None and end > len(prefixes):
                raise InputError(
                    f"{name_of(path)} has more than the {len(prefixes):,} lines of {prefix_file}: expected one for each"
                )
        forced = prefixes[done:end] if prefixes is not None else None
        yield Lines(done, sources, [prefix] * len(sources) if prefix is not None else forced)
        done = end


def prompt_windows(path: str, *, errors: Errors, batch_size: int) -> Iterator[Lines]:
    """The same for prompts of a decoder alone: a batch of lines at a time, unchecked."""
    done = 0
    for prompts in line_blocks(path, errors=errors, size=batch_size):
        yield Lines(done, prompts, None)
        done += len(prompts)


def _prefixes(path: str, errors: Errors, checks: Checks) -> list[str]:
    lines = [line for block in line_blocks(path, errors=errors, size=CHECKED_LINES) for line in block]
    for number, line in enumerate(lines, start=1):
        checks.prefix(line, place=f"{path}:{number}")
    return lines


def _places(path: str, first: int, count: int) -> list[str]:
    return [f"{name_of(path)}:{number}" for number in range(first + 1, first + 1 + count)]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
