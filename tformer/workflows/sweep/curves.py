"""The plot of a sweep: the validation metric against the step, one curve a variant, the mean over its seeds.

Where training is validated only once, at its end, that is no curve: the training loss is drawn instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tformer.viz.curves import Curve, draw_curves
from tformer.workflows.sweep.plan import Plan
from tformer.workflows.sweep.results import Result
from tformer.workflows.sweep.table import Stat

FORMATS = ("svg", "png")


def draw(plan: Plan, results: Sequence[Result], out: Path) -> list[Path]:
    """Write curves.svg and curves.png; of several tasks, whose metrics differ, a pair for each. What was written."""
    written = []
    for task in plan.tasks:
        own = [result for result in results if result.task == task.name]
        validated = any(len(result.curve) > 1 for result in own)
        curves = _mean_curves(own, "curve" if validated else "training_curve")
        if not any(curve.points for curve in curves):
            continue
        stem = "curves" if len(plan.tasks) == 1 else f"curves-{task.name}"
        title = plan.name if len(plan.tasks) == 1 else f"{plan.name}: {task.name}"
        for suffix in FORMATS:
            path = out / f"{stem}.{suffix}"
            label = f"validation {own[0].metric}" if validated else "training loss"
            draw_curves(curves, path, title=title, y_label=label, x_label="step")
            written.append(path)
    return written


def _mean_curves(results: Sequence[Result], key: str) -> list[Curve]:
    """For each variant the mean over its seeds, at the steps that all of them have, and its deviation as a band."""
    variants: dict[tuple[tuple[str, str], ...], list[dict[float, float]]] = {}
    for result in results:
        points: dict[float, float] = dict(getattr(result, key))
        if points:
            variants.setdefault(tuple(result.choices.items()), []).append(points)
    curves = []
    for choices, seeds in variants.items():
        label = ", ".join(_named(name, value) for name, value in choices) or "the recipe"
        steps = sorted(set.intersection(*(set(points) for points in seeds)))
        stats = [stat for step in steps if (stat := Stat.of([points[step] for points in seeds])) is not None]
        points_of_mean = [(step, stat.mean) for step, stat in zip(steps, stats, strict=True)]
        spread = [stat.deviation or 0.0 for stat in stats] if len(seeds) > 1 else None
        curves.append(Curve(label, points_of_mean, None, spread))
    return curves


def _named(label: str, value: str) -> str:
    """Words speak for themselves; numbers and truth values need their key."""
    return value if value[:1].isalpha() and value not in ("true", "false", "null") else f"{label} {value}"
