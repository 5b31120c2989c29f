from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.corpus import TokenCorpus
from tformer.data.mixture import MixedWindows, Mixture
from tformer.data.windows import LmWindows
from tformer.errors import InputError


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
        assert (row == sources[number].window(epoch, index)).all()
        assert (np.diff(row) == 1).all()
    assert (mixed.window(1, 3) == rows[3]).all()
