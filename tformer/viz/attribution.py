"""Attribution as plots, tables, JSON and CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tformer.inside.attribution import LARGE_GAP, AttributionReport
from tformer.inside.options import METHODS
from tformer.support.formatting import csv_text, json_text, plural
from tformer.viz.lens.text import signs
from tformer.viz.plots import Heat, Plot, plain

CAUTION = (
    "Attribution is of this input against this baseline. Gradients see small changes, occlusion one token at a time, "
    "rollout only where attention looks: what several methods agree on is worth more."
)
MOST_LINES = 8
DIGITS = 5  # of numbers in plots
MOST_LETTERS = 45  # of the numbers in a row of cells


def attribution_plots(report: AttributionReport) -> list[Plot]:
    """Of an image its patches by each method; of one answer all methods by token; else a map of answers and tokens."""
    if report.pixels is not None:
        return _plots_of_patches(report)
    plots: list[Plot] = []
    for side, tokens in report.tokens.items():
        names = [f"{place}: {signs(token)}" for place, token in enumerate(tokens)]
        words = {"encoder": "source", "decoder": "target"} if report.positions[0] is not None else {}
        where = f", {words.get(side, side)}" if len(report.tokens) > 1 else ""
        if len(report.targets) == 1:
            found = np.stack([_shares(each[side][0]) for each in report.scores.values()])
            if np.isfinite(found).any():
                rows = [METHODS[method] for method in report.scores]
                caption = f"Each row divided by its largest number. {'. '.join(attribution_lines(report))}."
                title = f"what mattered for {_what(report, 0)}{where}"
                plots.append(_heat(found.round(2), rows, names, "method", "share", title, caption))
            continue
        rows = [_what(report, n) for n in range(len(report.targets))]
        caption = "" if plots else f"{'. '.join(attribution_lines(report))}."
        for method, by_side in report.scores.items():
            if np.isfinite(by_side[side]).any():  # a target of one token has none that may change
                unit, title = _unit(report, method), f"{METHODS[method]}{where}"
                plots.append(_heat(by_side[side], rows, names, "position: answer", unit, title, caption))
                caption = ""
    return plots


def _heat(
    values: np.ndarray,
    rows: Any,
    columns: Any,
    row_label: str,
    unit: str,
    title: str,
    caption: str,
    column_label: str = "token read",
) -> Heat:
    """A map of positive (red) and negative (blue) numbers, which are written into the cells where they fit."""
    most = float(np.nanmax(np.abs(values))) or 1.0
    rounded = np.round(values, DIGITS - math.floor(math.log10(most)))
    letters = values.shape[1] * max(len(plain(value)) for value in rounded[np.isfinite(rounded)].tolist())
    return Heat(rounded, rows, columns, row_label, column_label, "RdBu_r", -most, most, unit, title, caption,
                numbers=letters <= MOST_LETTERS)  # fmt: skip


def _shares(scores_T: np.ndarray) -> np.ndarray:
    """The scores divided by the largest size among them."""
    most = float(np.nanmax(np.abs(scores_T))) if np.isfinite(scores_T).any() else 0.0
    return scores_T / (most or 1.0)


def _plots_of_patches(report: AttributionReport) -> list[Plot]:
    """The brightness of the image, and beside it a map of its patches by each method."""
    assert report.pixels is not None
    (rows, columns), bright = report.grid, report.pixels.mean(axis=2)
    height, width = map(range, bright.shape)
    caption = f"{'. '.join(attribution_lines(report))}."
    plots: list[Plot] = [Heat(np.round(bright), height, width, "row", "column", "cividis", 0.0, 255.0, "brightness",
                              "the image", caption)]  # fmt: skip
    for method, by_side in report.scores.items():
        values = by_side["encoder"][0, -rows * columns :].reshape(rows, columns)
        title, unit = f"{METHODS[method]} for {_what(report, 0)}", _unit(report, method)
        plots.append(_heat(values, range(rows), range(columns), "row of patches", unit, title, "",
                           column_label="column of patches"))  # fmt: skip
    return plots


def _unit(report: AttributionReport, method: str) -> str:
    return "attention" if method == "rollout" else report.metric


def _what(report: AttributionReport, n: int) -> str:
    """`5: ␣mat`, the position and the token that is explained; of a classifier the label."""
    position, target = report.positions[n], signs(report.targets[n])
    return target if position is None else f"{position}: {target}"


def attribution_lines(report: AttributionReport) -> Iterator[str]:
    """The metric of each answer with the input and with the baseline; the gap of integrated gradients."""
    minus = "" if report.against is None else f" to {signs(report.against)}"
    for n, (value, base) in enumerate(zip(report.values, report.baseline_values, strict=True)):
        if n == MOST_LINES:
            yield f"and {plural(len(report.values) - n, 'more answer')}"
            break
        what = f"{_what(report, n)}: {report.metric}{minus}"
        yield f"{what} {value:.4g}, {base:.4g} with the baseline ({report.baseline})"
    if (gaps := report.gaps) is not None and (shares := report.gap_shares) is not None:
        worst = int(shares.argmax())
        advice = "; more --steps or another --baseline make it smaller" if shares[worst] > LARGE_GAP else ""
        yield (
            f"integrated gradients miss {abs(gaps[worst]):.2g} ({100 * shares[worst]:.2g} %) of the change from the "
            f"baseline after {report.steps} steps{advice}"
        )


def attribution_table(report: AttributionReport, side: str) -> list[tuple[str, ...]]:
    """A row for each token of a side with its scores for the only answer."""
    columns = [by_side[side][0] for by_side in report.scores.values()]
    rows = [("token", *report.scores)]
    for place, token in enumerate(report.tokens[side]):
        numbers = [float(column[place]) for column in columns]
        rows.append((signs(token), *("" if math.isnan(number) else f"{number:+.4f}" for number in numbers)))
    return rows


def attribution_json(report: AttributionReport, *, run: str) -> str:
    """One document: the tokens, the answers with their metrics and gaps, scores [answer][token] by method and side."""
    facts = {name: getattr(report, name) for name in ("against", "metric", "baseline", "steps", "rule", "notes")}
    gaps = [None] * len(report.targets) if report.gaps is None else report.gaps.tolist()
    columns = (report.positions, report.targets, report.values.tolist(), report.baseline_values.tolist(), gaps)
    names = ("position", "target", "value", "baseline_value", "gap")
    answers = [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]
    scores = {method: {side: each.tolist() for side, each in found.items()} for method, found in report.scores.items()}
    facts |= {"tokens": report.tokens, "answers": answers, "scores": scores}
    return json_text({"run": run, **report.texts, **facts})


def attribution_csv(report: AttributionReport) -> str:
    """A row for each answer and token."""
    rows: list[tuple[Any, ...]] = [("position", "target", "side", "place", "token", *report.scores)]
    for n, (position, target) in enumerate(zip(report.positions, report.targets, strict=True)):
        for side, tokens in report.tokens.items():
            for place, token in enumerate(tokens):
                numbers = [float(by_side[side][n, place]) for by_side in report.scores.values()]
                if not all(map(math.isnan, numbers)):
                    cells = ("" if math.isnan(number) else number for number in numbers)
                    rows.append((position, target, side, place, token, *cells))
    return csv_text(rows)
