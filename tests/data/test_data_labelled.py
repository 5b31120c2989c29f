"""Labelled sources: formats, columns (asked for and guessed), labels."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import Columns, Spec, pipe, refusal, write
from tformer.data.sources import tables
from tformer.data.sources.columns import LabelledLayout, TableHead
from tformer.data.sources.labelled import LabelIndex, LabelledSource, collect_labels, matching_names, open_labelled
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import LabelledRow
from tformer.support.errors import InputError


def open_one(path: Path | str, columns: Columns | None = None, **options: object) -> LabelledSource:
    return open_labelled([Spec(str(path))], columns=columns, **options)[0]  # type: ignore[arg-type]


def read(path: Path | str, columns: Columns | None = None, **options: object) -> list[tuple[str, str | None]]:
    return [(row.text, row.label) for row in open_one(path, columns, **options).rows()]


# -- formats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_columns_are_guessed_from_the_beginning_of_long_cells(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows from which columns are guessed take a bounded part of memory, and the rows that are read are whole."""
    monkeypatch.setattr(tables, "HEAD_CHARACTERS", 20)
    heads: list[TableHead] = []
    find = tables._head
    monkeypatch.setattr(tables, "_head", lambda *given: heads.append(find(*given)) or heads[-1])
    rows = [(str(n) + "x" * 100, ("no", "yes")[n % 2]) for n in range(4)]
    separator = {"csv": ",", "tsv": "\t"}.get(ending)
    lines = [
        json.dumps({"body": text, "class": label}) if separator is None else separator.join((text, label))
        for text, label in rows
    ]
    path = write(tmp_path / f"a.{ending}", "".join(f"{line}\n" for line in lines))
    assert read(path) == rows
    assert max(len(cell) for head in heads for row in head.rows for cell in row) == 20


def test_tsv_rows_have_text_label_and_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'label\tid\ttext\npos\t1\tgood "film\nneg\t2\tbad, film\n')
    source = open_one(path)
    assert list(source.rows()) == [
        LabelledRow('good "film', None, "pos", f"{path}:2"),
        LabelledRow("bad, film", None, "neg", f"{path}:3"),
    ]
    assert list(source.rows()) == list(source.rows()), "rows can be read again"
    assert [(row.number, row.id) for row in source.rows()] == [(0, "1"), (1, "2")]
    assert [row.record for row in source.rows()] == [None, None]
    kept = [row.record for row in source.keeping_records().rows()]
    assert kept == [["pos", "1", 'good "film'], ["neg", "2", "bad, film"]]
    assert not source.has_text2
    assert (source.text_column, source.text2_column, source.label_column) == ("text", None, "label")
    assert source.notes == ("a.tsv: text in column 'text', label in column 'label'",)
    assert source.size_bytes() == path.stat().st_size


def test_a_carriage_return_alone_ends_no_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "label\ttext\r\npos\tgood\rfilm\u2028\x85\r\nneg\tbad\r\n")
    assert [(row.text, row.label) for row in open_one(path).rows()] == [("good\rfilm\u2028\x85", "pos"), ("bad", "neg")]
    path = write(tmp_path / "a.csv", 'label,text\r\npos,"good\rfilm"\r\n')
    assert [row.text for row in open_one(path).rows()] == ["good\rfilm"]
    error = refusal(lambda: read(write(tmp_path / "b.csv", "label,text\npos,good\rfilm\n")))
    assert "b.csv:2: " in error.message and "quote the cell" in str(error.hint)


def test_csv_quotes_hold_commas_and_line_breaks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", '\ufefftext, label\r\n"one, two\r\nthree", a \r\n\r\nfour,b\r\n')
    assert read(path) == [("one, two\nthree", "a"), ("four", "b")]


