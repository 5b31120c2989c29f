"""Classification metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tformer.metrics.classification import (
    accuracy,
    calibration_curve,
    confusion_matrix,
    expected_calibration_error,
    f1_binary,
    f1_macro,
    mcc,
    micro_scores,
    per_class,
    per_label,
    subset_accuracy,
    top_k_accuracy,
)
from tformer.metrics.statistics import distinct_places, pearson, spearman

CLASSES = 4
PAIRS = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=40)


def loop_scores(pairs: list[tuple[int, int]], wanted: int) -> tuple[float, float, float]:
    hits = sum(1 for true, guess in pairs if true == guess == wanted)
    found = sum(1 for _, guess in pairs if guess == wanted)
    there = sum(1 for true, _ in pairs if true == wanted)
    precision = hits / found if found else 0.0
    recall = hits / there if there else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return precision, recall, f1


@given(PAIRS)
def test_accuracy_and_confusion_count_pairs(pairs: list[tuple[int, int]]) -> None:
    labels, guesses = zip(*pairs, strict=True)
    table = confusion_matrix(labels, guesses, num_classes=CLASSES)
    for true in range(CLASSES):
        for guess in range(CLASSES):
            assert table[true, guess] == pairs.count((true, guess))
    assert accuracy(labels, guesses) == pytest.approx(sum(t == g for t, g in pairs) / len(pairs))


@given(PAIRS)
def test_f1_precision_recall_match_loops(pairs: list[tuple[int, int]]) -> None:
    labels, guesses = zip(*pairs, strict=True)
    scores = per_class(labels, guesses, num_classes=CLASSES)
    for wanted, score in enumerate(scores):
        assert (score.precision, score.recall, score.f1) == pytest.approx(loop_scores(pairs, wanted))
        assert score.support == labels.count(wanted)
        assert f1_binary(labels, guesses, positive=wanted) == pytest.approx(score.f1)
    occurring = set(labels) | set(guesses)
    expected = sum(loop_scores(pairs, wanted)[2] for wanted in occurring) / len(occurring)
    assert f1_macro(labels, guesses, num_classes=CLASSES) == pytest.approx(expected)


@given(PAIRS)
def test_mcc_is_the_correlation_of_one_hot_codes(pairs: list[tuple[int, int]]) -> None:
    labels, guesses = zip(*pairs, strict=True)

    def covariance(xs: tuple[int, ...], ys: tuple[int, ...]) -> float:
        total = 0.0
        for wanted in range(CLASSES):
            share_x, share_y = xs.count(wanted) / len(xs), ys.count(wanted) / len(ys)
            total += sum(((x == wanted) - share_x) * ((y == wanted) - share_y) for x, y in zip(xs, ys, strict=True))
        return total

    spread = covariance(labels, labels) * covariance(guesses, guesses)
    expected = covariance(labels, guesses) / math.sqrt(spread) if spread > 1e-12 else 0.0
    assert mcc(labels, guesses) == pytest.approx(expected, abs=1e-9)


def test_mcc_extremes() -> None:
    assert mcc([0, 1, 0, 1], [0, 1, 0, 1]) == 1.0
    assert mcc([0, 1, 0, 1], [1, 0, 1, 0]) == -1.0
    assert mcc([0, 1, 0, 1], [1, 1, 1, 1]) == 0.0


def test_agreement_with_scikit_learn() -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    labels, guesses = rng.integers(0, CLASSES, 200), rng.integers(0, CLASSES, 200)
    assert f1_macro(labels, guesses, num_classes=CLASSES) == pytest.approx(
        sklearn_metrics.f1_score(labels, guesses, average="macro")
    )
    assert mcc(labels, guesses) == pytest.approx(sklearn_metrics.matthews_corrcoef(labels, guesses))


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30), st.integers(1, 12))
def test_calibration_error_matches_its_definition(rows: list[tuple[float, bool]], bins: int) -> None:
    edges = np.linspace(0.0, 1.0, bins + 1)
    expected = 0.0
    for index in range(bins):
        inside = [
            (confidence, right)
            for confidence, right in rows
            if (confidence > edges[index] or index == 0) and confidence <= edges[index + 1]
        ]
        if inside:
            gap = sum(right for _, right in inside) / len(inside) - sum(c for c, _ in inside) / len(inside)
            expected += abs(gap) * len(inside) / len(rows)
    confidences, correct = zip(*rows, strict=True)
    assert expected_calibration_error(confidences, correct, num_bins=bins) == pytest.approx(expected, abs=1e-12)
    confident, _, counts = calibration_curve(confidences, correct, num_bins=bins)
    assert counts.sum() == len(rows) and (counts > 0).all() and (np.diff(confident) > 0).all()


def test_a_calibrated_model_has_no_calibration_error() -> None:
    assert expected_calibration_error([0.75] * 4, [1, 1, 1, 0]) == 0.0


NUMBERS = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=20)


@given(NUMBERS)
def test_correlations_match_loops(pairs: list[tuple[int, int]]) -> None:
    xs, ys = ([float(value) for value in side] for side in zip(*pairs, strict=True))

    def loop_pearson(a: list[float], b: list[float]) -> float:
        mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
        top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
        low = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
        return top / low if len(set(a)) > 1 and len(set(b)) > 1 else 0.0

    def loop_ranks(values: list[float]) -> list[float]:
        return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]

    assert pearson(xs, ys) == pytest.approx(loop_pearson(xs, ys), abs=1e-9)
    ranked = spearman(distinct_places(xs), distinct_places(ys))
    assert ranked == pytest.approx(loop_pearson(loop_ranks(xs), loop_ranks(ys)), abs=1e-9)


def test_spearman_sees_order_only() -> None:
    xs = np.arange(1.0, 9.0)
    assert spearman(distinct_places(xs), distinct_places(np.exp(xs))) == pytest.approx(1.0)
    assert pearson(xs, np.exp(xs)) < 0.9


def test_correlation_with_a_constant_is_zero() -> None:
    assert pearson([0.1] * 7, list(range(7))) == 0.0


@pytest.mark.parametrize("metric", [accuracy, mcc, f1_binary, pearson, spearman, expected_calibration_error])
def test_unequal_lengths_are_refused_with_both(metric: object) -> None:
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        metric([0, 1, 1], [0, 1])  # type: ignore[operator]


def test_a_class_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match="label 4 is not one of the 4 classes"):
        confusion_matrix([0, 4], [0, 1], num_classes=4)


TABLES = st.integers(1, 12).flatmap(
    lambda size: st.tuples(*(arrays.arrays(bool, (size, 3), elements=st.booleans()) for _ in range(2)))
)


@given(TABLES)
def test_scores_of_labels_are_those_of_each_label_alone(tables: tuple[np.ndarray, np.ndarray]) -> None:
    labels, guesses = tables
    expected = [f1_binary(labels[:, index], guesses[:, index]) for index in range(3)]
    assert [score.f1 for score in per_label(labels, guesses)] == pytest.approx(expected)
    assert [score.support for score in per_label(labels, guesses)] == labels.sum(axis=0).tolist()


@given(TABLES)
def test_micro_pools_all_decisions(tables: tuple[np.ndarray, np.ndarray]) -> None:
    labels, guesses = tables
    assert micro_scores(labels, guesses).f1 == pytest.approx(f1_binary(labels.ravel(), guesses.ravel()))
    expected = np.mean([(row == guess).all() for row, guess in zip(labels, guesses, strict=True)])
    assert subset_accuracy(labels, guesses) == pytest.approx(expected)


def test_multi_label_agrees_with_scikit_learn() -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    labels, guesses = rng.random((100, 5)) < 0.3, rng.random((100, 5)) < 0.4
    labels[:, 4] = guesses[:, 4] = False  # a label that is absent
    for average, ours in (
        ("micro", micro_scores(labels, guesses).f1),
        ("macro", np.mean([score.f1 for score in per_label(labels, guesses)])),
    ):
        assert ours == pytest.approx(sklearn_metrics.f1_score(labels, guesses, average=average, zero_division=0))
    assert subset_accuracy(labels, guesses) == pytest.approx(sklearn_metrics.accuracy_score(labels, guesses))


def test_tables_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(2, 3\)"):
        subset_accuracy(np.zeros((2, 2)), np.zeros((2, 3)))


def test_top_k_accuracy_is_the_share_of_labels_among_the_best() -> None:
    draw = np.random.default_rng(0)
    labels, scores = draw.integers(0, 8, 200), draw.normal(size=(200, 8))
    for k in (1, 3, 8):
        ranks = (scores > scores[np.arange(200), labels][:, None]).sum(axis=1)
        assert top_k_accuracy(labels, scores, k) == pytest.approx(float((ranks < k).mean()))
    assert top_k_accuracy(labels, scores, 8) == 1.0
