"""Tables of answers: the columns that were read come back as they were, and those of the answers behind them."""

from __future__ import annotations

import csv
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import Spec
from tformer.data.sources.columns import TextLayout
from tformer.data.sources.labelled import LabelledTable, open_labelled, open_texts
from tformer.data.sources.reading import Reading
from tformer.decoding.answer_table import WRITTEN, AnswerTable, as_text, new_names, output_format
from tformer.support.errors import InputError, Interrupted
from tformer.support.files import open_output

COLUMNS = (("label", "text"), ("probability", "number"), ("tags", "list"))
ANSWERS = [["good", 0.123456789, ["a", "b"]], ["bad", 1.0, []]]


def answer(read: Path, written: Path, answers: list[Any] | None = None, **options: Any) -> Path:
    """The table of answers to a table, as a command writes it, one block for each answer."""
    source = open_labelled([Spec(str(read))], needs_label=False)[0].keeping_records()
    format = output_format(written, source.tables[0].format)
    assert format is not None
    table = AnswerTable(format, options.pop("columns", COLUMNS), source.tables, **options)
    with open_output(written) as write, table.writing(write) as take:
        for _, each in zip(table.reading(source.rows()), ANSWERS if answers is None else answers, strict=False):
            take(json.dumps(each) + "\n")
    return written


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def test_csv_keeps_columns_quotes_line_ends_and_blank_rows(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('id,text,when\n007,"one, ""two""\nthree",2024-01-01\n\n', newline="")
    found = rows_of(answer(tmp_path / "in.csv", tmp_path / "out.csv"))
    assert found == [
        ["id", "text", "when", "label", "probability", "tags"],
        ["007", 'one, "two"\nthree', "2024-01-01", "good", "0.123457", "a|b"],
        ["", "", "", "bad", "1", ""],
    ]


def test_the_separator_and_the_columns_of_a_latin_table_come_back(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(
        "id;text\n1;größer; als\n".replace("größer; als", '"größer; als"').encode("cp1252")
    )
    assert answer(tmp_path / "in.csv", tmp_path / "out.csv", ANSWERS[:1]).read_text().splitlines() == [
        "id;text;label;probability;tags",
        '1;"größer; als";good;0.123457;a|b',
    ]


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=8)


@given(rows=st.lists(st.tuples(cells, cells.map("x".__add__)), min_size=1, max_size=5))
def test_every_cell_of_csv_comes_back(rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "in.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("note", "text"), *rows])
    found = rows_of(answer(path, folder / "out.csv", [["x"]] * len(rows), columns=[("label", "text")]))
    assert [row[:2] for row in found[1:]] == [list(row) for row in rows]


def test_jsonl_keeps_types_missing_keys_and_keys_of_later_rows(tmp_path: Path) -> None:
    rows = [{"text": "a", "id": 7, "meta": {"x": [1]}, "when": None}, {"text": "b", "late": True, "label": "old"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = answer(tmp_path / "in.jsonl", tmp_path / "out.jsonl").read_text().splitlines()
    new = [{"predicted_label": label, "probability": p, "tags": tags} for label, p, tags in ANSWERS]
    assert [json.loads(line) for line in lines] == [row | each for row, each in zip(rows, new, strict=True)]
    assert list(json.loads(lines[0])) == ["text", "id", "meta", "when", "predicted_label", "probability", "tags"]
    found = rows_of(answer(tmp_path / "in.jsonl", tmp_path / "out.csv"))
    assert found[0][:6] == ["text", "id", "meta", "when", "late", "label"]
    assert found[1][:6] == ["a", "7", '{"x": [1]}', "", "", ""] and found[2][:6] == ["b", "", "", "", "true", "old"]


def test_parquet_keeps_the_types_that_were_read_and_finds_those_of_jsonl(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    import datetime

    read = pa.table(
        {
            "text": ["a", None],
            "day": pa.array([datetime.date(2024, 1, 1), None]),
            "small": pa.array([1, 2], pa.int8()),
            "kind": pa.array(["x", "y"]).dictionary_encode(),
            "raw": pa.array([b"\xff", b""]),
        }
    )
    parquet.write_table(read, tmp_path / "in.parquet")
    found = parquet.read_table(answer(tmp_path / "in.parquet", tmp_path / "out.parquet"))
    assert found.select(read.column_names).equals(read)
    assert found.to_pydict() | {"tags": [["a", "b"], []], "probability": [0.123456789, 1.0]} == found.to_pydict()
    lines = answer(tmp_path / "in.parquet", tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["day"] == "2024-01-01" and json.loads(lines[1])["text"] is None

    rows = [{"text": "a", "n": 1, "mixed": 1, "f": 1}, {"text": "b", "n": 2**70, "mixed": "x", "f": 0.5}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = parquet.read_table(answer(tmp_path / "in.jsonl", tmp_path / "b.parquet")).to_pydict()
    assert typed["f"] == [1.0, 0.5] and typed["mixed"] == ["1", "x"] and typed["n"] == ["1", str(2**70)]


def test_a_name_that_is_taken_gets_a_prefix() -> None:
    assert new_names(["label", "probability", "label"], ["text", "label", "predicted_label"]) == [
        "predicted_predicted_label",
        "probability",
        "predicted_predicted_predicted_label",
    ]


@pytest.mark.parametrize(
    ("output", "read", "as_json", "format"),
    [
        (None, ".csv", False, ".csv"),
        (None, ".parquet", False, ".jsonl"),
        (None, "sheet", False, ".csv"),
        (None, None, False, None),
        ("a.txt", ".tsv", False, ".tsv"),
        ("a.JSONL", ".csv", False, ".jsonl"),
        ("a.tsv", None, False, None),
        ("a.tsv", ".csv", False, ".tsv"),
        ("a.csv", None, False, ".csv"),
        ("a.csv", ".csv", True, "rows"),
        ("a.csv", None, True, None),
    ],
)
def test_the_ending_of_the_output_else_the_input_decides(
    output: str | None, read: str | None, as_json: bool, format: str | None
) -> None:
    assert output_format((output and Path(output)) or None, read, as_json) == format


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", ["a.xlsx", "a.ods", "a.csv.gz"])
def test_endings_of_tables_that_are_not_written_are_refused(name: str, as_json: bool) -> None:
    with pytest.raises(InputError, match="is not written") as refused:
        output_format(Path(name), ".csv", as_json)
    assert all(ending in str(refused.value.hint) for ending in WRITTEN)


def test_the_objects_of_json_have_the_number_and_the_id_of_their_row(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('text,Ticket ID\n"a\nb",T1\nc,T2\n')
    written: list[str] = []
    source = open_labelled([Spec(str(path))], needs_label=False)[0]
    table = AnswerTable("rows", (), source.tables)
    with table.writing(written.append) as take:
        assert [row.text for row in table.reading(source.rows())] == ["a\nb", "c"]
        take('{"label": "x"}\n{"label": "y"}\n')
    assert [json.loads(line) for line in "".join(written).splitlines()] == [
        {"row": 0, "id": "T1", "label": "x"},
        {"row": 1, "id": "T2", "label": "y"},
    ]


def test_an_interrupt_keeps_the_rows_that_were_answered(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\nb\n")
    source = open_labelled([Spec(str(tmp_path / "in.csv"))], needs_label=False)[0].keeping_records()
    for ending in (".csv", ".jsonl"):
        table, out = AnswerTable(ending, (("label", "text"),), source.tables), tmp_path / f"out{ending}"
        with pytest.raises(Interrupted), open_output(out) as write, table.writing(write) as take:
            next(table.reading(source.rows()))
            take('["x"]\n')
            raise Interrupted("stopped", signal_number=2)
        assert "x" in out.read_text() and "\nb," not in out.read_text() and '"b"' not in out.read_text()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


@given(blocks=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_each_answer_stands_beside_its_row_however_far_the_rows_are_read(
    blocks: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    count = sum(blocks)
    (folder / "long.csv").write_text("id,text\n" + "".join(f"{n},text {n}\n" for n in range(count)))
    source = open_labelled([Spec(str(folder / "long.csv"))], needs_label=False)[0].keeping_records()
    table, written = AnswerTable(".csv", (("label", "text"),), source.tables), list[str]()
    rows = table.reading(source.rows())
    with table.writing(written.append) as take:
        for size in blocks:
            read = list(islice(rows, size))
            take("".join(json.dumps([row.text]) + "\n" for row in read))
    assert "".join(written).splitlines()[1:] == [f"{n},text {n},text {n}" for n in range(count)]
    assert not table.waiting


def test_columns_without_names_are_numbered_and_differing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,1\nb,2\n")
    assert rows_of(answer(tmp_path / "a.csv", tmp_path / "out.csv"))[0][:2] == ["0", "1"]
    (tmp_path / "b.csv").write_text("text,n\na,1\n")
    (tmp_path / "c.csv").write_text("text,m\na,1\n")
    tables = [open_labelled([Spec(str(tmp_path / f"{n}.csv"))], needs_label=False)[0].tables[0] for n in "bc"]
    with (
        pytest.raises(InputError, match=r"c\.csv has other columns than .*b\.csv"),
        AnswerTable(".csv", COLUMNS, tables).writing(print),
    ):
        pass


def test_two_columns_of_one_name_need_a_format_with_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,x,x\na,1,2\nb,3,4\n")
    assert rows_of(answer(tmp_path / "a.csv", tmp_path / "out.csv"))[1][:3] == ["a", "1", "2"]
    with pytest.raises(InputError, match="two columns have the name 'x'") as refused:
        answer(tmp_path / "a.csv", tmp_path / "out.jsonl")
    assert "--output FILE.csv" in str(refused.value.hint)


def test_cells_of_text() -> None:
    values = [None, "a", True, 3, 0.1, [1, "é"], float("inf")]
    assert [as_text(value) for value in values] == ["", "a", "true", "3", "0.1", '[1, "é"]', "Infinity"]
    assert as_text(0.123456789, digits=6) == "0.123457"


# --- the text to continue or translate --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "column", "trained", "found"),
    [
        ("id,prompt", None, None, "prompt"),
        ("source,target", None, None, "source"),
        ("text,title", None, None, "text"),
        ("en,de", None, "en", "en"),
        ("en,de", "de", "en", "de"),
        ("lemma,features", None, "lemma,features", "lemma,features"),
        ("en,de", 1, None, "de"),
    ],
)
def test_the_text_is_the_named_the_trained_or_a_known_column(
    header: str, column: Any, trained: Any, found: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,one\n2,two\n3,three\n4,four\n")
    source = open_texts(str(tmp_path / "a.csv"), column=column, trained=trained, reading=Reading())
    assert source.tables[0].column("text") in (found, 1)
    assert isinstance(source.tables[0], LabelledTable) and isinstance(source.tables[0].layout, TextLayout)
