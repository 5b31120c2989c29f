"""Input line by line: blocks of lines, texts and prompts from files, tables and standard input, in order.

Plain text is one input a line, empty lines included. Standard input is answered as it arrives: a block ends when it is
full, or when no further input is waiting. Files come in larger windows, which are sorted by length inside.

A file of sources is read once before the work begins, so that an error on line 90,000 is found at once. What can be
read only once (standard input, a pipe) is checked as it arrives.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tformer.data.sources.files import MAX_ROW_CHARACTERS, decode_text, read_bytes
from tformer.data.sources.labelled import LabelledSource, open_labelled
from tformer.data.sources.pairs import with_prefix
from tformer.data.sources.reading import Reading, ReadsTexts
from tformer.data.sources.tables import LabelledRow, table_format
from tformer.decoding.sentences import Places, SentenceReader
from tformer.recipe.sections import Columns, SourceSpec
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.support.options import Errors
from tformer.tokenizer.pieces import batches_of

BLOCK_LINES = 4096
BLOCK_CHARACTERS = 1 << 24  # at which a block of fewer lines ends
CHECKED_LINES = 1024  # lines that are checked at a time
WINDOW_BATCHES = 16  # batches in a window of a file
CHUNK_BYTES = 1 << 16

Text = tuple[str, str | None]
"""A text and None, or a pair of texts."""
Item = TypeVar("Item")


def name_of(path: str) -> str:
    """The name of an input in messages."""
    return "standard input" if path == STANDARD_INPUT else path


def line_blocks(
    path: str, *, errors: Errors, size: int, encoding: str | None = None, accepts: Collection[str] = ()
) -> Iterator[list[str]]:
    """Blocks of up to `size` lines, without line ends, from a file or standard input (`-`).

    A block ends where its lines have `BLOCK_CHARACTERS`. Raises InputError for a line of more than
    `MAX_ROW_CHARACTERS`, of which no more are read, and as `decode_text`, also for `accepts`.
    """
    name, from_stdin = name_of(path), path == STANDARD_INPUT
    if from_stdin:  # the bytes that have arrived, without waiting for a whole chunk
        chunks = iter(lambda: os.read(sys.stdin.fileno(), CHUNK_BYTES), b"")
    else:
        chunks = read_bytes(Path(path))
    lines: list[str] = []
    unfinished: list[str] = []  # parts of a line that has no end yet
    done = held = length = 0  # lines done, characters of `lines` and of `unfinished`
    for text in decode_text(chunks, name=name, errors=errors, encoding=encoding or "utf-8", accepts=accepts):
        first, *others = text.split("\n")
        unfinished.append(first)
        length += len(first)
        if length > MAX_ROW_CHARACTERS:
            raise InputError(
                f"{name}:{done + len(lines) + 1}: a line has more than {MAX_ROW_CHARACTERS:,} characters",
                hint="split it: every line is read as one text",
            )
        if others:
            lines += ["".join(unfinished), *others[:-1]]
            held += length + sum(map(len, others[:-1]))
            unfinished, length = [others[-1]], len(others[-1])
        while len(lines) >= size or held >= BLOCK_CHARACTERS or (lines and from_stdin and not _more_is_waiting()):
            held -= sum(map(len, lines[:size]))
            done += len(lines[:size])
            yield lines[:size]
            del lines[:size]
    if any(unfinished):
        lines.append("".join(unfinished))
    yield from blocks(iter(lines), size)


def blocks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items; the last may be shorter."""
    while block := list(islice(items, size)):
        yield block


def _more_is_waiting() -> bool:
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
    return bool(ready)


# --- texts and pairs to classify --------------------------------------------------------------------------------------


def text_blocks(path: str, *, pairs: bool | None, reading: Reading) -> Iterator[list[Text]]:
    """The lines of a file or of standard input (`-`): each a text, or two with a tab between them (pairs).

    Raises InputError for a file that cannot be read, invalid UTF-8 when strict, and a line that is no pair.
    """
    name, number = name_of(path), 0
    for lines in line_blocks(path, errors=reading.errors, encoding=reading.encoding, size=BLOCK_LINES):
        if pairs:
            yield [_pair(line, place=f"{name}:{number + index}") for index, line in enumerate(lines, start=1)]
        else:
            yield [(line, None) for line in lines]
        number += len(lines)


def reads_table(options: ReadsTexts) -> bool:
    """Whether the input of a command is a table: by its ending, or because a column or a delimiter was named."""
    named = (options.text_column, getattr(options, "text2_column", None), options.delimiter)
    return any(each is not None for each in named) or table_format(Path(options.input_path or "")) is not None


def open_texts_or_pairs(path: str, *, pairs: bool | None, columns: Columns, reading: Reading) -> LabelledSource:
    """A table with a text in each row, or two; no labels are needed.

    pairs: whether each row has two texts; None: as many as the table has. Raises InputError for a file that cannot be
    read, a missing column, and one text where two are needed or two where one is.
    """
    [source] = open_labelled((SourceSpec(path=path),), columns=columns, reading=reading, needs_label=False)
    if pairs is not None and source.has_text2 != pairs:
        found, trained = ("one text", "pairs") if pairs else ("two texts", "single texts")
        raise InputError(
            f"{source.name} has {found} a row, the model was trained on {trained}",
            hint="name the second one with --text2-column" if pairs else "--text-column NAME reads one alone",
        )
    return source


