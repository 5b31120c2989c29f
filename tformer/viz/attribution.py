"""Attribution as plots, tables, JSON and CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer.inside.attribution import LARGE_GAP, AttributionReport
from tformer.inside.options import METHODS
from tformer.loading import Identity
from tformer.support.formatting import aligned, plural
from tformer.viz.attention.scene import run_name
from tformer.viz.lens.text import signs
from tformer.viz.picture import ReportView
from tformer.viz.plots import Heat, Plot, counted_heat, plain

CAUTION = (
    "Attribution is of this input against this baseline. Gradients see small changes, occlusion one token at a time, "
    "rollout only where attention looks: what several methods agree on is worth more."
)
TITLE = "What mattered for {}"
MOST_LINES = 8
DIGITS = 5  # of numbers in plots
MOST_LETTERS = 45  # of the numbers in a row of cells
Axes = tuple[Sequence[Any], Sequence[Any], str, str]
"""Names of rows and columns, labels of both."""


def view_of(report: AttributionReport, model: Identity) -> ReportView:
    """The report; in a terminal one answer is a table."""
    texts = (f"{name.capitalize()}: {text}" for name, text in report.texts.items())
    return ReportView(
        TITLE,
        lambda: _document(report, model),
        lambda: plots_of(report),
        lambda: rows_of(report),
        (lambda **_: _text(report, model)) if len(report.targets) == 1 and report.pixels is None else None,
        notes=(CAUTION, *report.notes, *texts),
    )


def _text(report: AttributionReport, model: Identity) -> str:
    rows, title = rows_of(report), TITLE.format(run_name(Path(str(model["name"]))))
    shown = [row[2:3] * (len(report.tokens) > 1) + row[4:] for row in rows]
    cells = [[signs(each) if isinstance(each, str) else f"{each:+.4f}" for each in row] for row in shown]
    return "\n".join([title, "", *attribution_lines(report), "", *aligned(cells, right=tuple(METHODS)), ""])


def plots_of(report: AttributionReport) -> list[Plot]:
    """Plots of a report: an image's patches by each method, one answer's tokens by method, or answers by tokens."""
    plots: list[Plot] = []
    answers = [_what(report, n) for n in range(len(report.targets))]
    about = "; ".join((attribution_lines if len(answers) == 1 else gap_lines)(report))
    units = {method: "attention" if method == "rollout" else report.metric for method in report.scores}
    if report.pixels is not None:
        bright = np.round(report.pixels.mean(axis=2))
        plots.append(counted_heat(bright, "row", "column", "cividis", 0.0, 255.0, "brightness", "the image", about))
        rows, columns = map(range, report.grid)
        axes: Axes = rows, columns, "row of patches", "column of patches"
        for method, by_side in report.scores.items():
            patches = by_side["encoder"][0, -math.prod(report.grid) :].reshape(report.grid)
            plots.append(_heat(patches, axes, units[method], f"{METHODS[method]} for {answers[0]}"))
        return plots
    for side, tokens in report.tokens.items():
        names = [f"{place}: {signs(token)}" for place, token in enumerate(tokens)]
        name = side if report.positions[0] is None else {"encoder": "source", "decoder": "target"}[side]
        where = f", {name}" if len(report.tokens) > 1 else ""
        found = {METHODS[method]: by_side[side] for method, by_side in report.scores.items()}
        if len(answers) == 1:
            shares = np.stack([row / (np.nanmax(np.abs(row), initial=0.0) or 1.0) for [row] in found.values()])
            axes = list(found), names, "method", "token read"
            if np.isfinite(shares).any():  # a target of one token has none that may change
                caption = f"Each row divided by its largest number. {about}"
                plots.append(_heat(shares.round(2), axes, "share", f"what mattered for {answers[0]}{where}", caption))
            continue
        axes = answers, names, "position: answer", "token read"
        for (method, values), unit in zip(found.items(), units.values(), strict=True):
            if np.isfinite(values).any():
                plots.append(_heat(values, axes, unit, f"{method}{where}", "" if plots else about))
    return plots


def _heat(values: np.ndarray, axes: Axes, unit: str, title: str, caption: str = "") -> Heat:
    """A map of positive (red) and negative (blue) numbers, which are written into the cells where they fit."""
    most = float(np.nanmax(np.abs(values))) or 1.0
    rounded = np.round(values, DIGITS - math.floor(math.log10(most)))
    letters = values.shape[1] * max(len(plain(value)) for value in rounded[np.isfinite(rounded)].tolist())
    return Heat(rounded, *axes, "RdBu_r", -most, most, unit, title, caption, numbers=letters <= MOST_LETTERS)


def _what(report: AttributionReport, n: int) -> str:
    """Name of an answer: `5: ␣mat` (position and explained token), or a classifier's label."""
    position, target = report.positions[n], signs(report.targets[n])
    return target if position is None else f"{position}: {target}"


def attribution_lines(report: AttributionReport) -> Iterator[str]:
    """The metric of each answer with the input and with the baseline; `gap_lines`."""
    minus = "" if report.against is None else f" to {signs(report.against)}"
    for n, (value, base) in enumerate(zip(report.values, report.baseline_values, strict=True)):
        if n == MOST_LINES:
            yield f"and {plural(len(report.values) - n, 'more answer')}"
            break
        what = f"{_what(report, n)}: {report.metric}{minus}"
        yield f"{what} {value:.4g}, {base:.4g} with the baseline ({report.baseline})"
    yield from gap_lines(report)


def gap_lines(report: AttributionReport) -> Iterator[str]:
    """A line with the largest gap of integrated gradients, if they were computed."""
    if (gaps := report.gaps) is not None:
        shares = np.abs(gaps) / np.maximum(np.abs(report.changes), 1e-12)
        worst = int(shares.argmax())
        advice = "; more --steps or another --baseline make it smaller" if shares[worst] > LARGE_GAP else ""
        yield (
            f"integrated gradients miss {abs(gaps[worst]):.2g} ({100 * shares[worst]:.2g} %) of the change from the "
            f"baseline after {report.steps} steps{advice}"
        )


def rows_of(report: AttributionReport) -> list[tuple[Any, ...]]:
    """A heading, and a row for each answer and token that it sees, with a score or "" by each method."""
    rows: list[tuple[Any, ...]] = [("position", "target", "side", "place", "token", *report.scores)]
    for n, answer in enumerate(zip(report.positions, report.targets, strict=True)):
        for side, tokens in report.tokens.items():
            scores_TM = np.stack([by_side[side][n] for by_side in report.scores.values()], axis=1)
            for place, (token, numbers) in enumerate(zip(tokens, scores_TM.tolist(), strict=True)):
                if not all(map(math.isnan, numbers)):
                    cells = ("" if math.isnan(number) else number for number in numbers)
                    rows.append((*answer, side, place, token, *cells))
    return rows


def _document(report: AttributionReport, model: Identity) -> dict[str, Any]:
    """The tokens, the answers with their metrics and gaps, scores [answer][token] by method and side."""
    facts = {name: getattr(report, name) for name in ("against", "metric", "baseline", "steps", "notes", "tokens")}
    gaps = [None] * len(report.targets) if report.gaps is None else report.gaps.tolist()
    columns = (report.positions, report.targets, report.values.tolist(), report.baseline_values.tolist(), gaps)
    names = ("position", "target", "value", "baseline_value", "gap")
    answers = [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]
    scores = {method: {side: each.tolist() for side, each in found.items()} for method, found in report.scores.items()}
    return {"model": model, **report.texts, **facts, "answers": answers, "scores": scores}
