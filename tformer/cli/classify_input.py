"""What `tformer classify` reads: texts, pairs of texts or names of images, in blocks and in order.

Plain text is one input a line, empty lines included. Standard input is answered as it comes: a block ends when it is
full, and when nothing more is waiting (while one block is answered, the next gathers).
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.sources.files import Errors
    from tformer.recipe.sections import Columns

BLOCK_LINES = 4096
BLOCK_IMAGES = 256
CHUNK_BYTES = 1 << 16
STANDARD_INPUT = "-"

Text = tuple[str, str | None]
Item = TypeVar("Item")


def text_blocks(
    path: str, *, pairs: bool | None, columns: Columns, by_column: bool, errors: Errors
) -> Iterator[list[Text]]:
    """The inputs of a file or of standard input (`-`).

    Args:
        pairs: each input is two texts; in plain text a tab parts them. None: as a table has it, in plain text one.
        columns: of tables; `by_column`: they were named by the person, so standard input is a table too.

    Raises:
        InputError: a file that cannot be read, invalid UTF-8 when strict, one text where two are needed or two where
            one is (file and line).
    """
    if by_column or (path != STANDARD_INPUT and _is_table(path)):
        yield from blocks(_rows(path, pairs=pairs, columns=columns, errors=errors), BLOCK_LINES)
        return
    name, number = name_of(path), 0
    for lines in line_blocks(path, errors=errors, size=BLOCK_LINES):
        if pairs:
            yield [_pair(line, place=f"{name}:{number + index}") for index, line in enumerate(lines, start=1)]
        else:
            yield [(line, None) for line in lines]
        number += len(lines)


def line_blocks(path: str, *, errors: Errors, size: int) -> Iterator[list[str]]:
    """Up to `size` lines at a time, without their ends."""
    from tformer.data.sources.files import (
        MAX_ROW_CHARACTERS,
        decode_text,
        read_bytes,
    )

    name, from_stdin = name_of(path), path == STANDARD_INPUT
    chunks = _stdin_chunks() if from_stdin else read_bytes(Path(path))
    lines: list[str] = []
    unfinished: list[str] = []  # the parts of a line whose end has not come
    done = 0
    for text in decode_text(chunks, name=name, errors=errors):
        first, *others = text.split("\n")
        unfinished.append(first)
        if others:
            lines += ["".join(unfinished), *others[:-1]]
            unfinished = [others[-1]]
        elif sum(map(len, unfinished)) > MAX_ROW_CHARACTERS:
            raise InputError(f"{name}:{done + len(lines) + 1}: a line of more than {MAX_ROW_CHARACTERS:,} characters")
        while len(lines) >= size or (lines and from_stdin and not _more_is_waiting()):
            yield lines[:size]
            done += len(lines[:size])
            del lines[:size]
    if any(unfinished):
        lines.append("".join(unfinished))
    yield from blocks(iter(lines), size)


def blocks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items; the last may be shorter."""
    while block := list(islice(items, size)):
        yield block


def is_image_set(path: Path) -> bool:
    """Whether a path holds images itself: a folder, a zip or an IDX file. Any other file names one a line."""
    from tformer.data.sources.image_files import is_idx

    return path.is_dir() or path.suffix.lower() == ".zip" or (path.is_file() and is_idx(path))


def name_of(path: str) -> str:
    """What errors call an input."""
    return "standard input" if path == STANDARD_INPUT else path


def _is_table(path: str) -> bool:
    from tformer.data.sources.tables import table_format

    return table_format(Path(path)) is not None


def _rows(path: str, *, pairs: bool | None, columns: Columns, errors: Errors) -> Iterator[Text]:
    from tformer.cli.report import console
    from tformer.data.sources.labelled import open_labelled
    from tformer.recipe.sections import SourceSpec

    for source in open_labelled((SourceSpec(path=path),), columns=columns, errors=errors, needs_label=False):
        for note in source.notes:
            console.print(note, markup=False)
        if pairs is not None and source.has_text2 != pairs:
            found, trained = ("one text", "pairs") if pairs else ("two texts", "single texts")
            raise InputError(
                f"{source.name} has {found} a row, the model was trained on {trained}",
                hint="name the second one with --text2-column" if pairs else "--text-column NAME reads one alone",
            )
        for row in source.rows():
            yield row.text, row.text2 if source.has_text2 else None


def _pair(line: str, *, place: str) -> Text:
    texts = line.split("\t") if line else ["", ""]
    if len(texts) != 2:
        raise InputError(
            f"{place}: expected two texts parted by a tab, found {len(texts)}",
            hint="the model was trained on pairs; columns of csv, tsv and jsonl files are named by --text-column and "
            "--text2-column",
        )
    return texts[0], texts[1]


def _stdin_chunks() -> Iterator[bytes]:
    """What has arrived, without waiting for a whole chunk."""
    return iter(lambda: os.read(sys.stdin.fileno(), CHUNK_BYTES), b"")


def _more_is_waiting() -> bool:
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
    return bool(ready)
