"""Metrics of several labels per example against loops, and scikit-learn if present."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tformer.metrics import f1_binary, micro_scores, multi_label_f1_macro, per_label, subset_accuracy

TABLES = st.integers(1, 12).flatmap(
    lambda size: st.tuples(*(arrays.arrays(bool, (size, 3), elements=st.booleans()) for _ in range(2)))
)


@given(TABLES)
def test_scores_of_labels_are_those_of_each_label_alone(tables: tuple[np.ndarray, np.ndarray]) -> None:
    labels, guesses = tables
    expected = [f1_binary(labels[:, index], guesses[:, index]) for index in range(3)]
    assert [score.f1 for score in per_label(labels, guesses)] == pytest.approx(expected)
    assert [score.support for score in per_label(labels, guesses)] == labels.sum(axis=0).tolist()
    occurring = [f1 for f1, index in zip(expected, range(3), strict=True) if (labels | guesses)[:, index].any()]
    assert multi_label_f1_macro(labels, guesses) == pytest.approx(np.mean(occurring) if occurring else 0.0)


@given(TABLES)
def test_micro_pools_all_decisions(tables: tuple[np.ndarray, np.ndarray]) -> None:
    labels, guesses = tables
    assert micro_scores(labels, guesses).f1 == pytest.approx(f1_binary(labels.ravel(), guesses.ravel()))
    expected = np.mean([(row == guess).all() for row, guess in zip(labels, guesses, strict=True)])
    assert subset_accuracy(labels, guesses) == pytest.approx(expected)


def test_multi_label_agrees_with_scikit_learn() -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    labels, guesses = rng.random((100, 4)) < 0.3, rng.random((100, 4)) < 0.4
    for average, ours in (
        ("micro", micro_scores(labels, guesses).f1),
        ("macro", multi_label_f1_macro(labels, guesses)),
    ):
        assert ours == pytest.approx(sklearn_metrics.f1_score(labels, guesses, average=average))
    assert subset_accuracy(labels, guesses) == pytest.approx(sklearn_metrics.accuracy_score(labels, guesses))


def test_tables_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(2, 3\)"):
        subset_accuracy(np.zeros((2, 2)), np.zeros((2, 3)))
