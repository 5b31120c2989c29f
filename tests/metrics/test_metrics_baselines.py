"""Baselines: frequencies are those of the data, every id has a probability, and certain guesses cost nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.metrics.baselines import bigram, constant_scores, shares, unigram

COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any).map(np.array)
TOKENS = st.lists(st.integers(0, 6), min_size=2, max_size=80).map(np.array)


def neighbours(ids: np.ndarray) -> np.ndarray:
    return np.stack([ids[:-1], ids[1:]])


@given(COUNTS)
def test_every_id_has_a_share_in_the_order_of_the_counts(counts: np.ndarray) -> None:
    found = shares(counts)
    assert found.sum() == pytest.approx(1) and (found > 0).all()
    assert (np.sort(counts) == counts[np.argsort(found, kind="stable")]).all()


def test_a_constant_text_costs_nothing() -> None:
    found = unigram(np.array([0, 10_000, 0]), np.array([0, 300, 0]))
    assert 0 <= found["loss"] < 1e-4 and found["accuracy"] == 1 and found["perplexity"] == pytest.approx(1, abs=1e-4)


def test_equally_frequent_ids_have_the_entropy_of_a_die() -> None:
    found = unigram(np.full(6, 1000), np.full(6, 7))
    assert found["loss"] == pytest.approx(math.log(6)) and found["accuracy"] == pytest.approx(1 / 6)


def test_a_cycle_is_certain_after_the_last_token_and_not_before() -> None:
    cycle = np.tile(np.arange(5), 2000)
    found = bigram(neighbours(cycle), neighbours(cycle[:101]), num_ids=5)
    assert found["loss"] < 2e-3 and unigram(np.bincount(cycle), np.full(5, 20))["loss"] == pytest.approx(math.log(5))


@given(TOKENS, TOKENS)
def test_a_bigram_is_a_distribution_over_the_next_token(train: np.ndarray, text: np.ndarray) -> None:
    for last in text.tolist():
        losses = [bigram(neighbours(train), np.array([[last], [token]]), num_ids=8)["loss"] for token in range(8)]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)


@given(TOKENS, TOKENS)
def test_after_a_token_that_was_never_seen_a_bigram_is_the_unigram(train: np.ndarray, text: np.ndarray) -> None:
    counts, found = (np.bincount(ids, minlength=8) for ids in (train[1:], text))
    after_7 = np.stack([np.full(len(text), 7), text])
    expected = unigram(counts, found)["loss"]
    assert bigram(neighbours(train), after_7, num_ids=8)["loss"] == pytest.approx(expected)


def test_a_constant_answer_is_the_majority_the_frequent_labels_or_the_mean() -> None:
    assert int(np.argmax(constant_scores(np.array([0, 2, 2, 1]), num_labels=3))) == 2
    several = np.array([[True, False, True], [True, False, False], [True, True, False]])
    assert [score > 0 for score in constant_scores(several, num_labels=3)] == [True, False, False]
    assert constant_scores(np.array([1.0, 2.0, 6.0]), num_labels=0) == [3.0]
