"""Curves of a classifier's decisions are those of scikit-learn; the picture of a report draws them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.evaluation.reports import MAX_CURVES, classification_report, curves_of, log_softmax, multi_label_report
from tformer.metrics.classification import calibration_curve, expected_calibration_error
from tformer.viz.evaluation import MAX_POINTS, plots_of
from tformer.viz.plots import Heat, Lines

metrics = pytest.importorskip("sklearn.metrics")
calibration = pytest.importorskip("sklearn.calibration")


def made(classes: int, size: int = 300, digits: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Labels and rounded probabilities: many of them are equal."""
    rng = np.random.default_rng(classes)
    labels = rng.integers(0, classes, size)
    scores = rng.normal(size=(size, classes))
    scores[np.arange(size), labels] += 1.0
    return labels, np.exp(log_softmax(scores)).round(digits)


def require_curve(found: dict[str, Any], truth: np.ndarray, values: np.ndarray) -> None:
    precision, recall, _ = metrics.precision_recall_curve(truth, values)
    assert found["precision"] == pytest.approx(precision) and found["recall"] == pytest.approx(recall)
    assert found["average_precision"] == pytest.approx(metrics.average_precision_score(truth, values))


def test_two_classes_have_the_curves_of_the_second() -> None:
    labels, values = made(2)
    found = curves_of("classes", labels, values, ["no", "yes"])
    assert list(found["precision_recall"]) == ["yes"]
    require_curve(found["precision_recall"]["yes"], labels == 1, values[:, 1])
    share, confidence = calibration.calibration_curve(labels, values[:, 1], n_bins=10)
    assert found["calibration"]["confidence"] == pytest.approx(confidence)
    assert found["calibration"]["accuracy"] == pytest.approx(share)
    assert sum(found["calibration"]["examples"]) == len(labels)


def test_several_classes_have_a_curve_against_the_rest_and_the_confidence_of_the_predicted_one() -> None:
    labels, values = made(3)
    found = curves_of("classes", labels, values, ["a", "b", "c"])
    for number, name in enumerate("abc"):
        require_curve(found["precision_recall"][name], labels == number, values[:, number])
    guesses = values.argmax(axis=1)
    share, confidence = calibration.calibration_curve(labels == guesses, values.max(axis=1), n_bins=10)
    assert found["calibration"]["confidence"] == pytest.approx(confidence)
    assert found["calibration"]["accuracy"] == pytest.approx(share)


def test_labels_have_a_curve_each_and_many_have_one_of_all_decisions() -> None:
    rng = np.random.default_rng(0)
    for count in (4, MAX_CURVES + 1):
        truth, values = rng.random((200, count)) < 0.3, rng.random((200, count)).round(2)
        names = [f"l{number}" for number in range(count)]
        found = curves_of("labels", truth, values, names)
        curves = found["precision_recall"]
        if count <= MAX_CURVES:
            for number, name in enumerate(names):
                require_curve(curves[name], truth[:, number], values[:, number])
        else:
            assert list(curves) == ["all decisions"]
            require_curve(curves["all decisions"], truth.ravel(), values.ravel())
        share, _ = calibration.calibration_curve(truth.ravel(), values.ravel(), n_bins=10)
        assert found["calibration"]["accuracy"] == pytest.approx(share)


def test_a_label_that_never_occurs_has_a_curve() -> None:
    found = curves_of("labels", np.zeros((3, 1), dtype=bool), np.array([[0.1], [0.5], [0.9]]), ["never"])
    curve = found["precision_recall"]["never"]
    assert curve["average_precision"] == 0 and curve["recall"] == [1, 1, 1, 1] and curve["precision"] == [0, 0, 0, 1]


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 20))
def test_the_calibration_error_is_the_mean_gap_of_the_curve(rows: list[tuple[float, bool]], bins: int) -> None:
    confidences, correct = zip(*rows, strict=True)
    confident, right, counts = calibration_curve(confidences, correct, num_bins=bins)
    assert counts.sum() == len(rows) and (counts > 0).all() and (np.diff(confident) > 0).all()
    error = expected_calibration_error(confidences, correct, num_bins=bins)
    assert error == pytest.approx((np.abs(confident - right) * counts).sum() / len(rows))


def report_of(classes: int, size: int = 300, digits: int = 2) -> dict[str, Any]:
    labels, values = made(classes, size, digits)
    names = [f"c{number}" for number in range(classes)]
    report = classification_report(labels, np.log(values + 1e-9), names, intervals=False)
    return report | {"curves": curves_of("classes", labels, values, names)}


def test_the_plots_of_a_report_are_its_matrix_and_its_curves() -> None:
    report = report_of(3)
    matrix, curves, calibrated = plots_of(report)
    assert isinstance(matrix, Heat) and matrix.values.tolist() == report["confusion"] and matrix.shows_numbers
    assert isinstance(curves, Lines) and isinstance(calibrated, Lines)
    assert [line.label.partition(",")[0] for line in curves.lines] == ["c0", "c1", "c2"]
    assert curves.lines[0].y.tolist() == report["curves"]["precision_recall"]["c0"]["precision"]
    assert calibrated.lines[0].y.tolist() == report["curves"]["calibration"]["accuracy"]


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    _, curves, _ = plots_of(report_of(2, 5000, digits=9))
    assert isinstance(curves, Lines)
    [line] = curves.lines
    assert len(line.x) == MAX_POINTS and (line.x[0], line.x[-1], line.y[-1]) == (1, 0, 1)


def test_several_labels_have_no_matrix() -> None:
    truth, scores = np.eye(3, dtype=bool), np.eye(3) - 0.5
    report = multi_label_report(truth, scores, "abc", intervals=False)
    curves = curves_of("labels", truth, 1 / (1 + np.exp(-scores)), "abc")
    assert [plot.title for plot in plots_of(report | {"curves": curves})] == ["Precision and recall", "Calibration"]
    assert plots_of(report) == []
