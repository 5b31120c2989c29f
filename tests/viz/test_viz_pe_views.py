"""Every view of every kind gives plots, and every mistake is told in one line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tformer.errors import InputError
from tformer.viz.pe.catalogue import VIEWS
from tformer.viz.pe.numbers import plots_to_csv, plots_to_json
from tformer.viz.pe.settings import ALL, ENCODINGS, Settings, check_settings
from tformer.viz.pe.tables import Table
from tformer.viz.pe.views import FIXED, LEARNED, plots_of
from tformer.viz.plots import Heat, Lines

SMALL = Settings(d_model=16, heads=2, positions=12, grid=3, clip=3)
DRAW = np.random.default_rng(0)
TABLES = {
    "learned": Table("learned", "run", weight=DRAW.normal(size=(20, 16))),
    "t5_bias": Table("t5_bias", "run", bias=DRAW.normal(size=(32, 2)), bidirectional=True),
    "shaw": Table("shaw", "run", keys=DRAW.normal(size=(7, 8)), values=DRAW.normal(size=(7, 8))),
}


def settings_for(kind: str) -> Settings:
    return replace(SMALL, compare=ALL) if kind == "compare" else replace(SMALL, encoding=kind)


def test_the_catalogue_and_the_functions_name_the_same_views() -> None:
    named = {(kind, name) for kind, views in VIEWS.items() for name in views if kind != "compare"}
    assert named == set(FIXED) | set(LEARNED) and set(VIEWS) == {*ENCODINGS, "compare"}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, views in VIEWS.items() for name in views])
def test_every_view_draws(kind: str, name: str) -> None:
    found, plots = plots_of(settings_for(kind), name, TABLES.get(kind))
    assert found == name and plots
    for plot in plots:
        assert plot.title and len(plot.caption) > 30, "a sentence says what to see"
        if isinstance(plot, Heat):
            assert plot.values.shape == (len(plot.rows), len(plot.columns)) and np.isfinite(plot.values).any()
        else:
            assert plot.lines and all(len(line.x) == len(line.y) for line in plot.lines)
    document = plots_to_json(plots)
    assert len(document) == len(plots) and plots_to_csv(plots).count("\n") > 2


def test_the_classic_traces_are_of_50_and_of_500_tokens_with_and_without_cosines() -> None:
    _, plots = plots_of(Settings(d_model=64), None, None)
    assert [len(plot.lines) for plot in plots] == [50, 50, 500, 500]  # type: ignore[union-attr]
    alone, both = plots[:2]
    assert isinstance(alone, Lines) and isinstance(both, Lines)
    assert np.array_equal(alone.lines[7].x, np.arange(0, 64, 2))
    assert np.allclose(alone.lines[7].y[0], np.sin(7))
    finite = np.isfinite(both.lines[7].x)
    assert sorted(both.lines[7].x[finite]) == list(range(64))
    assert len(plots_of(Settings(d_model=64, positions=9), None, None)[1]) == 2


def test_fixed_scales() -> None:
    _, [heat] = plots_of(SMALL, "heatmap", None)
    assert isinstance(heat, Heat) and heat.limits == (-1, 1) and heat.colours == "RdBu_r"
    _, [angles] = plots_of(replace(SMALL, encoding="rope"), "angles", None)
    assert isinstance(angles, Heat) and angles.colours == "twilight" and angles.limits == (0, 2 * np.pi)


def test_curves_compared_begin_at_one() -> None:
    _, [plot] = plots_of(replace(SMALL, compare=("sinusoidal", "rope", "alibi")), None, None)
    assert isinstance(plot, Lines)
    assert [line.y[0] for line in plot.lines] == pytest.approx([1.0] * 4)  # two heads: first (also the middle) and last
    assert {line.label.split(",")[0] for line in plot.lines} == {"sinusoidal", "rope", "alibi"}
    _, [plot] = plots_of(replace(SMALL, compare=("learned", "rope")), None, TABLES["learned"])
    assert isinstance(plot, Lines) and plot.lines[0].label == "learned" and plot.lines[0].y.max() == 1


def test_learned_plots_show_the_table_itself() -> None:
    table = TABLES["learned"]
    _, [heat] = plots_of(replace(SMALL, encoding="learned"), "heatmap", table)
    assert isinstance(heat, Heat) and np.array_equal(heat.values, table.learned[:12])
    _, [similar] = plots_of(replace(SMALL, encoding="learned"), "similarity", table)
    assert isinstance(similar, Heat) and np.allclose(np.diag(similar.values), 1)
    _, [norms] = plots_of(replace(SMALL, encoding="learned"), "norms", table)
    assert isinstance(norms, Lines) and norms.lines[0].y[3] == pytest.approx(np.linalg.norm(table.learned[3]))
    bias = TABLES["t5_bias"].bias
    assert bias is not None
    _, [heads] = plots_of(replace(SMALL, encoding="t5_bias"), "bias", TABLES["t5_bias"])
    assert isinstance(heads, Heat) and list(heads.columns) == list(range(-11, 12))
    assert heads.values[1, 11] == bias[0, 1] and heads.values[0, 8] == bias[3, 0] and heads.values[0, 14] == bias[19, 0]


def test_the_path_keeps_distances_in_a_plane() -> None:
    corner = np.array([[0.0, 0, 0], [3, 0, 0], [3, 1, 0], [0, 1, 0]]) @ np.linalg.qr(DRAW.normal(size=(3, 3)))[0]
    path = Table("learned", "run", weight=corner).path()
    assert np.linalg.norm(path[0] - path[2]) == pytest.approx(np.sqrt(10))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoding": "sinusodal"}, "--encoding sinusodal: unknown"),
        ({"d_model": 7}, "--d-model 7 is odd"),
        ({"d_model": 1 << 20}, "--d-model 1048576: expected 2 to 8,192"),
        ({"encoding": "patch2d", "d_model": 6}, "--d-model 6: patch2d needs a multiple of 4"),
        ({"encoding": "rope", "d_model": 12, "heads": 4}, "an even number"),
        ({"positions": 1}, "--positions 1: expected 2 to"),
        ({"base": 1.0}, "--base 1: expected a number above 1"),
        ({"base": float("nan")}, "--base nan"),
        ({"layout": "spiral"}, "--layout spiral: expected interleaved or halves or fairseq"),
        ({"encoding": "alibi", "layout": "halves"}, "alibi has no layouts"),
        ({"encoding": "t5_bias", "max_distance": 16}, "--max-distance 16: expected more than half the buckets (16)"),
        ({"compare": ("rope", "nope")}, "--compare nope: unknown"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as error:
        check_settings(replace(Settings(), **change))  # type: ignore[arg-type]
    assert words in error.value.message


@pytest.mark.parametrize(
    ("change", "view", "words"),
    [
        ({}, "gramm", "--view gramm: sinusoidal has no such view"),
        ({"encoding": "learned"}, None, "--encoding learned shows what a model has learned"),
        ({"encoding": "t5_bias"}, "bias", "--view bias shows what a model has learned"),
        ({"dims": (16,)}, "waves", "--dims 16: there is no such dimension, expected 0 to 15"),
        ({"encoding": "alibi", "dims": (0,)}, None, "--dims 0: there is no such head, expected 1 to 2"),
        ({"encoding": "shaw", "dims": (0,)}, None, "--dims: shaw has no view of single dimensions"),
        ({"compare": ("shaw",)}, None, "--compare shaw: it has no curve"),
        ({"compare": ("learned",)}, None, "--compare learned: its curve is learned"),
    ],
)
def test_views_that_cannot_be(change: dict[str, object], view: str | None, words: str) -> None:
    with pytest.raises(InputError) as error:
        plots_of(replace(SMALL, **change), view, None)  # type: ignore[arg-type]
    assert words in error.value.message
