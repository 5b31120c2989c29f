"""Reports of classifiers, regressions and multi-label models, and the lists of their mistakes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tformer.evaluation.mistakes import find_mistakes
from tformer.evaluation.reports import classification_report, multi_label_report, regression_report, report_lines
from tformer.metrics.classification import accuracy, f1_binary, f1_macro, mcc
from tformer.metrics.statistics import pearson, spearman
from tformer.support.errors import InputError

NAMES = ("cat", "dog", "fish")


def made(num_classes: int = 3, size: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, num_classes, size)
    scores = rng.normal(size=(size, num_classes)).astype(np.float32)
    scores[np.arange(size), labels] += 1.5
    return labels, scores


def test_classification_figures() -> None:
    labels, scores = made()
    report, guesses = classification_report(labels, scores, NAMES), scores.argmax(axis=1)
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
    labels, scores = made(2)
    report = classification_report(labels, scores, NAMES[:2])
    assert report["f1_binary"] == f1_binary(labels, scores.argmax(axis=1)) != report["f1_macro"]
    assert report["positive"] == "dog"
    assert f"f1_binary {report['f1_binary']:.4f} of 'dog'" in list(report_lines(report))


def test_intervals_hold_their_figures_and_are_left_out_when_not_asked_for() -> None:
    labels, scores = made()
    truth = labels + np.random.default_rng(1).normal(size=len(labels))
    table = np.eye(3, dtype=bool)[labels]
    for report, names in (
        (classification_report(labels, scores, NAMES), {"accuracy", "f1_macro"}),
        (regression_report(truth, labels.astype(np.float32)), {"pearson", "spearman"}),
        (multi_label_report(table, scores, NAMES), {"accuracy", "f1_micro"}),
    ):
        assert report["intervals"].keys() == names
        for name, (low, high) in report["intervals"].items():
            assert low < report[name] < high
    assert "intervals" not in classification_report(labels, scores, NAMES, intervals=False)
    assert "intervals" not in regression_report(truth, labels, intervals=False)
    assert "intervals" not in multi_label_report(table, scores, NAMES, intervals=False)


def test_reports_are_json_and_the_same_every_time() -> None:
    labels, scores = made()
    table = np.eye(3, dtype=bool)[labels]
    for make in (
        lambda: classification_report(labels, scores, NAMES),
        lambda: regression_report(labels.astype(np.float32), scores[:, 0]),
        lambda: multi_label_report(table, scores, NAMES),
    ):
        assert json.dumps(make()) == json.dumps(make())


def test_extreme_scores_have_a_finite_loss_and_a_class_may_be_absent() -> None:
    scores = np.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], dtype=np.float32)
    report = classification_report(np.array([0, 0]), scores, NAMES)
    assert report["loss"] == pytest.approx(1e4) and report["per_class"]["fish"]["f1"] == 0.0
    assert (report["precision_macro"], report["recall_macro"]) == (0.5, 0.25), "means of the classes that occur"
    assert math.isnan(classification_report(np.array([0]), np.full((1, 3), np.nan), NAMES, intervals=False)["loss"])


def test_regression_figures() -> None:
    truth = np.random.default_rng(2).normal(size=50).astype(np.float32)
    scores = truth * 2 + 1
    report = regression_report(truth, scores)
    assert report["loss"] == pytest.approx(float(((scores - truth) ** 2).mean()), rel=1e-5)
    assert report["mae"] == pytest.approx(float(np.abs(scores - truth).mean()), rel=1e-5)
    assert report["pearson"] == pytest.approx(pearson(truth, scores)) == pytest.approx(1.0)
    assert report["spearman"] == pytest.approx(spearman(truth, scores)) == pytest.approx(1.0)


def test_multi_label_figures() -> None:
    labels = np.array([[1, 0], [1, 1], [0, 0], [0, 1]], dtype=bool)
    scores = np.array([[2.0, -1.0], [1.0, -3.0], [-1.0, -2.0], [0.5, 1.0]], dtype=np.float32)
    report = multi_label_report(labels, scores, NAMES[:2])
    expected = F.binary_cross_entropy_with_logits(torch.tensor(scores), torch.tensor(labels).float())
    assert report["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert report["accuracy"] == 0.5
    micro = (report[f"{name}_micro"] for name in ("precision", "recall", "f1"))
    assert tuple(micro) == pytest.approx((3 / 4, 3 / 4, 3 / 4))
    assert report["per_class"]["dog"] == {"precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "support": 2}


def test_nothing_to_evaluate_is_said() -> None:
    empty = np.zeros((0, 3), dtype=np.float32)
    with pytest.raises(InputError, match="0 examples"):
        classification_report(np.zeros(0, dtype=np.int64), empty, NAMES)
    with pytest.raises(InputError, match="0 examples"):
        multi_label_report(empty.astype(bool), empty, NAMES)
    with pytest.raises(InputError, match="at least 2 examples, found 1"):
        regression_report(np.ones(1), np.ones(1))


pytest.importorskip("tformer.evaluation.classifier")


def test_only_wrong_classes_the_surest_first():
    labels = np.array([0, 1, 1, 0])
    values = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.05, 0.95]])
    found = find_mistakes("classes", labels, values, ("no", "yes"))
    assert [mistake.index for mistake in found] == [3, 1]
    assert (found[0].label, found[0].prediction, found[0].sureness) == ("no", "yes", 0.95)
    assert found[1].probabilities == {"no": 0.7, "yes": 0.3}


def test_any_wrong_label_is_a_mistake():
    labels = np.array([[True, False], [True, True], [False, False]])
    values = np.array([[0.9, 0.1], [0.9, 0.4], [0.1, 0.99]])
    found = find_mistakes("labels", labels, values, ("a", "b"))
    assert [(mistake.index, mistake.label, mistake.prediction) for mistake in found] == [
        (2, [], ["b"]),
        (1, ["a", "b"], ["a"]),
    ]
    assert [mistake.sureness for mistake in found] == pytest.approx([0.99, 0.6])
    assert find_mistakes("labels", np.array([[False]]), np.array([[0.5]]), ("a",)) == [], "a label is above one half"


def test_scores_are_told_by_their_distance():
    found = find_mistakes("score", np.array([1.0, 5.0]), np.array([[1.5], [2.0]]), ())
    assert [(mistake.index, mistake.sureness) for mistake in found] == [(1, 3.0), (0, 0.5)]


def test_no_mistakes_are_no_lines():
    assert find_mistakes("classes", np.array([0]), np.array([[1.0, 0.0]]), ("a", "b")) == []
