"""Pictures of a sweep, means over seeds: curves of training, over the size of the data, over positions and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tformer.metrics.statistics import Stat
from tformer.support.files import write_file
from tformer.viz.evaluation import middle
from tformer.viz.figure import draw_panels
from tformer.viz.output import OutputTarget, write_output
from tformer.viz.picture import render_plots
from tformer.viz.plot.series import MetricPanel, Series, label_of, make_series
from tformer.viz.plots import Line, LinePlot, Plot
from tformer.workflows.sweep.cells import DONE, Result
from tformer.workflows.sweep.grid import UNSAFE, axes_of
from tformer.workflows.sweep.plan import SweepPlan, SweepTask

CURVE_FORMATS: tuple[Literal["svg", "png"], ...] = ("svg", "png")
PLOT_FORMATS = ("html", "svg", "png", "csv")
FRACTION = "data.fraction"


def draw(plan: SweepPlan, results: Sequence[Result], out: Path) -> list[Path]:
    """Write curves.svg and curves.png; in four formats learning-curve, of an axis over the size of the data, and
    LABEL-by-position or -length, of an evaluation with --by. A set for each task. Returns the files.
    """
    written = []
    for task in plan.tasks:
        own = [result for result in results if result.task == task.name]
        alone = len(plan.tasks) == 1
        end, title = ("", plan.name) if alone else (f"-{task.name}", f"{plan.name}: {task.name}")
        if (panel := _training(own)) is not None:
            for suffix in CURVE_FORMATS:
                written.append(out / f"curves{end}.{suffix}")
                write_file(written[-1], [draw_panels([panel], suffix, title=title, x_label="step")])
        pictures = {"learning-curve": list(_learning_curves(task, own)), **dict(_breakdowns(task, own))}
        for stem, plots in pictures.items():
            for kind in PLOT_FORMATS if plots else ():
                written.append(out / f"{stem}{end}.{kind}")
                write_output(OutputTarget(kind, written[-1]), render_plots(plots, kind, title=title))
    return written


def _training(results: Sequence[Result]) -> MetricPanel | None:
    """Validation metric against the step, one curve for each variant, the mean over its seeds.

    Where training is validated only once, at its end, the training loss is drawn instead.
    """
    validated = any(len(result.curve) > 1 for result in results)
    curves = _mean_curves(results, "curve" if validated else "training_curve")
    if not any(curve.x.size for curve in curves):
        return None
    return MetricPanel(f"validation {results[0].metric}" if validated else "training loss", curves)


def _mean_curves(results: Sequence[Result], key: str) -> list[Series]:
    """For each variant the mean over its seeds at the steps that all have, with the deviation as a band."""
    curves: list[Series] = []
    points = ((_variant(result), *point) for result in results for point in dict(getattr(result, key)).items())
    for label, stats in statistics_of(points).items():
        seeds = max(stat.count for _, stat in stats)
        means = [(step, stat.mean) for step, stat in stats if stat.count == seeds]
        spread = [stat.deviation or 0.0 for _, stat in stats if stat.count == seeds]
        curves.append(make_series(len(curves), label, means, spread if seeds > 1 else None))
    return curves


def statistics_of(points: Iterable[tuple[str, float, float]]) -> dict[str, list[tuple[float, Stat]]]:
    """(x, statistics of the values there) of each line, of values (name of the line, x, value)."""
    found: dict[str, dict[float, list[float]]] = {}
    for name, x, value in points:
        found.setdefault(name, {}).setdefault(x, []).append(value)
    return {
        name: [(x, stat) for x in sorted(values) if (stat := Stat.of(values[x])) is not None]
        for name, values in found.items()
    }


def _learning_curves(task: SweepTask, results: Sequence[Result]) -> Iterator[Plot]:
    """The best validation, and each evaluation, against the share of the training data; none without such an axis."""
    label = next((axis.label for axis in axes_of(task) if axis.keys == (FRACTION,)), None)
    if label is None:
        return
    done = [result for result in results if result.status == DONE]
    for name in ("validation", *task.evaluate):
        points, metrics = [], []
        for result in done:
            best: dict[str, Any] = {"value": result.best, "metric": result.metric}
            found = best if name == "validation" else result.evaluate.get(name, {})
            if found.get("value") is not None:
                points.append((_variant(result, without=label), float(result.choices[label]), float(found["value"])))
                metrics.append(found["metric"])
        if points:
            words = label_of(metrics[0])
            yield mean_lines(points, "share of the training data", words, title=f"{name}: {words}", log_x=True)


def _breakdowns(task: SweepTask, results: Sequence[Result]) -> Iterator[tuple[str, list[Plot]]]:
    """(name of the files, plot) of each evaluation with --by: the loss by position or length."""
    for label in task.evaluate:
        found = [(result, entry["by"]) for result in results if "by" in (entry := result.evaluate.get(label, {}))]
        points = [(_variant(result), middle(row), row["loss"]) for result, by in found for row in by["rows"]]
        if points:
            axis = found[0][1]["axis"]
            lines = mean_lines(points, axis, "loss", title=f"{label}: loss by {axis}", log_x=axis == "length")
            yield f"{UNSAFE.sub('-', label)}-by-{axis}", [lines]


def mean_lines(points: Iterable[tuple[str, float, float]], x_label: str, y_label: str, **options: object) -> LinePlot:
    """Lines through the means of the values (name of the line, x, value) at each x, their deviation as error bars."""
    lines, seeds = [], 1
    for name, stats in statistics_of(points).items():
        most = max(stat.count for _, stat in stats)
        spread = np.array([stat.deviation or 0.0 for _, stat in stats]) if most > 1 else None
        lines.append(Line(name, np.array([x for x, _ in stats]), np.array([stat.mean for _, stat in stats]), spread))
        seeds = max(seeds, most)
    caption = f"Mean of {seeds} seeds; the bars are one standard deviation." if seeds > 1 else "One seed."
    return LinePlot(x_label, y_label, lines, points=True, caption=caption, **options)  # type: ignore[arg-type]


def _variant(result: Result, *, without: str = "") -> str:
    """The choices of a result in a legend, without those on one axis."""
    named = (_named(name, value) for name, value in result.choices.items() if name != without)
    return ", ".join(named) or "the recipe"


def _named(label: str, value: str) -> str:
    """The value in a legend; numbers and truth values follow their key."""
    return value if value[:1].isalpha() and value not in ("true", "false", "null") else f"{label} {value}"
