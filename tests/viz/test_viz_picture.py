"""Plots as a page, a picture, text, JSON or CSV: the same numbers in each; error bars, and numbers in the cells."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import numpy as np
import pytest

from tformer.viz.output import FORMATS
from tformer.viz.picture import render_plots
from tformer.viz.plots import MAX_NUMBERS, Heat, Line, Lines, Plot

HOSTILE = "</script><b>&"
COUNTS = np.array([[50.0, 3.0], [1.0, 40.0]])
CONFUSION = Heat(
    COUNTS, ["no", HOSTILE], ["no", HOSTILE], "label", "prediction", "viridis", title="Confusion", numbers=True
)
X, Y, SPREAD = np.array([0.1, 0.2, 1.0]), np.array([3.0, 2.5, np.nan]), np.array([0.2, 0.1, 0.3])
CURVE = Lines(
    "share", "loss", [Line("rope", X, Y, SPREAD), Line("alibi", X, Y + 1)], log_x=True, points=True, title="Curve"
)
PLOTS: list[Plot] = [CONFUSION, CURVE]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_made_twice_the_same(kind: str) -> None:
    first, second = (render_plots(PLOTS, kind, title=f"A {HOSTILE}") for _ in range(2))
    assert first == second and first


def test_csv_holds_the_numbers_and_the_error_bars() -> None:
    text = render_plots(PLOTS, "csv", title="")
    assert isinstance(text, str)
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["plot", "line", "x", "y", "spread"]
    assert ["Confusion", "no", HOSTILE, "3.0"] in rows
    assert ["Curve", "rope", "0.2", "2.5", "0.1"] in rows and ["Curve", "alibi", "0.1", "4.0"] in rows
    assert len([row for row in rows if row[0] == "Curve"]) == 4  # without what is not a number
    plain = render_plots([Lines("x", "y", [Line("a", X, X)])], "csv", title="")
    assert isinstance(plain, str) and plain.startswith("plot,line,x,y\n")


def test_json_and_the_page_hold_the_same_numbers() -> None:
    document = json.loads(render_plots(PLOTS, "json", title="T"))
    assert document["title"] == "T" and document["plots"][0]["values"] == COUNTS.tolist()
    assert document["plots"][1]["lines"][0]["points"] == [[0.1, 3.0, 0.2], [0.2, 2.5, 0.1]]
    page = render_plots(PLOTS, "html", title=HOSTILE)
    assert isinstance(page, str) and HOSTILE not in page
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page)
    assert found is not None
    heat, curve = json.loads(found[1])["plots"]
    assert heat["values"] == COUNTS.ravel().tolist() and heat["rowNames"] == ["no", HOSTILE] and heat["numbers"]
    assert curve["series"][0]["spread"] == SPREAD.tolist() and curve["series"][0]["y"] == [3.0, 2.5, None]
    assert "spread" not in curve["series"][1] and curve["logX"]


def test_a_picture_writes_the_counts_of_small_maps_only() -> None:
    def svg(plot: Plot) -> str:
        drawn = render_plots([plot], "svg", title="")
        assert isinstance(drawn, bytes)
        return drawn.decode()

    assert all(f">{number}<" in svg(CONFUSION) for number in (50, 3, 1, 40))
    names = [f"c{n}" for n in range(MAX_NUMBERS + 1)]
    many: Any = Heat(np.full((len(names),) * 2, 77777.0), names, names, "a", "b", "viridis", numbers=True)
    assert ">77,777<" not in svg(many) and not many.shows_numbers


def test_a_logarithmic_axis_over_one_decade_names_more_than_its_ends() -> None:
    drawn = render_plots([CURVE], "svg", title="")
    assert isinstance(drawn, bytes) and all(f">{tick}<" in drawn.decode() for tick in ("0.1", "0.2"))
