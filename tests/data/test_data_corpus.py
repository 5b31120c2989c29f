"""Chunks and corpora: cuts that keep tokens, slices, splits, byte counts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import ByteTokenizer, open_one
from tformer.data.shards import token_files
from tformer.data.shards.corpus import TokenCorpus, token_corpus
from tformer.data.shards.token_files import safe_chunks
from tformer.data.sources.files import DocumentChunk
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.workers.work import Work

# Stands in for GPT-2's pre-tokenizer: words with their space, runs of white space up to the last before a word.
PRETOKENS = re.compile(r" ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+")


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> object:
    patch = pytest.MonkeyPatch()
    patch.setattr(token_files, "CHUNK_CHARACTERS", 20)
    patch.setattr(token_files, "CHUNK_LIMIT", 60)
    yield
    patch.undo()


def pieces_of(text: str, size: int) -> list[DocumentChunk]:
    return [DocumentChunk(text[start : start + size], start + size >= len(text)) for start in range(0, len(text), size)]


LINES = st.lists(st.text("ab .\n\t", min_size=0, max_size=12), min_size=1, max_size=30).map("\n".join).filter(bool)


@given(text=LINES, size=st.integers(1, 70))
def test_chunks_depend_on_the_document_alone_and_lose_nothing(text: str, size: int) -> None:
    whole = list(safe_chunks([DocumentChunk(text, True)]))
    assert list(safe_chunks(pieces_of(text, size))) == whole
    assert "".join(chunk.text for chunk in whole) == text
    assert [chunk.ends_document for chunk in whole] == [False] * (len(whole) - 1) + [True]
    assert all(len(chunk.text) <= 60 for chunk in whole)


@given(lines=st.lists(st.from_regex(r"[ab.]( ?[ab.]){0,7}", fullmatch=True), min_size=1, max_size=40))
def test_chunks_pretokenize_as_the_whole_document(lines: list[str]) -> None:
    text = "\n".join(lines)
    parts = [token for chunk in safe_chunks([DocumentChunk(text, True)]) for token in PRETOKENS.findall(chunk.text)]
    assert parts == PRETOKENS.findall(text)


def test_chunks_end_after_a_newline_between_words_only() -> None:
    text = "one two three\n  four five six\n\nseven eight nine\nten"
    assert [chunk.text for chunk in safe_chunks([DocumentChunk(text, True)])] == [
        "one two three\n  four five six\n\nseven eight nine\n",
        "ten",
    ]


def test_chunks_of_an_endless_line_end_before_a_word_and_else_at_the_limit() -> None:
    words = list(safe_chunks([DocumentChunk("word " * 40, True)]))
    assert all(chunk.text.startswith(" word") for chunk in words[1:])
    assert [len(chunk.text) for chunk in safe_chunks([DocumentChunk("x" * 130, True)])] == [60, 60, 10]


def test_chunks_keep_documents_apart() -> None:
    pieces = [DocumentChunk("a", True), DocumentChunk("b", False), DocumentChunk("c", True)]
    assert list(safe_chunks(pieces)) == [DocumentChunk("a", True), DocumentChunk("bc", True)]


@pytest.fixture
def many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenized: Callable[..., TokenCorpus]) -> TokenCorpus:
    monkeypatch.setattr(token_files, "SHARD_BYTES", 64)  # 32 tokens
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number}\n" for number in range(40)))
    return tokenized(path)


def test_corpus_reads_across_shards_as_one(many_shards: TokenCorpus) -> None:
    text = "".join(f"line {number}\n" for number in range(40)).encode()
    assert len(many_shards.shards) == -(-len(text) // 32)
    assert bytes(many_shards.slice(0, len(many_shards)).tolist()) == text
    for start, stop in ((0, 5), (30, 34), (31, 33), (32, 64), (10, 200), (-3, 4), (300, 10**9), (7, 7), (9, 3)):
        assert bytes(many_shards.slice(start, stop).tolist()) == text[max(0, start) : max(0, stop)]
    starts = np.arange(0, len(text) - 20, 7)
    rows = many_shards.gather(starts, 20)
    assert [bytes(row.tolist()) for row in rows] == [text[start : start + 20] for start in starts]
    part = many_shards.subset(29, 290)
    assert bytes(part.slice(1, 70).tolist()) == text[30:99]
    assert bytes(part.gather(np.array([2]), 40)[0].tolist()) == text[31:71]
    assert bytes(part.slice(250, 300).tolist()) == text[279:290]


def test_corpus_counts_bytes_of_any_part_exactly(many_shards: TokenCorpus) -> None:
    for cut in range(1, len(many_shards), 13):
        assert many_shards.subset(0, cut).num_bytes == cut
        assert many_shards.subset(cut, len(many_shards)).num_bytes == len(many_shards) - cut


def test_corpus_documents_of_a_part_are_clipped() -> None:
    corpus = TokenCorpus.from_ids(range(30), documents=[0, 10, 20])
    assert corpus.document_offsets.tolist() == [0, 10, 20, 30]
    assert corpus.subset(5, 25).document_offsets.tolist() == [0, 5, 15, 20]
    assert corpus.subset(10, 20).document_offsets.tolist() == [0, 10]
    assert corpus.subset(5, 25).subset(5, 20).document_offsets.tolist() == [0, 10, 15]
    assert len(corpus.subset(12, 18).document_offsets) == 2


def test_split_cuts_one_text_at_the_exact_token() -> None:
    corpus = TokenCorpus.from_ids(range(1003854))
    train, valid = corpus.split(fraction=0.1)
    assert len(train) == int(1003854 * 0.9)
    assert len(train) + len(valid) == 1003854
    assert valid.slice(0, 1)[0] == len(train)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=40), fraction=st.floats(0.05, 0.45))
def test_split_is_exact_or_at_a_near_document(sizes: list[int], fraction: float) -> None:
    starts = (np.cumsum(sizes) - np.array(sizes)).tolist()
    corpus = TokenCorpus.from_ids(np.arange(sum(sizes)), documents=starts)
    cut = int(len(corpus) * (1 - fraction))
    if cut == 0:
        return
    train, valid = corpus.split(fraction=fraction)
    assert np.concatenate([train.slice(0, 10**6), valid.slice(0, 10**6)]).tolist() == list(range(len(corpus)))
    assert len(train) == cut or (len(train) in starts and abs(len(train) - cut) <= 0.1 * (len(corpus) - cut))
    assert len(corpus.split(fraction=fraction)[0]) == len(train)


def test_split_keeps_short_documents_whole() -> None:
    corpus = TokenCorpus.from_ids(range(7000), documents=range(0, 7000, 7))
    train, valid = corpus.split(fraction=0.1)
    assert len(train) % 7 == 0
    assert valid.document_offsets[0] == 0 and (np.diff(valid.document_offsets) == 7).all()
    later, rest = corpus.subset(3500, 7000).split(fraction=0.101)
    assert len(later) % 7 == 0 and (np.diff(rest.document_offsets) == 7).all()


def test_split_refuses_a_corpus_without_two_parts() -> None:
    with pytest.raises(InputError, match="memory: 1 tokens are too few"):
        TokenCorpus.from_ids([5]).split(fraction=0.1)


def test_bytes_of_parts_follow_the_decoder(tmp_path: Path, tokenized: Callable[..., TokenCorpus]) -> None:
    """A tokenizer whose tokens stand for different numbers of bytes: shares by count of tokens would be wrong."""

    class Characters(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[1 if letter == "é" else 0 for letter in text] for text in texts]

        def decode(self, ids: list[int]) -> str:
            return "".join("é" if number else "a" for number in ids)

    (tmp_path / "a.txt").write_text("a" * 500 + "é" * 500)
    corpus = tokenized(tmp_path / "a.txt", Characters())
    assert corpus.num_bytes == 1500
    assert corpus.subset(0, 500).num_bytes == 500
    assert corpus.subset(600, 1000).num_bytes == 800


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
    monkeypatch.setattr(token_files, "CHUNK_CHARACTERS", 500)
    corpus = token_corpus(open_one(tmp_path / "a.txt"), tokenizer, Work(cache_dir=tmp_path / "cache"))
    assert corpus.slice(0, len(corpus)).tolist() == tokenizer.encode(text)
    assert corpus.num_bytes == len(text)


@pytest.fixture
def gpt_tokenizer() -> Tokenizer:
    text = sample_text()
    return train_tokenizer(lambda: iter([text]), TokenizerOptions(vocab_size=400, template="gpt"))


def test_special_token_text_inside_data_stays_text(tmp_path: Path, gpt_tokenizer: Tokenizer) -> None:
    text = "before <|endoftext|> after <|pad|>"
    (tmp_path / "a.txt").write_text(text)
    corpus = token_corpus(open_one(tmp_path / "a.txt"), gpt_tokenizer, Work(cache_dir=tmp_path / "cache"))
    ids = corpus.slice(0, len(corpus)).tolist()
    assert gpt_tokenizer.special.eos not in ids and gpt_tokenizer.special.pad not in ids
    assert gpt_tokenizer.decode(ids) == text


def test_rows_end_with_the_tokenizers_own_eos(tmp_path: Path, gpt_tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"text": "sat on"}\n')
    corpus = token_corpus(open_one(tmp_path / "a.jsonl"), gpt_tokenizer, Work(cache_dir=tmp_path / "cache"))
    ids = corpus.slice(0, len(corpus)).tolist()
    assert [place + 1 for place, number in enumerate(ids) if number == gpt_tokenizer.special.eos] == (
        corpus.document_offsets[1:].tolist()
    )
    assert gpt_tokenizer.decode(ids) == "the catsat on"


def test_byte_counts_of_a_split_are_exact(tmp_path: Path, gpt_tokenizer: Tokenizer) -> None:
    text = sample_text()
    (tmp_path / "a.txt").write_text(text)
    corpus = token_corpus(open_one(tmp_path / "a.txt"), gpt_tokenizer, Work(cache_dir=tmp_path / "cache"))
    for cut in (1, len(corpus) // 3, len(corpus) - 1):
        part = corpus.subset(cut, len(corpus))
        assert part.num_bytes == len(gpt_tokenizer.decode(part.slice(0, len(part)).tolist()).encode())
