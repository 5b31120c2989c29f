"""Columns of labelled tables: asked for and guessed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.data.fakes import Columns
from tformer.data.sources.columns import Head, LabelledLayout
from tformer.support.errors import InputError


class Roles(NamedTuple):
    text: int
    text2: int | None
    label: int | None
    guessed: bool


def choose(
    names: str | None, *rows: str, needs_label: bool = True, numeric_label: bool = False, **asked: object
) -> Roles:
    layout = LabelledLayout(needs_label=needs_label, numeric_label=numeric_label)
    named = layout.named(Columns(**asked))  # type: ignore[arg-type]
    head = Head("a.csv", None if names is None else tuple(names.split(",")), [row.split(",") for row in rows])
    chosen = layout.choose(head, named)
    columns = [chosen.get(role, (None,))[0] for role in layout.roles]
    return Roles(*columns, guessed=bool(chosen.keys() - named.keys()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("text,label", (0, None, 1)),
        ("label,fine_label,text", (2, None, 0)),
        ("label,rating,text", (2, None, 0)),
        ("idx,Sentence,Label", (1, None, 2)),
        ("review,sentiment", (0, None, 1)),
        ("Category,Message", (1, None, 0)),
        ("title,description,label", (1, None, 2)),
        ("label,text_a,text_b", (1, 2, 0)),
        ("premise,hypothesis,label", (0, 1, 2)),
        ("index,question,sentence,label", (1, 2, 3)),
        ("Quality,#1 ID,#2 ID,#1 String,#2 String", (3, 4, 0)),
        ("id,qid1,qid2,question1,question2,is_duplicate", (3, 4, 5)),
        ("pair_ID,sentence_A,sentence_B,relatedness_score,entailment_judgment", (1, 2, 4)),
        ("text,verdict", (0, None, 1)),  # one known name, and one column left
        ("id,notes,label", (1, None, 2)),  # numbers of rows are neither text nor label
    ],
)
def test_known_names_are_found(names: str, expected: tuple[int, int | None, int]) -> None:
    row = ",".join("abcdef"[: names.count(",") + 1])
    roles = choose(names, row)
    assert (roles.text, roles.text2, roles.label) == expected and roles.guessed


def test_a_score_is_preferred_for_a_regression() -> None:
    names, row = "label,relatedness,text_a,text_b", "neutral,4.5,a,b"
    assert choose(names, row).label == 0
    assert choose(names, row, numeric_label=True).label == 1


def test_named_columns_are_taken_without_a_note() -> None:
    roles = choose("a,b,c", "1,2,3", text="c", label=0)
    assert roles == Roles(text=2, text2=None, label=0, guessed=False)
    assert choose("text,label,other", "1,2,3", text="other").label == 1


def test_naming_the_text_alone_means_one_text() -> None:
    names, row = "label,text_a,text_b", "x,a,b"
    assert choose(names, row, text="text_a").text2 is None
    assert choose(names, row, label="label").text2 == 2
    assert choose(names, row, text2="text_b").text == 1
    assert choose("label,text,other", row, text2="other").text == 1


def test_of_two_unknown_columns_the_label_has_fewer_values() -> None:
    rows = ("good film,1", "bad film,0", "good one,1", "so so,0")
    assert (choose(None, *rows).text, choose(None, *rows).label) == (0, 1)
    turned = tuple(",".join(reversed(row.split(","))) for row in rows)
    assert (choose(None, *turned).text, choose(None, *turned).label) == (1, 0)
    assert choose("v1,v2", *turned).label == 0
    same = ("a long text,x", "another text,y")
    assert choose(None, *same).label == 1, "the shorter one when both have as many values"
    assert choose(None, "7,some,", "8,words,", text=1, label=0).guessed is False


def test_a_number_is_found_for_a_regression_without_names() -> None:
    rows = ("same,0.5", "same,0.7", "same,0.1")
    assert choose(None, *rows, numeric_label=True).label == 1
    assert choose(None, *rows).label == 0


def test_labels_may_be_missing_where_none_is_needed() -> None:
    assert choose(None, "only text", needs_label=False) == Roles(0, None, None, guessed=True)
    assert choose("text,other", "a,b", needs_label=False).label is None
    assert choose("text,other", "a,b", needs_label=False, label="label").label is None
    assert choose(None, "a text,x", "b text,x", needs_label=False).label == 1


@pytest.mark.parametrize(
    ("names", "asked", "words"),
    [
        ("text,labl", {"label": "label"}, "a.csv: no column 'label'; did you mean 'labl'? (known: labl, text)"),
        ("text,label", {"text": "txet"}, "a.csv: no column 'txet'; did you mean 'text'?"),
        ("text,label", {"text2": 2}, "a.csv: no column 2; there are 2 columns, numbered from 0"),
        ("text,a,b", {}, "a.csv: cannot tell which column holds the label; columns: text, a, b"),
        ("u,v,w", {}, "a.csv: cannot tell which column holds the text; columns: u, v, w"),
        ("id,text", {}, "a.csv: cannot tell which column holds the label; columns: id, text"),
        ("text", {}, "a.csv: cannot tell which column holds the label; columns: text"),
    ],
)
def test_errors_of_missing_columns_list_the_existing_ones(names: str, asked: dict[str, object], words: str) -> None:
    row = ",".join("abc"[: names.count(",") + 1])
    with pytest.raises(InputError) as caught:
        choose(names, row, **asked)
    assert caught.value.message.startswith(words) and "-column" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("names", "asked", "message"),
    [
        ("text,label", {"text": "text", "label": "text"}, "a.csv: text and label are the same column 'text'"),
        ("text,label", {"text": "text", "text2": "text"}, "a.csv: text and second text are the same column 'text'"),
        ("text,label", {"text": 0, "label": "text"}, "a.csv: text and label are the same column 'text'"),
        (None, {"text": 1, "label": 1}, "a.csv: text and label are the same column 1"),
    ],
)
def test_one_column_has_one_role(names: str | None, asked: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        choose(names, "a,x", **asked)
    assert caught.value.message == message


def test_without_names_the_number_of_columns_is_said() -> None:
    with pytest.raises(InputError, match="there are 3 columns, numbered from 0"):
        choose(None, "a,b,c")


@pytest.mark.parametrize(
    ("lines", "asked", "expected"),
    [
        (["text,label", "a,x"], {}, True),
        (["a,x", "b,y"], {}, False),
        (["a,x", "b,y"], {"text": "words"}, True),  # a missing name is told later
        (["text,label", "a,x"], {"text": 0, "label": 1}, True),
        (["a,x", "b,y"], {"text": 0, "label": 1}, False),
        (["question,what?", "question,who?", "person,she"], {}, False),  # a label that looks like a name
        (["v1,v2", "0,a", "1,b", "0,c"], {}, True),  # a word over numbers
        (["v1,v2", "0,a", "1,b", "z,c"], {}, False),
    ],
)
def test_a_row_of_names_is_recognised(lines: list[str], asked: dict[str, object], expected: bool) -> None:
    rows = [line.split(",") for line in lines]
    layout = LabelledLayout()
    assert layout.has_names(rows, layout.named(Columns(**asked))) is expected  # type: ignore[arg-type]
