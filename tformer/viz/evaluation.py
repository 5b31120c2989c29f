"""Plots of an evaluation: confusion matrix, precision-recall and calibration curves, loss by position or length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tformer.support.errors import InputError
from tformer.support.formatting import shortened, without_middle
from tformer.viz.output import OutputTarget, choose_output, write_output
from tformer.viz.picture import render_plots
from tformer.viz.plots import UNIT_SQUARE, Heat, Line, LinePlot, Plot

MAX_POINTS = 2000  # of a curve
MAX_NAME, MAX_TITLE = 24, 56  # characters of a label, and of the heading


def choose_plot(file: Path | None) -> OutputTarget | None:
    """The file of `--plot` and its format. Raises InputError as `choose_output`, and for standard output."""
    if file is not None and str(file) == "-":
        raise InputError("--plot: expected a file, standard output has the report", hint="--plot evaluation.html")
    return None if file is None else choose_output(file, None, stem="evaluation", option="--plot")


def draw_report(report: dict[str, Any], output: OutputTarget | None) -> dict[str, Any]:
    """Write the pictures of a report, if wanted; the report without its curves, which only pictures need."""
    if output is not None:
        run = report["run"].partition("/checkpoints/")[0].rpartition("/")[2]
        title = without_middle(f"{run}: {report['data']}", MAX_TITLE)
        write_output(output, render_plots(plots_of(report), output.format, title=title))
    return {name: value for name, value in report.items() if name != "curves"}


def plots_of(report: Mapping[str, Any]) -> list[Plot]:
    """Plots of a report: confusion matrix, curves, loss by position or length, those that it has."""
    plots: list[Plot] = []
    if (curves := report.get("curves")) is not None:
        if "confusion" in report:
            names = [shortened(name, MAX_NAME) for name in report["per_class"]]
            counts = np.array(report["confusion"], dtype=float)
            plots.append(Heat(counts, names, names, "label", "prediction", "viridis", 0, value_label="examples",
                              title="Confusion matrix", numbers=True))  # fmt: skip
        lines = [
            _line(f"{shortened(name, MAX_NAME)}, AP {each['average_precision']:.3f}", each["recall"], each["precision"])
            for name, each in curves["precision_recall"].items()
        ]
        about = "AP: average precision, the area under a curve."
        plots.append(LinePlot("recall", "precision", lines, title="Precision and recall", caption=about, **UNIT_SQUARE))
        plots.append(calibration({"model": curves["calibration"]}, bins=10))
    if "by" in report:
        axis, rows = report["by"]["axis"], report["by"]["rows"]
        line = _line("loss", [middle(row) for row in rows], [row["loss"] for row in rows])
        plots.append(LinePlot(axis, "loss", [line], points=True, log_x=axis == "length", title=f"Loss by {axis}"))
    return plots


def calibration(curves: Mapping[str, Mapping[str, list[float]]], *, bins: int) -> LinePlot:
    """Calibration: share of right answers against the probability of the most probable answer, for each curve."""
    lines = [_line(name, found["confidence"], found["accuracy"]) for name, found in curves.items()]
    about = f"{bins} equal bins of probability: below the diagonal the model is too sure."
    return LinePlot("probability", "share that is right", [*lines, _line("perfect", [0, 1], [0, 1])], points=True,
                    title="Calibration", caption=about, **UNIT_SQUARE)  # fmt: skip


def middle(row: Mapping[str, Any]) -> float:
    """The place of a row of `--by` on the axis."""
    return (row["from"] + row["to"]) / 2


def _line(name: str, x: list[float], y: list[float]) -> Line:
    """A line through at most `MAX_POINTS` of the points, evenly spread, both ends among them."""
    chosen = np.unique(np.linspace(0, len(x) - 1, min(len(x), MAX_POINTS)).round().astype(int))
    return Line(name, np.array(x, dtype=float)[chosen], np.array(y, dtype=float)[chosen])
