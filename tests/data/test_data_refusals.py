"""Files of data that are refused: how each is read, its content, and the one message."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from tests.data import pair_makers
from tests.data.fakes import Columns, Spec, open_one, read_documents, refusal, write
from tformer.data.sources.labelled import open_labelled

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
    ("a.txt", gzip.compress(b"a", mtime=0), {}, ":1: invalid UTF-8 at byte 1 (0x8b: invalid start byte)", "like gzip"),
    ("a.txt", b"PK\x03\x04\xff", {}, ":1: invalid UTF-8 at byte 4 (0xff: invalid start byte)", "like a zip"),
    ("a.jsonl", f'{FINE}{{"text": \n', {}, ":2: not JSON: Expecting value at character 10", ""),
    ("a.jsonl", f'{FINE}["text"]\n', {}, ":2: expected an object with the key 'text', found list", ""),
    ("a.jsonl", f'{FINE}{{"txt": "a"}}\n', {}, ":2: no key 'text'; did you mean 'txt'? (known: txt)", "--text-column"),
    ("a.jsonl", f'{FINE}{{"text": 5}}\n', {}, ":2: 'text' should be text, found int", ""),
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
    ("a.jsonl", f'{FINE}["b", "y"]\n', {}, ":2: expected an object, found list", ""),
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
    ("a.jsonl", f'{FINE}{{"text": 5, "label": "y"}}\n', {}, ":2: 'text' should be text, found int", ""),
    ("a.jsonl", '{"text": "\\ud800", "label": "x"}\n', {}, ":1: \\ud800 is half a character", "--invalid-utf8"),
    *(
        ("a.jsonl", f'{FINE}{{"text": "b", "label": {label}}}\n', {}, f":2: {message}", hint)
        for label, message, hint in (
            ('{"x": 1}', "the label should be text or a number, found dict", ""),
            ("[1]", "the labels in a list should be text, found int", ""),
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
    ("a.jsonl", '{"source": "a", "target": "x"}\n["b", "y"]\n', {}, ":2: expected an object, found list", ""),
    ("a.jsonl", '{"source": "a", "target": "x"}\n{"source": "b"}\n', {}, ":2: no key 'target'; known: source", ""),
    ("a.jsonl", '{"source": "a", "target": 5}\n', {}, ":1: 'target' should be text, found int", ""),
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
