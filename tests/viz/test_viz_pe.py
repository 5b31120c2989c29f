"""Positional encodings: values against the training modules, and every view."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tformer.nn.positions import POSITIONS, PositionSizes
from tformer.nn.positions.biases import AlibiPositions, T5BiasOptions, alibi_slopes
from tformer.nn.positions.fixed import Patch2dOptions, Patch2dPositions, SinusoidalOptions, SinusoidalPositions
from tformer.nn.positions.rope import RopeOptions, RopePositions
from tformer.support.errors import InputError
from tformer.viz.pe import fixed
from tformer.viz.pe.learned import LearnedEncoding
from tformer.viz.pe.page import explorer
from tformer.viz.pe.selection import plots_of, views_of
from tformer.viz.pe.settings import ALL, ENCODINGS, EncodingSettings, check_settings
from tformer.viz.pe.views import VIEWS
from tformer.viz.plots import Heat, LinePlot, plots_to_csv, plots_to_json


@pytest.mark.parametrize("layout", ["interleaved", "halves", "fairseq"])
def test_the_sinusoidal_gram_matrix_is_toeplitz(layout: str) -> None:
    table = fixed.sinusoidal_table(EncodingSettings(layout=layout), 512)
    gram = table @ table.T
    for offset in range(-511, 512, 7):
        diagonal = np.diagonal(gram, offset)
        assert np.ptp(diagonal) < 5e-12, offset


def test_the_table_is_the_papers_and_that_of_training() -> None:
    settings = EncodingSettings(d_model=20, base=500.0)
    table = fixed.sinusoidal_table(settings, 60)
    for position in (0, 1, 17, 59):
        for i in range(10):
            angle = position / 500.0 ** (2 * i / 20)
            assert table[position, 2 * i] == pytest.approx(math.sin(angle), abs=1e-14)
            assert table[position, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-14)
    module = SinusoidalPositions(SinusoidalOptions(base=500.0), d_model=20, max_seq_len=60)
    trained = module.embed(torch.zeros(1, 60, 20), torch.arange(60).unsqueeze(0))[0].numpy()
    assert np.array_equal(table.astype(np.float32), trained)
    assert 0 < fixed.fp32_error(settings, 60) < 6e-8


@pytest.mark.parametrize("layout", ["interleaved", "halves", "fairseq"])
def test_columns_named_sines_hold_sines(layout: str) -> None:
    settings = EncodingSettings(d_model=12, layout=layout)
    table = fixed.sinusoidal_table(settings, 3)
    sines = fixed.sine_dimensions(settings).astype(int)
    cosines = np.setdiff1d(np.arange(12), sines)
    assert np.all(table[0, sines] == 0) and np.all(table[0, cosines] == 1)
    assert len(sines) == 6


def test_ropes_curve_and_the_sinusoidal_gram_curve_are_one_function() -> None:
    """Mean cosine over the same frequencies."""
    settings = EncodingSettings(d_model=64, heads=1)
    curve = fixed.rope_curve(settings, 200)
    assert np.allclose(curve, fixed.distance_curve(fixed.sinusoidal_table(settings, 200)), atol=1e-12)


def test_any_query_and_key_of_rope_meet_by_distance_only() -> None:
    module = RopePositions(RopeOptions(), head_dim=16, max_seq_len=64)
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(at: int, other: int) -> float:
        turned = module.rotate(query, key, torch.tensor([[at]]), torch.tensor([[other]]))
        return float((turned[0] * turned[1]).sum())

    for distance in (0, 3, 20):
        scores = [score(at + distance, at) for at in range(0, 44, 4)]
        assert max(scores) - min(scores) < 1e-5


def test_alibi_slopes_are_the_published_ones() -> None:
    """The paper: 8 heads 1/2 ... 1/256, 16 heads 1/2^0.5 ...; 12: those of 8, then every other one of 16."""
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    for heads, expected in ((8, eight), (16, [2 ** (-(n + 1) / 2) for n in range(16)]), (12, eight + between)):
        drawn = [
            -fixed.alibi_bias(EncodingSettings(encoding="alibi", heads=heads), head + 1, 2)[0, 1]
            for head in range(heads)
        ]
        assert np.allclose(drawn, expected, rtol=1e-12)


def test_alibis_matrix_is_the_modules() -> None:
    module = AlibiPositions(num_heads=6)
    place = torch.arange(20).unsqueeze(0)
    for head in (1, 4, 6):
        shown = fixed.alibi_bias(EncodingSettings(encoding="alibi", heads=6), head, 20)
        assert np.allclose(shown, module.bias(place, place)[0, head - 1].numpy(), atol=1e-6)


# T5, both directions, 32 buckets, maximum distance 128: the first distance of each bucket, worked out from the rule
# 8 + floor(8 ln(d/8) / ln(128/8)), that is from d = 8 · 16^(n/8).
FIRST_BOTH = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
# Causal: 16 + floor(16 ln(d/16) / ln(128/16)), from d = 16 · 8^(n/16).
FIRST_CAUSAL = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


@pytest.mark.parametrize(("bidirectional", "firsts"), [(True, FIRST_BOTH), (False, FIRST_CAUSAL)])
def test_t5_buckets_are_the_published_ones(bidirectional: bool, firsts: list[int]) -> None:
    distances = np.arange(300.0)
    shown = fixed.bucket_of(EncodingSettings(encoding="t5_bias"), -distances, bidirectional=bidirectional)
    expected = np.searchsorted(firsts, distances, side="right") - 1
    assert np.array_equal(shown, expected)
    later = fixed.bucket_of(EncodingSettings(encoding="t5_bias"), distances[1:], bidirectional=bidirectional)
    assert np.array_equal(later, expected[1:] + 16 if bidirectional else np.zeros(299))


def test_shaws_index_is_the_clipped_distance() -> None:
    shown = fixed.shaw_index(EncodingSettings(encoding="shaw", clip=4), 12)
    for i in range(12):
        for j in range(12):
            assert shown[i, j] == min(max(j - i, -4), 4) + 4


def test_patches_know_row_and_column() -> None:
    settings = EncodingSettings(encoding="patch2d", d_model=32, grid=5)
    table = fixed.patch_table(settings)
    module = Patch2dPositions(Patch2dOptions(), d_model=32, grid=(5, 5, True))
    assert np.array_equal(table.astype(np.float32), module.table[1:].numpy())
    assert np.allclose(table[7, :16], table[17, :16]) and np.allclose(table[7, 16:], table[9, 16:])
    _, [plot] = plots_of(settings, "similarity", None)
    values = plot.values  # type: ignore[union-attr]
    assert values.shape == (29, 29) and np.isnan(values[5]).all() and np.isnan(values[:, 11]).all()
    for patch in range(25):
        at = patch // 5 * 6 + patch // 5, patch % 5 * 6 + patch % 5
        assert values[at] == pytest.approx(1.0), "a patch is most like itself"


SMALL = EncodingSettings(d_model=16, heads=2, positions=12, grid=3, clip=3)
DRAW = np.random.default_rng(0)
TABLES = {
    "learned": LearnedEncoding("learned", "run", weight=DRAW.normal(size=(20, 16))),
    "t5_bias": LearnedEncoding("t5_bias", "run", bias=DRAW.normal(size=(32, 2)), bidirectional=True),
    "learned_t5_bias": LearnedEncoding(
        "learned_t5_bias", "run", weight=DRAW.normal(size=(20, 16)), bias=DRAW.normal(size=(32, 2)), bidirectional=True
    ),
}


def settings_for(kind: str) -> EncodingSettings:
    return replace(SMALL, compare=ALL) if kind == "compare" else replace(SMALL, encoding=kind)


def test_every_kind_that_acts_has_views() -> None:
    assert set(ENCODINGS) == {*VIEWS} - {"compare"} == {*POSITIONS} - {"none"}
    assert all(map(views_of, (*ENCODINGS, "compare")))


def test_a_kind_without_views_is_shown_by_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module computes the numbers, also for the page, which has no formula for it."""
    for kind in ("sinusoidal", "rope", "alibi"):
        monkeypatch.delitem(VIEWS, kind)
    name, [heat] = plots_of(replace(SMALL, encoding="sinusoidal"), None, None)
    assert isinstance(heat, Heat) and name == "embed"
    assert np.allclose(heat.values, fixed.sinusoidal_table(SMALL, 12), atol=1e-6)
    name, [heat] = plots_of(replace(SMALL, encoding="rope"), "rotate", None)
    cosines, sines = fixed.rope_turns(SMALL, 12)
    turned = np.concatenate((cosines - sines, cosines + sines), axis=1)
    assert isinstance(heat, Heat) and np.allclose(heat.values, turned, atol=1e-6)
    alibi = replace(SMALL, encoding="alibi")
    name, plots = plots_of(alibi, None, None)
    assert name == "bias" and [plot.title for plot in plots] == [f"Bias of the scores, head {n}" for n in (1, 2)]
    for head, plot in enumerate(plots, 1):
        assert isinstance(plot, Heat) and np.allclose(plot.values, fixed.alibi_bias(alibi, head, 12), atol=1e-6)
    page = explorer(alibi, "bias", None, command="tformer viz-pe")
    assert page.count('id="blob-alibi-bias-') == 2 and page.count('id="blob-rope-rotate-') == 1


