"""Long texts in pieces: nothing is lost, tokens and offsets are those of the whole text, only the ends are encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from tformer.tokenizer import Tokenizer, TokenizerOptions, pieces, train_tokenizer
from tformer.tokenizer.options import TokenizerModel
from tformer.tokenizer.pieces import Truncation, batches_of, pieces_from_end, pieces_of, size_for_message

KINDS = get_args(TokenizerModel)
WORDS = [
    "the",
    "cat",
    "naïve",
    "日本語",
    "don't",
    "x.y",
    "12345",
    "_a",
    "  ",
    "\t",
    "a\nb",
    "é",
    "👩\u200d👧",
    "ΟΔΟΣ",
    "A\u0301",
]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=120).map(" ".join)
SMALL, LARGEST = 40, 120


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(pieces, "PIECE_CHARACTERS", SMALL)
    patch.setattr(pieces, "PIECE_LIMIT", LARGEST)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    text = " ".join(WORDS) * 30
    return {
        kind: train_tokenizer(lambda: iter([text]), TokenizerOptions(model=kind, vocab_size=400, unicode="nfc"))
        for kind in KINDS
    }


def whole(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = tokenizer._rust.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets


@given(text=st.text("ab .\n\t", max_size=600))
def test_pieces_are_bounded_and_lose_nothing(text: str) -> None:
    for parts in (list(pieces_of(text)), list(pieces_from_end(text))[::-1]):
        assert "".join(piece for _, piece in parts) == text
        assert [place for place, _ in parts] == [sum(len(piece) for _, piece in parts[:n]) for n in range(len(parts))]
        assert max(len(piece) for _, piece in parts) <= LARGEST


def test_pieces_begin_where_a_line_begins() -> None:
    text = "\n".join("x" * length for length in range(1, 30))
    for parts in (pieces_of(text), pieces_from_end(text)):
        places = [place for place, _ in parts if place]
        assert len(places) > 3 and {text[place - 1] for place in places} == {"\n"}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=TEXTS)
def test_a_long_text_has_the_tokens_and_offsets_of_the_whole(
    kind: str, text: str, trained: dict[str, Tokenizer]
) -> None:
    tokenizer = trained[kind]
    ids, spans = whole(tokenizer, text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode_spans(text) == (ids, spans)
    assert tokenizer.count(text) == len(ids)


@settings(deadline=None)
@given(text=TEXTS, most=st.integers(0, 80), keep=st.sampled_from(get_args(Truncation)))
def test_the_ends_of_a_long_text_are_those_of_the_whole(
    text: str, most: int, keep: Truncation, trained: dict[str, Tokenizer]
) -> None:
    tokenizer = trained["byte-bpe"]
    ids, _ = whole(tokenizer, text)
    found = tokenizer.encode(text, most=most, keep=keep)
    assert tokenizer.encode_spans(text, most=most, keep=keep)[0] == found
    if found != ids:
        assert most < len(found) < len(ids)
        if keep != "tail":
            assert found[: most + 1] == ids[: most + 1]
        if keep != "head":
            assert found[-most - 1 :] == ids[-most - 1 :]


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@given(text=TEXTS, keep=st.sampled_from(get_args(Truncation)), most=st.integers(1, 30))
@settings(max_examples=30)
def test_a_tokenizer_that_marks_words_as_sentencepiece_does_has_the_tokens_of_the_whole(
    scheme: Any, text: str, keep: Truncation, most: int
) -> None:
    tokenizer = marking(scheme)
    ids, spans = whole(tokenizer, text)
    assert tokenizer.encode(text) == ids and tokenizer.count(text) == len(ids)
    assert tokenizer.encode_spans(text) == (ids, spans)
    part = tokenizer.encode(text, most=most, keep=keep)
    head = {"head": most, "tail": 0, "head_tail": most // 2}[keep]
    tail = min(most - head, len(ids))
    assert part[:head] == ids[:head] and part[len(part) - tail :] == ids[len(ids) - tail :]


@cache
def marking(scheme: Any) -> Tokenizer:
    """A tokenizer that marks the beginning of words, and of a text as `scheme` says."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    rust.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    rust.train_from_iterator(["x " + " ".join(WORDS)] * 30, trainer)
    return Tokenizer.from_json(rust.to_str())


@pytest.mark.parametrize("keep", get_args(Truncation))
def test_the_middle_of_a_long_text_is_not_encoded(
    keep: Truncation, trained: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encode = Tokenizer._encode_piece
    monkeypatch.setattr(Tokenizer, "_encode_piece", lambda self, piece: seen.append(piece) or encode(self, piece))
    trained["byte-bpe"].encode("the cat " * 10_000, most=3, keep=keep)
    assert 0 < sum(map(len, seen)) <= 4 * LARGEST


def test_a_text_that_is_not_long_is_encoded_at_once(
    make: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make("char")
    monkeypatch.setattr(Tokenizer, "_encode_long", None)
    assert len(tokenizer.encode("a" * SMALL, most=2)) == SMALL


def test_batches_end_at_a_size_or_a_count() -> None:
    items: list[Any] = ["a" * size for size in (1, 2, 9, 1, 1, 1, 1)]
    assert [[len(item) for item in batch] for batch in batches_of(items, len, size=10, count=3)] == [
        [1, 2, 9],
        [1, 1, 1],
        [1],
    ]
    assert list(batches_of(["aa", "b"], len, size=2)) == [["aa"], ["b"]]


def test_messages_count_the_tokens_of_short_texts_only() -> None:
    assert size_for_message("a b", 1234, most=1000) == "1,234 tokens"
    assert size_for_message("a" * 5000, 1234, most=1000) == "more than 1,000 tokens (5,000 characters)"
