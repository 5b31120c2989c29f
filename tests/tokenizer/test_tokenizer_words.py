"""Which tokens begin a word, of written-out vocabularies and of trained ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tformer.tokenizer import Tokenizer
from tformer.tokenizer.words import STARTS_WORD, word_starts


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        ("wordpiece", ["[CLS]", "run", "##ning", "."], [True, True, False, True]),
        ("byte-bpe", ["<s>", "run", "Ġrun", "ning", "."], [False, False, True, False, False]),
        ("bpe", ["run", "▁run", "ning"], [False, True, False]),
        ("unigram", ["run", "▁run", "▁"], [False, True, True]),
        ("word", ["run", "##x"], [True, True]),
        ("char", ["r", "▁"], [True, True]),
    ],
)
def test_each_kind_marks_words_its_own_way(kind: str, tokens: list[str], expected: list[bool]) -> None:
    found = word_starts(kind, tokens)  # type: ignore[arg-type]
    assert found.dtype == bool and found.tolist() == expected


@pytest.mark.parametrize("kind", list(STARTS_WORD))
def test_a_trained_tokenizer_begins_as_many_words_as_the_text_has(make: Callable[..., Tokenizer], kind: str) -> None:
    tokenizer = make(kind, template="bert", **({} if kind == "char" else {"vocab_size": 400}))
    starts = word_starts(tokenizer.kind, [tokenizer.token(i) for i in range(tokenizer.vocab_size)])
    ids = tokenizer.encode(" the brown dog jumps")
    assert len(starts) == tokenizer.vocab_size
    assert starts[ids].sum() == (len(ids) if kind == "char" else 4)
    if kind != "char":
        assert starts[tokenizer.encode(" lazydogoverfox")].sum() <= 1 or kind == "word"
