"""Pairs of sentences: splitting, corpora, sampling."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import ByteTokenizer, open_one
from tformer.data.batching.sentences import (
    SentenceCorpus,
    SentencePairs,
    prepare_sentences,
    sentences_of,
)
from tformer.data.sources.files import DocumentChunk
from tformer.support.errors import InputError, Interrupted
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.workers.work import Work


@cache
def tokenizer(template: str = "bert") -> Tokenizer:
    options = TokenizerOptions(model="word", vocab_size=60, template=template)  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter(["a b c d e f g . ! ?\n" * 5]), options)


def corpus_of(documents: Iterable[Iterable[int]]) -> SentenceCorpus:
    """Documents of sentences of these sizes; every id is its own position plus 100."""
    sizes = [list(document) for document in documents]
    flat = [size for document in sizes for size in document]
    ends = np.cumsum([len(document) for document in sizes])
    return SentenceCorpus(
        name="memory",
        ids=(np.arange(sum(flat)) + 100).astype(np.uint32),
        offsets=np.array([0, *np.cumsum(flat)], dtype=np.int64),
        documents=np.array([0, *ends], dtype=np.int64),
        fingerprint="f",
    )


def pairs_of(documents: Iterable[Iterable[int]], *, seq_len: int = 15, **options: int) -> SentencePairs:
    return SentencePairs(corpus_of(documents), tokenizer(), seq_len=seq_len, **options)  # type: ignore[arg-type]


MANY = [[3, 5, 2, 4, 6, 1, 2], [4, 4], [2, 2, 2, 20, 3], [7], [1, 1, 1, 1]] * 4


# --- from text to sentences ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("It costs 3.50 euros, e.g. here.", ["It costs 3.50 euros, e.g. here."]),
        ("By J. Smith. Next.", ["By J. Smith.", "Next."]),
        ("今日は。明日は！", ["今日は。", "明日は！"]),
        ("   ", []),
    ],
)
def test_sentences_end_where_the_rules_say(line: str, expected: list[str]) -> None:
    assert [sentence.text for sentence in sentences_of([DocumentChunk(line, True)])] == expected


def test_lines_end_sentences_and_blank_lines_paragraphs() -> None:
    found = list(sentences_of([DocumentChunk("one\ntwo. Three\n \nfour", True), DocumentChunk("\nfive", True)]))
    assert [sentence.text for sentence in found] == ["one", "two.", "Three", "four", "five"]
    assert [sentence.begins_paragraph for sentence in found] == [True, False, False, True, True]
    assert [sentence.begins_document for sentence in found] == [True, False, False, False, True]


@given(text=st.text(alphabet="ab. \n", max_size=60), cut=st.integers(0, 60))
def test_how_pieces_arrive_makes_no_difference(text: str, cut: int) -> None:
    whole = list(sentences_of([DocumentChunk(text, True)]))
    assert list(sentences_of([DocumentChunk(text[:cut], False), DocumentChunk(text[cut:], True)])) == whole
    assert "".join("".join(sentence.text.split()) for sentence in whole) == "".join(text.split())


def test_in_one_text_file_blank_lines_end_documents(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One. Two.\nthree\n\nFour. Five.\n")
    corpus = prepare_sentences([open_one(file)], ByteTokenizer())
    assert corpus.num_sentences == 5 and corpus.documents.tolist() == [0, 3, 5]
    assert bytes(corpus.tokens(1, 3).tolist()) == b" Two. three"


def test_rows_are_documents_whatever_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "One. Two.\\n\\nThree."}\n{"text": "Four."}\n')
    corpus = prepare_sentences([open_one(file)], ByteTokenizer())
    assert corpus.documents.tolist() == [0, 3, 4]


def test_several_sources_follow_each_other_and_progress_is_reported(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} one.\n{name} two.\n\n{name} three.\n")
    seen: list[tuple[int, int | None]] = []
    sources = [open_one(tmp_path / "a.txt"), open_one(tmp_path / "b.txt")]
    corpus = prepare_sentences(
        sources, ByteTokenizer(), work=Work(report=lambda done, total: seen.append((done, total)))
    )
    assert corpus.documents.tolist() == [0, 2, 3, 5, 6]
    assert seen[-1][0] > seen[0][0] and seen[0][1] == sum(len((tmp_path / f"{n}.txt").read_bytes()) for n in "ab")
    again = prepare_sentences(sources, ByteTokenizer())
    assert again.fingerprint == corpus.fingerprint
    assert prepare_sentences(sources[:1], ByteTokenizer()).fingerprint != corpus.fingerprint


def test_sentences_without_tokens_are_left_out() -> None:
    class Picky(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[] if "x" in text else [1] for text in texts]

    class OneSource:
        name = "memory"

        def documents(self) -> Iterable[DocumentChunk]:
            return iter([DocumentChunk("x\nb\nc\n\nx\n\nd", True)])

        def fingerprint(self) -> str:
            return ""

        def size_bytes(self) -> int | None:
            return None

    corpus = prepare_sentences([OneSource()], Picky())  # type: ignore[list-item]
    assert corpus.num_sentences == 3 and corpus.documents.tolist() == [0, 2, 3]


def test_preparation_can_be_interrupted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One. Two.")
    with pytest.raises(Interrupted):
        prepare_sentences([open_one(tmp_path / "a.txt")], ByteTokenizer(), work=Work(should_stop=lambda: True))


def test_a_split_keeps_documents_whole() -> None:
    corpus = corpus_of(MANY)
    train, valid = corpus.split(fraction=0.25)
    assert train.num_documents + valid.num_documents == corpus.num_documents
    assert np.concatenate([train.ids, valid.ids]).tolist() == corpus.ids.tolist()
    assert 0.15 < len(valid.ids) / len(corpus.ids) < 0.35
    assert train.fingerprint != valid.fingerprint
    joined = np.concatenate([np.diff(train.offsets), np.diff(valid.offsets)])
    assert joined.tolist() == np.diff(corpus.offsets).tolist()
    assert all(part.num_documents >= 2 for part in corpus_of(MANY[:4]).split(fraction=0.01))
    with pytest.raises(InputError, match="3 documents cannot be split"):
        corpus_of(MANY[:3]).split(fraction=0.5)


# --- from sentences to pairs -----------------------------------------------------------------------------------------


def texts(pairs: SentencePairs, epoch: int) -> list[tuple[list[int], list[int], int]]:
    """(first text, second text, label) of every sample, its special tokens and types checked."""
    special = tokenizer().special
    found = []
    for sample in pairs.examples(epoch, range(len(pairs))):
        assert len(sample) <= pairs.seq_len and sample.token_type_ids is not None
        assert sample.ids[0] == special.cls and sample.ids[-1] == special.sep
        [middle, end] = np.flatnonzero(sample.ids == special.sep).tolist()
        assert sample.token_type_ids.tolist() == [0] * (middle + 1) + [1] * (end - middle)
        assert isinstance(sample.label, int)
        found.append((sample.ids[1:middle].tolist(), sample.ids[middle + 1 : end].tolist(), sample.label))
    return found


@given(
    documents=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=9), min_size=2, max_size=8).filter(
        lambda documents: any(len(document) > 1 for document in documents)
    ),
    epoch=st.integers(0, 3),
)
def test_a_pair_is_two_neighbours_or_from_two_documents(documents: list[list[int]], epoch: int) -> None:
    pairs = pairs_of(documents)
    corpus = pairs.corpus
    starts = corpus.offsets[corpus.documents[:-1]] + 100
    for first, second, label in texts(pairs, epoch):
        assert first and second and (np.diff(first) == 1).all() and (np.diff(second) == 1).all()
        documents_of = [np.searchsorted(starts, text[0], side="right") for text in (first, second)]
        assert (second[0] == first[-1] + 1) == (label == 0)
        assert (documents_of[0] == documents_of[1]) == (label == 0)
        assert first[-1] + 1 - 100 in corpus.offsets  # the first text ends, and the second begins, with a sentence
        assert second[0] - 100 in corpus.offsets


@given(st.integers(0, 5), st.integers(0, 5))
def test_half_of_the_pairs_are_random(epoch: int, seed: int) -> None:
    labels = [label for _, _, label in texts(pairs_of(MANY, seed=seed), epoch)]
    assert sum(labels) == len(labels) // 2


def test_samples_are_a_pure_function_of_seed_epoch_and_index() -> None:
    first, second = pairs_of(MANY, seed=1), pairs_of(MANY, seed=1)
    assert texts(first, 3) == texts(second, 3)
    assert [sample.ids.tolist() for sample in first.examples(3, [4, 2])] == [
        second.examples(3, [index])[0].ids.tolist() for index in (4, 2)
    ]
    assert texts(first, 3) != texts(first, 4)
    assert texts(first, 3) != texts(pairs_of(MANY, seed=2), 3)


def test_every_document_of_two_sentences_is_read_to_its_end() -> None:
    pairs = pairs_of(MANY, seq_len=64)
    real = {token for epoch in range(40) for first, second, label in texts(pairs, epoch) if label == 0
            for token in (*first, *second)}  # fmt: skip
    bounds = pairs.corpus.documents
    expected = [pairs.corpus.tokens(int(a), int(b)) for a, b in pairwise(bounds) if b - a > 1]
    assert real == set(np.concatenate(expected).tolist())


def test_any_sentence_may_be_drawn_as_a_second_text() -> None:
    pairs = pairs_of(MANY[:5], seq_len=64)
    drawn = {second[0] for epoch in range(400) for _, second, label in texts(pairs, epoch) if label == 1}
    assert drawn == set((pairs.corpus.offsets[:-1] + 100).tolist())


def test_lengths_are_those_of_real_pairs() -> None:
    pairs = pairs_of(MANY)
    for sample, length in zip(pairs.examples(0, range(len(pairs))), pairs.lengths, strict=True):
        assert len(sample) <= pairs.seq_len
        assert len(sample) == length or sample.label == 1


def test_most_spans_fill_the_length_and_some_are_short() -> None:
    pairs = pairs_of([[2] * 2000, [2] * 2000], seq_len=43)
    share = (pairs.lengths < 40).mean()
    assert 0.05 < share < 0.35 and (pairs.lengths == 43).mean() > 0.6


def test_a_long_pair_loses_the_outer_ends_of_its_longer_text() -> None:
    pairs = pairs_of([[30, 4], [5, 30]], seq_len=15)
    real = [(first, second) for epoch in range(4) for first, second, label in texts(pairs, epoch) if label == 0]
    assert {(tuple(first), tuple(second)) for first, second in real} == {
        (tuple(range(122, 130)), tuple(range(130, 134))),
        (tuple(range(134, 139)), tuple(range(139, 146))),
    }


def test_types_are_left_out_where_template_or_model_has_none() -> None:
    corpus = corpus_of(MANY)
    for pairs in (
        SentencePairs(corpus, tokenizer("roberta"), seq_len=20),
        SentencePairs(corpus, tokenizer(), seq_len=20, token_types=False),
    ):
        assert all(sample.token_type_ids is None for sample in pairs.examples(0, range(4)))


def test_corpora_without_pairs_are_refused() -> None:
    with pytest.raises(InputError, match="at least two documents, found 1"):
        pairs_of([[1, 2, 3]])
    with pytest.raises(InputError, match="no document has the two sentences"):
        pairs_of([[1], [2], [3]])
    with pytest.raises(InputError, match="leave no room for two texts") as caught:
        pairs_of(MANY, seq_len=4)
    assert caught.value.hint == "set it to at least 5"
