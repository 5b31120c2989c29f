"""Cutting long documents where a tokenizer would cut anyway, so that pieces encode to what the whole encodes to.

A chunk ends after a newline that stands between two characters that are no white space ("x\\n|y"). There the
pre-tokenizers of byte-level BPE (GPT-2 and its successors), WordPiece, word and char models start a new word, and no
normaliser joins the sides; so the ids are those of the whole document. (A pre-tokenizer that marks the start of a text,
as SentencePiece's does, marks every chunk's.) A document without such a place for `CHUNK_LIMIT` characters is cut
before a single space, and without one at the limit: there a word may come apart.
Cuts depend on the document alone, never on how its pieces arrive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tformer.data.text import Piece

CHUNK_CHARACTERS = 1 << 16
CHUNK_LIMIT = 1 << 20

_LINE_START = re.compile(r"(?<=\S)\n(?=\S)")
_WORD_START = re.compile(r"(?<=\S) (?=\S)")


def safe_chunks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same documents in chunks of `CHUNK_CHARACTERS` or less where safe places are that close."""
    parts: list[str] = []
    length = 0
    for piece in pieces:
        parts.append(piece.text)
        length += len(piece.text)
        if length <= CHUNK_LIMIT and not piece.ends_document:
            continue
        buffer, start = "".join(parts), 0
        while len(buffer) - start > (CHUNK_CHARACTERS if piece.ends_document else CHUNK_LIMIT):
            cut = _find_cut(buffer, start)
            if cut == len(buffer):
                break
            yield Piece(buffer[start:cut], False)
            start = cut
        rest = buffer[start:]
        if piece.ends_document:
            yield Piece(rest, True)
            rest = ""
        parts, length = [rest], len(rest)


def _find_cut(text: str, start: int) -> int:
    """Where the chunk that begins at `start` ends: the end of the text, or at most `CHUNK_LIMIT` further."""
    end, limit = start + CHUNK_CHARACTERS, min(start + CHUNK_LIMIT, len(text))
    newline = _last(_LINE_START, "\n", text, start + 1, end)
    if newline < 0 and (later := _LINE_START.search(text, end, limit)):
        newline = later.start()
    if newline >= 0:
        return newline + 1
    space = -1 if limit == len(text) else _last(_WORD_START, " ", text, start + 1, limit)
    return limit if space < 0 else space


def _last(pattern: re.Pattern[str], character: str, text: str, start: int, end: int) -> int:
    """The last place in [start, end) where the pattern, which begins with `character`, matches; -1 when none does."""
    place = text.rfind(character, start, end)
    while place >= 0 and not pattern.match(text, place):
        place = text.rfind(character, start, place)
    return place
