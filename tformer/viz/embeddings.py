"""Vectors of tokens and labels as a page, plots, tables, JSON and CSV."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from tformer.inside.embeddings import EmbeddingReport, nearest
from tformer.loading import Identity
from tformer.support.formatting import aligned
from tformer.viz.lens.text import signs
from tformer.viz.page import render_page
from tformer.viz.picture import ReportView
from tformer.viz.plots import Line, LinePlot, Plot

MOST_NAMED = 60  # points of a picture that all have their names beside them
MOST_WORK = 4e11  # multiplications for the cosines that a page has of every point: about ten seconds of two cores
CHOICE_WORK = 400  # as many take as long as choosing the largest among cosines, for each cosine
MOST_NEIGHBOURS = 1_000_000  # of a page: 8 MB
CAUTION = "The plane shows a part of the variance: points that are near in it may be far apart, which cosines tell."
BODY = """\
<div id="controls" class="controls" role="group" aria-label="What is shown"></div>
<section id="points" aria-label="Principal components"></section>
<section id="nearest" aria-label="Nearest vectors" aria-live="polite"></section>
"""
Rows = list[tuple[Any, ...]]


def described(report: EmbeddingReport) -> str:
    """A line on the vectors shown, the variance of two components, and the measure of nearness."""
    count, of = f"{len(report.shown):,}", f" of {len(report.names):,}" if len(report.shown) < len(report.names) else ""
    shares = "components 1 and 2 have {:.1%} and {:.1%} of the variance".format(*report.explained)
    near = "nearest by cosine" + (", the mean of the table subtracted" if report.centred else "")
    return f"Table '{report.table}', {count}{of} vectors; {shares}; {near}"


def neighbour_rows(report: EmbeddingReport) -> Rows:
    """A heading, then the neighbours of each chosen row, the nearest first."""
    found: Rows = [("name", "id", "rank", "nearest", "nearest_id", "cosine")]
    each = zip(report.asked.tolist(), report.neighbours.tolist(), report.cosines.tolist(), strict=True)
    for row, near, cosines in each:
        for rank, (other, value) in enumerate(zip(near, cosines, strict=True), start=1):
            found.append((report.names[row], row, rank, report.names[other], other, value))
    return found


def point_rows(report: EmbeddingReport) -> Rows:
    """A heading, then each row that is shown with its components."""
    components = [f"component_{number + 1}" for number in range(report.coordinates.shape[1])]
    points = zip(report.shown.tolist(), report.coordinates.tolist(), strict=True)
    return [("name", "id", *components), *((report.names[row], row, *values) for row, values in points)]


def view_of(report: EmbeddingReport, model: Identity) -> ReportView:
    """The report; in a terminal few points, or the neighbours of chosen rows, are a table."""
    few = len(report.asked) or len(report.shown) <= MOST_NAMED
    return ReportView(
        "Vectors of {}",
        lambda: _document(report, model),
        lambda: plots_of(report),
        lambda: _table(report),
        (lambda **_: _text(report)) if few else None,
        partial(render, report),
    )


def _document(report: EmbeddingReport, model: Identity) -> dict[str, Any]:
    """The points that are shown, and the neighbours of the chosen rows."""
    points, near = (
        [dict(zip(names, row, strict=True)) for row in rows]
        for names, *rows in (point_rows(report), neighbour_rows(report))
    )
    facts = {"table": report.table, "centred": report.centred, "explained": report.explained.tolist()}
    return {"model": model, **facts, "nearest": near, "points": points}


def _table(report: EmbeddingReport) -> Rows:
    """The neighbours of the chosen rows; without chosen rows, the points."""
    return neighbour_rows(report) if len(report.asked) else point_rows(report)


def _text(report: EmbeddingReport) -> str:
    """The table to read."""
    heading, *rows = _table(report)
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else signs(str(cell)) for cell in row] for row in rows]
    return "\n".join(aligned([heading, *cells], right=set(heading) - {"name", "nearest"})) + "\n"


def plots_of(report: EmbeddingReport) -> list[Plot]:
    """The points of the first two components; chosen rows and their neighbours have colours and names."""
    number_of = {row: number for number, row in enumerate(report.shown.tolist())}
    few = len(number_of) <= MOST_NAMED

    def line(label: str, rows: Iterable[int], named: bool) -> Line:
        found = [row for row in rows if row in number_of]
        x, y = report.coordinates[[number_of[row] for row in found], :2].T
        return Line(label, x, y, names=[signs(report.names[row]) for row in found] if named else ())

    lines = [line("all that are shown", number_of, few)]
    for row, near in zip(report.asked.tolist(), report.neighbours.tolist(), strict=True):
        lines.append(line(f"nearest to {signs(report.names[row])}", [row, *near], not few))
    return [LinePlot("component 1", "component 2", lines, points=True, joined=False, square=True,
                     title="Principal components", caption=described(report))]  # fmt: skip


def render(report: EmbeddingReport, *, title: str, notes: Iterable[str] = ()) -> str:
    """The page as text: all points, with the neighbours of all if that is quick and small, else of the chosen rows."""
    rows, near, cosines, most = report.asked, report.neighbours, report.cosines, report.neighbours.shape[1]
    drawn = np.array(list(dict.fromkeys([*report.shown.tolist(), *rows.tolist()])))
    work = len(drawn) * len(report.names) * (report.vectors.shape[1] + CHOICE_WORK)
    if work <= MOST_WORK and len(drawn) * most <= MOST_NEIGHBOURS:
        rows, (near, cosines) = drawn, nearest(report.vectors, drawn, most, centred=report.centred)
    return render_page(
        title=title,
        subtitle=described(report),
        body=BODY,
        scripts=("embeddings.js",),
        data={
            "names": report.names.tolist(),
            "shown": report.shown.tolist(),
            "rows": rows.tolist(),
            "asked": report.asked.tolist(),
            "nearest": most,
            "explained": report.explained.tolist(),
        },
        blobs={
            "coordinates": report.coordinates.astype("<f4").tobytes(),
            "neighbours": near.astype("<i4").tobytes(),
            "cosines": cosines.astype("<f4").tobytes(),
        },
        notes=[CAUTION, *notes],
        without=("heatmap.js", "lines.js"),
    )
