"""Attribution to inputs: functions with known integrals, formulas written from the papers, completeness, captum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.inside.lens_models import RECIPES, head_of, loaded_of
from tformer.inside.attribution import STEPS, AttributionInputs, AttributionReport, attribute
from tformer.inside.options import METHODS, AttributeOptions
from tformer.loading import Loaded
from tformer.support.errors import NotFiniteError
from tformer.workers.work import QUIET
from tformer.workflows.attribution import attribute_inputs

# --- functions whose attributions are known ---------------------------------------------------------------------------


def scores_of(
    f: Callable[[Tensor], Tensor],
    x_PE: list[list[float]],
    *,
    baseline: list[list[float]] | None = None,
    steps: int = 50,
    stays: list[bool] | None = None,
) -> dict[str, np.ndarray]:
    """Of f(x), fp32 [B], of the vectors x [B, P, E]."""
    real = torch.tensor([x_PE])
    base = torch.zeros_like(real) if baseline is None else torch.tensor([baseline])
    count = real.shape[1]
    marks = torch.tensor(stays or [False] * count)
    subject = AttributionInputs({"x": real}, {"x": base}, {"x": torch.arange(count).unsqueeze(1)}, marks)
    found, values, base_values, _ = attribute(lambda at: f(at["x"]).unsqueeze(0), subject, METHODS, steps=steps)
    return {name: each[0] for name, each in found.items()} | {"change": values - base_values}


def test_of_a_linear_function_all_methods_are_exact_and_equal() -> None:
    weights, x = torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 0.0]]), [[2.0, 1.0], [4.0, -1.0], [5.0, 5.0]]
    found = scores_of(lambda x_BPE: (weights * x_BPE).sum((1, 2)) + 7.0, x, steps=1)
    for method in ("gradient", "integrated", "occlusion"):
        np.testing.assert_allclose(found[method], [0.0, -1.0, 0.0], atol=1e-6)
    assert found["change"] == pytest.approx(-1.0)


def test_a_product_is_shared_by_its_factors_and_lost_with_each() -> None:
    """Symmetry: along (a x, a y) both have the share x y / 2; without one of them nothing is left."""
    found = scores_of(lambda x_BPE: x_BPE[:, 0, 0] * x_BPE[:, 1, 0], [[3.0], [4.0], [9.0]], steps=2)
    np.testing.assert_allclose(found["integrated"], [6.0, 6.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(found["occlusion"], [12.0, 12.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(found["gradient"], [12.0, 12.0, 0.0], atol=1e-5)


def test_the_path_starts_at_the_baseline() -> None:
    """f = x², from 1 to 3: (3 - 1) ∫ 2 (1 + 2a) da = 8 = f(3) - f(1)."""
    found = scores_of(lambda x_BPE: x_BPE[:, 0, 0] ** 2, [[3.0]], baseline=[[1.0]], steps=1)
    assert found["integrated"] == pytest.approx([8.0]) and found["occlusion"] == pytest.approx([8.0])
    assert found["gradient"] == pytest.approx([18.0])


@pytest.mark.parametrize(("power", "steps", "exact"), [(3, 2, True), (9, 5, True), (5, 2, False)])
def test_the_sum_over_points_is_exact_for_polynomials(power: int, steps: int, exact: bool) -> None:
    """Gauss and Legendre: N points integrate slopes of degree 2 N - 1; the gap of more is what they miss."""
    found = scores_of(lambda x_BPE: x_BPE[:, 0, 0] ** power, [[2.0]], steps=steps)
    assert (found["integrated"] == pytest.approx([2.0**power], rel=1e-5)) is exact


def test_more_points_are_taken_where_the_first_miss_much() -> None:
    """A step of tanh near the baseline."""
    subject = AttributionInputs({"x": torch.ones(1, 1, 1)}, {"x": torch.zeros(1, 1, 1)},
                                {"x": torch.zeros(1, 1).long()}, torch.tensor([False]))  # fmt: skip
    for slope, expected in ((1.0, STEPS[0]), (400.0, STEPS[1])):
        *_, points = attribute(lambda at, k=slope: (k * (at["x"] - 0.5)).tanh()[..., 0].T, subject, ["integrated"])  # type: ignore[misc]
        assert points == expected


def test_places_that_stay_have_no_score_but_a_gradient() -> None:
    found = scores_of(lambda x_BPE: x_BPE.sum((1, 2)), [[1.0], [2.0]], stays=[True, False])
    assert np.isnan(found["integrated"][0]) and np.isnan(found["occlusion"][0]) and found["gradient"][0] == 1.0


def test_gradients_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(NotFiniteError, match="gradients"):
        scores_of(lambda x_BPE: x_BPE[:, 0, 0].abs().sqrt(), [[0.0]], baseline=[[0.0]])


# --- models of every family -------------------------------------------------------------------------------------------


def report_of(family: str, folder: Path, **options: Any) -> AttributionReport:
    """Of a short text of the test's vocabulary, or of an image."""
    loaded = loaded_of(family)
    given: dict[str, Any] = {"text": "the [MASK] dog runs" if head_of(loaded) == "masked_lm" else "the brown dog runs"}
    if loaded.model.is_encoder_decoder:
        given["target"] = "able thing"
    if loaded.recipe.model.patches is not None:
        draws = np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(draws).save(folder / "image.png")
        given = {"image": folder / "image.png"}
    return attribute_inputs(loaded, AttributeOptions(**given | options), QUIET)


