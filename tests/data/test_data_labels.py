"""Labels in order, as numbers and back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.labels import LabelIndex, collect_labels
from tformer.errors import InputError


def test_labels_are_sorted_alphabetically_or_by_value() -> None:
    assert collect_labels(["b", "a", "b", "C"]) == ("C", "a", "b")
    assert collect_labels(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert collect_labels(["10", "9", "x"]) == ("10", "9", "x")
    assert collect_labels(["nan", "2", "10"]) == ("10", "2", "nan")


def test_several_labels_are_parted() -> None:
    assert collect_labels(["b|a", "", "c| a"], multi=True) == ("a", "b", "c")
    assert collect_labels(["x;y"], multi=True, separator=";") == ("x", "y")
    with pytest.raises(InputError, match="no label in any row"):
        collect_labels(["", "|"], multi=True)


@pytest.mark.parametrize(("labels", "words"), [(["a", "a"], "one class only, 'a'"), ([], "no rows")])
def test_one_class_is_nothing_to_learn(labels: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        collect_labels(labels)


@given(st.sets(st.text(st.characters(codec="utf-8"), min_size=1), min_size=2))
def test_every_label_has_its_own_number(names: set[str]) -> None:
    index = LabelIndex(collect_labels(names))
    assert [index.encode(name, "x") for name in index.names] == list(range(len(index)))
    assert index.encode_all(index.names, index.names).dtype == np.int64


def test_several_labels_become_a_row_of_flags() -> None:
    index = LabelIndex(("a", "b", "c"), multi=True)
    assert index.encode("c|a", "x").tolist() == [True, False, True]  # type: ignore[union-attr]
    assert index.encode("", "x").tolist() == [False] * 3  # type: ignore[union-attr]
    flags = index.encode_all(["a", "", "b|c"], ["x"] * 3)
    assert flags.dtype == bool and flags.tolist() == [[True, False, False], [False] * 3, [False, True, True]]


def test_an_unknown_label_names_place_and_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        LabelIndex(("sport", "world")).encode("sports", "valid.tsv:12")
    assert caught.value.message == (
        "valid.tsv:12: unknown label 'sports', not one of the training data; "
        "did you mean 'sport'? (known: sport, world)"
    )
    with pytest.raises(InputError, match="unknown label 'z'"):
        LabelIndex(("a", "b"), multi=True).encode("a|z", "x")


def test_a_label_of_a_page_is_cut_in_messages() -> None:
    with pytest.raises(InputError) as caught:
        LabelIndex(("a" * 5000, "b")).encode("c" * 5000, "x")
    assert len(caught.value.message) < 400


def test_two_labels_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="'a' is there more than once"):
        LabelIndex(("a", "b", "a"))
