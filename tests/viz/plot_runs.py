"""Folders that look like runs to whoever plots them: a metrics.jsonl, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def train_record(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    record = {"split": "train", "step": step, "loss": loss, "lr": 0.001, "grad_norm": 1.5, "tokens": 100 * step}
    return {**record, "tokens_per_second": 50.0, "seconds": 2.0 * step, **more}


def valid_record(step: int, loss: float, accuracy: float) -> dict[str, Any]:
    record = {"split": "valid", "step": step, "loss": loss, "accuracy": accuracy, "is_best": True}
    return {**record, "tokens": 7, "bytes": 9}  # of the validation set, not of the training


def write_run(folder: Path, records: list[dict[str, Any]] | None = None, *, tail: str = "") -> Path:
    """Training at 10, 20 ... 100 and validation at 50 and 100, unless other records are given."""
    if records is None:
        records = [train_record(step, 4 - step / 50) for step in range(10, 101, 10)]
        records += [valid_record(50, 3.1, 0.25), valid_record(100, 2.5, 0.5)]
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("schema: 1\n")
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + tail, encoding="utf-8")
    return folder