def test_a_learned_kind_without_views_needs_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(VIEWS, "t5_bias")
    with pytest.raises(InputError, match="--encoding t5_bias shows what a model has learned"):
        plots_of(replace(SMALL, encoding="t5_bias"), None, None)
    module = T5BiasOptions().build(PositionSizes(16, 2, 8, 8, 12, True))
    torch.nn.init.normal_(module.weight)
    table = LearnedEncoding("t5_bias", "run", module=module)
    _, plots = plots_of(replace(SMALL, encoding="t5_bias"), None, table)
    place = torch.arange(12).unsqueeze(0)
    assert np.array_equal(plots[1].values, module.bias(place, place)[0, 1].detach().numpy())  # type: ignore[union-attr]


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
    _, plots = plots_of(EncodingSettings(d_model=64), None, None)
    assert [len(plot.lines) for plot in plots] == [50, 50, 500, 500]  # type: ignore[union-attr]
    alone, both = plots[:2]
    assert isinstance(alone, LinePlot) and isinstance(both, LinePlot)
    assert alone.ramp is not None and (alone.ramp.low, alone.ramp.high) == (0, 49), "the numbers of the tokens"
    assert np.array_equal(alone.lines[7].x, np.arange(0, 64, 2))
    assert np.allclose(alone.lines[7].y[0], np.sin(7))
    finite = np.isfinite(both.lines[7].x)
    assert sorted(both.lines[7].x[finite]) == list(range(64))
    assert len(plots_of(EncodingSettings(d_model=64, positions=9), None, None)[1]) == 2


