"""Scored examples: reports, curves of scikit-learn and their pictures, and the lists of mistakes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tformer.evaluation.mistakes import find_mistakes
from tformer.evaluation.reports import report_lines, report_of
from tformer.evaluation.scored import MAX_CURVES, Scored, curves_of
from tformer.metrics.classification import accuracy, f1_binary, f1_macro, mcc
from tformer.metrics.statistics import distinct_places, pearson, spearman
from tformer.support.errors import InputError
from tformer.viz.evaluation import MAX_POINTS, plots_of
from tformer.viz.plots import Heat, LinePlot

NAMES = ("cat", "dog", "fish")


def made(num_classes: int = 3, size: int = 200, digits: int = 9) -> Scored:
    """Classes with scores; with few digits many of these are equal."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, num_classes, size)
    scores = rng.normal(size=(size, num_classes)).astype(np.float32)
    scores[np.arange(size), labels] += 1.5
    return Scored("classes", NAMES[:num_classes], labels, scores.round(digits))


def of_labels(num_labels: int = 3, size: int = 200) -> Scored:
    rng = np.random.default_rng(1)
    names = [f"l{number}" for number in range(num_labels)]
    return Scored("labels", names, rng.random((size, num_labels)) < 0.3, rng.normal(size=(size, num_labels)).round(1))


def of_scores(size: int = 50) -> Scored:
    rng = np.random.default_rng(2)
    truth = rng.normal(size=size).astype(np.float32)
    return Scored("score", (), truth, (truth * 2 + rng.normal(size=size, scale=0.1))[:, None].astype(np.float32))


# --- reports ---------------------------------------------------------------------------------------------------------


def test_classification_figures() -> None:
    scored = made()
    labels, scores, guesses = scored.labels, scored.scores, scored.scores.argmax(axis=1)
    report = report_of(scored)
    assert report["loss"] == pytest.approx(float(F.cross_entropy(torch.tensor(scores), torch.tensor(labels))), rel=1e-5)
    assert report["accuracy"] == accuracy(labels, guesses)
    assert report["f1_macro"] == f1_macro(labels, guesses, num_classes=3)
    assert "f1" not in report and "f1_binary" not in report  # of three classes there is no other F1
    assert report["mcc"] == mcc(labels, guesses)
    assert 0 <= report["ece"] <= 1
    assert np.array(report["confusion"]).sum() == report["examples"] == 200
    assert report["confusion"][0][1] == int(((labels == 0) & (guesses == 1)).sum())
    assert list(report["per_class"]) == list(NAMES)
    assert report["per_class"]["dog"]["support"] == int((labels == 1).sum())
    assert report["recall_macro"] == pytest.approx(np.mean([(guesses[labels == c] == c).mean() for c in range(3)]))


def test_two_classes_report_the_f1_of_the_last_and_say_so() -> None:
    scored = made(2)
    report = report_of(scored)
    assert report["f1_binary"] == f1_binary(scored.labels, scored.scores.argmax(axis=1)) != report["f1_macro"]
    assert report["positive"] == "dog"
    assert f"f1_binary {report['f1_binary']:.4f} of 'dog'" in list(report_lines(report))


@pytest.mark.parametrize(
    ("scored", "names"),
    [
        (made(), {"accuracy", "f1_macro"}),
        (of_scores(), {"pearson", "spearman"}),
        (of_labels(), {"accuracy", "f1_micro"}),
    ],
)
def test_intervals_hold_their_figures_and_reports_are_the_same_json_every_time(scored: Scored, names: set[str]) -> None:
    report = report_of(scored)
    assert report["intervals"].keys() == names
    for name, (low, high) in report["intervals"].items():
        assert low < report[name] < high
    assert json.dumps(report_of(scored)) == json.dumps(report)
    assert report_of(scored, intervals=False) == {name: report[name] for name in report if name != "intervals"}


