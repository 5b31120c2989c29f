"""Curves as a page: every metric of every run, one file, to choose from and to smooth while looking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tformer.viz.page import render_page
from tformer.viz.plot.document import summary
from tformer.viz.plot.records import Run, Track
from tformer.viz.plot.series import AXES, Axis, Choice, axis_label, is_noisy, label_of, metrics_of, time_unit
from tformer.viz.plots import Numbers

SCRIPTS = ("plot.js",)
MAX_VALUES = 1_000_000  # of all runs together: about 8 MB
DIGITS = 7  # that matter; training computes in fp32
BODY = """\
<div id="controls" class="controls"></div>
<section id="shown" aria-label="Lines shown"></section>
<div id="panels"></div>
<h2>Last and best values</h2>
<p class="caption">Of the runs shown, as they were logged. What has no better end has no best value.</p>
<div id="table"></div>
<div id="table-save"></div>
"""
SMOOTHING = (
    "Smoothing is an exponential average without its bias to zero, over what training logged (faint behind it); "
    "validation and the learning rate are drawn as they are."
)


def render(
    runs: Sequence[Run],
    choices: Sequence[Choice],
    *,
    title: str,
    x: Axis,
    smooth: float,
    log_x: bool,
    log_y: bool,
) -> str:
    """The page as text: all metrics of all runs, the choices shown first.

    Args:
        title: the heading.
        x, smooth, log_x, log_y: where its controls stand when it is opened.
    """
    metrics = metrics_of(runs)
    stride = math.ceil(sum(_values(run) for run in runs) / MAX_VALUES)
    notes = [SMOOTHING]
    if stride > 1:
        notes.append(f"Every {stride}th value of each curve is here, for all would be a page too large; the CSV of "
                     "`tformer plot` has all.")  # fmt: skip
    data = {
        "metrics": [
            {"name": metric, "label": label_of(metric), "splits": splits, "noisy": is_noisy(metric, "train")}
            for metric, splits in metrics.items()
        ],
        "chosen": [{"metric": choice.metric, "splits": choice.splits} for choice in choices],
        "axes": [{"name": axis, "label": axis_label(runs, axis), "there": _has(runs, axis)} for axis in AXES],
        "second": time_unit(runs)[1],
        "start": {"x": x, "smooth": smooth, "logX": log_x, "logY": log_y},
        "runs": [
            {
                "name": run.name,
                "path": run.place,
                "tracks": {split: _track(track, stride) for split, track in run.tracks.items()},
            }
            for run in runs
        ],
        "summary": summary(runs),
    }
    subtitle = ", ".join(run.name for run in runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    return render_page(title=title, subtitle=subtitle, body=BODY, scripts=SCRIPTS, data=data, notes=notes)


def _values(run: Run) -> int:
    return sum(len(track.step) * (3 + len(track.values)) for track in run.tracks.values())


def _has(runs: Sequence[Run], axis: Axis) -> bool:
    tracks = [track for run in runs for track in run.tracks.values()]
    return axis == "step" or any(
        math.isfinite(value) for track in tracks for value in (track.tokens if axis == "tokens" else track.seconds)
    )


def _track(track: Track, stride: int) -> Mapping[str, Any]:
    """Columns for JSON; with a stride the last record is always among those kept."""
    kept = slice((len(track.step) - 1) % stride, None, stride)
    return {
        "step": _column(track.step[kept]),
        "tokens": _column(track.tokens[kept]),
        "time": _column(track.seconds[kept]),
        "values": {metric: _column(values[kept]) for metric, values in track.values.items()},
    }


def _column(values: Numbers) -> list[float | None]:
    return [_short(value) if math.isfinite(value) else None for value in values.tolist()]


def _short(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")
