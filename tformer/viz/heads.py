"""Scores of attention heads as plots, tables, JSON and CSV: of one checkpoint, or over a training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tformer.inside.heads import KINDS, MEANINGS, HeadReport, Kind
from tformer.inside.options import head_name
from tformer.loading import Identity
from tformer.support.formatting import aligned
from tformer.viz.picture import ReportView
from tformer.viz.plots import Heat, Line, LinePlot, Plot

WEAK = 0.1  # up to this score a head is not named as one of its kind
MOST_CURVES = 24  # of a plot: more names than that do not fit under it
COPYING = "Loss on random tokens, read for the first time and repeated; a model that copies predicts the latter."


def plots_of(reports: Sequence[HeadReport]) -> list[Plot]:
    """Plots: a map of layers and heads for each score, or for several checkpoints a curve of each head."""
    last = reports[-1]
    plots: list[Plot] = []
    for kind, scores in last.scores.items():
        for name, found_LH in scores.items():
            title, caption = f"{name}, {KINDS[kind]}", f"{MEANINGS[name]}; {last.read}"
            if len(reports) == 1:
                layers, heads = map(range, found_LH.shape)
                plots.append(Heat(found_LH, layers, heads, "layer", "head", "viridis", 0.0, 1.0, name, title, caption,
                                  numbers=True))  # fmt: skip
            else:
                plots.append(_curves(reports, kind, name, title, caption))
    if len(reports) > 1 and last.copying:
        steps = _steps(reports)
        lines = [
            Line(label, steps, np.array([report.copying[key] for report in reports]))
            for label, key in (("first time", "first_loss"), ("repeated", "repeated_loss"))
        ]
        plots.append(LinePlot("step", "loss (nats)", lines, points=True, title="copying", caption=COPYING))
    return plots


def _curves(reports: Sequence[HeadReport], kind: Kind, name: str, title: str, caption: str) -> LinePlot:
    found_NLH = np.stack([report.scores[kind][name] for report in reports])
    highest_LH = np.nan_to_num(found_NLH, nan=-1.0).max(axis=0)
    total = int((highest_LH >= 0).sum())
    if total > MOST_CURVES:
        caption += f"; the {MOST_CURVES} of {total} heads with the highest values"
    shown = np.sort(np.argsort(-highest_LH, axis=None, kind="stable")[: min(total, MOST_CURVES)])
    places = [divmod(int(place), highest_LH.shape[1]) for place in shown]
    cross = kind == "cross"
    lines = [
        Line(head_name(layer, head, cross=cross), _steps(reports), found_NLH[:, layer, head]) for layer, head in places
    ]
    return LinePlot("step", name, lines, points=len(reports) <= 40, title=title, caption=caption)


def _steps(reports: Sequence[HeadReport]) -> Any:
    return np.array([report.step for report in reports], dtype=float)


def best_lines(report: HeadReport) -> Iterator[str]:
    """The head with the highest value of each score, one a line; then how well the model copies."""
    for kind, name, layer, head, value in _best(report):
        found = f"{head_name(layer, head, cross=kind == 'cross')} {value:.3f}"
        yield f"{name}: {found if value > WEAK else f'none above {WEAK} (highest {found})'} ({KINDS[kind]})"
    if report.copying:
        first, repeated, right = report.copying.values()
        yield f"loss {first:.3f} on new tokens, {repeated:.3f} on repeated ones, {right:.1%} of which are right"


def _best(report: HeadReport) -> Iterator[tuple[Kind, str, int, int, float]]:
    for kind, scores in report.scores.items():
        for name, found_LH in scores.items():
            if np.isfinite(found_LH).any():
                layer, head = report.best(name, kind)
                yield kind, name, layer, head, float(found_LH[layer, head])


def as_text(report: HeadReport) -> str:
    """A table of each kind of attention, a row for each head."""
    lines = []
    for kind, scores in report.scores.items():
        rows: list[tuple[str, ...]] = [("head", *scores)]
        for place in np.ndindex(next(iter(scores.values())).shape):
            values = (found_LH[place] for found_LH in scores.values())
            name = head_name(*place, cross=kind == "cross")
            rows.append((name, *("-" if np.isnan(value) else f"{value:.3f}" for value in values)))
        lines += [KINDS[kind], *aligned(rows, right=rows[0][1:]), ""]
    return "\n".join(lines)


def view_of(reports: Sequence[HeadReport], model: Identity) -> ReportView:
    """The reports of one checkpoint or of several; one has a table in a terminal."""
    what = f"step {reports[0].step:,}" if len(reports) == 1 else f"{len(reports)} checkpoints"
    return ReportView(
        f"Heads of {{}}, {what}",
        lambda: _document(reports, model),
        lambda: plots_of(reports),
        lambda: _table(reports),
        None if len(reports) > 1 else lambda **_: as_text(reports[0]),
    )


def _document(reports: Sequence[HeadReport], model: Identity) -> dict[str, Any]:
    """For each checkpoint the scores [layer][head], the best head of each score, and copying."""
    checkpoints = [
        {
            "step": report.step,
            "scores": {kind: {name: found_LH.tolist() for name, found_LH in scores.items()}
                       for kind, scores in report.scores.items()},
            "best": [{"attention": kind, "score": name, "name": head_name(layer, head, cross=kind == "cross"),
                      "layer": layer, "head": head, "value": value}
                     for kind, name, layer, head, value in _best(report)],
            "copying": report.copying or None,
        }
        for report in reports
    ]  # fmt: skip
    return {"model": model, "read": reports[0].read, "checkpoints": checkpoints}


def _table(reports: Sequence[HeadReport]) -> list[tuple[Any, ...]]:
    """A row for each step, kind of attention, head and score."""
    rows: list[tuple[Any, ...]] = [("step", "attention", "layer", "head", "score", "value")]
    for report in reports:
        for kind, scores in report.scores.items():
            for name, found_LH in scores.items():
                for (layer, head), value in np.ndenumerate(found_LH):
                    if np.isfinite(value):
                        rows.append((report.step, kind, layer, head, name, float(value)))
    return rows