def test_extreme_scores_have_a_finite_loss_and_a_class_may_be_absent() -> None:
    scores = np.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], dtype=np.float32)
    report = report_of(Scored("classes", NAMES, np.array([0, 0]), scores))
    assert report["loss"] == pytest.approx(1e4) and report["per_class"]["fish"]["f1"] == 0.0
    assert (report["precision_macro"], report["recall_macro"]) == (0.5, 0.25), "means of the classes that occur"
    unknown = Scored("classes", NAMES, np.array([0]), np.full((1, 3), np.nan))
    assert math.isnan(report_of(unknown, intervals=False)["loss"])


def test_regression_figures() -> None:
    truth = np.random.default_rng(2).normal(size=50).astype(np.float32)
    scores = truth * 2 + 1
    report = report_of(Scored("score", (), truth, scores[:, None]))
    assert report["loss"] == pytest.approx(float(((scores - truth) ** 2).mean()), rel=1e-5)
    assert report["mae"] == pytest.approx(float(np.abs(scores - truth).mean()), rel=1e-5)
    assert report["pearson"] == pytest.approx(pearson(truth, scores)) == pytest.approx(1.0)
    ranks = spearman(distinct_places(truth), distinct_places(scores))
    assert report["spearman"] == pytest.approx(ranks) == pytest.approx(1.0)


def test_multi_label_figures() -> None:
    labels = np.array([[1, 0], [1, 1], [0, 0], [0, 1]], dtype=bool)
    scores = np.array([[2.0, -1.0], [1.0, -3.0], [-1.0, -2.0], [0.5, 1.0]], dtype=np.float32)
    report = report_of(Scored("labels", NAMES[:2], labels, scores))
    expected = F.binary_cross_entropy_with_logits(torch.tensor(scores), torch.tensor(labels).float())
    assert report["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert report["accuracy"] == 0.5
    micro = (report[f"{name}_micro"] for name in ("precision", "recall", "f1"))
    assert tuple(micro) == pytest.approx((3 / 4, 3 / 4, 3 / 4))
    assert report["per_class"]["dog"] == {"precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "support": 2}


def test_a_correlation_needs_two_examples() -> None:
    with pytest.raises(InputError, match="at least 2 examples, found 1"):
        report_of(Scored("score", (), np.ones(1), np.ones((1, 1))))


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_only_wrong_classes_the_surest_first() -> None:
    values = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.05, 0.95]])
    found = find_mistakes(Scored("classes", ("no", "yes"), np.array([0, 1, 1, 0]), np.log(values)))
    assert [mistake.index for mistake in found] == [3, 1]
    assert (found[0].label, found[0].prediction, found[0].sureness) == ("no", "yes", pytest.approx(0.95))
    assert list(found[1].probabilities.items()) == [("no", pytest.approx(0.7)), ("yes", pytest.approx(0.3))]
    right = Scored("classes", ("no", "yes"), np.array([0]), np.array([[1.0, 0.0]]))
    assert find_mistakes(right) == []


def test_any_wrong_label_is_a_mistake() -> None:
    labels = np.array([[True, False], [True, True], [False, False]])
    values = np.array([[0.9, 0.1], [0.9, 0.4], [0.1, 0.99]])
    found = find_mistakes(Scored("labels", ("a", "b"), labels, np.log(values / (1 - values))))
    assert [(mistake.index, mistake.label, mistake.prediction) for mistake in found] == [
        (2, [], ["b"]),
        (1, ["a", "b"], ["a"]),
    ]
    assert [mistake.sureness for mistake in found] == pytest.approx([0.99, 0.6])
    half = Scored("labels", ("a",), np.array([[False]]), np.zeros((1, 1)))
    assert find_mistakes(half) == [], "a label is above one half"


def test_scores_are_told_by_their_distance() -> None:
    found = find_mistakes(Scored("score", (), np.array([1.0, 5.0]), np.array([[1.5], [2.0]])))
    assert [(mistake.index, mistake.sureness) for mistake in found] == [(1, 3.0), (0, 0.5)]


