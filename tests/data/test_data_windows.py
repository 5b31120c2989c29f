from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.corpus import TokenCorpus
from tformer.data.windows import LmWindows
from tformer.errors import InputError


def corpus_of(sizes: list[int]) -> TokenCorpus:
    """Documents of these sizes; every id is its own position."""
    starts = (np.cumsum(sizes) - np.array(sizes)).tolist()
    return TokenCorpus.from_ids(np.arange(sum(sizes)), documents=starts)


def predicted(windows: LmWindows, epoch: int) -> list[int]:
    """The positions of all labels of an epoch."""
    samples = windows.examples(epoch, list(range(len(windows))))
    for sample in samples:
        assert (np.diff(sample.ids) == 1).all()
    return [int(label) for sample in samples for label in sample.ids[1:]]


@given(tokens=st.integers(9, 400), epoch=st.integers(0, 5), seed=st.integers(0, 5))
def test_concat_predicts_no_token_twice_and_all_but_the_edges(tokens: int, epoch: int, seed: int) -> None:
    windows = LmWindows(corpus_of([tokens]), 8, seed=seed)
    labels = predicted(windows, epoch)
    start = windows.offset(epoch)
    assert 0 <= start < 8
    assert labels == list(range(start + 1, start + 1 + 8 * len(windows)))
    assert tokens - len(labels) <= 3 * 8


def test_concat_offsets_vary_between_epochs_and_depend_on_the_seed() -> None:
    corpus = corpus_of([1000])
    offsets = [LmWindows(corpus, 16, seed=1).offset(epoch) for epoch in range(100)]
    assert len(set(offsets)) == 16
    assert offsets != [LmWindows(corpus, 16, seed=2).offset(epoch) for epoch in range(100)]


def test_concat_windows_are_vectorised_and_equal_single_ones() -> None:
    windows = LmWindows(corpus_of([50, 60, 70]), 8, seed=3)
    rows = windows.windows(2, [5, 0, 7])
    assert rows.shape == (3, 9) and rows.dtype == np.int64
    for row, index in zip(rows, [5, 0, 7], strict=True):
        assert (row == windows.window(2, index)).all()


def test_concat_one_window_needs_its_label_too() -> None:
    assert len(LmWindows(corpus_of([9]), 8)) == 1
    with pytest.raises(InputError, match="8 tokens are fewer than the 9") as caught:
        LmWindows(corpus_of([8]), 8)
    assert caught.value.hint is not None and "data.seq_len to at most 7" in caught.value.hint
    assert len(LmWindows(corpus_of([8]), 7)) == 1


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20).filter(lambda sizes: max(sizes) > 1))
def test_documents_packing_keeps_short_documents_whole(sizes: list[int]) -> None:
    windows = LmWindows(corpus_of(sizes), 10, packing="documents", document_mask=True)
    labels = predicted(windows, 0)
    assert len(labels) == len(set(labels))
    ends = np.cumsum(sizes)
    samples = windows.examples(0, list(range(len(windows))))
    assert [len(sample) for sample in samples] == windows.lengths.tolist()  # type: ignore[union-attr]
    holders: dict[int, set[int]] = {}
    for number, sample in enumerate(samples):
        assert 2 <= len(sample) <= 11
        own = np.searchsorted(ends, sample.ids, side="right")
        assert sample.document_ids is not None
        assert (sample.document_ids == own - own[0]).all()
        for document in set(own.tolist()):
            holders.setdefault(document, set()).add(number)
    for document, size in enumerate(sizes):
        if 2 <= size <= 11:
            first = sum(sizes[:document])
            inside = set(range(first + 1, first + size))
            assert inside <= set(labels)
            assert len(holders[document]) == 1
        if size > 11:  # split, sharing one id: every token but the first is still predicted
            first = sum(sizes[:document])
            assert set(range(first + 1, first + size)) <= set(labels)
    assert windows.split_documents == sum(size > 11 for size in sizes)


def test_documents_packing_is_greedy() -> None:
    windows = LmWindows(corpus_of([4, 4, 4, 4, 9]), 10, packing="documents")
    assert windows.lengths is not None
    assert windows.lengths.tolist() == [8, 8, 9]


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20).filter(lambda sizes: max(sizes) > 1))
def test_no_packing_gives_each_document_and_splits_without_loss(sizes: list[int]) -> None:
    windows = LmWindows(corpus_of(sizes), 10, packing="none")
    starts = np.cumsum(sizes) - np.array(sizes)
    assert sorted(predicted(windows, 0)) == sorted(
        place for start, size in zip(starts, sizes, strict=True) for place in range(start + 1, start + size)
    )
    assert sum(size > 1 for size in sizes) <= len(windows)
    assert windows.split_documents == sum(size > 11 for size in sizes)


def test_document_ids_mark_documents_in_concatenated_windows() -> None:
    windows = LmWindows(corpus_of([5, 5, 20]), 9, document_mask=True)
    sample = windows.examples(0, [0])[0]
    assert sample.document_ids is not None
    assert (np.diff(sample.document_ids) == np.isin(sample.ids[1:], [5, 10])).all()
    assert sample.document_ids[0] == 0


def test_windows_refuse_a_corpus_without_a_prediction() -> None:
    with pytest.raises(InputError, match="1 tokens are fewer than the 2"):
        LmWindows(corpus_of([1]), 8, packing="none")
    with pytest.raises(InputError, match="no document has the 2 tokens"):
        LmWindows(corpus_of([1, 1, 1]), 8, packing="none")
    with pytest.raises(ValueError, match='packing "concat"'):
        LmWindows(corpus_of([5]), 8, packing="none").windows(0, [0])
