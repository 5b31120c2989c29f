"""Excel and OpenDocument spreadsheets as tables."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.fakes import Columns, Spec, open_one, read_documents, refusal, write
from tests.data.workbooks import excel, open_document
from tformer.data.sources import spreadsheets
from tformer.data.sources.files import Content, FoundFile
from tformer.data.sources.labelled import LabelledSource, open_labelled
from tformer.data.sources.reading import Reading
from tformer.data.sources.spreadsheets import sheet_rows

pytest.importorskip("python_calamine")

ROWS = [["id", "text", "label"], [1, "one, two\nthree", "a"], [2, "Größe €", "b"], [None, None, None], [3, "c", "a"]]


def open_table(path: Path, columns: Columns | None = None) -> LabelledSource:
    [source] = open_labelled([Spec(str(path))], columns=columns)  # type: ignore[list-item]
    return source


@pytest.mark.parametrize(("name", "content"), [("a.xlsx", excel({"Sheet1": ROWS})), ("a.ods", open_document(ROWS))])
def test_spreadsheets_are_read_as_tables(tmp_path: Path, name: str, content: bytes) -> None:
    path = write(tmp_path / name, content)
    source = open_table(path)
    assert [(row.text, row.label, row.place) for row in source.rows()] == [
        ("one, two\nthree", "a", f"{path}:2"),
        ("Größe €", "b", f"{path}:3"),
        ("c", "a", f"{path}:5"),
    ]
    assert source.notes == (f"{name}: text in column 'text', label in column 'label'",)
    assert source.size_bytes() is None
    assert read_documents(open_one(path)) == ["one, two\nthree", "Größe €", "c"]
    first = source.fingerprint()
    assert open_table(write(path, content)).fingerprint() == first
    assert open_table(path, Columns(label="id")).fingerprint() != first


def test_cells_of_every_type_are_text(tmp_path: Path) -> None:
    row = ["x", 3, 3.0, 2.5, -1.0, True, datetime.date(2024, 5, 6), None, "1.0"]
    path = write(tmp_path / "a.xlsx", excel({"s": [row]}))
    [(number, cells)] = sheet_rows(Content(str(path), FoundFile(path), Reading()))
    assert (number, cells) == (1, ["x", "3", "3", "2.5", "-1", "true", "2024-05-06", "", "1.0"])


def test_the_first_sheet_with_rows_is_read_and_named_among_several(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xlsx", excel({"cover": [], "data": ROWS, "more": ROWS}))
    source = open_table(path)
    assert len(list(source.rows())) == 3
    assert source.notes[0].startswith("a.xlsx: sheet 'data', the first of 2, text in column")


def test_a_folder_leaves_spreadsheets_out(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "text,label\nq,x\nr,y\n")
    write(tmp_path / "a.xlsx", excel({"s": ROWS}))
    assert [row.text for row in open_table(tmp_path).rows()] == ["q", "r"]


WHOLE = excel({"Sheet1": ROWS})


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("a.xlsx", b"", ": is empty", ""),
        ("a.xlsx", b"text,label\na,x\n", ": damaged or no spreadsheet: ", ""),
        ("a.xlsx", WHOLE[:-200], ": damaged or no spreadsheet: ", ""),
        ("a.xlsx", excel({"s": []}), ": no rows", ""),
        ("a.xlsx", excel({"s": ROWS[:1]}), ": no rows under the names of its columns", ""),
        ("a.xlsx", excel({"s": [["text", "label"], ["b", None]]}), ":2: the label is empty", ""),
        ("a.csv", WHOLE, ": found an Excel spreadsheet, expected text", "the ending .xlsx"),
        (
            "a.csv",
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
            ": found an old file of Word or Excel, expected text",
            ".xlsx or",
        ),
    ],
)
def test_a_wrong_spreadsheet_is_one_message(tmp_path: Path, name: str, content: bytes, message: str, hint: str) -> None:
    path = write(tmp_path / name, content)
    error = refusal(lambda: list(open_table(path).rows()))
    assert error.message.startswith(f"{path}{message}") and hint in str(error.hint)


def test_a_spreadsheet_that_unpacks_to_more_than_memory_should_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spreadsheets, "MAX_BYTES", 100)
    path = write(tmp_path / "a.xlsx", WHOLE)
    error = refusal(lambda: open_table(path))
    assert "when unpacked, expected at most 100" in error.message and ".csv" in str(error.hint)


@pytest.mark.parametrize("ending", [".xlsx", ".ods"])
def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    path = write(tmp_path / f"a{ending}", WHOLE)
    error = refusal(lambda: open_table(path))
    assert error.message == f"{path}: reading {ending} needs the package python_calamine"
    assert error.hint == "install it with: pip install 'tformer[excel]'"


def test_pandas_reads_the_same_cells(tmp_path: Path) -> None:
    """An independent reader of the same workbooks agrees, where pandas has one."""
    pandas: Any = pytest.importorskip("pandas")
    path = write(tmp_path / "a.xlsx", excel({"Sheet1": ROWS[:3]}))
    frame = pandas.read_excel(path, engine="calamine")
    assert [(row.text, row.label) for row in open_table(path).rows()] == list(
        zip(frame["text"], frame["label"], strict=True)
    )