# --- curves ----------------------------------------------------------------------------------------------------------


def require_curve(found: dict[str, Any], truth: np.ndarray, values: np.ndarray) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    precision, recall, _ = metrics.precision_recall_curve(truth, values)
    assert found["precision"] == pytest.approx(precision) and found["recall"] == pytest.approx(recall)
    assert found["average_precision"] == pytest.approx(metrics.average_precision_score(truth, values))


def require_calibration(found: dict[str, Any], right: np.ndarray, confidences: np.ndarray) -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    share, confidence = calibration.calibration_curve(right, confidences, n_bins=10)
    assert found["confidence"] == pytest.approx(confidence) and found["accuracy"] == pytest.approx(share)
    assert sum(found["examples"]) == len(right)


def test_two_classes_have_the_curves_of_the_second() -> None:
    scored = made(2, 300, digits=1)
    found = curves_of(scored)
    assert list(found["precision_recall"]) == ["dog"]
    require_curve(found["precision_recall"]["dog"], scored.labels == 1, scored.values[:, 1])
    require_calibration(found["calibration"], scored.labels == 1, scored.values[:, 1])


def test_several_classes_have_a_curve_against_the_rest_and_the_confidence_of_the_predicted_one() -> None:
    scored = made(3, 300, digits=1)
    found, values = curves_of(scored), scored.values
    for number, name in enumerate(NAMES):
        require_curve(found["precision_recall"][name], scored.labels == number, values[:, number])
    require_calibration(found["calibration"], scored.labels == values.argmax(axis=1), values.max(axis=1))


@pytest.mark.parametrize("count", [4, MAX_CURVES + 1])
def test_labels_have_a_curve_each_and_many_have_one_of_all_decisions(count: int) -> None:
    scored = of_labels(count)
    found = curves_of(scored)
    curves, truth, values = found["precision_recall"], scored.labels, scored.values
    if count <= MAX_CURVES:
        for number, name in enumerate(scored.names):
            require_curve(curves[name], truth[:, number], values[:, number])
    else:
        assert list(curves) == ["all decisions"]
        require_curve(curves["all decisions"], truth.ravel(), values.ravel())
    require_calibration(found["calibration"], truth.ravel(), values.ravel())


def test_a_label_that_never_occurs_has_a_curve() -> None:
    never = Scored("labels", ["never"], np.zeros((3, 1), dtype=bool), np.array([[-1.0], [0.0], [1.0]]))
    curve = curves_of(never)["precision_recall"]["never"]
    assert curve["average_precision"] == 0 and curve["recall"] == [1, 1, 1, 1] and curve["precision"] == [0, 0, 0, 1]


def plotted(scored: Scored) -> tuple[dict[str, Any], list[Any]]:
    report = report_of(scored, intervals=False) | {"curves": curves_of(scored)}
    return report, plots_of(report)


def test_the_plots_of_a_report_are_its_matrix_and_its_curves() -> None:
    report, (matrix, curves, calibrated) = plotted(made(3))
    assert isinstance(matrix, Heat) and matrix.values.tolist() == report["confusion"] and matrix.shows_numbers
    assert isinstance(curves, LinePlot) and isinstance(calibrated, LinePlot)
    assert [line.label.partition(",")[0] for line in curves.lines] == list(NAMES)
    assert curves.lines[0].y.tolist() == report["curves"]["precision_recall"]["cat"]["precision"]
    assert calibrated.lines[0].y.tolist() == report["curves"]["calibration"]["accuracy"]


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    [line] = plotted(made(2, 5000))[1][1].lines
    assert len(line.x) == MAX_POINTS and (line.x[0], line.x[-1], line.y[-1]) == (1, 0, 1)


def test_several_labels_have_no_matrix() -> None:
    report, plots = plotted(of_labels())
    assert [plot.title for plot in plots] == ["Precision and recall", "Calibration"]
    assert plots_of({name: value for name, value in report.items() if name != "curves"}) == []
