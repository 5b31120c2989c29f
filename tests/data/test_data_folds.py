"""Folds are disjoint parts with the share of every class; the examples of a group stay together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.sources.folds import fold_numbers
from tformer.support.errors import InputError

CLASSES = st.lists(st.integers(0, 4), min_size=6, max_size=80).map(np.array)
FOLDS = st.integers(2, 6)


def folds_of(labels: np.ndarray, folds: int, groups: np.ndarray | None = None) -> np.ndarray:
    return fold_numbers(labels, folds=folds, name="data", groups=groups)


def spread(counts: np.ndarray) -> int:
    return int(counts.max() - counts.min())


@given(CLASSES, FOLDS)
def test_every_fold_has_the_share_of_every_class(labels: np.ndarray, folds: int) -> None:
    found = folds_of(labels, folds)
    assert spread(np.bincount(found, minlength=folds)) <= 1
    for label in np.unique(labels):
        assert spread(np.bincount(found[labels == label], minlength=folds)) <= 1


@given(CLASSES, FOLDS)
def test_folds_depend_on_the_labels_alone(labels: np.ndarray, folds: int) -> None:
    assert np.array_equal(folds_of(labels, folds), folds_of(labels.copy(), folds))


def test_folds_are_no_runs_of_neighbours() -> None:
    found = folds_of(np.zeros(60, dtype=np.int64), 3)
    assert (np.diff(found) != 0).sum() > 20


def test_counts_of_classes_are_those_of_scikit_learn() -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    labels = np.random.default_rng(0).integers(0, 3, 100)
    theirs = [np.bincount(labels[test]) for _, test in selection.StratifiedKFold(5).split(labels, labels)]
    found = folds_of(labels, 5)
    ours = [np.bincount(labels[found == fold]) for fold in range(5)]
    assert all(
        sorted(column) == sorted(other) for column, other in zip(np.array(ours).T, np.array(theirs).T, strict=True)
    )


def test_sets_of_labels_and_ranges_of_scores_are_spread() -> None:
    rng = np.random.default_rng(1)
    table = rng.random((90, 3)) < 0.4
    found = folds_of(table, 3)
    for each in np.unique(table, axis=0):
        assert spread(np.bincount(found[(table == each).all(axis=1)], minlength=3)) <= 1
    scores = rng.normal(size=200).astype(np.float32)
    means = [scores[folds_of(scores, 4) == fold].mean() for fold in range(4)]
    assert max(means) - min(means) < 0.2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=4, max_size=60), st.integers(2, 4))
def test_the_examples_of_a_group_are_in_one_fold(rows: list[tuple[int, int]], folds: int) -> None:
    labels, groups = (np.array(column) for column in zip(*rows, strict=True))
    if len(np.unique(groups)) < folds:
        with pytest.raises(InputError, match=rf"data: found \d groups, expected at least {folds}"):
            folds_of(labels, folds, groups)
        return
    found = folds_of(labels, folds, groups)
    for group in np.unique(groups):
        assert len(np.unique(found[groups == group])) == 1
    assert len(np.unique(found)) == folds  # none is empty


def test_groups_of_equal_sizes_are_spread_as_evenly_as_examples() -> None:
    labels = np.repeat(np.arange(30) % 2, 4)
    found = folds_of(labels, 5, np.repeat(np.arange(30), 4))
    assert all(list(np.bincount(found[labels == label])) == [12] * 5 for label in (0, 1))


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(InputError, match="data: found 3 examples, expected at least 5, one for each fold"):
        folds_of(np.arange(3), 5)


def test_the_names_of_groups_have_no_meaning() -> None:
    labels, groups = np.arange(24) % 2, np.arange(24) // 3
    found = folds_of(labels, 3, groups)
    assert np.array_equal(found, folds_of(labels, 3, -groups)) and np.array_equal(
        found, folds_of(labels, 3, groups * 7 % 8)
    )
