"""Sets of pairs mixed by weight, as T5 mixes its tasks: shares, coverage, fixed lengths, resumable draws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.pair_makers import rows_of, tokenise
from tformer.data.mixture import MixedWindows
from tformer.data.pair_mixture import MixedPairs
from tformer.data.pair_set import PairTokens
from tformer.data.plan import BatchPlan, Cursor
from tformer.errors import InputError


def task(name: str, size: int) -> PairTokens:
    """Pairs of 1 to 9 words, each target saying which one it is."""
    rows = [("the " * (1 + 7 * n % 9), "cat " * (n % 4 + 1)) for n in range(size)]
    return tokenise(rows_of(rows, task=name, name=f"{name}.tsv"))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_every_epoch_has_the_shares_and_shows_pairs_no_longer_than_told(sizes: list[int], data: st.DataObject) -> None:
    weights = [data.draw(st.floats(0.5, 2)) for _ in sizes]
    sets = [task(f"t{n}", size) for n, size in enumerate(sizes)]
    try:
        mixed = MixedPairs(sets, weights, seed=2)
    except InputError:
        return  # a weight that is too small for one sample
    assert len(mixed) == len(mixed.lengths) == sum(sizes) == mixed.quotas.sum()
    exact = np.array(weights) / sum(weights) * sum(sizes)
    assert (np.abs(mixed.quotas - exact) < 1).all()
    for epoch in (0, 1, 5):
        found = mixed.locate(epoch, range(len(mixed)))
        of_set = np.searchsorted(np.cumsum(sizes), found, side="right")
        assert np.bincount(of_set, minlength=len(sizes)).tolist() == mixed.quotas.tolist()
        shown = mixed.pairs.lengths[found]
        assert (shown <= mixed.lengths).all()


def test_every_pair_is_shown_before_any_again() -> None:
    sets = [task("rare", 60), task("often", 60)]
    mixed = MixedPairs(sets, [1, 4])
    rare = np.flatnonzero(mixed.locate(0, range(len(mixed))) < 60)
    assert len(rare) == 24
    seen: Counter[int] = Counter()
    for epoch in range(5):
        found = mixed.locate(epoch, rare)
        assert len(set(found.tolist())) == len(rare)
        seen.update(found.tolist())
        if epoch == 1:
            assert max(seen.values()) == 1
    assert set(seen) == set(range(60)), "stretches of two or three pairs: all were shown within three epochs"
    often = mixed.locate(0, np.setdiff1d(np.arange(len(mixed)), rare))
    assert set(often.tolist()) == set(range(60, 120)) and max(Counter(often.tolist()).values()) == 2


def test_shares_in_proportion_are_every_pair_once() -> None:
    mixed = MixedPairs([task("a", 30), task("b", 13)], [30, 13])
    for epoch in (0, 3):
        assert sorted(mixed.locate(epoch, range(43)).tolist()) == list(range(43))
    assert sorted(mixed.lengths.tolist()) == sorted(mixed.pairs.lengths.tolist()), "lengths are then exact"


def test_lengths_stay_near_what_is_shown() -> None:
    mixed = MixedPairs([task("a", 90), task("b", 200)], [1, 1], seed=1)
    shown = np.array([len(each) for each in mixed.examples(4, range(len(mixed)))])
    assert shown.sum() > 0.95 * mixed.lengths.sum()


def test_samples_are_a_pure_function_and_carry_their_task() -> None:
    mixed = MixedPairs([task("a", 30), task("b", 30)], [1, 2], seed=3)
    rows = mixed.examples(2, range(60))
    for index in (0, 25, 59):
        (alone,) = mixed.examples(2, [index])
        assert (alone.source == rows[index].source).all() and (alone.target == rows[index].target).all()
    tasks = [mixed.pairs.tasks[row.task] for row in rows]
    assert Counter(tasks) == {"a": 20, "b": 40}


def test_batches_are_cut_by_tokens() -> None:
    mixed = MixedPairs([task("a", 40), task("b", 80)], [1, 1])
    plan = BatchPlan(seed=0, lengths=mixed.lengths, batch_tokens=60, sort_window=64)
    cursor = Cursor()
    while cursor.epoch < 2:
        examples = mixed.examples(cursor.epoch, plan.batch(cursor))
        assert max(map(len, examples)) * len(examples) <= 60
        cursor = plan.next(cursor)


def test_a_weight_too_small_for_one_sample_is_refused() -> None:
    with pytest.raises(InputError, match=r"source 1 has weight 0\.001"):
        MixedPairs([task("a", 20), task("b", 20)], [1, 0.001])


def test_mixed_windows_take_pairs_as_well() -> None:
    sets = [task("a", 20), task("b", 30)]
    mixed = MixedWindows(sets, [1, 2], seed=3, block=30)
    assert (len(mixed), mixed.seq_len, mixed.lengths) == (50, 16, None)
    rows = mixed.examples(1, list(range(30)))
    for row, (number, epoch, index) in zip(rows, mixed.locate(1, list(range(30))), strict=True):
        assert row.source.tolist() == sets[number].examples(epoch, [index])[0].source.tolist()
