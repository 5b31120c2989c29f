"""Pages of `heads` and `patch`: their sizes for large models, and hostile tokens."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tformer.inside.heads import HeadReport
from tformer.inside.patching import Ablation, AblationReport, PatchMap, PatchReport
from tformer.viz.heads import best_lines, plots_of
from tformer.viz.patching import ablation_plots, ablation_table, patch_lines, patch_plots
from tformer.viz.picture import render_plots
from tformer.viz.plots import Heat


def patched(tokens: int, *, layers: int = 12, noising: bool = False) -> PatchReport:
    """All parts of a decoder, with random cells."""
    draw = np.random.default_rng(0)
    shapes = dict.fromkeys(("residual", "attention", "feedforward"), (layers, tokens)) | {"heads": (layers, 12)}
    maps = [
        PatchMap("decoder", part, draw.normal(size=shape), draw.normal(size=shape)) for part, shape in shapes.items()
    ]
    words = tuple(f" word{n}" for n in range(tokens))
    return PatchReport({"decoder": words}, "x", "</script>", "difference", noising, 3.0, -2.0, maps)


@pytest.mark.parametrize(("tokens", "megabytes"), [(64, 1.0), (512, 20.0)])
def test_a_page_of_twelve_layers_is_small(tokens: int, megabytes: float) -> None:
    page = render_plots(patch_plots(patched(tokens)), "html", title="Denoising")
    assert isinstance(page, str) and len(page) < megabytes * 1e6 and "</script>'" not in page


def test_a_page_of_many_heads_over_a_training_is_small() -> None:
    draw = np.random.default_rng(0)
    reports = [
        HeadReport(
            step,
            "10 sequences",
            {"decoder": {name: draw.random((12, 12)) for name in ("previous", "first", "duplicate", "induction")}},
            {"first_loss": 4.0, "repeated_loss": 1.0, "repeated_accuracy": 0.5},
        )
        for step in range(100)
    ]
    assert len(render_plots(plots_of(reports), "html", title="Heads")) < 1_000_000
    assert len(list(best_lines(reports[-1]))) == 5


def test_the_cell_that_matters_most_is_named() -> None:
    report = patched(3, layers=1)
    exact = report.maps[0].exact
    assert exact is not None
    for noising, place in ((False, exact.argmax()), (True, exact.argmin())):
        lines = list(patch_lines(patched(3, layers=1, noising=noising)))
        assert f"L0 ' word{place}'" in lines[1] and "correlation" in lines[1]


def test_an_ablation_shows_the_loss_that_each_part_saves() -> None:
    parts = [
        Ablation("decoder", "heads", 0, head, {"loss": loss, "accuracy": 0.5}) for head, loss in enumerate((3.0, 2.5))
    ] + [Ablation("decoder", "attention", 0, None, {"loss": 4.0, "accuracy": 0.1})]
    report = AblationReport("zero", "data", {"loss": 2.0, "accuracy": 0.7}, parts)
    heads, layers = ablation_plots(report)
    assert isinstance(heads, Heat) and isinstance(layers, Heat)
    np.testing.assert_allclose(heads.values, [[1.0, 0.5]])
    np.testing.assert_allclose(layers.values, [[2.0]])
    assert [row[0] for row in ablation_table(report)] == ["part", "(whole)", "L0 attention", "L0H0", "L0H1"]


def test_maps_of_patches_say_what_their_scale_means() -> None:
    for plot in patch_plots(patched(4)):
        assert isinstance(plot, Heat) and plot.value_label == "difference, 1 clean, 0 corrupted"


def test_a_picture_counts_layers_and_heads_in_whole_numbers() -> None:
    heat = Heat(np.eye(2), range(2), range(2), "layer", "head", "RdBu_r", 0.0, 1.0, "value")
    picture = render_plots([heat], "svg", title="x")
    assert isinstance(picture, bytes)
    words = re.findall(r">([^<>\s]+)</text>", picture.decode())
    below = words[: words.index("head")]
    assert set(below) <= {"0", "1", "x"}, below


def test_a_low_score_names_no_head_of_its_kind() -> None:
    scores = {
        "duplicate": np.array([[0.002, 0.003], [0.010, 0.001]]),
        "induction": np.array([[0.02, 0.03], [0.04, 0.9]]),
    }
    duplicate, induction = best_lines(HeadReport(1, "x", {"decoder": scores}, {}))
    assert duplicate == "duplicate: none above 0.1 (highest L1H0 0.010) (decoder self-attention)"
    assert induction == "induction: L1H1 0.900 (decoder self-attention)"
