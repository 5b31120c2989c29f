"""Vectors of tokens, labels and positions as a page, plots, tables, JSON and CSV."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tformer.inside.embeddings import EmbeddingReport, nearest
from tformer.support.errors import InputError
from tformer.support.files import encode_text
from tformer.support.formatting import aligned, csv_text, json_text
from tformer.viz.lens.text import signs
from tformer.viz.page import render_page
from tformer.viz.plots import Line, Lines, Plot

MOST_NAMED = 60  # points of a picture that all have their names beside them
MOST_WORK = 4e11  # multiplications for the cosines that a page has of every point: about ten seconds of two cores
CHOICE_WORK = 400  # as many take as long as choosing the largest among cosines, for each cosine
MAX_BYTES = 20e6
LARGEST = 32767  # of int16
CAUTION = "The plane shows a part of the variance: points that are near in it may be far apart, which cosines tell."
BODY = """\
<div id="controls" class="controls" role="group" aria-label="What is shown"></div>
<section id="points" aria-label="Principal components"></section>
<section id="nearest" aria-label="Nearest vectors" aria-live="polite"></section>
"""


def described(report: EmbeddingReport) -> str:
    """What is shown, with the variance of the first two components."""
    first, second = report.explained[:2]
    count, of = f"{len(report.shown):,}", f" of {len(report.ids):,}" if len(report.shown) < len(report.ids) else ""
    shares = f"components 1 and 2 have {first:.1%} and {second:.1%} of the variance"
    return f"Table '{report.table}', {count}{of} vectors; {shares}"


def measure(report: EmbeddingReport) -> str:
    """How near is measured."""
    return "cosine, the mean of the table subtracted" if report.centred else "cosine"


def plots_of(report: EmbeddingReport) -> list[Plot]:
    """The points of the first two components; rows asked for and their neighbours have colours and names."""
    place_of = {place: number for number, place in enumerate(report.shown.tolist())}
    few = len(place_of) <= MOST_NAMED

    def line(label: str, places: Iterable[int], named: bool) -> Line:
        found = [place for place in places if place in place_of]
        x, y = report.coordinates[[place_of[place] for place in found], :2].T
        return Line(label, x, y, names=[signs(report.names[place]) for place in found] if named else ())

    lines = [line("all that are shown", place_of, few)]
    for place, near in zip(report.asked.tolist(), report.neighbours.tolist(), strict=True):
        lines.append(line(f"nearest to {signs(report.names[place])}", [place, *near], not few))
    caption = described(report) + (f"; nearest by {measure(report)}" if len(report.asked) else "")
    return [Lines("component 1", "component 2", lines, points=True, joined=False, square=True,
                  title="Principal components", caption=caption)]  # fmt: skip


def neighbour_lines(report: EmbeddingReport) -> list[str]:
    """A table for each row asked for: its neighbours, the nearest first."""
    lines = []
    for place, near, cosines in zip(report.asked, report.neighbours, report.cosines, strict=True):
        pairs = zip(near, cosines, strict=True)
        cells = [(signs(report.names[n]), str(report.ids[n]), f"{value:.4f}") for n, value in pairs]
        heading = f"{signs(report.names[place])} ({report.ids[place]}): {measure(report)}"
        lines += [heading, *aligned([("nearest", "id", "cosine"), *cells], right=("id", "cosine")), ""]
    return lines


def as_json(report: EmbeddingReport, *, run: str) -> str:
    """One document: the points that are shown, and the neighbours of the rows asked for."""
    points = [
        {**_named(report, place), "components": coordinates}
        for place, coordinates in zip(report.shown, report.coordinates.tolist(), strict=True)
    ]
    asked = [
        {**_named(report, place), "nearest": [{**_named(report, n), "cosine": float(value)}
         for n, value in zip(near, cosines, strict=True)]}
        for place, near, cosines in zip(report.asked, report.neighbours, report.cosines, strict=True)
    ]  # fmt: skip
    facts = {"table": report.table, "centred": report.centred, "explained": report.explained.tolist()}
    return json_text({"run": run, **facts, "asked": asked, "points": points})


def _named(report: EmbeddingReport, place: int) -> dict[str, Any]:
    return {"id": int(report.ids[place]), "name": report.names[place]}


def as_csv(report: EmbeddingReport) -> str:
    """A row for each neighbour of the rows asked for; without any, for each point."""
    if not len(report.asked):
        heading = ("id", "name", *(f"component_{number + 1}" for number in range(report.coordinates.shape[1])))
        rows = zip(report.shown, report.coordinates.tolist(), strict=True)
        return csv_text([heading, *((*_named(report, place).values(), *values) for place, values in rows)])
    table: list[tuple[Any, ...]] = [("id", "name", "rank", "nearest_id", "nearest", "cosine")]
    for place, near, cosines in zip(report.asked, report.neighbours, report.cosines.tolist(), strict=True):
        for rank, (n, value) in enumerate(zip(near, cosines, strict=True), start=1):
            table.append((*_named(report, place).values(), rank, *_named(report, n).values(), value))
    return csv_text(table)


def render(report: EmbeddingReport, *, title: str, notes: Iterable[str] = (), max_bytes: float = MAX_BYTES) -> str:
    """The page as text: every point as int16, and the neighbours of all where that is quick, else of those asked for.

    Raises InputError for a page of more than `max_bytes`.
    """
    shown, asked = report.shown, report.asked
    rows = np.array(list(dict.fromkeys([*shown.tolist(), *asked.tolist()])))
    every = len(rows) * len(report.ids) * (report.vectors.shape[1] + CHOICE_WORK) <= MOST_WORK
    rows = rows if every else asked
    near, cosines = nearest(report.vectors, rows, report.neighbours.shape[1], centred=report.centred)
    places = np.array(list(dict.fromkeys([*shown.tolist(), *rows.tolist(), *near.ravel().tolist()])))
    number_of = np.zeros(len(report.ids), dtype=np.int64)
    number_of[places] = np.arange(len(places))
    scales = np.abs(report.coordinates).max(axis=0)
    packed = np.round(report.coordinates / np.where(scales > 0, scales, 1.0) * LARGEST)
    data = {
        "names": report.names[places].tolist(),
        "count": len(shown),
        "rows": number_of[rows].tolist() if not every else None,
        "asked": number_of[asked].tolist(),
        "nearest": near.shape[1],
        "measure": measure(report),
        "scales": scales.tolist(),
        "explained": report.explained.tolist(),
    }
    page = render_page(
        title=title,
        subtitle=described(report),
        body=BODY,
        scripts=("embeddings.js",),
        data=data,
        blobs={
            "ids": report.ids[places].astype("<i4").tobytes(),
            "coordinates": packed.astype("<i2").tobytes(),
            "lengths": np.linalg.norm(report.vectors[shown], axis=1).astype("<f4").tobytes(),
            "neighbours": number_of[near].astype("<i4").tobytes(),
            "cosines": np.round(cosines * LARGEST).astype("<i2").tobytes(),
        },
        notes=[CAUTION, *notes],
        without=("heatmap.js", "lines.js"),
    )
    size = len(encode_text(page))
    if size > max_bytes:
        hint = "--tokens or --top-k make it smaller"
        raise InputError(f"a page of {size / 1e6:.1f} MB does not fit into {max_bytes / 1e6:g} MB", hint=hint)
    return page
