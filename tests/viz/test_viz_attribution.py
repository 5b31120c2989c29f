"""Attribution as plots, tables, JSON and CSV of random numbers: sizes, hostile tokens, the gap, patches."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.viz.attribution_reports import HOSTILE, random_report
from tformer.viz.attribution import (
    attribution_csv,
    attribution_json,
    attribution_lines,
    attribution_plots,
    attribution_table,
)
from tformer.viz.picture import render_plots
from tformer.viz.plots import Heat


def words(count: int) -> tuple[str, ...]:
    return tuple(f" word{n}" for n in range(count))


@pytest.mark.parametrize(
    ("source", "target", "answers", "megabytes"), [(64, 64, 64, 1.0), (512, 512, 128, 20.0), (0, 512, 1, 1.0)]
)
def test_a_page_is_small(source: int, target: int, answers: int, megabytes: float) -> None:
    tokens = {"encoder": words(source), "decoder": words(target)} if source else {"decoder": words(target)}
    page = render_plots(attribution_plots(random_report(tokens, answers=answers)), "html", title="x")
    assert isinstance(page, str) and len(page) < megabytes * 1e6


def test_one_answer_is_a_map_of_methods_and_tokens_in_shares() -> None:
    report = random_report({"decoder": (HOSTILE, " b", "c")})
    [plot] = attribution_plots(report)
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
    image, *maps = attribution_plots(report)
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


def test_json_csv_and_the_table_have_every_number_and_nothing_for_what_is_not_seen() -> None:
    report = random_report({"encoder": words(3), "decoder": words(3)}, answers=2)
    found = json.loads(attribution_json(report, run="runs/x"))
    assert found["scores"]["occlusion"]["decoder"][0][2] is None and found["run"] == "runs/x"
    assert [each["position"] for each in found["answers"]] == [1, 2] and found["answers"][0]["gap"] is not None
    rows = list(csv.DictReader(io.StringIO(attribution_csv(report))))
    assert len(rows) == 2 * 3 + 2 + 3 and {row["side"] for row in rows} == {"encoder", "decoder"}
    assert float(rows[0]["gradient"]) == report.scores["gradient"]["encoder"][0, 0]
    table = attribution_table(report, "decoder")
    assert table[0] == ("token", *report.scores) and table[3][1:] == ("",) * 4
    assert table[1][1] == f"{report.scores['gradient']['decoder'][0, 0]:+.4f}"
