"""Rows that cannot be used, the look at a table, and duplicates in the held-out part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import messy
from tests.data.fakes import Spec, refusal, write
from tformer.data import look as looking
from tformer.data.look import look_at, look_at_text
from tformer.data.sources.files import DocumentChunk
from tformer.data.sources.labelled import (
    LabelIndex,
    LabelledSource,
    duplicate_keys,
    hold_out,
    open_labelled,
    stratified_split,
)
from tformer.data.sources.pairs import open_pairs
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import LabelledRow, PairRow
from tformer.data.sources.text import open_sources
from tformer.support.errors import InputError
from tformer.tasks.base import note_rows
from tformer.workers.work import Work

DROP = Reading(bad_rows="drop")


def source_of(path: Path, reading: Reading = Reading(), **options: Any) -> LabelledSource:
    [source] = open_labelled([Spec(str(path))], reading=reading, **options)  # type: ignore[list-item]
    return source


# -- rows that cannot be used ------------------------------------------------------------------------------------------


def test_all_bad_rows_are_counted_and_the_first_ten_are_named(tmp_path: Path) -> None:
    lines = [f"t{n},{'' if n % 2 else 'x'}" for n in range(40)] + ["t,x,y"]
    path = write(tmp_path / "a.csv", "text,label\n" + "\n".join(lines) + "\n")
    error = refusal(lambda: list(source_of(path).rows()))
    named = ", ".join(str(line) for line in range(3, 22, 2))
    assert error.message == (
        f"{path}: 21 rows cannot be used: the label is empty (20 rows, first lines {named}); and 1 more"
    )
    assert error.hint == "--bad-rows drop leaves such rows out"


def test_one_bad_row_is_named_as_before_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,x\nb,\n")
    error = refusal(lambda: list(source_of(path).rows()))
    assert (error.message, error.hint) == (f"{path}:3: the label is empty", "--bad-rows drop leaves such rows out")


@pytest.mark.parametrize(
    ("name", "text", "reasons"),
    [
        ("a.csv", 'text,label\na,x\n"",y\nb,\nc,x,y\nd,y\n', ["the text is blank", "the label is empty", "expected 2"]),
        (
            "a.jsonl",
            '{"text": "a", "label": "x"}\n{"text": 3, "label": "x"}\n{"text": "b"}\nno JSON\n'
            '{"text": "d", "label": "y"}\n',
            ["'text' should be text, found a number", "no key 'label'", "not JSON"],
        ),
    ],
)
def test_bad_rows_are_left_out_and_listed(tmp_path: Path, name: str, text: str, reasons: list[str]) -> None:
    path = write(tmp_path / name, text)
    source = source_of(path, DROP)
    assert [(row.text, row.label) for row in source.rows()] == [("a", "x"), ("d", "y")]
    bad = list(source.bad_rows())
    assert [place for place, _, _ in bad] == [f"{path}:{n}" for n in ((3, 4, 5) if name == "a.csv" else (2, 3, 4))]
    assert all(reason in error.message for reason, (_, _, error) in zip(reasons, bad, strict=True))
    assert list(source_of(write(tmp_path / f"b{name}", text.replace("{", "{", 1))).bad_rows()) == []  # only of "drop"
    assert source.fingerprint() != source_of(path).fingerprint()


@pytest.mark.parametrize(
    ("name", "text", "raw"),
    [
        ("a.jsonl", '{"text": "a b"}\n{"text": 3}\nno JSON\n{"words": "c"}\n{"text": "d"}\n', "no JSON\n"),
        ("a.csv", "label,text\nx,a b\ny\nz\ny\nx,d\n", ["z"]),
    ],
)
def test_bad_rows_of_running_text_are_left_out_and_listed(tmp_path: Path, name: str, text: str, raw: Any) -> None:
    path = write(tmp_path / name, text)
    [strict], [source] = open_sources([Spec(str(path))]), open_sources([Spec(str(path))], reading=DROP)
    assert [piece.text for piece in source.documents()] == ["a b", "d"]
    first = 2 if name == "a.jsonl" else 3
    bad = list(source.bad_rows())
    assert [place for place, _, _ in bad] == [f"{path}:{number}" for number in range(first, first + 3)]
    assert bad[1][1] == raw and source.fingerprint() != strict.fingerprint()
    notes: list[str] = []
    note_rows([source], Work(note=notes.append))
    assert any(note.startswith(f"{path}: 3 rows left out: ") for note in notes)
    assert refusal(lambda: list(strict.documents())).message == bad[0][2].message and not list(strict.bad_rows())


def test_unknown_labels_are_bad_rows_of_validation_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,x\nb,z\nc,q\n")
    index = LabelIndex(("x", "y"))
    error = refusal(lambda: list(source_of(path).checked(index).rows()))
    assert error.message.startswith(f"{path}: 2 rows cannot be used: unknown label 'z'")
    assert [row.text for row in source_of(path, DROP).checked(index).rows()] == ["a"]


def test_bad_pairs_are_left_out_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "source\ttarget\na\tb\nc\n")
    [source] = open_pairs([Spec(str(path))], reading=DROP)
    assert [(row.source, row.target) for row in source.rows()] == [("a", "b")]


def test_inputs_of_a_classifier_are_never_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\na,x\n"",\n')
    assert [row.text for row in source_of(path, DROP, needs_label=False).rows()] == ["a", ""]


# -- duplicates in the held-out part -----------------------------------------------------------------------------------


def test_near_duplicates_differ_in_case_spaces_and_punctuation_only() -> None:
    texts = ["A b, c.", "a B  c", "a-b c!", "a b d", "?", "!", "", " ", "ab c"]
    keys = duplicate_keys((text, None) for text in texts).tolist()
    assert keys[0] == keys[1] == keys[2] and keys[6] == keys[7]
    assert len({keys[0], keys[3], keys[4], keys[5], keys[6], keys[8]}) == 6


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), min_size=2, max_size=120),
    st.sampled_from(["stratified", "last"]),
    st.floats(0.02, 0.4),
)
def test_duplicates_never_straddle_a_split(examples: list[tuple[int, int]], how: Any, fraction: float) -> None:
    labels, keys = np.array(examples).T
    if how == "stratified":
        kept, held_out = stratified_split(labels, fraction=fraction, keys=keys)
        assert len(kept) or len(set(keys.tolist())) < 2
    else:
        try:
            kept, held_out = hold_out(labels, fraction=fraction, how=how, name="a", keys=keys)
        except InputError as error:
            assert "too few" in str(error)
            return
    if set(keys[kept].tolist()) & set(keys[held_out].tolist()):  # too many are equal
        assert how == "last" and held_out.tolist() == hold_out(labels, fraction=fraction, how=how, name="a")[1].tolist()
    assert sorted([*kept, *held_out]) == list(range(len(labels)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.floats(0.01, 0.49))
def test_without_duplicates_the_split_is_the_same(values: list[int], fraction: float) -> None:
    labels = np.array(values)
    plain, keyed = (stratified_split(labels, fraction=fraction, keys=keys) for keys in (None, np.arange(len(labels))))
    assert all(a.tolist() == b.tolist() for a, b in zip(plain, keyed, strict=True))


@pytest.mark.parametrize("how", ["stratified", "last"])
def test_a_few_texts_that_all_occur_often_are_divided_by_their_share(how: Any) -> None:
    labels = np.arange(50) % 2
    _, held_out = hold_out(labels, fraction=0.1, how=how, name="a", keys=labels)
    assert 4 <= len(held_out) <= 6


# -- the look at labelled rows -----------------------------------------------------------------------------------------


def test_the_look_at_a_messy_table_counts_everything(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", messy.messy_csv(messy.messy_rows()))
    [source] = open_labelled([Spec(str(path))], needs_label=False)  # type: ignore[list-item]
    rows = list(source.rows())
    look = look_at(rows, np.array([len(row.text.split()) for row in rows]), unit="words", valid=rows[:3])
    found = look.figures
    assert [found[name] for name in ("rows", "blank", "conflicting", "in_both")] == [3000, 24, 1, 3]
    exact, near = (sum(n % 100 == rest for n in messy.REPEATED) for rest in (9, 59))
    assert (found["exact"], found["near"]) == (exact + 1, near)  # one text with two labels is a duplicate, too
    assert sum(found["labels"].values()) == 3000 - len(messy.UNLABELLED)
    lengths, texts, caution = look.lines
    assert lengths.startswith("lengths: median ") and "24 blank texts" in texts
    assert "1 text with several labels" in caution and "3 validation rows whose text is in the training" in caution
    assert json.loads(json.dumps(found))["blank"] == 24


def test_of_large_data_the_first_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MAX_ROWS", 3)
    rows = [LabelledRow("same", None, "x", f"a:{n}") for n in range(10)]
    found = look_at(rows, np.ones(10, dtype=np.int64), unit="tokens")
    assert [found.figures[name] for name in ("rows", "looked_at", "exact")] == [10, 3, 2]
    assert all(line.endswith("(of the first 3 rows)") for line in found.lines)
    monkeypatch.setattr(looking, "MAX_CHARACTERS", 8)
    assert look_at(rows, np.ones(10, dtype=np.int64), unit="tokens").figures["looked_at"] == 2


def test_scores_have_no_shares_and_several_labels_are_counted_apart() -> None:
    rows = [LabelledRow("a", None, "1.5", "a:1"), LabelledRow("b", None, "x|y", "a:2")]
    ones = np.ones(2, dtype=np.int64)
    assert look_at(rows, ones, unit="words", has_classes=False).figures["labels"] == {}
    assert look_at(rows, ones, unit="words", separator="|").figures["labels"] == {"1.5": 1, "x": 1, "y": 1}
    assert len(look_at(rows, ones, unit="words").lines) == 1, "nothing is said of nothing"


# -- the look at pairs and running text --------------------------------------------------------------------------------

PAIRS = [
    ("Guten Tag", "Good day"),
    ("guten  Tag!", "good day"),  # nearly the first
    ("Guten Tag", "Hello"),  # another target
    ("Danke", "Thanks"),
    ("Danke", "Thanks"),
    ("Amen", "Amen"),
    ("", "Nothing"),
    ("Leer", "  "),
]


def pair_rows(pairs: list[tuple[str, str]] = PAIRS) -> list[PairRow]:
    return [PairRow(source, target, f"a.tsv:{n}") for n, (source, target) in enumerate(pairs, 1)]


def test_the_look_at_pairs_counts_blank_repeated_equal_and_contradictory_ones() -> None:
    lengths = np.array([[len(side.split()) for side in pair] for pair in PAIRS])
    look = look_at(pair_rows(), lengths, unit="words", most=1, valid=pair_rows([("danke.", "Cheers"), ("Neu", "New")]))
    found = look.figures
    assert (found["rows"], found["blank"], found["exact"], found["near"], found["equal"]) == (8, 2, 1, 1, 1)
    assert (found["conflicting"], found["conflicts"], found["in_both"], found["labels"]) == (1, (("1", "3"),), 1, {})
    assert (found["lengths"]["source"]["longest"], found["lengths"]["target"]["longest"], found["cut"]) == (2, 2, 3)
    assert look.lines == (
        "lengths: source median 1 words, 95 % at most 2, longest 2; target median 1 words, 95 % at most 2, longest 2; "
        "3 pairs longer than 1 tokens would be left out",
        "texts: 2 pairs with a blank side, 1 exact duplicate, 1 near duplicate, 1 pair of a text and itself",
        "caution: 1 source with several targets (lines 1 and 3), "
        "1 validation pair whose source is in the training data",
    )


def test_nothing_is_said_of_clean_pairs_but_their_lengths() -> None:
    rows = [PairRow("a", "b", ""), PairRow("c", "d", "")]
    assert len(look_at(rows, np.ones((2, 2), dtype=np.int64), unit="tokens").lines) == 1
    rows.append(PairRow("a", "e", ""))
    _, caution = look_at(rows, np.ones((3, 2), dtype=np.int64), unit="tokens").lines
    assert caution == "caution: 1 source with several targets", "lines are named where they are known"


@given(st.lists(st.sampled_from(["", "a", "b c", " ", "long " * 9]), min_size=1, max_size=30), st.integers(1, 40))
def test_lines_of_text_are_counted_however_it_is_cut(lines: list[str], size: int) -> None:
    text = "\n".join([*lines, "end"])
    cut = [DocumentChunk(text[start : start + size], start + size >= len(text)) for start in range(0, len(text), size)]
    found = look_at_text(cut, unit="words", count=lambda piece: piece.count("a")).figures
    assert (found["characters"], found["lines"], found["words"]) == (len(text), len(lines) + 1, text.count("a"))
    written = [line.strip() for line in lines if line.strip()]
    assert found["blank"] == len(lines) - len(written)
    assert found["repeated"] == len(written) - len(set(written))


def test_the_look_at_running_text_is_at_most_three_lines_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "LONG_LINE", 5)
    documents = [
        DocumentChunk("a\n\nlonger line\n", True),
        DocumentChunk("a", True),
    ]  # of which the second begins a line
    look = look_at_text(documents, unit="tokens", count=len)
    assert look.lines == (
        "text: 16 characters in 4 lines, 16 tokens",
        "lengths: median 1 characters, 95 % at most 9, longest 11",
        "lines: 25.0% are blank, 25.0% occur before, 1 line longer than 5 characters",
    )
    monkeypatch.setattr(looking, "MAX_TEXT", 10)
    shown = look_at_text(documents)
    assert shown.lines[0] == "text: 15 characters in 3 lines (of the first 15 characters)"
    assert not shown.figures["whole"] and look.figures["whole"]