@pytest.mark.parametrize("family", RECIPES)
def test_integrated_gradients_add_up_to_the_change_from_the_baseline(family: str, tmp_path: Path) -> None:
    """The gap is below 1 %, of 50 points where no vector passes near zero; a maximum over positions has edges: 2 %."""
    report = report_of(family, tmp_path, methods="integrated")
    change, limit = report.values - report.baseline_values, 0.02 if family == "classifier, largest" else 0.01
    assert report.gaps is not None and (np.abs(report.gaps) <= limit * np.abs(change)).all()
    assert report.steps == (300 if family in ("llama", "classifier, largest") else 50)
    total = sum(np.nansum(each, axis=1) for each in report.scores["integrated"].values())
    np.testing.assert_allclose(total - change, report.gaps, atol=1e-9)
    assert np.abs(change).max() > 1e-2


@pytest.mark.parametrize("family", RECIPES)
def test_every_method_has_a_score_for_every_answer_and_token(family: str, tmp_path: Path) -> None:
    report = report_of(family, tmp_path, steps=3)
    assert list(report.scores) == list(METHODS)
    for by_side in report.scores.values():
        for side, found in by_side.items():
            assert found.shape == (len(report.targets), len(report.tokens[side]))
            assert side == "decoder" or np.isfinite(found).any(axis=1).all()


def test_gradient_x_input_is_the_slope_when_a_vector_grows(tmp_path: Path) -> None:
    loaded, report = loaded_of("gpt"), report_of("gpt", tmp_path, methods="gradient")
    tap, ids = "decoder.embedding.tokens", torch.tensor([loaded.text_tokenizer.encode("the brown dog runs")])
    target = int(loaded.model(ids).logits[0, -1].argmax())
    with torch.no_grad():
        own = loaded.model(ids, taps=[tap]).taps[tap]
        for place, score in enumerate(report.scores["gradient"]["decoder"][0]):
            values = []
            for factor in (1.01, 0.99):
                moved = own.clone()
                moved[0, place] *= factor
                values.append(float(loaded.model(ids, replace={tap: moved}).logits[0, -1, target]))
            assert score == pytest.approx((values[0] - values[1]) / 0.02, abs=2e-2)


def test_integrated_gradients_are_the_sum_of_the_paper(tmp_path: Path) -> None:
    """Equation 3 of arXiv 1703.01365, with the middles of 500 equal steps."""
    loaded = loaded_of("post-norm decoder")
    report = report_of("post-norm decoder", tmp_path, methods="integrated", baseline="zero")
    tap, ids = "decoder.embedding.tokens", torch.tensor([loaded.text_tokenizer.encode("the brown dog runs")])
    target = int(loaded.model(ids).logits[0, -1].argmax())
    own = loaded.model(ids, taps=[tap]).taps[tap].detach()
    points = ((torch.arange(500) + 0.5) / 500).view(-1, 1, 1).mul(own).requires_grad_()
    loaded.model(ids.expand(500, -1), replace={tap: points}).logits[:, -1, target].sum().backward()
    assert points.grad is not None
    expected = (own[0] * points.grad.mean(0)).sum(-1)
    np.testing.assert_allclose(report.scores["integrated"]["decoder"][0], expected, atol=1e-4)


def test_occlusion_is_the_answer_without_a_token(tmp_path: Path) -> None:
    loaded, report = loaded_of("bert"), report_of("bert", tmp_path, methods="occlusion", baseline="pad")
    reading = loaded.text_tokenizer.reading_special()
    ids = [reading.special.cls, *reading.encode("the [MASK] dog runs"), reading.special.sep]
    at, pad = ids.index(reading.special.mask), reading.special.pad
    with torch.no_grad():
        whole = loaded.model(torch.tensor([ids])).logits[0, at]
        for place, score in enumerate(report.scores["occlusion"]["encoder"][0]):
            if ids[place] in (reading.special.cls, reading.special.mask, reading.special.sep):
                assert np.isnan(score)
                continue
            other = loaded.model(torch.tensor([[*ids[:place], pad, *ids[place + 1 :]]])).logits[0, at]
            target = whole[: reading.vocab_size].argmax()
            assert score == pytest.approx(float(whole[target] - other[target]), abs=1e-5)


