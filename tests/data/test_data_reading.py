"""Encoding and separator of tables: found, or named; and whole numbers that pandas made floats."""

from __future__ import annotations

import codecs
import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import Columns, Spec, open_one, read_documents, refusal, write
from tformer.data.sources.labelled import LabelledSource, open_labelled
from tformer.data.sources.pairs import open_pairs
from tformer.data.sources.reading import Reading, find_delimiter, find_encoding

ROWS = [("Ça va, très bien\u00a0: « naïf »", "oui"), ("Größe; über 5 €", "non"), ("plain", "oui")]


def source_of(path: Path, columns: Columns | None = None, **reading: Any) -> LabelledSource:
    [source] = open_labelled([Spec(str(path))], columns=columns, reading=Reading(**reading))  # type: ignore[list-item]
    return source


def rows_of(path: Path, columns: Columns | None = None, **reading: Any) -> list[tuple[str, str | None]]:
    return [(row.text, row.label) for row in source_of(path, columns, **reading).rows()]


def table(rows: list[tuple[str, ...]], delimiter: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([("text", "label"), *rows])
    return text.getvalue()


# -- encoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "bom", "found"),
    [
        ("utf-8", b"", "utf-8"),
        ("utf-8-sig", b"", "utf-8"),
        ("utf-16", b"", "utf-16"),
        ("utf-16-be", codecs.BOM_UTF16_BE, "utf-16"),
        ("utf-16-le", b"", "utf-16-le"),
        ("utf-16-be", b"", "utf-16-be"),
        ("cp1252", b"", "cp1252"),
    ],
)
def test_the_encoding_of_a_table_is_found_and_no_letter_is_lost(
    tmp_path: Path, encoding: str, bom: bytes, found: str
) -> None:
    path = write(tmp_path / "a.csv", bom + table(ROWS).encode(encoding))
    source = source_of(path)
    assert [(row.text, row.label) for row in source.rows()] == ROWS
    assert find_encoding(iter([path.read_bytes()])) == found
    [note] = source.notes
    assert note.startswith("a.csv: text in" if found == "utf-8" else f"a.csv: encoding {found}, text in")
    assert next(iter(source.rows())).place == f"{path}:2"


def test_latin_1_is_read_where_cp1252_leaves_a_byte_undefined(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "text\tlabel\ncafé\x81\tx\nb\ty\n".encode("latin-1"))
    assert rows_of(path)[0] == ("café\x81", "x")


@given(st.text(st.characters(codec="cp1252", categories=["L"]), min_size=3), st.sampled_from("äéñßÿ"))
def test_words_of_western_languages_are_read_as_they_were_written(word: str, letter: str) -> None:
    data = f"text,label\n{word} {letter} {letter}d,x\n".encode("cp1252")
    if find_encoding(iter([data])) != "utf-8":  # a row of several letters beyond ASCII may be of another script
        assert data.decode(find_encoding(iter([data]))) == data.decode("cp1252")


@pytest.mark.parametrize("encoding", ["cp1251", "koi8-r", "shift_jis", "gbk", "cp1253"])
def test_other_scripts_are_not_taken_for_a_western_encoding(tmp_path: Path, encoding: str) -> None:
    text = {"cp1253": "Ελληνικά γράμματα", "shift_jis": "日本語の文章", "gbk": "中文文本在这里"}.get(
        encoding, "Русский текст"
    )
    path = write(tmp_path / "a.csv", table([(text, "x"), ("b", "y")]).encode(encoding))
    error = refusal(lambda: rows_of(path))
    assert f"{path}:2: invalid UTF-8 at byte " in error.message and "--encoding" in str(error.hint)
    assert rows_of(path, encoding=encoding)[0] == (text, "x")


def test_a_named_encoding_is_used_for_text_and_pairs_too(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "déjà vu\r\nça\n".encode("latin-1"))
    assert read_documents(open_one(text, encoding="latin-1")) == ["déjà vu\nça\n"]
    assert "--encoding" in str(refusal(lambda: read_documents(open_one(text))).hint)
    sides = [write(tmp_path / name, f"{name} é\n".encode("utf-16")) for name in ("source", "target")]
    [pairs] = open_pairs([Spec(*map(str, sides))], reading=Reading(encoding="utf-16"))
    assert [(row.source, row.target) for row in pairs.rows()] == [("source é", "target é")]


def test_bytes_that_are_not_of_the_named_encoding_are_refused_with_line_and_byte_or_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"text,label\na,x\n\x81,y\n")
    assert refusal(lambda: rows_of(path, encoding="cp1252")).message == (
        f"{path}:3: invalid cp1252 at byte 15 (0x81: character maps to <undefined>)"
    )
    assert rows_of(path, encoding="cp1252", errors="replace")[1] == ("\ufffd", "y")


