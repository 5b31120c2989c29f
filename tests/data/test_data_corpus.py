from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import ByteTokenizer
from tformer.data import shards
from tformer.data.corpus import TokenCorpus, split_corpus
from tformer.errors import InputError


@pytest.fixture
def many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenised: Callable[..., TokenCorpus]) -> TokenCorpus:
    monkeypatch.setattr(shards, "SHARD_BYTES", 64)  # 32 tokens
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number}\n" for number in range(40)))
    return tokenised(path)


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
    assert corpus.subset(12, 18).num_documents == 1


def test_split_cuts_one_text_at_the_exact_token() -> None:
    corpus = TokenCorpus.from_ids(range(1003854))
    train, valid = split_corpus(corpus, fraction=0.1)
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
    train, valid = split_corpus(corpus, fraction=fraction)
    assert np.concatenate([train.slice(0, 10**6), valid.slice(0, 10**6)]).tolist() == list(range(len(corpus)))
    assert len(train) == cut or (len(train) in starts and abs(len(train) - cut) <= 0.1 * (len(corpus) - cut))
    assert len(split_corpus(corpus, fraction=fraction)[0]) == len(train)


def test_split_keeps_short_documents_whole() -> None:
    corpus = TokenCorpus.from_ids(range(7000), documents=range(0, 7000, 7))
    train, valid = split_corpus(corpus, fraction=0.1)
    assert len(train) % 7 == 0
    assert valid.document_offsets[0] == 0 and (np.diff(valid.document_offsets) == 7).all()


def test_split_refuses_a_corpus_without_two_parts() -> None:
    with pytest.raises(InputError, match="memory: 1 tokens are too few"):
        split_corpus(TokenCorpus.from_ids([5]), fraction=0.1)


def test_bytes_of_parts_follow_the_decoder(tmp_path: Path, tokenised: Callable[..., TokenCorpus]) -> None:
    """A tokenizer whose tokens stand for different numbers of bytes: shares by count of tokens would be wrong."""

    class Characters(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[1 if letter == "é" else 0 for letter in text] for text in texts]

        def decode(self, ids: list[int]) -> str:
            return "".join("é" if number else "a" for number in ids)

    (tmp_path / "a.txt").write_text("a" * 500 + "é" * 500)
    corpus = tokenised(tmp_path / "a.txt", Characters())
    assert corpus.num_bytes == 1500
    assert corpus.subset(0, 500).num_bytes == 500
    assert corpus.subset(600, 1000).num_bytes == 800
