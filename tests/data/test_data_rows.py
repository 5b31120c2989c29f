"""Rows in memory as a jsonl file: dicts, tuples, strings and data frames; the same rows give the same file."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer.data.sources.rows import is_path, keep_rows, rows_in_messages
from tformer.support.errors import InputError

KEYS = (("text", "label"), ("text", "text2", "label"))


def kept(data: Any, folder: Path, keys: tuple[tuple[str, ...], ...] = KEYS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in keep_rows(data, folder, keys=keys, name="data").read_text().splitlines()]


class Frame:
    """A data frame as far as it is read: names of columns, and columns by name."""

    columns = ("text", "label")

    def __getitem__(self, name: str) -> list[Any]:
        return {"text": ["a", "b"], "label": [np.int64(1), float("nan")]}[name]


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ([("a", "x"), ["b", 2]], [{"text": "a", "label": "x"}, {"text": "b", "label": 2}]),
        ([("a", "b", "x")], [{"text": "a", "text2": "b", "label": "x"}]),
        ([{"text": "a\n\tb", "label": None, "id": 3}], [{"text": "a\n\tb", "label": None, "id": 3}]),
        (Frame(), [{"text": "a", "label": 1}, {"text": "b", "label": None}]),
        (({"n": value} for value in (True, 0.5, "é")), [{"n": True}, {"n": 0.5}, {"n": "é"}]),
        ([(np.str_("a"), np.float32(0.5))], [{"text": "a", "label": 0.5}]),
    ],
)
def test_rows_become_lines_of_jsonl(data: Any, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert kept(data, tmp_path / "new" / "folder") == rows


def test_dates_are_text(tmp_path: Path) -> None:
    days = [{"day": datetime.date(2026, 11, 22), "at": datetime.datetime(2026, 11, 22, 10, 30)}]
    assert kept(days, tmp_path) == [{"day": "2026-11-22", "at": "2026-11-22 10:30:00"}]


def test_messages_name_the_row_in_place_of_the_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "0123.jsonl"
    with pytest.raises(InputError) as caught, rows_in_messages({path: "valid"}):
        raise InputError(f"{path}:12: the label is empty ({path})")
    assert caught.value.message == str(caught.value) == "valid[11]: the label is empty (valid)"


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    frame = Frame()
    frame.columns = ("text", "label", "text")  # type: ignore[assignment]
    with pytest.raises(InputError, match="data: two columns have the name 'text'"):
        keep_rows(frame, tmp_path, keys=KEYS, name="data")


def test_a_string_is_a_tuple_of_one_value(tmp_path: Path) -> None:
    assert kept(["a", "b c"], tmp_path, keys=(("text",),)) == [{"text": "a"}, {"text": "b c"}]


def test_the_same_rows_give_the_same_file_and_others_another(tmp_path: Path) -> None:
    rows = [("a", "x"), ("b", "y")]
    first = keep_rows(rows, tmp_path, keys=KEYS, name="data")
    assert keep_rows(iter(rows), tmp_path, keys=KEYS, name="data") == first
    assert keep_rows(rows[::-1], tmp_path, keys=KEYS, name="data") != first
    assert len(list(tmp_path.iterdir())) == 2  # no temporary file


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data: found int, expected a path, rows (dicts, tuples or strings) or a data frame"),
        ({"text": ["a"]}, "data: found a dict"),
        ([], "data: no rows"),
        ([("a", "x"), 3], "data[1]: found int, expected a dict, a tuple or a string"),
        ([("a",)], "data[0]: found ('a',), expected (text, label) or (text, text2, label)"),
        ([{"a": object}], "data[0]: {'a': <class 'object'>}"),
        ([{"a": float("inf")}], "data[0]: {'a': inf}"),
        ([{"a": "\ud800"}], "data[0]"),
        ([Path("a")], "data: path a among rows"),
    ],
)
def test_other_data_is_one_clear_error_and_leaves_no_file(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        keep_rows(data, tmp_path, keys=KEYS, name="data")
    assert caught.value.message.startswith(message) and not list(tmp_path.iterdir())


def test_names_of_files_are_no_rows() -> None:
    assert is_path("a.txt") and is_path(Path("a.txt")) and not is_path(["a.txt"]) and not is_path(None)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames_of_both_libraries_are_read(library: str, tmp_path: Path) -> None:
    frames = pytest.importorskip(library)
    frame = frames.DataFrame({"text": ["a", "b"], "label": ["x", None], "number": [1, 2], "share": [0.5, 1.0]})
    assert kept(frame, tmp_path) == [
        {"text": "a", "label": "x", "number": 1, "share": 0.5},
        {"text": "b", "label": None, "number": 2, "share": 1.0},
    ]
