"""The lens as page, text and numbers: what a report of random numbers becomes, and how large."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viz.lens_reports import HOSTILE, random_report
from tests.viz.pages import page_data, script_bytes
from tformer.support.errors import InputError
from tformer.viz.lens.page import render, view_of
from tformer.viz.lens.text import as_text, plots_of
from tformer.viz.picture import render_plots
from tformer.viz.plots import Heat

ROOT = Path(__file__).parents[2]


def test_a_page_of_12_layers_of_12_heads_and_512_tokens_is_below_20_megabytes() -> None:
    assert len(render(random_report(12, 12, 512), max_bytes=20e6).encode()) <= 20e6


def test_a_page_of_64_tokens_is_below_a_megabyte() -> None:
    page = render(random_report(12, 12, 64), max_bytes=20e6)
    assert len(page.encode()) <= 1e6 and script_bytes(page) < 80_000


def test_a_page_that_is_too_large_is_refused_with_the_flags_that_help() -> None:
    with pytest.raises(InputError, match=r"does not fit into 0\.001 MB") as caught:
        render(random_report(2, 2, 4), max_bytes=1000)
    assert "--top-k" in (caught.value.hint or "")


def test_hostile_tokens_stay_inside_the_data() -> None:
    page = render(random_report(2, 2, len(HOSTILE), tokens=HOSTILE), max_bytes=20e6)
    assert "<script>alert" not in page and "<img src" not in page and page_data(page)["tokens"] == list(HOSTILE)


def test_the_page_says_what_it_is_of_and_what_a_lens_cannot_tell() -> None:
    page = render(replace(random_report(2, 2, 4), notes=("a note",), command="tformer lens X"), max_bytes=20e6)
    for words in ("need not be what the model uses", "sha256 abababab", "tformer lens X", "a note"):
        assert words in page


def test_json_has_every_number() -> None:
    report = random_report(2, 3, 4)
    document = json.loads(view_of(report, "layers").render("json"))
    np.testing.assert_allclose(document["probability"], report.lens.probability, atol=1e-8)
    assert np.array(document["top"]).shape == (3, 4, 10) and document["rows"] == ["input", "0", "1"]
    np.testing.assert_allclose(np.sum(document["parts"]["values"], axis=1), document["parts"]["logits"], atol=1e-5)
    bare = view_of(replace(report, parts=None, without_parts="no sum"), "layers").document()
    assert bare["parts"] == {"reason": "no sum"}


def test_csv_has_a_row_for_each_layer_and_position_or_for_each_part() -> None:
    report: Any = random_report(2, 3, 4)
    rows = list(csv.DictReader(io.StringIO(view_of(report, "layers").render("csv"))))
    assert len(rows) == 3 * 4 and float(rows[5]["probability"]) == pytest.approx(report.lens.probability[1, 1])
    parts = list(csv.DictReader(io.StringIO(view_of(report, "parts").render("csv"))))
    assert len(parts) == 4 * len(report.parts.parts)
    head = next(row for row in parts if row["part"] == "self_attention")
    assert (head["layer"], head["head"]) == ("0", "0")


def test_the_terminal_shows_layers_or_the_largest_parts_with_their_sum() -> None:
    report: Any = random_report(4, 4, 4)
    layers = as_text(report, "layers")
    assert "position 3" in layers and "position 2" not in layers and "most probable" in layers
    assert len(layers.splitlines()) == 2 + 1 + 1 + 5
    parts = as_text(report, "parts")
    assert "other parts" in parts and f"sum {report.parts.values[3].sum():+.3f}" in " ".join(parts.split())
    held_out = as_text(replace(report, tuned_kl=np.array([[3.0, 2.0, 1.0, 0.5]] * 2)), "layers")
    assert "on held-out text" in held_out and held_out.startswith("Tuned lens of tiny")


def test_pictures_are_equal_for_equal_reports_and_parts_have_a_column_for_each_head() -> None:
    report = random_report(2, 3, 4)
    once, again = (render_plots(plots_of(report, "layers"), "svg", title="x") for _ in range(2))
    assert isinstance(once, bytes) and once.splitlines() == again.splitlines()
    [plot] = plots_of(report, "parts")
    assert isinstance(plot, Heat) and list(plot.columns) == ["H0", "H1", "H2", "bias", "FF"]
    assert "All parts add up to" in plot.caption
    picture = render_plots([plot], "png", title="x")
    assert isinstance(picture, bytes) and picture.startswith(b"\x89PNG")


def test_a_classifier_is_drawn_by_its_labels() -> None:
    report = random_report(2, 2, 1, head="classifier")
    [plot] = plots_of(report, "layers")
    assert isinstance(plot, Heat) and plot.values.shape == (3, 10)
    np.testing.assert_allclose(plot.values[2], report.lens.top_probabilities[2, 0])


def test_the_python_names_in_the_guide_are_those_of_a_report() -> None:
    section = (ROOT / "tformer/guide/inside.md").read_text().split("## Lens")[1].split("\n## ")[0]
    named = re.findall(r"`report\.([a-z_.]+)`", section)
    assert len(named) >= 3
    for name in named:
        assert isinstance(attrgetter(name)(random_report(2, 2, 4)), np.ndarray), name


def test_the_divergence_names_its_direction_in_text_and_pictures() -> None:
    report = replace(random_report(2, 2, 4), tuned_kl=np.array([[2.0, 1.0], [1.0, 0.5]]))
    direction = "KL(model's answer ‖ answer after the layer)"
    assert direction in as_text(report, "layers")
    assert any(plot.title == direction for plot in plots_of(report, "layers"))