def test_the_separator_and_the_encoding_belong_to_the_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label;b\ncafé,x;y\nd,z;w\n".encode("cp1252"))
    found = {source_of(path, **reading).fingerprint() for reading in ({}, {"encoding": "latin-1"}, {"delimiter": ";"})}
    assert len(found) == 3


# -- separator ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delimiter", "name"), [(",", None), (";", "semicolon"), ("\t", "tab"), ("|", "bar")])
def test_the_separator_of_csv_is_found(tmp_path: Path, delimiter: str, name: str | None) -> None:
    rows = [("one, two; three | four", "a"), ('say "hi"\nand bye', "b"), ("", "a")]
    path = write(tmp_path / "a.csv", table(rows, delimiter))
    source = source_of(path)
    assert [(row.text, row.label) for row in source.rows()] == rows
    assert source.notes == (
        f"a.csv: {'' if name is None else f'separator {name}, '}text in column 'text', label in column 'label'",
    )
    words = read_documents(open_one(path))
    assert words == [text for text, _ in rows if text]  # running text, a document in each row


@given(
    st.sampled_from(",;|\t"),
    st.lists(st.tuples(st.text(st.sampled_from('ab,;|\t"\n '), max_size=8), st.sampled_from("xy")), min_size=1),
)
def test_any_cells_come_back_with_every_separator(delimiter: str, rows: list[tuple[str, str]]) -> None:
    text = table(rows, delimiter)
    assert find_delimiter(text.splitlines(keepends=True)) == delimiter


def test_a_named_separator_wins_over_what_would_be_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text;label\na,b;x\nc,d;y\n")
    assert rows_of(path) == [("a,b", "x"), ("c,d", "y")]
    other = write(tmp_path / "a.txt", "text~label\na~x\nb~y\n")
    assert rows_of(other, delimiter="~") == [("a", "x"), ("b", "y")]
    assert rows_of(write(tmp_path / "a.tsv", "text;label\na;x\n"), delimiter="semicolon") == [("a", "x")]
    assert rows_of(write(tmp_path / "b.tsv", 'text\tlabel\n"a\tx\n'), delimiter="tab") == [('"a', "x")]


def test_one_column_hints_at_the_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text~label\na~x\nb~y\n")
    error = refusal(lambda: source_of(path))
    assert "there is one column, number 0" in error.message and "--delimiter" in str(error.hint)


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        ({"encoding": "latin-99"}, "--encoding: unknown encoding 'latin-99'"),
        ({"encoding": "base64"}, "--encoding: unknown encoding 'base64'"),
        ({"delimiter": ""}, "--delimiter: expected one character, comma, semicolon, tab, bar, found ''"),
        ({"delimiter": "::"}, "--delimiter: expected one character, comma, semicolon, tab, bar, found '::'"),
        ({"delimiter": "\n"}, "--delimiter: expected one character, comma, semicolon, tab, bar, found '\\n'"),
    ],
)
def test_a_wrong_encoding_or_separator_is_refused(reading: dict[str, str], message: str) -> None:
    assert refusal(lambda: Reading(**reading)).message == message  # type: ignore[arg-type]


# -- whole numbers -----------------------------------------------------------------------------------------------------


def test_whole_numbers_that_pandas_made_floats_stay_whole(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["a", "b", "c"], "label": [1, 0, None]})
    path = tmp_path / "a.csv"
    frame.to_csv(path, index=False)
    assert "1.0" in path.read_text()
    [source] = open_labelled([Spec(str(path))], needs_label=False)  # type: ignore[list-item]
    assert [row.label for row in source.rows()] == ["1", "0", None]
    frame[:2].to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    assert [label for _, label in rows_of(tmp_path / "a.jsonl")] == ["1", "0"]
    pytest.importorskip("pyarrow")
    frame[:2].to_parquet(tmp_path / "a.parquet")
    assert [label for _, label in rows_of(tmp_path / "a.parquet")] == ["1", "0"]


def test_labels_of_several_forms_and_scores_stay_as_they_are_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,1.0\nb,1.1\nc,2.0\n")
    assert [label for _, label in rows_of(path)] == ["1.0", "1.1", "2.0"]
    scores = write(tmp_path / "b.csv", "text,score\na,1.0\nb,2.0\n")
    [source] = open_labelled([Spec(str(scores))], numeric_label=True)  # type: ignore[list-item]
    assert [row.label for row in source.rows()] == ["1.0", "2.0"]
