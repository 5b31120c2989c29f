"""The numbers themselves: one JSON document, or a row for each value."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from tformer.viz.plot.records import Run
from tformer.viz.plot.series import Axis, Choice, Panel, better, is_noisy, smooth_values
from tformer.viz.plots import Numbers

HEADER = ("run", "split", "metric", "step", "tokens", "seconds", "value")


def as_json(runs: Sequence[Run], panels: Sequence[Panel], *, x: Axis, x_label: str, smooth: float) -> str:
    """What would be drawn, on one line: axis, and of every series x, y and, where it is smoothed, the values logged."""
    series = [
        {
            "run": line.run.name,
            "split": line.split,
            "metric": panel.metric,
            "x": _list(line.x),
            "y": _list(line.y),
            **({} if line.raw is None else {"raw": _list(line.raw)}),
        }
        for panel in panels
        for line in panel.series
    ]
    document = {
        "axis": x,
        "x_label": x_label,
        "smooth": smooth,
        "runs": [{"name": run.name, "path": run.place} for run in runs],
        "series": series,
        "summary": summary(runs),
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(runs: Sequence[Run], choices: Sequence[Choice], *, smooth: float) -> str:
    """A row for each value that was logged; with smoothing a last column, empty where there is none."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*HEADER, *(["smoothed"] if smooth else [])])
    for choice in choices:
        for run in runs:
            for split, track in run.tracks.items():
                values = track.values.get(choice.metric)
                if values is None or split not in choice.splits:
                    continue
                smoothed = (
                    smooth_values(values, smooth)
                    if smooth and is_noisy(choice.metric, split)
                    else [math.nan] * len(values)
                )
                for step, tokens, seconds, value, mean in zip(
                    track.step, track.tokens, track.seconds, values, smoothed, strict=True
                ):
                    if math.isfinite(value):
                        numbers = (step, tokens, seconds, value, *([mean] if smooth else []))
                        writer.writerow([run.name, split, choice.metric, *map(_cell, numbers)])
    return stream.getvalue()


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each run, split and metric: the last value and, where one end is better, the best one, with their steps."""
    rows = []
    for run in runs:
        for split, track in run.tracks.items():
            for metric, values in track.values.items():
                there = [n for n, value in enumerate(values) if math.isfinite(value)]
                row: dict[str, Any] = {"run": run.name, "split": split, "metric": metric}
                row |= {"last": float(values[there[-1]]), "last_step": _step(track.step[there[-1]])}
                best = None
                if (end := better(metric)) is not None:
                    best = (min if end == "lower" else max)(there, key=lambda n: values[n])
                row["best"] = None if best is None else float(values[best])
                row["best_step"] = None if best is None else _step(track.step[best])
                rows.append(row)
    return rows


def _step(value: float) -> float:
    return int(value) if float(value).is_integer() else float(value)


def _list(values: Numbers) -> list[float | None]:
    return [_step(value) if math.isfinite(value) else None for value in values.tolist()]


def _cell(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
