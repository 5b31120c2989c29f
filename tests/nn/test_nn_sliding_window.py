"""Sliding windows: named global tokens, their projections, FlexAttention, options; the rest is in the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.nn.attention_cases import context_of, run, weights_tap
from tests.nn.kind_cases import (
    HEAD,
    HEADS,
    SCALE,
    WIDTH,
    assert_same,
    call_of,
    definition,
    hooks_of,
    mechanism_of,
    naive,
    padding,
    tensors,
)
from tformer.nn.attention import FullAttentionOptions
from tformer.nn.attention.block_sparse.flex import attend_flex
from tformer.nn.attention.context import AttentionInputs
from tformer.nn.attention.sliding_window import SlidingWindowAttention, SlidingWindowOptions, flex_rule, global_tokens
from tformer.nn.positions.biases import AlibiOptions
from tformer.nn.positions.rope import RopeOptions

pytestmark = pytest.mark.usefixtures("small_groups")


def make(*, causal: bool = False, sizes: dict[str, int] | None = None, **options: Any) -> SlidingWindowAttention:
    chosen = SlidingWindowOptions(**{"window": 8, "implementation": "blocks", **options})
    mechanism = mechanism_of(chosen, causal=causal, **(sizes or {}))
    assert isinstance(mechanism, SlidingWindowAttention)
    return mechanism


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dilation", [1, 3])
def test_tokens_named_as_global_take_the_place_of_the_first(causal: bool, dilation: int) -> None:
    mechanism = make(causal=causal, dilation=dilation, global_tokens=2)
    marks = torch.zeros(2, 30)
    marks[0, [4, 17, 29]] = 1
    for chosen in (marks, marks * 0):
        reach = context_of(30, causal, padding(30, "right"), global_mask=chosen)
        inputs = tensors(30)
        expected = definition(mechanism, *inputs, reach)
        assert_same(run(mechanism, *inputs, **call_of(reach))[0], expected, inputs)


# --- global projections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "blocks"])
def test_global_tokens_have_projections_of_their_own(rotate: bool, implementation: str) -> None:
    mechanism = make(global_tokens=2, global_projections=True, implementation=implementation)
    hooks = hooks_of(RopeOptions(), causal=False) if rotate else None
    reach = context_of(25, False, padding(25, "right"))
    inputs, x = tensors(25), torch.randn(2, 25, WIDTH, requires_grad=True)
    call = {**call_of(reach), "x_BTD": x, "positions": hooks}
    q, k, v = (
        matrix(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        for matrix in (mechanism.global_q, mechanism.global_k, mechanism.global_v)
    )
    if hooks is not None:
        q, k = hooks.rotate(q, k, reach.q_pos, reach.k_pos)
    assert reach.key_mask is not None
    own = naive(q, k, v, reach.key_mask.bool()[:, None, None].expand(2, 1, 25, 25))
    local = definition(mechanism, *inputs, reach)
    expected = torch.cat([own[:, :, :2], local[:, :, 2:]], dim=2)
    assert_same(run(mechanism, *inputs, **call)[0], expected, [*inputs, x, *mechanism.parameters()])
    out, weights = run(mechanism, *inputs, **call, taps=weights_tap())
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    values = torch.where((torch.arange(25) < 2).view(1, 1, -1, 1), weights @ v, weights @ inputs[2])
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def test_global_projections_are_for_encoders() -> None:
    with pytest.raises(ValueError, match=r"^global_projections: only for encoders"):
        make(causal=True, global_projections=True)


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_a_step_reads_the_window_alone() -> None:
    """Whatever stands outside may be anything, even no number at all."""
    mechanism = make(causal=True, global_tokens=1)
    q, k, v = (x.detach() for x in tensors(1, keys=60))
    for x in (k, v):
        x[:, :, 1:51] = float("nan")
    assert run(mechanism, q, k, v, **call_of(context_of(1, True, keys=60)))[0].isfinite().all()


def test_a_soft_cap_costs_the_scores_of_all_keys() -> None:
    plain, capped = (mechanism_of(SlidingWindowOptions(window=8, softcap=cap), causal=True) for cap in (None, 5.0))
    full = mechanism_of(FullAttentionOptions(), causal=True)
    assert plain.flops(2000, 2000) < capped.flops(2000, 2000) == full.flops(2000, 2000)


def test_named_global_tokens_and_a_cache_do_not_go_together() -> None:
    q, k, v = tensors(1, keys=9)
    with pytest.raises(ValueError, match=r"^global_attention_mask: not together with a cache"):
        run(make(causal=True), q, k, v, **call_of(context_of(1, True, keys=9, global_mask=torch.ones(2, 1))))


# --- the choice of the way, and options ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_flex_has_the_same_pattern(causal: bool) -> None:
    """Its rule, run here without its compiler and without gradients."""
    mechanism = make(causal=causal, dilation=2, global_tokens=1)
    reach = context_of(40, causal, padding(40, "left"))
    q, k, v = (x.detach() for x in tensors(40))
    rule = flex_rule(mechanism.reach, 2, global_tokens(mechanism.options, reach), start=0)
    found = attend_flex(AttentionInputs(q, k, v, reach, SCALE), rule)
    torch.testing.assert_close(found, definition(mechanism, q, k, v, reach), atol=1e-5, rtol=0)


@pytest.mark.parametrize("change", [{"dropout": 0.1}, {"positions": hooks_of(AlibiOptions(), causal=False)}])
def test_flex_refuses_dropout_and_bias(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^implementation: flex supports neither dropout nor positions with a bias"):
        attend_flex(
            AttentionInputs(*tensors(30), context_of(30), SCALE, **change), lambda example, query, key: key >= 0
        )


@pytest.mark.parametrize(("values", "words"), [
    ({"window": 0}, "window must be greater than 0, found 0"),
    ({"dilation": 0}, "dilation must be greater than 0, found 0"),
    ({"global_tokens": -1}, "global_tokens must be at least 0, found -1"),
    ({"global_projections": True, "qk_norm": True}, "global_projections: not defined together with qk_norm"),
])  # fmt: skip
def test_options_that_contradict_each_other_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        SlidingWindowOptions(**values)


@pytest.mark.parametrize(("causal", "values", "words"), [
    (False, {"window": 7}, r"window: expected an even number in an encoder \(half on each side\), found 7"),
    (False, {"window": 256, "block": 48}, "block: 48 does not divide the 128 keys of a side of the window"),
    (True, {"window": 25, "block": 4}, "block: 4 does not divide the 25 keys of a side of the window"),
])  # fmt: skip
def test_a_window_that_does_not_fit_its_stack_is_refused(causal: bool, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        make(causal=causal, **values)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_counts_the_visible_keys_beside_the_own_in_encoder_and_decoder(causal: bool) -> None:
    mask = make(causal=causal, window=6).visible_mask(context_of(40, causal))
    assert mask.sum(dim=-1)[0, 0, 10:30].tolist() == [7] * 20
