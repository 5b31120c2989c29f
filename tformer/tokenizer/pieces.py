"""Pieces of a long text that have, one after the other, the tokens of the whole text.

The library takes 100 to 300 bytes for every character that it encodes at once. Pieces bound that memory, and with them
the first or the last tokens of a text are found without encoding the rest.

A piece ends after a newline between two characters that are no white space ("x\\n|y"), or before a single space
("x| y"). There the pre-tokenizers of byte-level BPE (GPT-2 and its successors), WordPiece, word and char models start a
new word, and no normalizer joins the sides. A pre-tokenizer that marks the start of a text and of words, as
SentencePiece's does, marks a piece that begins with a space only once, but one that begins after a newline too often:
such texts are cut before spaces only (`at_lines` is false). (A normalizer that prepends a mark, as Llama 2's does,
marks every piece.) Where no such place is near, the text is cut at a limit, and a word may be split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

PIECE_CHARACTERS = 1 << 16  # a text up to this size is one piece
PIECE_LIMIT = 1 << 18  # of a piece without a place to cut
BATCH_CHARACTERS = 1 << 20  # encoded at once, over the tokenizer's threads

Truncation = Literal["head", "tail", "head_tail"]
"""The part of a long text that is kept: its beginning, its end, or half of each."""

_LINE_START = re.compile(r"(?<=\S)\n(?=\S)")
_WORD_START = re.compile(r"(?<=\S) (?=\S)")

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")


def find_cut(text: str, start: int, *, size: int, limit: int, at_lines: bool = True) -> int:
    """The end of the piece that begins at `start`: about `size` further where lines are that short, at most `limit`."""
    end, last = start + size, min(start + limit, len(text))
    newline = _last(_LINE_START, "\n", text, start + 1, end) if at_lines else -1
    if at_lines and newline < 0 and (later := _LINE_START.search(text, end, last)):
        newline = later.start()
    if newline >= 0:
        return newline + 1
    space = -1 if last == len(text) else _last(_WORD_START, " ", text, start + 1, last)
    return last if space < 0 else space


def _last(pattern: re.Pattern[str], character: str, text: str, start: int, end: int) -> int:
    """The last place in [start, end) where the pattern, which begins with `character`, matches; -1 if none does."""
    place = text.rfind(character, start, end)
    while place >= 0 and not pattern.match(text, place):
        place = text.rfind(character, start, place)
    return place


def is_long(text: str) -> bool:
    """Whether a text is encoded in pieces."""
    return len(text) > PIECE_CHARACTERS


def pieces_of(text: str, *, at_lines: bool = True) -> Iterator[tuple[int, str]]:
    """(place, piece) of a text, from its beginning."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = find_cut(text, start, size=PIECE_CHARACTERS, limit=PIECE_CHARACTERS, at_lines=at_lines)
        if cut == start + PIECE_CHARACTERS:  # no place is that near
            cut = find_cut(text, start, size=PIECE_CHARACTERS, limit=PIECE_LIMIT, at_lines=at_lines)
        yield start, text[start:cut]
        start = cut
    if start < len(text) or not text:
        yield start, text[start:]


def pieces_from_end(text: str, first: int = 0, *, at_lines: bool = True) -> Iterator[tuple[int, str]]:
    """(place, piece) of a text from the place `first` on, the last piece first."""
    end = len(text)
    while end - first > PIECE_CHARACTERS:
        earliest, latest = max(first, end - PIECE_LIMIT), end - PIECE_CHARACTERS // 2
        line = _last(_LINE_START, "\n", text, earliest, latest) if at_lines else -1
        space = _last(_WORD_START, " ", text, earliest + 1, latest)
        start = max(line + 1, space, earliest)
        yield start, text[start:end]
        end = start
    if end > first or not text:
        yield first, text[first:end]


def ends_of(
    text: str,
    most: int | None,
    keep: Truncation,
    encode: Callable[[str], Encoded],
    size: Callable[[Encoded], int],
    *,
    at_lines: bool = True,
) -> Iterator[tuple[int, Encoded]]:
    """(place, encoded piece) of a text, in order: all pieces, or those at its ends that `keep` names.

    Args:
        most: an end is complete when its pieces have more tokens than this; None gives all pieces.
        size: the number of tokens of an encoded piece.
    """
    first, count = 0, 0
    if most is None or keep != "tail":
        for place, piece in pieces_of(text, at_lines=at_lines):
            encoded = encode(piece)
            yield place, encoded
            first, count = place + len(piece), count + size(encoded)
            if most is not None and count > most:
                break
        if most is None or keep == "head" or first == len(text):
            return
    last, count = list[tuple[int, Encoded]](), 0
    for place, piece in pieces_from_end(text, first, at_lines=at_lines):
        last.append((place, encode(piece)))
        count += size(last[-1][1])
        if count > most:
            break
    yield from reversed(last)


def batches_of(
    items: Iterable[Item], characters: Callable[[Item], int], *, size: int = BATCH_CHARACTERS, count: int | None = None
) -> Iterator[list[Item]]:
    """The items in batches that end at `size` characters, as `characters` counts them, or after `count` items."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += characters(item)
        if total >= size or len(batch) == count:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def size_for_message(text: str, tokens: int, *, most: int) -> str:
    """The number of a text's tokens as part of a message; for a long text only that it is above `most`."""
    return f"more than {most:,} tokens ({len(text):,} characters)" if is_long(text) else f"{tokens:,} tokens"
