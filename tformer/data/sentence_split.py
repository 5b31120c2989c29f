"""Text to sentences, by rules: a line's end ends a sentence, and so does . ! ? before white space and no small letter.

The rules know no abbreviations but initials ("J. Smith"): for pairs of neighbouring texts a cut too many does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tformer.data.text import Piece

LINE_LIMIT = 1 << 20  # characters; a longer line is cut here, whatever stands there

_BOUNDARY = re.compile(
    r"(?<=[.!?…])(?<!\b[A-Z]\.)\s+(?=[^\sa-z])"
    r"|(?<=[.!?…][\"'”’)\]])\s+(?=[^\sa-z])"
    r"|(?<=[。！？])(?=.)"  # scripts without spaces
)


class Sentence(NamedTuple):
    """A sentence without the white space around it, and whether a paragraph or a document begins with it."""

    text: str
    begins_paragraph: bool
    begins_document: bool


def split_sentences(line: str) -> list[str]:
    """The sentences of one line, stripped; none of them empty."""
    return [text for part in _BOUNDARY.split(line) if (text := part.strip())]


def sentences_of(pieces: Iterable[Piece]) -> Iterator[Sentence]:
    """Every sentence of the documents, in order; a blank line ends a paragraph."""
    rest, new_paragraph, new_document = "", True, True
    for piece in pieces:
        *lines, rest = (rest + piece.text).split("\n")
        if piece.ends_document or len(rest) > LINE_LIMIT:
            lines, rest = [*lines, rest], ""
        for line in lines:
            sentences = split_sentences(line)
            for text in sentences:
                yield Sentence(text, new_paragraph, new_document)
                new_paragraph = new_document = False
            new_paragraph = new_paragraph or not sentences
        if piece.ends_document:
            new_paragraph = new_document = True
