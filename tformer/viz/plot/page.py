"""Training curves as an HTML page, a JSON document or CSV rows."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer.support.formatting import listed
from tformer.viz.page import render_page
from tformer.viz.plot.series import (
    AXES,
    Axis,
    Choices,
    MetricPanel,
    PlottedRun,
    Track,
    axis_label,
    better,
    is_noisy,
    label_of,
    metrics_of,
    smooth_values,
    time_unit,
)
from tformer.viz.plots import Numbers

HEADER = ("run", "split", "metric", "step", "tokens", "seconds", "value")


def as_json(runs: Sequence[PlottedRun], panels: Sequence[MetricPanel], *, x: Axis, x_label: str, smooth: float) -> str:
    """One JSON line: the axis, and for every series x, y and, where it is smoothed, the logged values."""
    series = [
        {
            "run": line.run,
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


def as_csv(runs: Sequence[PlottedRun], choices: Choices, *, smooth: float) -> str:
    """A row for each logged value; with smoothing a last column, empty for values that are not smoothed."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*HEADER, *(["smoothed"] if smooth else [])])
    for metric, splits in choices.items():
        for run in runs:
            for split, track in run.tracks.items():
                values = track.values.get(metric)
                if values is None or split not in splits:
                    continue
                smoothed = (
                    smooth_values(values, smooth) if smooth and is_noisy(metric, split) else [math.nan] * len(values)
                )
                for step, tokens, seconds, value, mean in zip(
                    track.step, track.tokens, track.seconds, values, smoothed, strict=True
                ):
                    if math.isfinite(value):
                        numbers = (step, tokens, seconds, value, *([mean] if smooth else []))
                        writer.writerow([run.name, split, metric, *(_plain(number, ALL_DIGITS) for number in numbers)])
    return stream.getvalue()


def summary(runs: Sequence[PlottedRun]) -> list[dict[str, Any]]:
    """For each run, split and metric: the last value and the best one (None without a better direction), with steps."""
    rows = []
    for run in runs:
        for split, track in run.tracks.items():
            for metric, values in track.values.items():
                there = [n for n, value in enumerate(values) if math.isfinite(value)]
                row: dict[str, Any] = {"run": run.name, "split": split, "metric": metric}
                row |= {"last": float(values[there[-1]]), "last_step": _plain(track.step[there[-1]])}
                best = None
                if (end := better(metric)) is not None:
                    best = (min if end == "lower" else max)(there, key=lambda n: values[n])
                row["best"] = None if best is None else float(values[best])
                row["best_step"] = None if best is None else _plain(track.step[best])
                rows.append(row)
    return rows


def _plain(value: float, digits: int | None = None) -> float | None:
    """A number for a file: whole ones without a point, others with these significant digits; None if not finite."""
    if not math.isfinite(value):
        return None
    if float(value).is_integer() and (digits is None or abs(value) < 1e15):
        return int(value)
    return float(value) if digits is None else float(f"{value:.{digits}g}")


def _list(values: Numbers, digits: int | None = None) -> list[float | None]:
    return [_plain(value, digits) for value in values.tolist()]


SCRIPTS = ("plot.js",)
MAX_VALUES = 1_000_000  # of all runs: about 8 MB
DIGITS = 7  # significant ones on a page; training computes in fp32
ALL_DIGITS = 17  # of any number
PROGRESS = """\
<p id="live" class="caption" role="status"></p>
<div id="progress"></div>
<div id="samples"></div>
"""
BODY = """\
<div id="controls" class="controls"></div>
<section id="shown" aria-label="Lines shown"></section>
<div id="panels"></div>
<h2>Last and best values</h2>
<p class="caption">Of the runs shown, as logged. Metrics without a better direction have no best value.</p>
<div id="table"></div>
<div id="table-save"></div>
"""
SMOOTHING = (
    "Smoothing is a debiased exponential average of what training logged (drawn faintly); "
    "validation and the learning rate are drawn as logged."
)


def render(runs: Sequence[PlottedRun], choices: Choices, *, title: str, **start: Any) -> str:
    """The page as text: all metrics of all runs, the choices shown first.

    Args:
        title: the heading.
        start: initial values of the controls, see `page_data`.
    """
    data = page_data(runs, choices, **start)
    notes = [SMOOTHING]
    if (stride := data["stride"]) > 1:
        notes.append(f"Every {stride}th value of each curve is shown; the CSV of `tformer plot` has all.")
    subtitle = listed([run.name for run in runs], 4)
    return render_page(title=title, subtitle=subtitle, body=BODY, scripts=SCRIPTS, data=data, notes=notes)


def render_live(data: Mapping[str, Any]) -> str:
    """The page of `tformer watch`, which asks its server for the data again.

    data: `page_data`, with `progress`: the summary of each run.
    """
    body, scripts = PROGRESS + BODY, (*SCRIPTS, "watch.js")
    return render_page(
        title="Trainings", subtitle="", body=body, scripts=scripts, data=data, notes=[SMOOTHING], live=True
    )


def page_data(
    runs: Sequence[PlottedRun],
    choices: Choices,
    *,
    x: Axis,
    smooth: float,
    log_x: bool,
    log_y: bool,
    max_values: int | None = None,
) -> dict[str, Any]:
    """The data of a page.

    Args:
        x, smooth, log_x, log_y: initial values of the controls.
        max_values: of all curves, `MAX_VALUES` by default; with more, every n-th of each is kept, n the `stride`.
    """
    metrics = metrics_of(runs)
    tracks = [track for run in runs for track in run.tracks.values()]
    values = sum(len(track.step) * (3 + len(track.values)) for track in tracks)
    stride = max(1, math.ceil(values / (max_values or MAX_VALUES)))
    there = {
        "step": True,
        "tokens": any(np.isfinite(track.tokens).any() for track in tracks),
        "time": any(np.isfinite(track.seconds).any() for track in tracks),
    }

    def columns(track: Track) -> dict[str, Any]:
        kept = slice((len(track.step) - 1) % stride, None, stride)  # with the last record
        return {
            "step": _list(track.step[kept], DIGITS),
            "tokens": _list(track.tokens[kept], DIGITS),
            "time": _list(track.seconds[kept], DIGITS),
            "values": {metric: _list(values[kept], DIGITS) for metric, values in track.values.items()},
        }

    return {
        "metrics": [
            {"name": metric, "label": label_of(metric), "splits": splits, "noisy": is_noisy(metric, "train")}
            for metric, splits in metrics.items()
        ],
        "chosen": [{"metric": metric, "splits": splits} for metric, splits in choices.items()],
        "axes": [{"name": axis, "label": axis_label(runs, axis), "there": there[axis]} for axis in AXES],
        "second": time_unit(runs)[1],
        "start": {"x": x, "smooth": smooth, "logX": log_x, "logY": log_y},
        "runs": [
            {
                "name": run.name,
                "path": run.place,
                "tracks": {split: columns(track) for split, track in run.tracks.items()},
            }
            for run in runs
        ],
        "summary": summary(runs),
        "stride": stride,
    }
