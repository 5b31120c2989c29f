"""Attribution as plots, tables, JSON and CSV of random numbers: sizes, hostile tokens, the gap, patches."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.viz.attribution_reports import HOSTILE, random_report
from tformer.inside.attribution import AttributionReport
from tformer.loading import Identity
from tformer.viz.attribution import attribution_lines, plots_of, view_of
from tformer.viz.picture import render_plots
from tformer.viz.plots import Heat

MODEL: Identity = {"name": "runs/x", "step": 3, "sha256": "0"}


def words(count: int) -> tuple[str, ...]:
    return tuple(f" word{n}" for n in range(count))


@pytest.mark.parametrize(
    ("source", "target", "answers", "megabytes"), [(64, 64, 64, 1.0), (512, 512, 128, 20.0), (0, 512, 1, 1.0)]
)
def test_a_page_is_small(source: int, target: int, answers: int, megabytes: float) -> None:
    tokens = {"encoder": words(source), "decoder": words(target)} if source else {"decoder": words(target)}
    page = render_plots(plots_of(random_report(tokens, answers=answers)), "html", title="x")
    assert isinstance(page, str) and len(page) < megabytes * 1e6


def test_one_answer_is_a_map_of_methods_and_tokens_in_shares() -> None:
    report = random_report({"decoder": (HOSTILE, " b", "c")})
    [plot] = plots_of(report)
    assert isinstance(plot, Heat) and list(plot.columns) == [f"0: {HOSTILE}", "1: ␣b", "2: c"]
    assert list(plot.rows) == ["gradient x input", "integrated gradients", "occlusion", "attention rollout"]
    np.testing.assert_allclose(np.abs(plot.values).max(axis=1), 1.0)
    page = render_plots([plot], "html", title="x")
    assert isinstance(page, str) and f"0: {HOSTILE}" not in page, "escaped in the data"
    for kind in ("svg", "png", "terminal"):
        assert len(render_plots([plot], kind, title="x")) > 100


def test_a_picture_has_a_map_of_its_patches_for_each_method_beside_it() -> None:
    tokens = {"encoder": ("CLS", "0,0", "0,1", "1,0", "1,1")}
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    report = random_report(tokens, pixels=pixels, grid=(2, 2))
    image, *maps = plots_of(report)
    assert isinstance(image, Heat) and image.values.shape == (8, 8) and len(maps) == 4
    for each, by_side in zip(maps, report.scores.values(), strict=True):
        assert isinstance(each, Heat)
        np.testing.assert_allclose(each.values.ravel(), by_side["encoder"][0, 1:], atol=1e-4)


def test_the_lines_say_the_change_from_the_baseline_and_what_integrated_gradients_miss() -> None:
    report = random_report({"decoder": words(4)})
    first, last = attribution_lines(report)
    assert first.startswith("3: answer0: logit ") and "with the baseline (pad)" in first
    assert last.endswith("after 50 steps")
    missed = replace(report, baseline_values=report.baseline_values + 10.0)
    *_, last = attribution_lines(missed)
    assert "integrated gradients miss 10 (" in last and "more --steps or another --baseline" in last
    many = list(attribution_lines(random_report({"decoder": words(20)}, answers=12)))
    assert len(many) == 8 + 1 + 1 and many[8] == "and 4 more answers"
    without = replace(report, scores={"rollout": report.scores["rollout"]})
    assert len(list(attribution_lines(without))) == 1 and without.gaps is None


def test_a_map_of_several_answers_has_only_the_gap_below_it() -> None:
    report = random_report({"encoder": words(2), "decoder": words(4)}, answers=3)
    first, *others = plots_of(report)
    assert first.caption == list(attribution_lines(report))[-1] and not any(plot.caption for plot in others)
    assert not plots_of(replace(report, scores={"rollout": report.scores["rollout"]}))[0].caption


def rendered(report: AttributionReport, format_: str) -> str:
    found = view_of(report, MODEL).render(format_, run="RUN", notes=["Model: runs/x."])
    assert isinstance(found, str)
    return found


def test_json_and_csv_have_every_number_and_nothing_for_what_is_not_seen() -> None:
    report = random_report({"encoder": words(3), "decoder": words(3)}, answers=2)
    found = json.loads(rendered(report, "json"))
    assert found["scores"]["occlusion"]["decoder"][0][2] is None and found["model"]["name"] == "runs/x"
    assert [each["position"] for each in found["answers"]] == [1, 2] and found["answers"][0]["gap"] is not None
    rows = list(csv.DictReader(io.StringIO(rendered(report, "csv"))))
    assert len(rows) == 2 * 3 + 2 + 3 and {row["side"] for row in rows} == {"encoder", "decoder"}
    assert float(rows[0]["gradient"]) == report.scores["gradient"]["encoder"][0, 0]


@pytest.mark.parametrize("sides", [("decoder",), ("encoder", "decoder")])
def test_a_terminal_has_a_table_of_one_answer(sides: tuple[str, ...]) -> None:
    report = random_report({side: words(3) for side in sides})
    heading, *rows = rendered(report, "terminal").splitlines()[-1 - 3 * len(sides) :]
    assert heading.split() == [*["side"] * (len(sides) > 1), "token", *report.scores]
    assert [row.split()[:-4] for row in rows] == [
        [*[side] * (len(sides) > 1), f"␣word{n}"] for side in sides for n in range(3)
    ]
    assert rows[0].split()[-4] == f"{report.scores['gradient'][sides[0]][0, 0]:+.4f}"


@pytest.mark.parametrize("format_", ["html", "svg", "png"])
def test_pictures_and_the_page_of_one_answer(format_: str) -> None:
    report = random_report({"decoder": words(3)}, notes=("a note",))
    found = view_of(report, MODEL).render(format_, run="RUN", notes=["Model: runs/x."])
    assert format_ != "html" or all(text in str(found) for text in ("a note", "Model: runs/x.", "Text:  word0 word1"))
    assert len(found) > 1000