def test_jsonl_labels_of_every_type(tmp_path: Path) -> None:
    lines = [
        '{"text": "s", "label": "x"}',
        '{"text": "i", "label": 3}',
        "",
        '{"label": 0.5, "text": "f"}',
        '{"text": "b", "label": true, "more": {"deep": [1]}}',
        '{"text": "l", "label": ["one"]}',
        '{"text": null, "label": "empty"}',
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    expected = [("s", "x"), ("i", "3"), ("f", "0.5"), ("b", "true"), ("l", "one"), ("", "empty")]
    assert read(path) == expected
    assert list(open_one(path).rows())[2].place == f"{path}:4"


def test_lists_of_labels_are_joined_for_multi_label(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "t", "labels": ["a", "b"]}\n{"text": "u", "labels": []}\n')
    assert read(path, multi_label=True) == [("t", "a|b"), ("u", "")]
    assert read(path, multi_label=True, separator=";")[0] == ("t", "a;b")


def test_parquet_rows(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pa.table({"n": [[1]] * 3, "label": [2, 0, 1], "sentence": ["a", None, "c"]})
    parquet.write_table(table, path)
    assert read(path) == [("a", "2"), ("", "0"), ("c", "1")]
    assert [row.place for row in open_one(path).rows()] == [f"{path}:{n}" for n in (1, 2, 3)]
    parquet.write_table(pa.table({"text": ["a"], "label": [None]}), path)
    assert refusal(lambda: read(path)).message == f"{path}:1: the label is empty"


def test_compressed_tables_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv.gz", gzip.compress(b"text\tlabel\na\tx\n"))
    assert read(path) == [("a", "x")]
    assert open_one(path).size_bytes() is None
    zstandard = pytest.importorskip("zstandard")
    other = write(tmp_path / "a.jsonl.zst", zstandard.ZstdCompressor().compress(b'{"text": "a", "label": "x"}'))
    assert read(other) == [("a", "x")]


def test_folder_and_glob_are_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.tsv", "text\tlabel\nb\tx\n")
    write(tmp_path / "a.csv", "label,text\ny,a\n")
    write(tmp_path / "SOURCE.md", "no data")
    write(tmp_path / "empty.csv", "")
    source = open_one(tmp_path)
    assert [(row.text, row.label) for row in source.rows()] == [("a", "y"), ("b", "x")]
    assert source.notes == ("a.csv: text in column 'text', label in column 'label'",)
    assert read(tmp_path / "*.tsv") == [("b", "x")]
    write(tmp_path / "c.tsv", "text_a\ttext_b\tlabel\na\tb\tx\n")
    assert "one text a row, but" in refusal(lambda: open_one(tmp_path)).message


def test_sources_must_agree_on_pairs_and_have_no_weights(tmp_path: Path) -> None:
    one = write(tmp_path / "one.tsv", "text\tlabel\na\tx\n")
    two = write(tmp_path / "two.tsv", "text_a\ttext_b\tlabel\na\tb\tx\n")
    assert f"{one}: one text a row" in refusal(lambda: open_labelled([Spec(str(two)), Spec(str(one))])).message
    both = [Spec(str(one), weight=2.0), Spec(str(one))]
    assert "no weights" in refusal(lambda: open_labelled(both)).message
    assert len(open_labelled([Spec(str(one)), Spec(str(one))])) == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "a", "label": "x"}\n', [("a", "x")]),
        ("label\ttext\nx\ta\ny\tb\n", [("a", "x"), ("b", "y")]),
        ("x\ta long text\ny\tanother\nx\tthird\n", [("a long text", "x"), ("another", "y"), ("third", "x")]),
        ('text,label\n"a, b",x\n', [("a, b", "x")]),
    ],
)
def test_the_format_of_standard_input_follows_from_its_first_lines(
    monkeypatch: pytest.MonkeyPatch, content: str, expected: list[tuple[str, str]]
) -> None:
    pipe(monkeypatch, content)
    source = open_one("-")
    assert [(row.text, row.label) for row in source.rows()] == expected
    assert next(iter(source.rows())).place.startswith("standard input:")
    assert source.size_bytes() == len(content)