def test_rollout_is_the_product_of_half_attention_and_half_identity(tmp_path: Path) -> None:
    """Abnar and Zuidema, equation 1, of the row that the answer is read from."""
    loaded, report = loaded_of("llama"), report_of("llama", tmp_path, methods="rollout")
    ids = torch.tensor([loaded.text_tokenizer.encode("the brown dog runs")])
    names = [f"decoder.{layer}.self_attention.weights" for layer in range(2)]
    with torch.no_grad():
        taps = loaded.model(ids, taps=names).taps
    product = torch.eye(ids.shape[1])
    for name in names:
        product = (taps[name][0].mean(0) + torch.eye(ids.shape[1])) / 2 @ product
    np.testing.assert_allclose(report.scores["rollout"]["decoder"][0], product[-1], atol=1e-6)


@pytest.mark.parametrize("method", ["gradient", "integrated", "occlusion"])
def test_scores_of_a_difference_are_differences_of_scores(method: str, tmp_path: Path) -> None:
    first, second = (report_of("gpt", tmp_path, methods=method, target_token=token) for token in ("g", " do"))
    both = report_of("gpt", tmp_path, methods=method, target_token="g", against=" do")
    difference = first.scores[method]["decoder"] - second.scores[method]["decoder"]
    np.testing.assert_allclose(both.scores[method]["decoder"], difference, atol=1e-4)
    np.testing.assert_allclose(both.values, first.values - second.values, atol=1e-5)
    assert both.metric == "difference" and both.against == " do"


def test_a_translation_is_a_map_of_target_and_source(tmp_path: Path) -> None:
    """Each answer sees the source, and of the target what was read before."""
    report = report_of("t5", tmp_path, methods="gradient,occlusion")
    source, target = (report.tokens[side] for side in ("encoder", "decoder"))
    assert report.positions == tuple(range(len(target))) and report.targets[:-1] == target[1:]
    for by_side in report.scores.values():
        assert np.isfinite(by_side["encoder"]).any() and by_side["encoder"].shape == (len(target), len(source))
        later = np.triu(np.ones((len(target), len(target)), dtype=bool), 1)
        assert np.isnan(by_side["decoder"][later]).all()
        assert np.isfinite(by_side["decoder"][~later]).any()
    [alone] = report_of("t5", tmp_path, methods="gradient", positions="1").scores["gradient"]["encoder"]
    np.testing.assert_allclose(alone, report.scores["gradient"]["encoder"][1], atol=1e-5)


def test_a_decoder_explains_what_it_generates_or_else_the_next_token(tmp_path: Path) -> None:
    alone = report_of("gpt", tmp_path, methods="gradient")
    length = len(alone.tokens["decoder"])
    assert alone.positions == (length - 1,)
    more = report_of("gpt", tmp_path, methods="gradient", max_new_tokens=3)
    assert more.positions == tuple(range(length - 1, len(more.tokens["decoder"]) - 1)) and len(more.positions) <= 3
    assert more.targets == more.tokens["decoder"][length:]


def test_the_score_of_a_patch_is_the_sum_of_its_pixels(tmp_path: Path) -> None:
    loaded, report = loaded_of("vit"), report_of("vit", tmp_path, methods="gradient,occlusion")
    assert report.baseline == "zero" and report.tokens["encoder"][0] == "CLS" and report.grid == (2, 2)
    assert report.pixels is not None
    pixels = torch.tensor(report.pixels[None, None, :, :, 0] / 255 * 2 - 1, dtype=torch.float32).requires_grad_()
    logits = loaded.model(pixel_values=pixels).logits[0]
    target = int(logits.argmax())
    logits[target].backward()
    assert pixels.grad is not None
    slopes = (pixels * pixels.grad).detach()[0, 0]
    with torch.no_grad():
        for place, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)], start=1):
            patch = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
            gradient, occlusion = (report.scores[name]["encoder"][0, place] for name in ("gradient", "occlusion"))
            assert gradient == pytest.approx(float(slopes[patch].sum()), abs=1e-6)
            hidden = pixels.clone()
            hidden[0, 0, patch[0], patch[1]] = 0.0
            lost = logits[target] - loaded.model(pixel_values=hidden).logits[0, target]
            assert occlusion == pytest.approx(float(lost), abs=1e-6)
    assert np.isnan(report.scores["occlusion"]["encoder"][0, 0])


def test_a_model_in_training_mode_is_read_in_evaluation_mode_and_left_as_it_was(tmp_path: Path) -> None:
    loaded: Loaded = loaded_of("gpt")
    before = report_of("gpt", tmp_path, methods="integrated", steps=2)
    loaded.model.train()
    try:
        after = report_of("gpt", tmp_path, methods="integrated", steps=2)
        assert loaded.model.training and all(each.grad is None for each in loaded.model.parameters())
    finally:
        loaded.model.eval()
    np.testing.assert_array_equal(after.scores["integrated"]["decoder"], before.scores["integrated"]["decoder"])
