"""Sources that are tables: jsonl, csv, tsv and parquet rows as documents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.data.source_cases import Documents, refusal, write
from tformer.data import text as text_module


def test_jsonl_rows_are_documents_and_other_keys_are_ignored(tmp_path: Path, documents: Documents) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '{"text": "one\\nline", "meta": {"deep": [1, {"text": "no"}]}}\n\n{"id": 1, "text": "é"}\r\n{"text": ""}\n'
        '{"text": null}\n{"text": "last", "body": "other"}',
    )
    assert documents(path) == ["one\nline", "é", "last"]
    error = refusal(lambda: documents(path, column="body"))
    assert error.message.startswith(f"{path}:1: no key 'body'; ")
    assert documents(write(tmp_path / "b.ndjson", '{"body": "x"}'), column="body") == ["x"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', "not JSON"),
        ('["text"]', "expected an object with the key 'text', found list"),
        ('{"txt": "a"}', "no key 'text'; did you mean 'txt'?"),
        ('{"text": 5}', "'text' should be text, found int"),
        ('{"text": "\\ud800"}', "half a character"),
        ('{"text": ' + "[" * 100000, "nested too deeply"),
    ],
)
def test_jsonl_mistakes_name_the_line(tmp_path: Path, documents: Documents, line: str, words: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n{line}\n')
    message = refusal(lambda: documents(path)).message
    assert message.startswith(f"{path}:2: ") and words in message


def test_jsonl_half_characters_are_replaced_when_asked(tmp_path: Path, documents: Documents) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a\\ud800b \\ud83d\\ude00"}')
    assert documents(path, errors="replace") == ["a\ufffdb 😀"]


def test_jsonl_refuses_numbered_columns(tmp_path: Path, documents: Documents) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a"}')
    assert "not numbered columns" in refusal(lambda: documents(path, column=0)).message


def test_csv_is_read_as_spreadsheets_write_it(tmp_path: Path, documents: Documents) -> None:
    path = write(tmp_path / "a.csv", '\ufeffid,text\r\n1,"say ""hi"", you\r\nsecond line"\r\n2,plain\r\n\r\n3,\r\n')
    assert documents(path) == ['say "hi", you\nsecond line', "plain"]
    assert documents(path, column="id") == ["1", "2", "3"]
    assert documents(path, column=0) == ["id", "1", "2", "3"]


def test_tsv_has_no_quoting(tmp_path: Path, documents: Documents) -> None:
    path = write(tmp_path / "a.tsv", 'label\ttext\n0\t"quoted" and "open\n1\tb\n')
    assert documents(path) == ['"quoted" and "open', "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id,txt\n1,a\n", ":1: no column 'text' in the first row; did you mean 'txt'?"),
        ("id,text\n1,a\n2\n", ":3: expected at least 2 columns, found 1"),
    ],
)
def test_csv_mistakes_name_the_line(tmp_path: Path, documents: Documents, content: str, words: str) -> None:
    path = write(tmp_path / "a.csv", content)
    assert refusal(lambda: documents(path)).message.startswith(f"{path}{words}")


def test_rows_that_never_end_are_refused_in_bounded_memory(
    tmp_path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "MAX_ROW_CHARACTERS", 1000)
    monkeypatch.setattr("tformer.data.tables.MAX_ROW_CHARACTERS", 1000)
    endless = write(tmp_path / "a.jsonl", '{"text": "' + "x" * 5000 + '"}')
    assert f"{endless}:1: a row has more than 1,000 characters" in refusal(lambda: documents(endless)).message
    unclosed = write(tmp_path / "a.csv", 'text\n"open\n' + "line\n" * 1000)
    assert "field larger than field limit" in refusal(lambda: documents(unclosed)).message


def test_parquet_rows_are_documents(tmp_path: Path, documents: Documents) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [f"row {number}" for number in range(1000)]
    table = pa.table({"n": list(range(1002)), "text": [*rows, None, ""], "kind": pa.array(["k"] * 1002)})
    table = table.set_column(2, "kind", table["kind"].dictionary_encode())
    parquet.write_table(table, path, row_group_size=300)
    assert documents(path) == rows == documents(path, column=1)
    assert documents(path, column="kind") == ["k"] * 1002
    assert "no column 'body'" in refusal(lambda: documents(path, column="body")).message
    assert "should hold text, found int64" in refusal(lambda: documents(path, column="n")).message


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "text,n,n,text\na,1,2,b\n"), ("a.tsv", "text\tn\tn\ttext\na\t1\t2\tb\n")]
)
def test_two_columns_of_the_texts_name_are_refused(
    tmp_path: Path, documents: Documents, name: str, content: str
) -> None:
    path = write(tmp_path / name, content)
    assert refusal(lambda: documents(path)).message == f"{path}:1: 2 columns are called 'text'"
    other = write(tmp_path / f"b{path.suffix}", content.replace("text", "x", 1))
    assert documents(other) == ["b"]


def test_two_parquet_columns_of_the_texts_name_are_refused(tmp_path: Path, documents: Documents) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "body", "text"]), path)
    for column in (None, 2):
        assert refusal(lambda column=column: documents(path, column=column)).message == (
            f"{path}: 2 columns are called 'text'"
        )
    assert documents(path, column="body") == ["b"]


def test_damaged_parquet_names_file_and_offset(tmp_path: Path, documents: Documents) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [os.urandom(20).hex() for _ in range(2000)]}), path, row_group_size=500)
    data = path.read_bytes()
    cut = write(tmp_path / "cut.parquet", data[:-100])
    assert f"{cut}: damaged or not Parquet: expected b'PAR1' at byte {len(data) - 104}" in (
        refusal(lambda: documents(cut)).message
    )
    hurt = bytearray(data)
    hurt[len(data) // 2 : len(data) // 2 + 9000] = bytes(9000)
    message = refusal(lambda: documents(write(tmp_path / "hurt.parquet", bytes(hurt)))).message
    assert "damaged Parquet data after row" in message
    hurt = bytearray(data)
    hurt[-60:-20] = bytes(40)
    assert "damaged Parquet" in refusal(lambda: documents(write(tmp_path / "foot.parquet", bytes(hurt)))).message
