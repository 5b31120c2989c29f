from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data import chunks
from tformer.data.chunks import safe_chunks
from tformer.data.text import Piece

# Stands in for GPT-2's pre-tokenizer: words with their space, runs of white space up to the last before a word.
PRETOKENS = re.compile(r" ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+")


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> object:
    patch = pytest.MonkeyPatch()
    patch.setattr(chunks, "CHUNK_CHARACTERS", 20)
    patch.setattr(chunks, "CHUNK_LIMIT", 60)
    yield
    patch.undo()


def pieces_of(text: str, size: int) -> list[Piece]:
    return [Piece(text[start : start + size], start + size >= len(text)) for start in range(0, len(text), size)]


LINES = st.lists(st.text("ab .\n\t", min_size=0, max_size=12), min_size=1, max_size=30).map("\n".join).filter(bool)


@given(text=LINES, size=st.integers(1, 70))
def test_chunks_depend_on_the_document_alone_and_lose_nothing(text: str, size: int) -> None:
    whole = list(safe_chunks([Piece(text, True)]))
    assert list(safe_chunks(pieces_of(text, size))) == whole
    assert "".join(chunk.text for chunk in whole) == text
    assert [chunk.ends_document for chunk in whole] == [False] * (len(whole) - 1) + [True]
    assert all(len(chunk.text) <= 60 for chunk in whole)


@given(lines=st.lists(st.from_regex(r"[ab.]( ?[ab.]){0,7}", fullmatch=True), min_size=1, max_size=40))
def test_chunks_pretokenise_as_the_whole_document(lines: list[str]) -> None:
    text = "\n".join(lines)
    parts = [token for chunk in safe_chunks([Piece(text, True)]) for token in PRETOKENS.findall(chunk.text)]
    assert parts == PRETOKENS.findall(text)


def test_chunks_end_after_a_newline_between_words_only() -> None:
    text = "one two three\n  four five six\n\nseven eight nine\nten"
    assert [chunk.text for chunk in safe_chunks([Piece(text, True)])] == [
        "one two three\n  four five six\n\nseven eight nine\n",
        "ten",
    ]


def test_chunks_of_an_endless_line_end_before_a_word_and_else_at_the_limit() -> None:
    words = list(safe_chunks([Piece("word " * 40, True)]))
    assert all(chunk.text.startswith(" word") for chunk in words[1:])
    assert [len(chunk.text) for chunk in safe_chunks([Piece("x" * 130, True)])] == [60, 60, 10]


def test_chunks_keep_documents_apart() -> None:
    pieces = [Piece("a", True), Piece("b", False), Piece("c", True)]
    assert list(safe_chunks(pieces)) == [Piece("a", True), Piece("bc", True)]
