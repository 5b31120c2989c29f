"""How an answer of `tformer classify` looks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tformer.cli.classify_output import AnswerFormat

P = np.array([0.1, 0.6, 0.3])


def test_a_class_is_its_label_and_probability():
    assert AnswerFormat("classes", ("a", "b", "c")).line(P) == "b\t0.6000"


def test_top_gives_pair_after_pair_and_never_more_than_there_are():
    assert AnswerFormat("classes", ("a", "b", "c"), top=2).line(P) == "b\t0.6000\tc\t0.3000"
    assert AnswerFormat("classes", ("a", "b", "c"), top=9).line(P).split("\t")[::2] == ["b", "c", "a"]


def test_json_has_the_label_and_all_probabilities_the_highest_first():
    document = AnswerFormat("classes", ("a", "b", "c")).document(P)
    assert document["label"] == "b"
    assert list(document["probabilities"]) == ["b", "c", "a"]
    assert json.loads(json.dumps(document))["probabilities"]["a"] == pytest.approx(0.1)
    assert list(AnswerFormat("classes", ("a", "b", "c"), top=1).document(P)["probabilities"]) == ["b"]


def test_several_labels_are_those_above_the_threshold():
    values = np.array([0.9, 0.2, 0.6])
    assert AnswerFormat("labels", ("x", "y", "z")).line(values) == "x,z\t0.9000,0.6000"
    assert AnswerFormat("labels", ("x", "y", "z"), threshold=0.95).line(values) == "\t"
    assert AnswerFormat("labels", ("x", "y", "z"), top=1).line(values) == "x\t0.9000"
    assert AnswerFormat("labels", ("x", "y", "z"), threshold=0.1).document(values)["labels"] == ["x", "z", "y"]


def test_a_score_is_a_number():
    assert AnswerFormat("score", ()).line(np.array([3.14159])) == "3.1416"
    assert AnswerFormat("score", ()).document(np.array([3.5])) == {"score": 3.5}


def test_a_label_with_a_tab_or_a_newline_stays_one_cell():
    assert AnswerFormat("classes", ("a\tb\nc", "d")).line(np.array([1.0, 0.0])) == "a\\tb\\nc\t1.0000"