def row_blocks(rows: Iterable[LabelledRow]) -> Iterator[list[Text]]:
    """The texts of the rows of a table, in blocks."""
    texts = ((row.text, row.text2) for row in rows)
    return batches_of(texts, lambda both: len(both[0]) + len(both[1] or ""), size=BLOCK_CHARACTERS, count=BLOCK_LINES)


def _pair(line: str, *, place: str) -> Text:
    texts = line.split("\t") if line else ["", ""]
    if len(texts) != 2:
        raise InputError(
            f"{place}: expected two texts with a tab between them, found {len(texts)}",
            hint="the model was trained on pairs; columns of csv, tsv and jsonl files are named by --text-column and "
            "--text2-column",
        )
    return texts[0], texts[1]


# --- prompts, and sources with the beginning of their target ----------------------------------------------------------


@dataclass(frozen=True)
class LineWindow:
    """Consecutive lines of an input.

    Attributes:
        first: number of the first line, from 0.
        lines: as they were read.
        sources: the text that the model reads: with the prefix of its task.
        prefixes: the beginning of each target; None: none is forced.
        places: names of the rows in messages; None: their numbers.
    """

    first: int
    lines: list[str]
    sources: list[str]
    prefixes: list[str] | None = None
    places: Places | None = None


def prompt_window(text: str, *, task_prefix: str = "", prefix: str | None = None) -> LineWindow:
    """A window with the source of `--prompt` and the beginning of its target."""
    places = Places(lambda row: "--prompt", lambda row: "--target-prefix")
    return LineWindow(0, [text], [with_prefix(task_prefix, text)], None if prefix is None else [prefix], places)


def text_windows(
    texts: Sequence[str], *, size: int, task_prefix: str = "", prefix: str | None = None
) -> Iterator[LineWindow]:
    """Windows of `size` texts in memory, each with the beginning of its target."""
    places = Places(lambda row: f"text {row + 1:,}", lambda row: "--target-prefix")
    for first in range(0, len(texts), size):
        lines = list(texts[first : first + size])
        sources = [with_prefix(task_prefix, line) for line in lines]
        yield LineWindow(first, lines, sources, None if prefix is None else [prefix] * len(lines), places)


def _texts(path: str, rows: Iterable[LabelledRow] | None, reading: Reading, *, size: int) -> Iterator[list[str]]:
    """`size` lines at a time, or texts of as many rows of a table."""
    if rows is None:
        return line_blocks(path, errors=reading.errors, encoding=reading.encoding, size=size)
    return blocks((row.text for row in rows), size)


def place_of(path: str, table: LabelledSource | None, row: int) -> str:
    """`file:17`: the place in the file of a line, or of a row of a table, which are counted from 0."""
    return f"{name_of(path)}:{row + 1}" if table is None else next(islice(table.rows(), row, None)).place


def prompt_windows(
    path: str, *, reading: Reading, batch_size: int, rows: Iterable[LabelledRow] | None = None
) -> Iterator[LineWindow]:
    """Prompts of a decoder-only model: a batch of lines, or of the rows of a table, at a time, unchecked."""
    done = 0
    for prompts in _texts(path, rows, reading, size=batch_size):
        yield LineWindow(done, prompts, prompts)
        done += len(prompts)


def source_windows(
    path: str,
    *,
    reading: Reading,
    batch_size: int,
    reader: SentenceReader,
    task_prefix: str = "",
    prefix: str | None = None,
    prefix_file: str | None = None,
    table: LabelledSource | None = None,
    rows: Iterable[LabelledRow] | None = None,
) -> Iterator[LineWindow]:
    """Sources of an encoder-decoder, each with the beginning of its target.

    Args:
        table: that is read in place of lines; rows: its rows, which are answered.
        prefix: the beginning of every target; prefix_file: a file with one a line.

    Raises:
        InputError: a file that cannot be read, a line of a file that `reader` refuses (file and line), a prefix file
            that has not one line for each source.
    """
    prefixes: list[str] | None = None
    places = Places(
        lambda row: place_of(path, table, row),
        lambda row: "--target-prefix" if prefix_file is None else f"{prefix_file}:{row + 1}",
    )
    if prefix_file is not None:
        prefixes = [line for block in _texts(prefix_file, None, reading, size=CHECKED_LINES) for line in block]
    reader.check_prefixes(prefixes or [prefix or ""], places=places)
    if table is not None or (path != STANDARD_INPUT and Path(path).is_file()):
        counted = 0
        for lines in _texts(path, None if table is None else table.rows(), reading, size=CHECKED_LINES):
            sources = [with_prefix(task_prefix, line) for line in lines]
            reader.check_sources(sources, first_row=counted, places=places)
            counted += len(lines)
        _require_one_each(path, counted, prefix_file, prefixes)
    size = batch_size if path == STANDARD_INPUT else batch_size * WINDOW_BATCHES
    done = 0
    for lines in _texts(path, rows, reading, size=size):
        end = done + len(lines)
        if prefixes is not None and end > len(prefixes):
            raise InputError(
                f"{name_of(path)} has more than the {len(prefixes):,} lines of {prefix_file}: expected one for each"
            )
        forced = [prefix] * len(lines) if prefix is not None else prefixes and prefixes[done:end]
        yield LineWindow(done, lines, [with_prefix(task_prefix, line) for line in lines], forced, places)
        done = end
    _require_one_each(path, done, prefix_file, prefixes)


def _require_one_each(path: str, counted: int, prefix_file: str | None, prefixes: list[str] | None) -> None:
    if prefixes is not None and len(prefixes) != counted:
        raise InputError(
            f"{name_of(path)} has {counted:,} lines, {prefix_file} {len(prefixes):,}: expected one for each"
        )