def test_plain_text_is_one_text_a_line_and_empty_lines_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "first, one\n\nthird\tline\n  \nlast"
    pipe(monkeypatch, content)
    expected = [(line, None) for line in content.split("\n")]
    assert read("-", needs_label=False) == expected
    path = write(tmp_path / "a.txt", content)
    source = open_one(path, needs_label=False)
    assert [(row.text, row.label) for row in source.rows()] == expected
    assert (source.has_text2, source.text_column, source.label_column, source.notes) == (False, None, None, ())


def test_empty_lines_of_tables_are_answered_only_where_no_label_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "text\tlabel\n\na\tx\n\n")
    assert read(path) == [("a", "x")]
    assert read(path, needs_label=False) == [("", None), ("a", "x"), ("", None)]


def test_missing_labels_are_no_error_where_none_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,text\n1,a\n2,b\n")
    source = open_one(path, Columns(text="text", label="label"), needs_label=False)
    assert [(row.text, row.label) for row in source.rows()] == [("a", None), ("b", None)]
    assert source.label_column is None
    keys = write(tmp_path / "a.jsonl", '{"text": "a", "label": "x"}\n{"text": "b"}\n')
    assert read(keys, needs_label=False) == [("a", "x"), ("b", None)]
    one = write(tmp_path / "one.csv", "just text\nmore\n")
    assert read(one, needs_label=False) == [("just text", None), ("more", None)]


@given(rows=st.lists(st.tuples(st.text('ab",\n\t x', max_size=8), st.sampled_from("xyz")), min_size=1, max_size=20))
def test_csv_round_trip(rows: list[tuple[str, str]]) -> None:
    import csv
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
        assert read(path, reading=Reading(quotes="cells")) == rows


def test_builtin_without_labels_and_scores_of_classes_are_refused() -> None:
    error = refusal(lambda: open_one("builtin:python-docs"))
    assert error.message == "builtin:python-docs: is text without labels" and "python-packages" in str(error.hint)
    assert "no such built-in" in refusal(lambda: open_one("builtin:nothing")).message
    assert "no scores" in refusal(lambda: open_one("builtin:python-packages", numeric_label=True)).message


# -- mistakes (others stand in test_data_refusals.py) ------------------------------------------------------------------


def test_of_several_columns_of_one_name_one_is_named_by_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label,label\na,x,1\nb,y,2\n")
    by_number = open_one(path, Columns(text="text", label=2))
    assert [row.label for row in by_number.rows()] == ["1", "2"] and by_number.label_column == 2
    unused = write(tmp_path / "b.csv", "text,x,x,label\na,1,2,p\n")
    assert read(unused) == [("a", "p")]


