"""Keys and columns that no format knows are named once with their number of rows, for every kind of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tformer.data.sources.conversations import open_conversations
from tformer.data.sources.labelled import open_labelled
from tformer.data.sources.pairs import open_pairs
from tformer.data.sources.preferences import PreferenceTable
from tformer.data.sources.questions import open_questions
from tformer.data.sources.text import TextSource, open_sources
from tformer.recipe.sections import Columns, SourceSpec
from tformer.tasks import base
from tformer.tasks.base import note_rows
from tformer.tasks.tags.rows import open_tagged
from tformer.workers.work import Work

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "messages": (open_conversations, {"messages": TURNS, "system": "x", "history": [], "tools": None}),
    "alpaca": (open_conversations, {"instruction": "a", "input": "", "output": "b", "system": "x"}),
    "text": (open_conversations, {"text": "a"}),
    "preferences": (
        partial(open_conversations, kind=PreferenceTable),
        {"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"},
    ),
    "questions": (open_questions, {"id": "1", "title": "t", "context": "a b", "question": "q", "answers": []}),
    "tags": (open_tagged, {"tokens": ["a"], "ner_tags": ["O"]}),
    "pairs": (open_pairs, {"source": "a", "target": "b"}),
    "translation": (open_pairs, {"translation": {"en": "a", "de": "b"}}),
    "labels": (open_labelled, {"text": "a", "label": "b"}),
}


def open_running(specs: Any) -> Any:
    return open_sources(specs, columns=Columns())


ROWS["running text"] = (open_running, {"text": "a"})


def notes_of(sources: Any) -> list[str]:
    shown = list[str]()
    list(sources[0].documents() if isinstance(sources[0], TextSource) else sources[0].rows())
    note_rows(sources, Work(note=shown.append))
    return shown


@pytest.mark.parametrize("name", ROWS)
def test_unknown_keys_are_named_once_with_their_rows(name: str, tmp_path: Path) -> None:
    open_rows, row = ROWS[name]
    path = tmp_path / "rows.jsonl"
    rows = [{**row, "id": n} | ({"topc": "x"} if n % 2 else {"topc": None}) | {"b": n} for n in range(4)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert notes_of(open_rows([SourceSpec(path=str(path))])) == [f"{path}: not used: 'b' (4 rows), 'topc' (2 rows)"]
    path.write_text("".join(json.dumps({**row, "id": n}) + "\n" for n in range(4)))
    assert notes_of(open_rows([SourceSpec(path=str(path))])) == []


def test_a_key_of_another_format_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TURNS, "prompt": "a", "input": "c"}) + "\n")
    [note] = notes_of(open_conversations([SourceSpec(path=str(tmp_path / "rows.jsonl"))]))
    assert note.endswith("not used: 'prompt' (1 row), 'input' (1 row)")


def test_a_count_that_ends_before_the_rows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "COUNTED_ROWS", 2)
    path = tmp_path / "rows.jsonl"
    for count, first in ((2, ""), (3, " in the first 2 rows")):
        path.write_text(count * (json.dumps({"text": "a", "b": 1}) + "\n"))
        assert notes_of(open_running([SourceSpec(path=str(path))])) == [f"{path}: not used{first}: 'b' (2 rows)"]


@pytest.mark.parametrize("open_rows", [open_labelled, open_running])
@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_columns_of_tables_are_named_too(format: str, open_rows: Any, tmp_path: Path) -> None:
    path, rows = tmp_path / f"rows.{format}", [("id", "text", "label", "date")]
    rows += [(str(n), f"text {n}", "ab"[n % 2], "" if n else "May") for n in range(4)]
    if format == "csv":
        path.write_text("".join(",".join(row) + "\n" for row in rows))
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist([dict(zip(rows[0], row, strict=True)) for row in rows[1:]]), path)
    label = "" if open_rows is open_labelled else "'label' (4 rows), "
    assert notes_of(open_rows([SourceSpec(path=str(path))])) == [f"{path}: not used: {label}'date' (1 row)"]


def test_a_table_without_names_has_no_unused_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("a b c\tx\nd e f\ty\n")
    assert notes_of(open_labelled([SourceSpec(path=str(tmp_path / "rows.tsv"))])) == []
