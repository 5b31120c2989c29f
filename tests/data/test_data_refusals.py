"""Files of data that are refused: how each is read, its content, and the one message."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path
from typing import Any

import pytest

from tests.data import pair_makers
from tests.data.fakes import Columns, Spec, open_one, read_documents, refusal, write
from tformer.data.sources.labelled import open_labelled
from tformer.data.sources.reading import Reading
from tformer.decoding.lines import line_blocks

TMX = '<?xml version="1.0"?>\n<tmx version="1.4"><body/></tmx>\n'
PO = '# German\nmsgid ""\nmsgstr ""\n'
CONLLU = "# sent_id = 1\n1\tGo\tgo\tVERB\t_\t_\t0\troot\t_\t_\n2\t!\t!\tPUNCT\t_\t_\t1\tpunct\t_\t_\n"
HTML = "<!DOCTYPE html>\n<html>\n<p>Hello\n"
FINE = '{"text": "a", "label": "x"}\n'
FORMS = "lemma\tform\tfeatures\nsee\tsaw\tV\n"
TWICE = "text,label,label\na,x,1\nb,y,2\n"
NO_LABEL_COLUMN = "name the column with --label-column (data.columns.label)"


def texts(path: Path, **options: Any) -> object:
    return read_documents(open_one(path, **options))


def labelled(path: Path, columns: Columns | None = None, **options: Any) -> object:
    return list(open_labelled([Spec(str(path))], columns=columns, **options)[0].rows())


def pairs(path: Path, **options: Any) -> object:
    return pair_makers.read(path, **options)


# (name of the file, content, options of reading, message after the path of the file, part of the hint)
TEXTS: list[tuple[str, str | bytes, dict[str, Any], str, str]] = [
    ("a.txt", "", {}, ": is empty", "with text in it"),
    ("a.txt", " ", {}, ": nothing but white space", ""),
    ("a.txt", "\n\n\t \r\n", {}, ": nothing but white space", ""),
    ("a.txt", "\ufeff \n", {}, ": nothing but white space", ""),
    ("a.txt", "a".encode("utf-16"), {}, ":1: invalid UTF-8 at byte 0 (0xff: invalid start byte)", "like UTF-16"),
    ("a.txt", gzip.compress(b"a", mtime=0), {}, ": found gzip data, expected text", "name it with the ending .gz"),
    ("a.txt", b"PK\x03\x04\xff", {}, ": found a zip archive, expected text", "unpack it"),
    ("a.jsonl", f'{FINE}{{"text": \n', {}, ":2: not JSON: Expecting value at character 10", ""),
    ("a.jsonl", f'{FINE}["text"]\n', {}, ":2: expected an object with the key 'text', found a list", ""),
    ("a.jsonl", f'{FINE}{{"txt": "a"}}\n', {}, ":2: no key 'text'; did you mean 'txt'? (known: txt)", "--text-column"),
    ("a.jsonl", f'{FINE}{{"text": 5}}\n', {}, ":2: 'text' should be text, found a number", ""),
    ("a.jsonl", f'{FINE}{{"text": "\\ud800"}}\n', {}, ":2: \\ud800 is half a character", "--invalid-utf8 replace"),
    ("a.jsonl", f'{FINE}{{"text": {"[" * 100000}\n', {}, ":2: JSON nested too deeply to be read", ""),
    ("a.jsonl", FINE, {"column": "body"}, ":1: no key 'body'; known: label, text", "--text-column"),
    ("a.jsonl", FINE, {"column": 0}, ": jsonl has keys, not numbered columns, found data.columns.text = 0", ""),
    ("a.csv", "id,txt\n", {}, ":1: no column 'text' in the first row; did you mean 'txt'? (known: id, txt)", "from 0"),
    ("a.csv", "id,text\n1,a\n2\n", {}, ":3: expected at least 2 columns, found 1", "--text-column"),
]
LABELLED: list[tuple[str, str | bytes, dict[str, Any], str, str]] = [
    ("a.tsv", "", {}, ": is empty", ""),
    ("a.tsv", "\n\n", {}, ": no rows", ""),
    ("a.tsv", "text\tlabel\n", {}, ": no rows under the names of its columns", ""),
    ("a.txt", "first\nlast", {}, ": plain text has no labels", ".tsv"),
    ("a.tsv", "text\tn\tlabel\na\t1\tx\nb\ty\n", {}, ":3: expected 3 fields, found 2", ""),
    ("a.tsv", "text\tlabel\na\tx\nb\tc\ty\n", {}, ":3: expected 2 fields, found 3", ""),
    ("a.csv", 'text,label\n"a\nb",x\nc,d,y\n', {}, ":4: expected 2 fields, found 3", "quotes"),
    ("a.csv", "text,label\na,x\nb, \n", {}, ":3: the label is empty", ""),
    (
        # UTF-8 with a damaged byte, which is no other encoding.
        *("a.tsv", b"text\tlabel\ncaf\xe9 \xc3\xa9\tx\n", {}),
        *(":2: invalid UTF-8 at byte 14 (0xe9: invalid continuation byte)", "--invalid-utf8 replace"),
    ),
    ("a.csv", TWICE, {}, ": 2 columns are called 'label'", "number"),
    ("a.csv", TWICE, {"columns": Columns(label="label")}, ": 2 columns are called 'label'", "number"),
    ("a.jsonl", f'{FINE}["b", "y"]\n', {}, ":2: expected an object, found a list", ""),
    # The place of a JSON error is counted in its line.
    ("a.jsonl", f'{FINE}{{"text": \n', {}, ":2: not JSON: Expecting value at character 10", ""),
    ("a.jsonl", f'{FINE}{{"text": nul}}\n', {}, ":2: not JSON: Expecting value at character 10", ""),
    ("a.jsonl", f'{FINE}{{"text": "a"\n', {}, ":2: not JSON: Expecting ',' delimiter at character 13", ""),
    ("a.jsonl", f'{FINE}{{"text": "abc\n', {}, ":2: not JSON: Unterminated string starting at character 10", ""),
    ("a.jsonl", f'{FINE}{{"text": "b"}}\n', {}, ":2: no key 'label'; known: text", NO_LABEL_COLUMN),
    (
        *("a.jsonl", f'{FINE}{{"text": "b", "lable": "x"}}\n', {}),
        *(":2: no key 'label'; did you mean 'lable'? (known: lable, text)", NO_LABEL_COLUMN),
    ),
    ("a.jsonl", f'{FINE}{{"text": 5, "label": "y"}}\n', {}, ":2: 'text' should be text, found a number", ""),
    ("a.jsonl", '{"text": "\\ud800", "label": "x"}\n', {}, ":1: \\ud800 is half a character", "--invalid-utf8"),
    *(
        ("a.jsonl", f'{FINE}{{"text": "b", "label": {label}}}\n', {}, f":2: {message}", hint)
        for label, message, hint in (
            ('{"x": 1}', "the label should be text or a number, found an object", ""),
            ("[1]", "the labels in a list should be text, found a number", ""),
            ("null", "the label is empty", ""),
            ("NaN", "the label is NaN", ""),
            ('["x", "y"]', "expected one label, found 2", "multi_label"),
            ('"\\ud800"', "\\ud800 is half a character", "--invalid-utf8 replace"),
            ('["a\\udfff"]', "\\udfff is half a character", "--invalid-utf8 replace"),
            (f'"y", "n": {"1" * 5000}', "a whole number of more than 4,300 digits", "quotes"),
        )
    ),
    (
        *("a.jsonl", '{"text": "t", "labels": ["a|b"]}\n', {"multi_label": True}),
        *(":1: the label 'a|b' holds the separator of labels, '|'", "data.label_separator"),
    ),
    *(
        (
            "a.tsv",
            f"text\tscore\na\t1.5\nb\t{score}\n",
            {"numeric_label": True},
            f":3: the label '{score}' is {wrong}",
            "",
        )
        for score, wrong in (
            ("high", "not a finite number, which a score must be"),
            ("nan", "not a finite number, which a score must be"),
            ("inf", "not a finite number, which a score must be"),
            ("-1e300", "too large for a score, at most 3.4e+38"),
        )
    ),
]
PAIRS: list[tuple[str, str | bytes, dict[str, Any], str, str]] = [
    ("a.tsv", "source\ttarget\na\tb\nc\n", {}, ":3: expected 2 fields, found 1", ""),
    ("a.tsv", "a\tb\nc\td\te\n", {}, ":2: expected 2 fields, found 3", ""),
    ("a.csv", 'source,target\n"a\nb",x\nc,d,y\n', {}, ":4: expected 2 fields, found 3", ""),
    ("a.tsv", "source\ttarget\n", {}, ": no rows under the names of its columns", ""),
    ("a.tsv", "\n\n", {}, ": no rows", ""),
    ("a.jsonl", '{"source": "a", "target": "x"}\n["b", "y"]\n', {}, ":2: expected an object, found a list", ""),
    ("a.jsonl", '{"source": "a", "target": "x"}\n{"source": "b"}\n', {}, ":2: no key 'target'; known: source", ""),
    ("a.jsonl", '{"source": "a", "target": 5}\n', {}, ":1: 'target' should be text, found a number", ""),
    ("a.txt", "just text\nmore of it\n", {}, ": plain text is one side of pairs, found no other", ""),
    ("a.txt", "a\tb\njust text, and more\n", {}, ": plain text is one side of pairs, found no other", ""),
    *(
        (name, content, {}, f": cannot tell which column holds the source; {found}", hint)
        for name, content, found, hint in (
            ("a.tsv", "one\ntwo\n", "there is one column, number 0", ""),
            ("a.tsv", FORMS, "there are 3 columns, numbered from 0", "first row: lemma, form, features"),
            ("a.jsonl", '{"a": "", "b": "", "c": ""}\n', "columns: a, b, c", ""),
        )
    ),
    *(
        ("a.tsv", FORMS, {"source_column": source, "target_column": target}, f": {message}", "data.columns.")
        for source, target, message in (
            ("lema", "form", "no column 'lema'; did you mean 'lemma'? (known: features, form, lemma)"),
            ("lemma,x", "form", "no column 'x'; known: features, form, lemma"),
            (7, 0, "no column 7; there are 3 columns, numbered from 0"),
            ("lemma,form", "form", "source and target are the same column 'form'"),
        )
    ),
    (
        "a.jsonl",
        '{"a": "x"}\n',
        {"source_column": 0},
        ": jsonl has keys, not numbered columns, found 0",
        "--source-column",
    ),
    ("a.tsv", "x\tx\tt\na\tb\tc\n", {"source_column": "x"}, ": 2 columns are called 'x'", ""),
]


def lines(path: Path) -> object:
    return list(line_blocks(str(path), errors="strict", size=9))


def sides(path: Path) -> object:
    return pairs(path, target=path)


# (name of the file, content, its name in messages): of no use to any reader of texts
KNOWN_KINDS: list[tuple[str, str | bytes, str]] = [
    ("a.tmx", TMX, "a translation memory (TMX)"),
    ("a.txt", TMX.encode("utf-16"), "a translation memory (TMX)"),
    ("a.xlf", TMX.replace("tmx", "xliff"), "XLIFF"),
    ("a.po", PO, "translations of gettext"),
    ("a.conllu", CONLLU, "words with tags (CoNLL-U)"),
    ("a.csv", CONLLU, "words with tags (CoNLL-U)"),
    ("a.conll", "Ada B-PER\n", "words with tags (CoNLL)"),
    ("a.txt", b"%PDF-1.7\n%\xe2\xe3", "a PDF document"),
    ("a.tsv", b"PK\x03\x04\xff", "a zip archive"),
    ("a.txt", "GGUF\3\0\0\0", "a GGUF model"),
    ("a.txt.gz", gzip.compress(b"\x89PNG\r\n\x1a\n", mtime=0), "an image"),
    ("a.json", "[\n]\n", "JSON"),
]


@pytest.mark.parametrize(("name", "content", "kind"), KNOWN_KINDS)
@pytest.mark.parametrize("read", [texts, labelled, pairs, sides, lines])
def test_a_known_kind_of_file_is_refused_by_name(
    tmp_path: Path, read: Any, name: str, content: str | bytes, kind: str
) -> None:
    path = write(tmp_path / name, content)
    if read is sides and name.endswith((".csv", ".tsv")):
        return
    how = {"errors": "replace"} if read is texts else {}  # replacing wrong bytes makes no text of it
    error = refusal(lambda: read(path, **how))
    assert error.message == f"{path}: found {kind}, expected text" and error.hint


@pytest.mark.parametrize(
    "content", [HTML, '<?xml version="1.0"?>\n<p>Hello</p>\n', "WEBVTT\n\n00:01 --> 00:02\nHello\n"]
)
def test_markup_is_running_text_but_its_lines_are_no_texts(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "a.txt", content)
    assert texts(path) == [content]
    for read in (labelled, pairs, sides, lines):
        error = refusal(lambda read=read: read(path))
        assert "expected text" in error.message and "only running text may have markup" in str(error.hint)


@pytest.mark.parametrize(
    "text", ["<s> Hello\n", "# Title\n\nA text\n", "#include <stdio.h>\n", "{ a\n", "[1] a note\n"]
)
def test_text_that_begins_like_a_known_kind_is_read(tmp_path: Path, text: str) -> None:
    for name in ("a.txt", "a.md", "a.c"):
        path = write(tmp_path / name, text)
        assert texts(path) == [text] and lines(path) == [text.splitlines()]


QUOTES = "--quotes text reads quotes as text"
INCHES = '" wide,pos\n5 ",neg\n'
UNITS = [("unit,text,label", '",pipe,x\n'), ("text,unit,label", 'pipe,",x\n'), ("text,label,unit", 'pipe,x,"\n')]
WRONG, EACH = "not at the end of a cell", "each line has all separators of a row"


@pytest.mark.parametrize(
    ("head", "rows", "line", "end"),
    [
        ("text,label", INCHES, 2, f"closed in line 3, but {EACH}"),
        ("text,label", f"a,x\n\nb,y\n{INCHES}", 5, f"closed in line 6, but {EACH}"),
        ("text,label", '" wide,pos\n\na, b,pos\n5 ",neg\n', 2, f"closed in line 5, but {EACH}"),
        ("text,label", '"good, quoted",x\n"" pipe,y\n', 3, f"closed in line 3, but {WRONG}"),
        ("text,label", '"two\nlines",x\n"Hi" he said,y\n', 4, f"closed in line 4, but {WRONG}"),
        ("text,label", 'a,x\n" pipe,y\nb,x\n', 3, "never closed"),
        *((names, 2 * row, 2, f"closed in line 3, but {EACH}") for names, row in UNITS),
    ],
)
def test_a_quote_that_opens_a_cell_by_mistake_has_its_line(
    tmp_path: Path, head: str, rows: str, line: int, end: str
) -> None:
    path = write(tmp_path / "a.csv", f"{head}\n{rows}")
    columns = Columns(text="text", label="label")
    error = refusal(lambda: labelled(path, columns))
    assert error.message == f"{path}:{line}: a quote opens a cell and is {end}" and QUOTES in str(error.hint)
    assert refusal(lambda: texts(path)).message == error.message


@pytest.mark.parametrize(("head", "row"), [("text,label", '" pipe,x\n'), *UNITS])
def test_quotes_that_are_text_are_read_as_in_tsv(tmp_path: Path, head: str, row: str) -> None:
    rows: Any = labelled(write(tmp_path / "a.csv", head + "\n" + 8 * row), reading=Reading(quotes="text"))
    other: Any = labelled(write(tmp_path / "b.tsv", (head + "\n" + 8 * row).replace(",", "\t")))
    assert [(row.text, row.label) for row in rows] == [(row.text, row.label) for row in other] and len(rows) == 8


def test_quoted_cells_of_several_lines_are_read(tmp_path: Path) -> None:
    cells = ["Dear Sir,\nthank you", "\nA text\n", 'He said "no",\nthen "yes"', ", and\nso on", '"', "a,\nb,"]
    table = io.StringIO()
    csv.writer(table).writerows([("text", "label"), *((cell, "x") for cell in cells), ("b", "y")])
    path = write(tmp_path / "a.csv", table.getvalue())
    assert [row.text for row in labelled(path)] == [*cells, "b"]  # type: ignore[attr-defined]
    path = write(tmp_path / "one.csv", 'text\n"a\nb"\n"\nc\n"\n')
    assert texts(path) == ["a\nb", "\nc\n"]


def test_named_quotes_around_cells_are_not_doubted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\n"of 1,000\nin all",x\nb,y\n')
    assert "--quotes cells" in str(refusal(lambda: labelled(path)).hint)
    rows: Any = labelled(path, reading=Reading(quotes="cells"))
    assert [row.text for row in rows] == ["of 1,000\nin all", "b"]


@pytest.mark.parametrize(
    ("read", "name", "content", "options", "message", "hint"),
    [(read, *row) for read, rows in ((texts, TEXTS), (labelled, LABELLED), (pairs, PAIRS)) for row in rows],
)
def test_a_wrong_file_is_one_message_with_its_name_and_line(
    tmp_path: Path, read: Any, name: str, content: str | bytes, options: dict[str, Any], message: str, hint: str
) -> None:
    path = write(tmp_path / name, content)
    error = refusal(lambda: read(path, **options))
    assert error.message == f"{path}{message}" and hint in str(error.hint)
