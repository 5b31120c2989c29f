"""Which examples are mistakes, and in which order they are told."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tformer.evaluation.classifier")
from tformer.evaluation.mistakes import find_mistakes


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


def test_scores_are_told_by_their_distance():
    found = find_mistakes("score", np.array([1.0, 5.0]), np.array([[1.5], [2.0]]), ())
    assert [(mistake.index, mistake.sureness) for mistake in found] == [(1, 3.0), (0, 0.5)]


def test_no_mistakes_are_no_lines():
    assert find_mistakes("classes", np.array([0]), np.array([[1.0, 0.0]]), ("a", "b")) == []
