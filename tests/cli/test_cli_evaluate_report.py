"""How the report on a classifier looks on a page."""

from __future__ import annotations

import numpy as np

from tformer.cli.evaluate_report import MAX_CLASSES, report_lines
from tformer.evaluation.classification import classification_report


def report(names: list[str], *, examples: int = 60) -> dict:
    draw = np.random.default_rng(0)
    labels = draw.integers(len(names), size=examples)
    scores = draw.normal(size=(examples, len(names))) + 2 * np.eye(len(names))[labels]
    return classification_report(labels, scores, names)


def test_figures_classes_and_confusions_follow_each_other():
    lines = list(report_lines(report(["cat", "a longer name than the others", "x\ty"])))
    assert lines[0].startswith("accuracy 0.") and lines[0].endswith("]")
    first = lines.index("")
    assert "examples 60" in lines[:first]
    second = lines.index("", first + 1)
    classes, confusion = lines[first + 1 : second], lines[second + 1 :]
    assert len(classes) == 4 and len(set(map(len, classes))) == 1  # numbers end at one place
    assert classes[2].startswith("a longer name than the …") and classes[3].startswith("x\\ty")
    assert confusion[0].startswith("confusion") and len(confusion) == 5
    assert len(set(map(len, confusion[1:]))) == 1


def test_many_classes_list_their_largest_confusions_instead():
    names = [f"class {number}" for number in range(MAX_CLASSES + 1)]
    lines = list(report_lines(report(names, examples=2000)))
    place = next(number for number, line in enumerate(lines) if line.startswith("most frequent confusions"))
    counts = [int(line.split()[-1]) for line in lines[place + 2 :]]
    assert 0 < len(counts) <= 20 and counts == sorted(counts, reverse=True)


def test_a_regression_has_no_classes():
    found = {"examples": 3, "loss": 1.0, "mae": 0.5, "pearson": 0.25, "spearman": 0.5}
    lines = list(report_lines({**found, "intervals": {"pearson": [0.1, 0.4]}}))
    assert lines == ["pearson 0.2500 [0.1000, 0.4000]", "spearman 0.5000", "mae 0.5000", "loss 1.0000", "examples 3"]
