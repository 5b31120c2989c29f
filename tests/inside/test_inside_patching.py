"""Activation patching, attribution patching and ablation, against single runs written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.viz.attention_models import DECODER, ENCODER, SEQ2SEQ, load_of
from tformer.inside.patching import (
    METRICS,
    PARTS,
    PatchingExample,
    PatchMap,
    Replaced,
    ablations,
    patch,
    taps_of,
)
from tformer.loading import Loaded
from tformer.support.errors import InputError
from tformer.workers.work import QUIET

CLEAN, CORRUPTED = [5, 6, 7, 8, 9], [5, 10, 7, 11, 9]


def question(metric: str = "difference", **more: Any) -> PatchingExample:
    clean, corrupted = ({"input_ids": torch.tensor([ids])} for ids in (CLEAN, CORRUPTED))
    return PatchingExample(clean, corrupted, -1, 12, 13, metric, **more)


def logits(loaded: Loaded, ids: list[int], **replace: Tensor) -> Tensor:
    with torch.inference_mode():
        return loaded.model(
            torch.tensor([ids]), replace={name.replace("__", "."): value for name, value in replace.items()}
        ).logits[0, -1]


def maps_of(loaded: Loaded, asked: PatchingExample, *parts: str, **options: Any) -> dict[tuple[str, str], PatchMap]:
    chosen = {"noising": False, "only_estimate": False} | options
    found, *_ = patch(loaded.model, asked, parts or tuple(PARTS), work=QUIET, **chosen)
    return {(each.side, each.part): each for each in found}


@pytest.mark.parametrize("noising", [False, True])
@pytest.mark.parametrize("metric", METRICS)
def test_each_cell_is_a_run_with_one_activation_of_the_other_prompt(metric: str, noising: bool) -> None:
    loaded, measure = load_of(DECODER), METRICS[metric]
    base, source = (CLEAN, CORRUPTED) if noising else (CORRUPTED, CLEAN)
    found = maps_of(loaded, question(metric), noising=noising)
    assert list(found) == [("decoder", part) for part in ("residual", "attention", "feedforward", "heads")]
    clean, corrupted = (float(measure(logits(loaded, ids)[None], 12, 13)) for ids in (CLEAN, CORRUPTED))
    for (_, part), each in found.items():
        names = taps_of(loaded.model, [part])["decoder", part]
        for layer, name in enumerate(names):
            with torch.inference_mode():
                own, other = (loaded.model(torch.tensor([ids]), taps=[name]).taps[name] for ids in (base, source))
            for place in range(own.shape[1]):
                changed = own.clone()
                changed[0, place] = other[0, place]
                value = float(measure(logits(loaded, base, **{name.replace(".", "__"): changed})[None], 12, 13))
                assert each.exact is not None
                assert each.exact[layer, place] == pytest.approx((value - corrupted) / (clean - corrupted), abs=1e-4)


def test_positions_before_the_first_difference_change_nothing_and_the_last_state_decides() -> None:
    found = maps_of(load_of(DECODER), question(), "residual")["decoder", "residual"].exact
    assert found is not None
    np.testing.assert_allclose(found[:, 0], 0.0, atol=1e-5)
    np.testing.assert_allclose(found[0, [2, 4]], 0.0, atol=1e-5)  # embeddings of equal tokens


def test_the_estimate_is_the_gradient_times_the_change() -> None:
    """By differences: M(a + e (a' - a)) - M(a) over e, for every cell."""
    loaded = load_of(DECODER)
    loaded.model.double()
    loaded.model.compute_dtype = torch.float64
    asked = question()
    for part, each in ((each.part, each) for each in maps_of(loaded, asked).values()):
        for layer, name in enumerate(taps_of(loaded.model, [part])["decoder", part]):
            with torch.no_grad():
                own, other = (loaded.model(torch.tensor([ids]), taps=[name]).taps[name] for ids in (CORRUPTED, CLEAN))
            for place in range(own.shape[1]):
                moved = own.clone()
                moved[0, place] += 1e-4 * (other - own)[0, place]
                with torch.no_grad():
                    values = [
                        float(asked.measure(loaded.model, asked.corrupted, replace={name: one})) for one in (own, moved)
                    ]
                    clean = float(asked.measure(loaded.model, asked.clean))
                slope = (values[1] - values[0]) / 1e-4 / (clean - values[0])
                assert each.estimate[layer, place] == pytest.approx(slope, abs=2e-2)


def test_the_estimate_is_exact_where_the_rest_is_linear() -> None:
    """Logit of one token without a final norm: the last layer's feed-forward and attention enter it linearly."""
    loaded = load_of(DECODER.replace("feedforward: {d_ff: 16}", "final_norm: false, feedforward: {d_ff: 16}"))
    found = maps_of(loaded, question("logit"), "feedforward")["decoder", "feedforward"]
    assert found.exact is not None
    np.testing.assert_allclose(found.estimate[-1], found.exact[-1], atol=1e-4)
    assert found.correlation is not None and -1 <= found.correlation <= 1
    alone = maps_of(loaded, question("logit"), "feedforward", only_estimate=True)["decoder", "feedforward"]
    assert alone.exact is None and alone.correlation is None
    np.testing.assert_array_equal(alone.estimate, found.estimate)


def test_an_encoder_decoder_is_patched_in_both_stacks() -> None:
    loaded = load_of(SEQ2SEQ)
    start = {"decoder_input_ids": torch.tensor([[1, 9]])}
    clean, corrupted = ({"input_ids": torch.tensor([ids])} | start for ids in (CLEAN, CORRUPTED))
    found = maps_of(loaded, PatchingExample(clean, corrupted, -1, 12, 13, "difference"))
    assert {side for side, _ in found} == {"encoder", "decoder"}
    assert ("encoder", "cross") not in found and ("decoder", "cross_heads") in found
    shapes = {key: each.estimate.shape for key, each in found.items()}
    assert shapes["encoder", "residual"] == (2, 5) and shapes["decoder", "cross"] == (3, 2)
    np.testing.assert_allclose(found["decoder", "residual"].estimate[0], 0.0, atol=1e-6)  # what it reads is the same


def test_a_model_that_answers_at_a_mask_or_once() -> None:
    masked = load_of(ENCODER)
    clean, corrupted = ({"input_ids": torch.tensor([ids])} for ids in (CLEAN, CORRUPTED))
    found = maps_of(masked, PatchingExample(clean, corrupted, 2, 12, 13, "difference"), "residual")
    assert found["encoder", "residual"].estimate.shape == (3, 5)
    classifier = load_of(ENCODER.replace("{kind: masked_lm}", "{kind: classifier}") + "data: {labels: [a, b]}\n")
    found = maps_of(classifier, PatchingExample(clean, corrupted, None, 0, 1, "difference"), "heads")
    assert found["encoder", "heads"].estimate.shape == (3, 2)


def test_several_labels_have_their_own_probability_and_loss() -> None:
    recipe = ENCODER.replace("{kind: masked_lm}", "{kind: classifier, multi_label: true}")
    loaded = load_of(recipe + "data: {labels: [a, b]}\n")
    clean, corrupted = ({"input_ids": torch.tensor([ids])} for ids in (CLEAN, CORRUPTED))
    with torch.inference_mode():
        right = loaded.model(**clean).logits[:, 1].double().sigmoid()
        for metric, expected in (("probability", right), ("loss", -right.log())):
            asked = PatchingExample(clean, corrupted, None, 1, 0, metric, several=True)
            torch.testing.assert_close(asked.measure(loaded.model, clean).double(), expected, atol=1e-6, rtol=0)


def test_prompts_with_the_same_metric_are_refused() -> None:
    same = PatchingExample(question().clean, question().clean, -1, 12, 13, "difference")
    with pytest.raises(InputError, match="there is nothing to restore"):
        maps_of(load_of(DECODER), same)


# --- ablation --------------------------------------------------------------------------------------------------------


def measured(loaded: Loaded, mode: Any) -> dict[tuple[str, int, int | None], float]:
    """The logit of token 12 at the last place of CLEAN and CORRUPTED, summed, without each part."""
    ids = torch.tensor([CLEAN, CORRUPTED])

    def measure(model: nn.Module) -> Mapping[str, float]:
        with torch.inference_mode():
            return {"loss": float(model(input_ids=ids).logits[:, -1, 12].sum())}

    found = ablations(loaded.model, mode, measure, work=QUIET)
    return {(each.part, each.layer, each.head): each.metrics["loss"] for each in found}


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_an_ablated_part_is_zero_or_its_mean_over_all_tokens(mode: str) -> None:
    loaded = load_of(DECODER)
    found = measured(loaded, mode)
    assert len(found) == 2 * (4 + 2)
    ids = torch.tensor([CLEAN, CORRUPTED])
    for (part, layer, head), value in found.items():
        [(_, names)] = taps_of(loaded.model, [part]).items()
        with torch.inference_mode():
            own = loaded.model(ids, taps=[names[layer]]).taps[names[layer]]
            changed = own.clone()
            if head is None:
                changed[:] = own.mean((0, 1)) if mode == "mean" else 0.0
            else:
                changed[:, head] = own[:, head].mean((0, 1)) if mode == "mean" else 0.0
            expected = loaded.model(ids, replace={names[layer]: changed}).logits[:, -1, 12].sum()
        assert value == pytest.approx(float(expected), abs=1e-4)


def test_the_mean_leaves_out_padding() -> None:
    loaded, rows = load_of(ENCODER), [[5, 6, 7, 8], [9, 10, 0, 0]]
    together = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}

    def padded(model: nn.Module) -> Mapping[str, float]:
        with torch.inference_mode():
            return {"loss": float(model(**together).logits[:, 0].sum())}

    def alone(model: nn.Module) -> Mapping[str, float]:
        with torch.inference_mode():
            return {
                "loss": sum(
                    float(model(input_ids=torch.tensor([row])).logits[:, 0].sum()) for row in (rows[0], rows[1][:2])
                )
            }

    one, other = (
        [each.metrics["loss"] for each in ablations(loaded.model, "mean", measure, work=QUIET)]
        for measure in (padded, alone)
    )
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_a_wrapped_model_keeps_its_mode() -> None:
    loaded = load_of(DECODER)
    wrapped = Replaced(loaded.model, {})
    assert not wrapped.training and torch.equal(
        wrapped(input_ids=torch.tensor([CLEAN])).hidden, loaded.model(torch.tensor([CLEAN])).hidden
    )