def test_several_columns_of_a_needed_name_are_refused_in_parquet(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pa.table([["a", "b"], ["x", "y"], ["1", "2"]], names=["text", "label", "label"])
    parquet.write_table(table, path)
    for columns in (None, Columns(label="label"), Columns(text="text", label=2)):
        message = refusal(lambda columns=columns: read(path, columns)).message
        assert message == f"{path}: 2 columns are called 'label'"
    parquet.write_table(table.rename_columns(["label", "other", "other"]), path)
    assert read(path, Columns(text="label"), needs_label=False) == [("a", None), ("b", None)]


def test_values_that_python_cannot_hold_are_refused_in_used_columns_only(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    times = pa.array([2**62], pa.timestamp("us"))
    parquet.write_table(pa.table({"text": ["a"], "label": ["x"], "when": times}), path)
    assert read(path) == [("a", "x")]
    message = refusal(lambda: read(path, Columns(label="when"))).message
    assert message.startswith(f"{path}: column 'when' has a value after row 0 that cannot be read: ")


def test_numbered_columns_are_noted_for_a_table_without_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,x\nb,y\n")
    note = "a.csv: text in column 0, label in column 1 (counted from 0; there is no row of names)"
    assert open_one(path, Columns(text=0, label=1)).notes == (note,)
    assert open_one(write(tmp_path / "a.txt", "a\nb\n"), needs_label=False).notes == ()


def test_scores_are_kept_as_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "text\tscore\na\t1.5\nb\t-2e3\nc\t3.4e38\n")
    assert read(path, numeric_label=True) == [("a", "1.5"), ("b", "-2e3"), ("c", "3.4e38")]


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.jsonl", '{"text": "b", "label": "\\ud800"}', {"reading": Reading("replace")}, ("b", "\ufffd")),
        ("a.jsonl", '{"text": "b", "label": ["a\\udfff"]}', {"reading": Reading("replace")}, ("b", "a\ufffd")),
        ("a.jsonl", '{"text": "\\ud800", "label": "x"}', {"reading": Reading("replace")}, ("\ufffd", "x")),
        ("a.tsv", b"text\tlabel\ncaf\xe9\tx\n", {"reading": Reading("replace")}, ("caf\ufffd", "x")),
        ("a.jsonl", '{"text": "a", "label": NaN}', {"needs_label": False}, ("a", None)),
    ],
)
def test_what_is_refused_elsewhere_is_replaced_or_left_out_where_that_is_asked_for(
    tmp_path: Path, name: str, content: str | bytes, options: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    assert read(write(tmp_path / name, content), **options) == [expected]


def test_a_number_of_very_many_digits_on_standard_input_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, f'{{"text": "b", "label": "y", "n": {"1" * 5000}}}\n{{"text": "a", "label": "x"}}\n')
    assert refusal(lambda: read("-")).message.startswith("standard input:1: a whole number")


def test_missing_files_and_folders_without_tables_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(lambda: open_one(tmp_path / "no.tsv")).message
    write(tmp_path / "folder" / "readme.md", "text")
    error = refusal(lambda: open_one(tmp_path / "folder"))
    assert "no text in this folder" in error.message and ".parquet" in str(error.hint)


def test_fingerprint_follows_the_rows_and_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "text\tlabel\tscore\na\tx\t1\n")
    first = open_one(path).fingerprint()
    assert open_one(path).fingerprint() == first
    assert open_one(path, Columns(label="score")).fingerprint() != first
    assert open_one(write(path, "text\tlabel\tscore\na\ty\t1\n")).fingerprint() != first


# -- real data ---------------------------------------------------------------------------------------------------------

DATA = os.environ.get("TFORMER_DATA")


@pytest.mark.skipif(DATA is None, reason="TFORMER_DATA names no folder of data sets")
@pytest.mark.parametrize(
    ("name", "count", "labels", "pair"),
    [
        ("trec/train.tsv", 5179, 6, False),
        ("sst2/valid.tsv", 350, 2, False),
        ("mrpc/train.tsv", 3576, 2, True),
        ("sick/train.tsv", 4500, 3, True),
        ("r8/train.tsv.gz", 5211, 8, False),
        ("imdb/valid.tsv.gz", 5000, 2, False),
    ],
)
def test_real_sets_are_read_without_naming_columns(name: str, count: int, labels: int, pair: bool) -> None:
    source = open_one(Path(str(DATA), name))
    rows = list(source.rows())
    assert (len(rows), len({row.label for row in rows}), source.has_text2) == (count, labels, pair)


@pytest.mark.skipif(DATA is None, reason="TFORMER_DATA names no folder of data sets")
def test_a_real_score_is_found() -> None:
    assert open_one(Path(str(DATA), "sick/train.tsv"), numeric_label=True).label_column == "relatedness"


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


