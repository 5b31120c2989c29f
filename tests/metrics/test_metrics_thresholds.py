"""Thresholds agree with their definition on every threshold, and with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.metrics.classification import accuracy, f1_binary, mcc
from tformer.metrics.thresholds import RULES, Curve, choose_threshold, parse_rule
from tformer.support.errors import InputError

PROBABILITIES = st.sampled_from([1e-9, 0.1, 0.2, 0.5, 0.50000001, 0.9, 1.0])  # few, so that values are equal
ROWS = st.lists(st.tuples(st.booleans(), PROBABILITIES), min_size=1, max_size=25)


def columns(rows: list[tuple[bool, float]]) -> tuple[np.ndarray, np.ndarray]:
    labels, values = zip(*rows, strict=True)
    return np.array(labels), np.array(values)


@given(ROWS)
def test_the_curve_has_the_figures_of_each_decision(rows: list[tuple[bool, float]]) -> None:
    labels, values = columns(rows)
    curve = Curve.of(labels, values)
    assert list(curve.thresholds[:-1]) == sorted(set(values.tolist())) and np.isinf(curve.thresholds[-1])
    for number, threshold in enumerate(curve.thresholds):
        guesses = values >= threshold
        assert curve.f1[number] == pytest.approx(f1_binary(labels, guesses))
        assert curve.accuracy[number] == pytest.approx(accuracy(labels, guesses))
        assert curve.mcc[number] == pytest.approx(mcc(labels, guesses))


@given(ROWS, st.sampled_from(["best-f1", "best-accuracy", "best-mcc", "precision", "recall"]))
def test_no_other_threshold_is_better_by_the_rule(rows: list[tuple[bool, float]], rule: str) -> None:
    labels, values = columns(rows)
    curve, least = Curve.of(labels, values), 0.7
    found, (goal, _) = choose_threshold(labels, values, rule, least), RULES[rule](curve, least)
    if found is None:
        assert goal.max() <= 0
        return
    assert 0 <= found <= 1
    guesses = values > found
    own = RULES[rule](Curve.of(labels, guesses), least)[0]
    reached = own[-2] if guesses.any() else own[-1]  # where the guesses themselves are the values
    assert reached == pytest.approx(goal.max())


def made(seed: int, size: int = 100) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.random(size) < 0.3
    return labels, np.clip(rng.normal(0.35 + 0.25 * labels, 0.2), 0.001, 0.999).round(2 + seed % 3)


@pytest.mark.parametrize("seed", range(6))
def test_the_curve_is_that_of_scikit_learn(seed: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels, values = made(seed)
    curve = Curve.of(labels, values)
    precision, recall, thresholds = metrics.precision_recall_curve(labels, values)
    assert np.array_equal(curve.precision, precision)
    assert np.array_equal(curve.recall, recall)
    assert np.array_equal(curve.thresholds[:-1], thresholds)


def by_scikit_learn(metrics: Any, labels: np.ndarray, values: np.ndarray, rule: str, least: float) -> float:
    """The threshold at which scikit-learn's figures are the best: yes is decided at it and above."""
    precision, recall, thresholds = metrics.precision_recall_curve(labels, values)
    precision, recall = precision[:-1], recall[:-1]
    if rule == "precision":
        return float(thresholds[np.lexsort((precision, np.where(precision >= least, recall, -1)))[-1]])
    if rule == "recall":
        return float(thresholds[np.lexsort((recall, np.where(recall >= least, precision, -1)))[-1]])
    score = {"best-f1": metrics.f1_score, "best-accuracy": metrics.accuracy_score,
             "best-mcc": metrics.matthews_corrcoef}[rule]  # fmt: skip
    return float(max(thresholds, key=lambda threshold: score(labels, values >= threshold)))


@pytest.mark.parametrize("rule", ["best-f1", "best-accuracy", "best-mcc", "precision=0.8", "recall=0.9"])
@pytest.mark.parametrize("seed", range(4))
def test_the_decisions_are_those_at_scikit_learn_s_best_threshold(seed: int, rule: str) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels, values = made(seed)
    name, least = parse_rule(rule)
    found, theirs = choose_threshold(labels, values, name, least), by_scikit_learn(metrics, labels, values, name, least)
    assert found is not None
    assert np.array_equal(values > found, values >= theirs)
    below = values[values < theirs]
    assert max(below, default=0.0) <= found < theirs  # and it lies between two values


def test_the_best_f1_is_that_of_scikit_learn_s_tuned_classifier() -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    linear = pytest.importorskip("sklearn.linear_model")
    labels, values = made(3)
    model = linear.LogisticRegression().fit(values[:, None], labels)
    tuned = selection.TunedThresholdClassifierCV(model, scoring="f1", cv="prefit", refit=False, thresholds=400)
    tuned.fit(values[:, None], labels)
    found = choose_threshold(labels, model.predict_proba(values[:, None])[:, 1], "best-f1")
    guesses = model.predict_proba(values[:, None])[:, 1] > found
    assert f1_binary(labels, guesses) == pytest.approx(tuned.best_score_)


def test_nothing_is_chosen_where_no_example_has_the_label() -> None:
    assert choose_threshold([False] * 3, [0.1, 0.2, 0.9], "best-f1") is None
    assert choose_threshold([True, False], [0.1, 0.9], "precision", 0.9) is None
    assert choose_threshold([False] * 3, [0.1, 0.2, 0.9], "precision", 0.5) is None
    assert choose_threshold([False] * 3, [0.1, 0.2, 0.9], "recall", 0.5) is None
    assert choose_threshold([False] * 3, [0.1, 0.2, 0.9], "best-accuracy") == 1.0  # never yes


def test_rules() -> None:
    assert parse_rule("best-f1") == ("best-f1", 0.0) and parse_rule("0.25") == ("", 0.25)
    assert parse_rule("precision=0.9") == ("precision", 0.9) and parse_rule("recall=1") == ("recall", 1.0)


@pytest.mark.parametrize("text", ["", "f1", "best-f2", "best-f1=0.3", "precision", "recall=", "recall=2", "-1", "nan"])
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"--threshold: found '{text}', expected a number from 0 to 1, best-f1"):
        parse_rule(text)
