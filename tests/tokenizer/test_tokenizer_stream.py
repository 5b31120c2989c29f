"""Streaming: all pieces together are the whole, and no piece shows half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.decoding import byte_level_alphabet

TEXT = "The low dog, lower; newest 日本語 👩‍👩‍👧 é!\n"
_CACHE: dict[str, Tokenizer] = {}


def _tokenizer(model: str) -> Tokenizer:
    if model not in _CACHE:
        options = TokenizerOptions(model=model, vocab_size=340, byte_fallback=model in ("bpe", "unigram"))
        _CACHE[model] = train_tokenizer(lambda: iter([TEXT * 30]), options)
    return _CACHE[model]


def _stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.finish()]


MODELS = ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"]


@given(text=st.text(max_size=40), model=st.sampled_from(["byte-bpe", "bpe", "unigram"]))
@settings(max_examples=150, deadline=None)
def test_stream_equals_decode_and_never_shows_half_a_character(text, model):
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode(text)
    pieces = _stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@given(model=st.sampled_from(MODELS), data=st.data())
@settings(max_examples=150, deadline=None)
def test_stream_equals_decode_for_any_ids(model, data):
    """Also for what an untrained model writes: broken bytes, special tokens, continuations without a start."""
    tokenizer = _tokenizer(model)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_emoji_appears_only_when_it_is_whole():
    tokenizer = _tokenizer("byte-bpe")
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    pieces = _stream(tokenizer, ids)
    assert pieces[: len(ids) - 1] == [""] * (len(ids) - 1)
    assert pieces[len(ids) - 1] == "😀"


def test_an_unfinished_character_shows_at_the_end_only():
    tokenizer = _tokenizer("byte-bpe")
    ids = tokenizer.encode("😀")[:-1]
    assert _stream(tokenizer, ids) == [""] * len(ids) + ["\ufffd"]


@pytest.mark.parametrize("model", MODELS)
def test_stream_of_words_keeps_their_spaces(model):
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode("The low dog, lower")
    assert "".join(_stream(tokenizer, ids)) == "The low dog, lower".replace(",", " ," if model == "wordpiece" else ",")


def test_decoding_equals_the_library(make):
    for model in MODELS:
        tokenizer = make(model)
        ids = tokenizer.encode("The quick brown fox,\n again\t12!") + tokenizer.encode("x", template=True)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special=skip) == tokenizer._rust.decode(ids, skip_special_tokens=skip)


def test_the_byte_alphabet_is_gpt2s():
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)
