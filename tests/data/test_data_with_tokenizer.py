"""The data room with real tokenizers: chunks encode to what the whole does, and text never becomes a special token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.data.fakes import open_one
from tformer.data import chunks
from tformer.data.cache import token_corpus
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

WORDS = [
    "the",
    "cat,",
    "sat",
    "on",
    "a",
    "mat.",
    "And",
    "don't",
    "",
    "saw",
    "(two)",
    "dogs\n",
    "",
    "",
    "",
    "run",
    "=",
    "f(x)\n\n\nwhere",
    "1234",
    "is\ttabbed",
]


def sample_text() -> str:
    draw = random.Random(0)
    return "".join(draw.choice(WORDS) + draw.choice([" ", " ", "\n", "\n\n", ".\n"]) for _ in range(3000))


@pytest.mark.parametrize("model", ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"])
def test_chunked_tokens_equal_those_of_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    text = sample_text()
    (tmp_path / "a.txt").write_text(text)
    options = TokenizerOptions(model=model, vocab_size=400)  # type: ignore[arg-type]
    tokenizer = train_tokenizer(lambda: iter([text]), options)
    monkeypatch.setattr(chunks, "CHUNK_CHARACTERS", 500)
    corpus = token_corpus(open_one(tmp_path / "a.txt"), tokenizer, cache_dir=tmp_path / "cache")
    assert corpus.slice(0, len(corpus)).tolist() == tokenizer.encode(text)
    assert corpus.num_bytes == len(text)


@pytest.fixture
def gpt_tokenizer() -> Tokenizer:
    text = sample_text()
    return train_tokenizer(lambda: iter([text]), TokenizerOptions(vocab_size=400, template="gpt"))


def test_special_token_text_inside_data_stays_text(tmp_path: Path, gpt_tokenizer: Tokenizer) -> None:
    text = "before <|endoftext|> after <|pad|>"
    (tmp_path / "a.txt").write_text(text)
    corpus = token_corpus(open_one(tmp_path / "a.txt"), gpt_tokenizer, cache_dir=tmp_path / "cache")
    ids = corpus.slice(0, len(corpus)).tolist()
    assert gpt_tokenizer.special.eos not in ids and gpt_tokenizer.special.pad not in ids
    assert gpt_tokenizer.decode(ids) == text


def test_rows_end_with_the_tokenizers_own_eos(tmp_path: Path, gpt_tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"text": "sat on"}\n')
    corpus = token_corpus(open_one(tmp_path / "a.jsonl"), gpt_tokenizer, cache_dir=tmp_path / "cache")
    ids = corpus.slice(0, len(corpus)).tolist()
    assert [place + 1 for place, number in enumerate(ids) if number == gpt_tokenizer.special.eos] == (
        corpus.document_offsets[1:].tolist()
    )
    assert gpt_tokenizer.decode(ids) == "the catsat on"


def test_byte_counts_of_a_split_are_exact(tmp_path: Path, gpt_tokenizer: Tokenizer) -> None:
    text = sample_text()
    (tmp_path / "a.txt").write_text(text)
    corpus = token_corpus(open_one(tmp_path / "a.txt"), gpt_tokenizer, cache_dir=tmp_path / "cache")
    for cut in (1, len(corpus) // 3, len(corpus) - 1):
        part = corpus.subset(cut, len(corpus))
        assert part.num_bytes == len(gpt_tokenizer.decode(part.slice(0, len(part)).tolist()).encode())
