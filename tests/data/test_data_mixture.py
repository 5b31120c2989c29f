"""Mixtures of windows and of pairs; samples with segmentations that are drawn again in each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.pair_makers import rows_of, tokenize
from tformer.data.batching.mixture import MixedPairs, MixedWindows, Mixture
from tformer.data.batching.plan import BatchPlan, Cursor
from tformer.data.batching.subwords import SampledSubwords
from tformer.data.batching.windows import LmWindows
from tformer.data.shards.corpus import Example, TokenCorpus
from tformer.data.shards.pair_tokens import PairExample, PairTokens
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.segmentation import segmenter_of


@given(weights=st.lists(st.floats(0.2, 5), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_mixture_hits_its_quotas_exactly_in_every_block(weights: list[float], seed: int) -> None:
    mixture = Mixture(weights, block=200, seed=seed)
    assert mixture.quotas.sum() == 200
    assert (np.abs(mixture.quotas - 200 * np.array(weights) / sum(weights)) < 1).all()
    sources, _ = mixture.draw(np.arange(600))
    for block in sources.reshape(3, 200):
        assert np.bincount(block, minlength=len(weights)).tolist() == mixture.quotas.tolist()


def test_mixture_goes_through_each_source_without_gaps() -> None:
    mixture = Mixture([3, 1, 2], block=60, seed=4)
    sources, positions = mixture.draw(np.arange(300))
    for number, quota in enumerate(mixture.quotas):
        assert sorted(positions[sources == number].tolist()) == list(range(5 * quota))


def test_mixture_draws_are_closed_form() -> None:
    mixture = Mixture([3, 1], block=40, seed=4)
    sources, positions = mixture.draw(np.arange(200))
    for draw in (0, 39, 40, 123):
        source, position = mixture.draw([draw])
        assert (source[0], position[0]) == (sources[draw], positions[draw])


def test_mixture_is_mixed_inside_a_block() -> None:
    sources, _ = Mixture([1, 1], block=100).draw(np.arange(100))
    assert 30 < (np.diff(sources) != 0).sum() < 70


def test_mixture_refuses_a_weight_without_a_draw() -> None:
    with pytest.raises(InputError, match=r"source 1 has weight 0\.001 .* block of 100"):
        Mixture([1, 0.001], block=100)


def test_mixed_windows_use_every_window_of_a_source_before_any_again() -> None:
    corpora = [TokenCorpus.from_ids(np.arange(200)), TokenCorpus.from_ids(np.arange(1000, 1100))]
    sources = [LmWindows(corpus, 8, seed=number) for number, corpus in enumerate(corpora)]
    mixed = MixedWindows(sources, [1, 2], seed=3, block=30)
    assert len(mixed) == len(sources[0]) + len(sources[1])
    places = [mixed.locate(epoch, [index])[0] for epoch in range(6) for index in range(len(mixed))]
    for number, source in enumerate(sources):
        own = [place[1:] for place in places if place[0] == number]
        first_epoch = [index for epoch, index in own if epoch == 0]
        assert sorted(first_epoch) == list(range(len(source)))
        assert len(own) == len(set(own))
    share = sum(place[0] == 1 for place in places[:120]) / 120
    assert share == pytest.approx(2 / 3)


def test_mixed_windows_read_what_they_locate() -> None:
    corpora = [TokenCorpus.from_ids(np.arange(200)), TokenCorpus.from_ids(np.arange(1000, 1100))]
    sources = [LmWindows(corpus, 8, seed=1) for corpus in corpora]
    mixed = MixedWindows(sources, [1, 1], block=10)
    rows = mixed.windows(1, list(range(12)))
    for row, (number, epoch, index) in zip(rows, mixed.locate(1, list(range(12))), strict=True):
        assert (row == sources[number].examples(epoch, [index])[0].ids).all()
        assert (np.diff(row) == 1).all()
    assert (mixed.examples(1, [3])[0].ids == rows[3]).all()


def task(name: str, size: int) -> PairTokens:
    """Pairs of 1 to 9 words, each target saying which one it is."""
    rows = [("the " * (1 + 7 * n % 9), "cat " * (n % 4 + 1)) for n in range(size)]
    return tokenize(rows_of(rows, task=name, name=f"{name}.tsv"))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_every_epoch_has_the_shares_and_pairs_within_their_lengths(sizes: list[int], data: st.DataObject) -> None:
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


def test_lengths_are_near_those_of_the_pairs() -> None:
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
        examples = mixed.examples(cursor.epoch, plan.global_batch(cursor))
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


# -- segmentations, fixed by (seed, epoch, number); never too long; aligned rows ---------------------------------------

WORDS = "the quick brown foxes were jumping over lazy dogs while others kept sleeping"


@cache
def tokenizer() -> Tokenizer:
    options = TokenizerOptions(model="bpe", vocab_size=120, template="seq2seq")
    return train_tokenizer(lambda: iter([f"{WORDS}. " * 50]), options)


def ids_of(text: str) -> np.ndarray:
    return np.array(tokenizer().encode(text), dtype=np.int64)


def sampled(samples: Sequence[Any], *, seed: int = 1, longest: int = 1000, rate: float = 0.3) -> SampledSubwords:
    segmenter = segmenter_of(tokenizer(), rate)
    return SampledSubwords(
        lambda epoch, numbers: [samples[number] for number in numbers],
        seed=seed,
        source=segmenter,
        target=segmenter,
        longest=(longest, longest),
    )


def test_draws_depend_on_seed_epoch_and_number_alone() -> None:
    """Not on the batch or the order in which samples are read: resumed runs and all processes read the same ids."""
    samples = [PairExample(ids_of(WORDS), ids_of(WORDS[::2]), task=number) for number in range(6)]
    read = sampled(samples)
    whole, parts = read(3, range(6)), [read(3, [number])[0] for number in (5, 1, 0)]
    for part, number in zip(parts, (5, 1, 0), strict=True):
        assert np.array_equal(part.source, whole[number].source) and np.array_equal(part.target, whole[number].target)
        assert part.task == number
    other_epoch, other_seed = read(4, range(6)), sampled(samples, seed=2)(3, range(6))
    for others in (other_epoch, other_seed):
        assert any(not np.array_equal(one.source, other.source) for one, other in zip(whole, others, strict=True))
    assert len({tuple(sample.source) for sample in whole}) > 1  # equal texts have draws of their own


def test_a_text_that_would_be_too_long_keeps_its_plain_segmentation() -> None:
    plain = ids_of(WORDS)
    for epoch in range(20):
        [sample] = sampled([Example(plain)], longest=len(plain), rate=0.9)(epoch, [0])
        assert len(sample.ids) <= len(plain)
    [longer] = sampled([Example(plain)], rate=0.9)(0, [0])
    assert len(longer.ids) > len(plain)


def test_labels_stay_and_token_types_follow_the_words() -> None:
    end = tokenizer().special.eos
    first, second = np.append(ids_of(WORDS), end), ids_of(f"{WORDS} again")
    types = np.repeat([0, 1], [len(first), len(second)])
    example = Example(np.concatenate([first, second]), None, types, 7)
    [found] = sampled([example], rate=0.6)(0, [0])
    assert found.label == 7 and len(found.token_type_ids) == len(found.ids) > len(example)
    for kind, ids in ((0, first), (1, second)):
        own = found.ids[found.token_type_ids == kind].tolist()
        assert tokenizer().decode(own) == tokenizer().decode(ids.tolist())


def test_the_ids_given_are_not_changed() -> None:
    plain = ids_of(WORDS)
    before = plain.copy()
    sampled([Example(plain)])(0, [0])
    assert np.array_equal(plain, before)
