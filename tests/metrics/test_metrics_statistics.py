"""Correlations and bootstrap intervals."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.metrics.classification import f1_macro
from tformer.metrics.statistics import (
    bootstrap_interval,
    f1_macro_rows,
    mean_rows,
    pearson,
    principal_components,
    spearman,
)

ROWS = st.integers(2, 20).flatmap(
    lambda size: st.lists(
        st.tuples(*(st.lists(st.integers(0, 3), min_size=size, max_size=size) for _ in range(2))),
        min_size=1,
        max_size=4,
    )
)


@given(ROWS)
def test_statistics_of_resamples_are_those_of_each_alone(rows: list[tuple[list[int], list[int]]]) -> None:
    xs, ys = (np.array(side) for side in zip(*rows, strict=True))
    for of_all, of_one in (
        (partial(f1_macro_rows, num_classes=4), partial(f1_macro, num_classes=4)),
        (pearson, pearson),
        (spearman, spearman),
    ):
        expected = [of_one(x, y) for x, y in zip(xs, ys, strict=True)]
        np.testing.assert_allclose(of_all(xs, ys), expected, atol=1e-9)


def test_the_interval_of_a_share_is_that_of_the_binomial() -> None:
    correct = np.arange(1000) < 800
    low, high = bootstrap_interval(mean_rows, correct, samples=4000)
    half = 1.96 * math.sqrt(0.8 * 0.2 / 1000)
    assert (low, high) == pytest.approx((0.8 - half, 0.8 + half), abs=0.003)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3).random((200, 150)) < 0.7
    intervals = [bootstrap_interval(mean_rows, row, samples=300) for row in draws]
    assert 0.88 <= np.mean([low <= 0.7 <= high for low, high in intervals]) <= 0.99


def test_an_interval_is_the_same_every_time_and_constants_do_not_vary() -> None:
    values = np.random.default_rng(0).normal(size=99)
    assert bootstrap_interval(mean_rows, values) == bootstrap_interval(mean_rows, values)
    assert bootstrap_interval(mean_rows, np.ones(7)) == (1.0, 1.0)


def test_arrays_are_resampled_alike_and_in_parts() -> None:
    xs = np.random.default_rng(0).normal(size=3000)  # 1000 resamples of 3000 do not fit into one part
    assert bootstrap_interval(pearson, xs, 2 * xs) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("arrays", [([1, 2], [1]), ([],)])
def test_unequal_or_empty_lists_are_refused(arrays: tuple[list[int], ...]) -> None:
    with pytest.raises(ValueError, match="found shapes"):
        bootstrap_interval(mean_rows, *arrays)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (3, 3), (2, 5), (1, 4), (9, 1)])
def test_principal_components_are_those_of_the_singular_value_decomposition(shape: tuple[int, int]) -> None:
    """X - mean = U S Vᵀ: coordinates U S, of which the largest is positive; shares S² / Σ S²."""
    rows = (np.random.default_rng(sum(shape)).normal(size=shape) + 5).astype(np.float32)
    found, shares = principal_components(rows, 3)
    left, scale, _ = np.linalg.svd(rows - rows.mean(0, dtype=float), full_matrices=False)
    known = min(3, *shape)
    np.testing.assert_allclose(np.abs(found[:, :known]), np.abs(left * scale)[:, :known], atol=1e-9)
    np.testing.assert_allclose(shares[:known], (scale**2 / ((scale**2).sum() or 1))[:known], atol=1e-12)
    assert found.shape == (shape[0], 3) and not found[:, known:].any() and not shares[known:].any()
    assert all(column.max() >= -column.min() for column in found.T) and 0 <= shares.sum() <= 1 + 1e-12


def test_equal_rows_have_no_components() -> None:
    found, shares = principal_components(np.ones((4, 3), dtype=np.float32), 2)
    assert not found.any() and not shares.any()
