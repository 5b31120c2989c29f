"""The table of a sweep on file: Markdown for people, CSV for spreadsheets, JSON for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tformer.checkpoint.atomic import write_text
from tformer.checkpoint.logs import finite
from tformer.workflows.sweep.plan import Plan
from tformer.workflows.sweep.results import Result
from tformer.workflows.sweep.table import Row, Table, measures

OF_A_CELL = ("status", "message", "steps", "tokens", "metric", "best_step")
CURVES = ("curve", "training_curve")


def write_tables(plan: Plan, table: Table, results: Sequence[Result], out: Path) -> None:
    """table.md, table.csv (a row a variant), cells.csv (a row a training) and table.json, each whole or not at all."""
    write_text(out / "table.md", markdown(table))
    write_text(out / "table.csv", _csv(_variant_rows(table)))
    write_text(out / "cells.csv", _csv(_cell_rows(table, results)))
    text = json.dumps(finite(document(plan, table, results)), ensure_ascii=False, allow_nan=False, indent=1)
    write_text(out / "table.json", text + "\n")


def markdown(table: Table) -> str:
    """The best of each task in bold."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    numbers = len(table.columns)
    rule = ["---"] * (len(table.headings) - numbers) + ["---:"] * numbers
    rows = [table.cells(row, mark=lambda text: f"**{text}**") for row in table.rows]
    return "\n".join(map(line, [table.headings, rule, *rows])) + "\n"


def document(plan: Plan, table: Table, results: Sequence[Result]) -> dict[str, Any]:
    """Everything but the curves: what `--json` prints."""
    cells = [{key: value for key, value in asdict(result).items() if key not in CURVES} for result in results]
    rows = [asdict(row) | {"text": dict(zip(table.headings, table.cells(row), strict=True))} for row in table.rows]
    return {"name": plan.name, "axes": list(table.labels), "columns": table.headings, "rows": rows, "cells": cells}


def _variant_rows(table: Table) -> list[dict[str, Any]]:
    return [_variant_row(table, row) for row in table.rows]


def _variant_row(table: Table, row: Row) -> dict[str, Any]:
    failed = sum(row.failures.values())
    cells: dict[str, Any] = {"task": row.task, **{label: row.choices.get(label, "") for label in table.labels}}
    cells |= {"seeds": row.seeds, "failed": failed, "failures": ", ".join(row.failures)}
    for key, stat in row.stats.items():
        cells[key] = stat.mean
        cells[f"{key}.sd"] = stat.deviation
    return cells


def _cell_rows(table: Table, results: Sequence[Result]) -> list[dict[str, Any]]:
    return [
        {"task": result.task, **{label: result.choices.get(label, "") for label in table.labels}, "seed": result.seed}
        | {name: getattr(result, name) for name in OF_A_CELL}
        | dict(measures(result))
        for result in results
    ]


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of different keys under the union of them."""
    names = dict.fromkeys(key for row in rows for key in row)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