def test_fixed_scales() -> None:
    _, [heat] = plots_of(SMALL, "heatmap", None)
    assert isinstance(heat, Heat) and heat.limits == (-1, 1) and heat.colours == "RdBu_r"
    _, [bias] = plots_of(replace(SMALL, encoding="alibi", heads=1), "bias", None)
    assert isinstance(bias, Heat) and bias.colours == "viridis" and bias.limits[1] == 0


def test_mean_cosines_are_compared_apart_from_what_is_added_to_scores() -> None:
    _, [cosines, added] = plots_of(replace(SMALL, compare=("sinusoidal", "rope", "alibi")), None, None)
    assert isinstance(cosines, LinePlot) and isinstance(added, LinePlot)
    assert (cosines.y_label, added.y_label) == ("mean cosine", "added to the score")
    assert [line.label.split(",")[0] for line in cosines.lines] == ["sinusoidal", "rope"]
    assert [line.y[0] for line in cosines.lines] == pytest.approx([1.0] * 2)
    assert len(added.lines) == 2, "two heads: the first (also the middle) and the last"
    for line, slope in zip(added.lines, alibi_slopes(SMALL.heads), strict=True):
        assert np.allclose(line.y, -slope * line.x), "a straight line"
    _, [plot] = plots_of(replace(SMALL, compare=("learned", "rope")), None, TABLES["learned"])
    assert isinstance(plot, LinePlot) and plot.lines[0].label == "learned" and plot.lines[0].y.max() == 1
    _, [plot] = plots_of(replace(SMALL, compare=("t5_bias",)), None, TABLES["t5_bias"])
    bias = TABLES["t5_bias"].bias
    assert isinstance(plot, LinePlot) and bias is not None and plot.lines[0].y[0] == bias[0, 0], "the bias itself"


def test_learned_plots_show_the_table_itself() -> None:
    table = TABLES["learned"]
    _, [similar] = plots_of(replace(SMALL, encoding="learned"), "similarity", table)
    assert isinstance(similar, Heat) and np.allclose(np.diag(similar.values), 1)
    one, other = table.learned[3], table.learned[7]
    assert similar.values[3, 7] == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    bias = TABLES["t5_bias"].bias
    assert bias is not None
    _, [heads] = plots_of(replace(SMALL, encoding="t5_bias"), "bias", TABLES["t5_bias"])
    assert isinstance(heads, Heat) and list(heads.columns) == list(range(-11, 12))
    assert heads.values[1, 11] == bias[0, 1] and heads.values[0, 8] == bias[3, 0] and heads.values[0, 14] == bias[19, 0]


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
        ({"encoding": "alibi", "layout": "halves"}, "pictures of alibi do not depend on a layout"),
        ({"encoding": "rope", "layout": "halves"}, "pictures of rope do not depend on a layout"),
        ({"compare": ("rope", "nope")}, "--compare nope: unknown"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as error:
        check_settings(replace(EncodingSettings(), **change))  # type: ignore[arg-type]
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