def test_labels_are_found_by_name_in_any_case_and_by_number_where_no_name_is_one() -> None:
    index = LabelIndex(("NEGATIVE", "positive"))
    assert [index.encode(label, "a:1") for label in ("negative", "1", "positive", "0", "Positive")] == [0, 1, 1, 0, 1]
    assert index.read_as == {"negative": "NEGATIVE", "1": "positive", "0": "NEGATIVE", "Positive": "positive"}
    assert "0 as NEGATIVE" in index.notes()[0] and LabelIndex(("a", "b")).notes() == ()
    for label in ("2", "-1", "0.0", "neg"):
        assert index.find(label) is None
    assert LabelIndex(("1", "2")).find("0") is None and LabelIndex(("a", "A", "b")).find("B") == 2
    assert LabelIndex(("a", "A", "b")).find("á") is None and LabelIndex(("x", "1")).find("0") is None


@pytest.mark.parametrize(
    ("known", "found", "expected"),
    [
        (("pos", "neg"), ("neg", "pos"), "known"),
        (("neg", "pos"), ("0", "1"), "known"),
        (("NEG", "POS"), ("neg", "pos"), "known"),
        (("LABEL_0", "LABEL_1"), ("0", "1"), "known"),
        (("entailment", "neutral", "contradiction"), ("entailment", "neutral"), "known"),
        (("a", "b", "c"), ("0", "1"), "found"),  # another task
        (("1", "2", "3", "4", "5"), ("1", "2"), "found"),
        (("1", "2"), ("1", "2"), "known"),
        (("LABEL_0", "LABEL_1"), ("neg", "pos"), "found"),
        ((), ("a", "b"), "found"),
    ],
)
def test_names_are_kept_where_the_labels_of_the_data_are_these(
    known: tuple[str, ...], found: tuple[str, ...], expected: str
) -> None:
    assert matching_names(known, found) == {"known": known, "found": found}[expected]


def test_two_labels_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="'a' is there more than once"):
        LabelIndex(("a", "b", "a"))


# -- columns -----------------------------------------------------------------------------------------------------------


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
    head = TableHead("a.csv", None if names is None else tuple(names.split(",")), [row.split(",") for row in rows])
    chosen = layout.choose(head, named)
    columns = [chosen.get(role, (None,))[0] for role in ("text", "text2", "label")]
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


@pytest.mark.parametrize("names", ["text;score\n", ""])
def test_decimal_commas_are_numbers_where_the_column_is_one_throughout(names: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", names + "one text;3,5\ntwo texts;-0,125\na third;4\nand more;1,234\n")
    assert [label for _, label in read(path, numeric_label=True)] == ["3.5", "-0.125", "4", "1.234"]
    assert "decimal commas" in open_one(path, numeric_label=True).notes[0]
    assert [label for _, label in read(path)][:2] == ["3,5", "-0,125"]  # classes stay as they are written


@pytest.mark.parametrize(("last", "message"), [("3.5", "has a decimal point, the first ones a comma"), ("x", "finite")])
def test_a_column_that_is_not_one_of_decimal_commas_throughout_is_refused(
    last: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", "text;score\n" + "one text;3,5\n" * 250 + f"two;{last}\n")
    assert message in refusal(lambda: read(path, numeric_label=True)).message
    early = write(tmp_path / "b.csv", f"text;score\none text;3,5\ntwo;{last}\n")
    assert "'3,5' is not a finite number" in refusal(lambda: read(early, numeric_label=True)).message


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
        (["a,x", "b,y"], {"text": "words"}, True),  # a missing name is reported when the file is read
        (["text,label", "a,x"], {"text": 0, "label": 1}, True),
        (["a,x", "b,y"], {"text": 0, "label": 1}, False),
        (["question,what?", "question,who?", "person,she"], {}, False),  # a label that looks like a name
        (["v1,v2", "0,a", "1,b", "0,c"], {}, True),  # a word over numbers
        (["v1,v2", "0,a", "1,b", "z,c"], {}, False),
    ],
)
def test_a_row_of_names_is_recognized(lines: list[str], asked: dict[str, object], expected: bool) -> None:
    rows = [line.split(",") for line in lines]
    layout = LabelledLayout()
    assert layout.has_names(rows, layout.named(Columns(**asked))) is expected  # type: ignore[arg-type]
