"""Windows of causal and of masked language models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.batching.mixture import MixedWindows
from tformer.data.batching.windows import LmWindows, MaskedWindows
from tformer.data.shards.corpus import TokenCorpus
from tformer.support.errors import InputError
from tformer.tasks.masked_text import Joined


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


def test_concat_windows_are_vectorized_and_equal_single_ones() -> None:
    windows = LmWindows(corpus_of([50, 60, 70]), 8, seed=3)
    rows = windows.windows(2, [5, 0, 7])
    assert rows.shape == (3, 9) and rows.dtype == np.int64
    for row, index in zip(rows, [5, 0, 7], strict=True):
        assert (row == windows.examples(2, [index])[0].ids).all()


def test_concat_one_window_needs_its_label_too() -> None:
    assert len(LmWindows(corpus_of([9]), 8)) == 1
    with pytest.raises(InputError, match="8 tokens are fewer than the 9") as caught:
        LmWindows(corpus_of([8]), 8)
    assert caught.value.hint is not None and "--set data.seq_len=7 or less" in caught.value.hint
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
    with pytest.raises(AssertionError, match='packing "concat"'):
        LmWindows(corpus_of([5]), 8, packing="none").windows(0, [0])


CLS, SEP, EOS = 90_001, 90_002, 90_003
ROOM = 8


def make(sizes: list[int], **options: Any) -> MaskedWindows:
    return MaskedWindows(corpus_of(sizes), ROOM + 2, prefix=[CLS], suffix=[SEP], **options)


def texts(windows: MaskedWindows, epoch: int) -> list[list[int]]:
    """The text of every sample of an epoch, checked to be consecutive and inside its special tokens."""
    found = []
    for sample in windows.examples(epoch, range(len(windows))):
        assert sample.ids.dtype == np.int64
        assert sample.ids[0] == CLS and sample.ids[-1] == SEP and len(sample) <= ROOM + 2
        inner = sample.ids[1:-1]
        assert len(inner) >= 1 and (np.diff(inner) == 1).all()
        found.append(inner.tolist())
    return found


sizes_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=20)


@given(
    sizes=sizes_of_documents,
    packing=st.sampled_from(["concat", "documents", "none"]),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 5),
)
def test_every_token_appears_in_every_epoch(sizes: list[int], packing: Any, epoch: int, seed: int) -> None:
    windows = make(sizes, packing=packing, seed=seed)
    seen = [token for text in texts(windows, epoch) for token in text]
    assert set(seen) == set(range(sum(sizes)))
    if packing != "concat":
        assert len(seen) == len(set(seen))


@given(sizes=sizes_of_documents, packing=st.sampled_from(["concat", "documents", "none"]))
def test_windows_that_do_not_move_hold_every_token_once(sizes: list[int], packing: Any) -> None:
    windows = make(sizes, packing=packing, moves=False)
    found = texts(windows, 0)
    assert sorted(token for text in found for token in text) == list(range(sum(sizes))) and found == texts(windows, 7)
    if packing == "concat":  # as few as possible, and equally long
        lengths = [len(text) for text in found]
        assert len(found) == -(-sum(sizes) // ROOM) and max(lengths) - min(lengths) <= 1


@given(sizes=sizes_of_documents, packing=st.sampled_from(["concat", "documents", "none"]))
def test_the_window_around_a_token_has_the_most_context_on_both_sides(sizes: list[int], packing: Any) -> None:
    total = sum(sizes)
    windows = make(sizes, packing=packing, moves=False)
    for token, (start, size, place) in enumerate(zip(*windows.around(np.arange(total)), strict=True)):
        ids = windows.window(start, size)
        assert ids[place] == token and ids[0] == CLS and ids[-1] == SEP
        before, after = place - 1, len(ids) - 2 - place
        if packing == "concat":
            assert before + after + 1 == min(ROOM, total)
            assert before >= min(token, ROOM // 2 - 1) and after >= min(total - 1 - token, ROOM // 2 - 1)


@given(tokens=st.integers(1, 400), epoch=st.integers(0, 5))
def test_concat_windows_have_one_length_and_equal_their_examples(tokens: int, epoch: int) -> None:
    windows = make([tokens])
    rows = windows.windows(epoch, range(len(windows)))
    assert windows.lengths is None and rows.shape == (len(windows), min(tokens, ROOM) + 2)
    assert rows.tolist() == [sample.ids.tolist() for sample in windows.examples(epoch, range(len(windows)))]
    assert rows.size - 2 * len(rows) - tokens <= 2 * ROOM  # few tokens are seen twice


def test_masked_concat_offsets_vary_between_epochs_and_depend_on_the_seed() -> None:
    offsets = [make([1000], seed=1).offset(epoch) for epoch in range(100)]
    assert set(offsets) == set(range(ROOM))
    assert offsets != [make([1000], seed=2).offset(epoch) for epoch in range(100)]


def test_a_corpus_shorter_than_a_window_is_one_window() -> None:
    windows = make([3])
    assert len(windows) == 1 and windows.examples(0, [0])[0].ids.tolist() == [CLS, 0, 1, 2, SEP]


@given(sizes=sizes_of_documents)
def test_masked_documents_packing_keeps_short_documents_whole(sizes: list[int]) -> None:
    windows = make(sizes, packing="documents", document_mask=True)
    ends = np.cumsum(sizes)
    holders: dict[int, set[int]] = {}
    for number, sample in enumerate(windows.examples(0, range(len(windows)))):
        own = np.searchsorted(ends, sample.ids[1:-1], side="right")
        assert sample.document_ids is not None
        assert (sample.document_ids[1:-1] == own - own[0]).all()
        assert sample.document_ids[0] == 0 and sample.document_ids[-1] == sample.document_ids[-2]
        for document in set(own.tolist()):
            holders.setdefault(document, set()).add(number)
    assert all(len(holders[document]) == 1 for document, size in enumerate(sizes) if size <= ROOM)


@given(sizes=sizes_of_documents, packing=st.sampled_from(["documents", "none"]))
def test_lengths_are_those_of_the_samples(sizes: list[int], packing: Any) -> None:
    windows = make(sizes, packing=packing)
    assert windows.lengths is not None
    assert windows.lengths.tolist() == [len(sample) for sample in windows.examples(0, range(len(windows)))]


def test_masked_documents_packing_is_greedy() -> None:
    assert make([4, 4, 4, 3, 9], packing="documents").lengths.tolist() == [10, 9, 10, 3]  # type: ignore[union-attr]


@given(sizes=sizes_of_documents)
def test_no_packing_gives_each_document_alone(sizes: list[int]) -> None:
    ends = np.cumsum(sizes)
    found = texts(make(sizes, packing="none"), 0)
    assert len(found) == sum(-(-size // ROOM) for size in sizes)
    assert all(len(set(np.searchsorted(ends, text, side="right").tolist())) == 1 for text in found)


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_the_token_that_ends_documents_is_not_written_twice(packing: Any) -> None:
    corpus = TokenCorpus.from_ids([1, 2, EOS, 3, 4, 5, EOS], documents=[0, 3])
    windows = MaskedWindows(corpus, 6, prefix=[CLS], suffix=[EOS], packing=packing)
    rows = [sample.ids.tolist() for sample in windows.examples(0, range(len(windows)))]
    assert rows == [[CLS, 1, 2, EOS], [CLS, 3, 4, 5, EOS]]
    assert windows.lengths is not None and windows.lengths.tolist() == [4, 5]


def test_without_a_template_a_window_is_all_text() -> None:
    windows = MaskedWindows(corpus_of([20]), 4)
    assert windows.windows(0, [1]).shape == (1, 4)


def test_several_corpora_mix() -> None:
    mixed = MixedWindows([make([40]), make([80])], [1.0, 2.0], seed=3)
    assert mixed.windows(0, np.arange(len(mixed))).shape[1] == ROOM + 2


def test_a_template_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(InputError, match="2 tokens leave no room") as caught:
        MaskedWindows(corpus_of([5]), 2, prefix=[CLS], suffix=[SEP])
    assert caught.value.hint == "set it to at least 3"
    with pytest.raises(AssertionError, match='packing "concat"'):
        make([5], packing="none").windows(0, [0])


@given(sizes=sizes_of_documents, most=st.sampled_from([1, 7, 10_000]), parts=st.integers(1, 3))
def test_pseudo_perplexity_counts_each_token_once(sizes: list[int], most: int, parts: int) -> None:
    """With overlapping windows, 101 tokens at a length of 64 counted 186 times."""
    left_out, total = [0, 5], sum(sizes)
    joined = Joined([make(sizes, moves=False) for _ in range(parts)])
    windows, places = joined.around_each_token(most, left_out=left_out)
    found = Counter(int(ids[place]) for ids, place in zip(windows, places, strict=True))
    assert not found.keys() & set(left_out)
    if most >= parts * total:
        assert found == dict.fromkeys(set(range(total)) - set(left_out), parts)
    else:
        assert sum(found.values()) <= max(most, parts)
