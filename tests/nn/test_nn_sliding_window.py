"""Sliding-window attention: equal to a mask in plain loops, forward and gradients, whole and step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.attention_cases import context_of, run, weights_tap
from tests.nn.sparse_cases import (
    HEAD,
    HEADS,
    REACHES,
    SCALE,
    WIDTH,
    assert_same,
    call_of,
    hooks_of,
    mechanism_of,
    naive,
    padding,
    tensors,
)
from tests.pairwise import pairwise
from tformer.nn.attention.block_sparse import explicit, kernel
from tformer.nn.attention.block_sparse.flex import attend_flex
from tformer.nn.attention.context import AttentionContext, AttentionInputs
from tformer.nn.attention.sliding_window import SlidingWindowAttention, SlidingWindowOptions, flex_rule, global_tokens
from tformer.nn.positions.biases import AlibiOptions, T5BiasOptions
from tformer.nn.positions.rope import RopeOptions
from tformer.nn.positions.shaw import ShawOptions

pytestmark = pytest.mark.usefixtures("small_groups")


def make(*, causal: bool = False, sizes: dict[str, int] | None = None, **options: Any) -> SlidingWindowAttention:
    chosen = SlidingWindowOptions(**{"window": 8, "implementation": "blocks", **options})
    mechanism = mechanism_of(chosen, causal=causal, **(sizes or {}))
    assert isinstance(mechanism, SlidingWindowAttention)
    return mechanism


def plain_mask(options: SlidingWindowOptions, reach: AttentionContext, batch: int, queries: int, keys: int) -> Tensor:
    """Element by element, as the paper says it."""
    mask = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for row in range(batch):
        real = [reach.key_mask is None or bool(reach.key_mask[row, j]) for j in range(keys)]
        chosen = {j for j in range(keys) if real[j]}
        if reach.global_mask is None:
            chosen = set(sorted(chosen)[: options.global_tokens])
        else:
            chosen = {j for j in chosen if reach.global_mask[row, j]}
        for t in range(queries):
            i = keys - queries + t
            for j in range(keys):
                steps, rest = divmod(abs(i - j), options.dilation)
                seen = (rest == 0 and steps <= options.reach(causal=reach.causal)) or i in chosen or j in chosen
                seen = seen and real[j] and not (reach.causal and j > i)
                if reach.document_ids is not None:
                    seen = seen and bool(reach.document_ids[row, i] == reach.document_ids[row, j])
                mask[row, 0, t, j] = seen
    return mask


OPTIONS: list[dict[str, Any]] = [
    {},
    {"block": 2},
    {"window": 10, "global_tokens": 3},
    {"window": 4, "block": 2, "dilation": 3, "global_tokens": 1},
    {"window": 6, "dilation": 2},
]


@pytest.mark.parametrize(("reach", "options", "length"), pairwise(reach=REACHES, options=OPTIONS, length=[37, 16, 3]))
def test_equals_the_mask_in_plain_loops(reach: Any, options: dict[str, Any], length: int) -> None:
    causal, side = reach
    mechanism = make(causal=causal, **options)
    reach = context_of(length, causal, padding(length, side))
    inputs = tensors(length)
    expected = naive(*inputs, plain_mask(mechanism.options, reach, 2, length, length))
    found, weights = run(mechanism, *inputs, **call_of(reach))
    assert weights is None
    assert_same(found, expected, inputs)


@pytest.mark.parametrize(("causal", "side"), REACHES)
@pytest.mark.parametrize("options", [{}, {"global_tokens": 2}, {"dilation": 2, "global_tokens": 2}], ids=str)
def test_the_dense_mask_is_that_of_plain_loops(causal: bool, side: str, options: dict[str, Any]) -> None:
    chosen, reach = SlidingWindowOptions(window=6, **options), context_of(20, causal, padding(20, side))
    mask = mechanism_of(chosen, causal=causal).visible_mask(reach).expand(2, 1, 20, 20)
    assert torch.equal(mask, plain_mask(chosen, reach, 2, 20, 20))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dilation", [1, 2])
def test_documents_do_not_see_each_other(causal: bool, dilation: int) -> None:
    mechanism = make(causal=causal, dilation=dilation, global_tokens=2)
    documents = torch.tensor([[0] * 9 + [1] * 20 + [2] * 4, [5] * 33])
    reach = context_of(33, causal, document_ids=documents)
    inputs = tensors(33)
    expected = naive(*inputs, plain_mask(mechanism.options, reach, 2, 33, 33))
    assert_same(run(mechanism, *inputs, **call_of(reach))[0], expected, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dilation", [1, 3])
def test_tokens_named_as_global_take_the_place_of_the_first(causal: bool, dilation: int) -> None:
    mechanism = make(causal=causal, dilation=dilation, global_tokens=2)
    marks = torch.zeros(2, 30)
    marks[0, [4, 17, 29]] = 1
    for chosen in (marks, marks * 0):
        reach = context_of(30, causal, padding(30, "right"), global_mask=chosen)
        inputs = tensors(30)
        expected = naive(*inputs, plain_mask(mechanism.options, reach, 2, 30, 30))
        assert_same(run(mechanism, *inputs, **call_of(reach))[0], expected, inputs)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("value_dim", [3, 9])
@pytest.mark.parametrize("groups", [1500, 10**6])
def test_shared_key_heads_and_other_value_sizes(
    kv_heads: int, value_dim: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "GROUP_ELEMENTS", groups)
    mechanism = make(causal=True, sizes={"kv_heads": kv_heads, "value_dim": value_dim}, global_tokens=2)
    reach = context_of(41, True, padding(41, "left"))
    inputs = tensors(41, kv_heads=kv_heads, value_dim=value_dim)
    expected = naive(*inputs, plain_mask(mechanism.options, reach, 2, 41, 41))
    assert_same(run(mechanism, *inputs, **call_of(reach))[0], expected, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_query_never_sees_the_future(causal: bool) -> None:
    mechanism = make(causal=causal, global_tokens=2, dilation=2)
    q, k, v = (x.detach() for x in tensors(40))
    call = call_of(context_of(40, causal))
    before = run(mechanism, q, k, v, **call)[0]
    for x in (q, k, v):
        x[:, :, 23:] += 1.0
    after = run(mechanism, q, k, v, **call)[0]
    assert torch.equal(before[:, :, :23], after[:, :, :23]) == causal


def test_bf16_is_close_to_fp32() -> None:
    mechanism = make(global_tokens=2)
    inputs = tensors(37, dtype=torch.bfloat16)
    expected = naive(*(x.float() for x in inputs), plain_mask(mechanism.options, context_of(37), 2, 37, 37))
    found = run(mechanism, *inputs, **call_of(context_of(37)))[0]
    assert found.dtype == torch.bfloat16
    assert_same(found.float(), expected, inputs, tolerance=0.06)


HOOKS = [AlibiOptions(), T5BiasOptions(buckets=8, max_distance=16), ShawOptions(clip=3)]


@pytest.mark.parametrize(
    ("kind", "causal", "options", "chunk"),
    pairwise(
        kind=HOOKS,
        causal=[False, True],
        options=[{}, {"global_tokens": 2}, {"dilation": 2, "global_tokens": 1}],
        chunk=[3000, 10**6],
    ),
)
def test_position_kinds_with_terms_of_their_own(
    kind: Any, causal: bool, options: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense way, tested elsewhere, is the oracle: outputs and gradients, of the tables too."""
    monkeypatch.setattr(explicit, "CHUNK_ELEMENTS", chunk)
    mechanism = make(causal=causal, **options)
    hooks = hooks_of(kind, causal=causal)
    inputs = [*tensors(29), *hooks.parameters()]
    mask = padding(29, "left" if causal else "right")
    assert mask is not None
    call = call_of(AttentionContext(mask.cumsum(1), mask.cumsum(1), causal=causal, key_mask=mask), positions=hooks)
    expected, _ = run(mechanism, *inputs[:3], **call, taps=weights_tap())
    found, _ = run(mechanism, *inputs[:3], **call)
    assert_same(found, expected, inputs)


def test_dropout_keeps_the_mean() -> None:
    mechanism, inputs, call = make(global_tokens=1), tensors(30), call_of(context_of(30))
    with torch.no_grad():
        expected = run(mechanism, *inputs, **call)[0]
        mechanism.dropout = 0.5
        many = torch.stack([run(mechanism, *inputs, **call)[0] for _ in range(600)]).mean(0)
    assert (many - expected).abs().max() < 0.5 and (many - expected).abs().mean() < 0.05


def test_dropout_is_the_same_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, inputs, call = make(global_tokens=1), tensors(30), call_of(context_of(30))
    mechanism.dropout = 0.5
    for chunk in (3000, 10**6):  # recomputed in chunks, and kept
        monkeypatch.setattr(explicit, "CHUNK_ELEMENTS", chunk)
        torch.manual_seed(3)
        out = run(mechanism, *inputs, **call)[0]
        v = inputs[2]
        # The output is linear in the values: <grad, v> is the output's sum, only if the same weights were dropped.
        (grad,) = torch.autograd.grad(out.sum(), [v])
        torch.testing.assert_close((grad * v).sum(), out.sum(), atol=1e-3, rtol=1e-4)


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
    local = naive(*inputs, plain_mask(mechanism.options, reach, 2, 25, 25))
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


@pytest.mark.parametrize(
    ("options", "sizes", "side"),
    pairwise(
        options=[{}, {"global_tokens": 3}, {"dilation": 3}, {"window": 4, "dilation": 2, "global_tokens": 2}],
        sizes=[[1] * 80, [50] + [1] * 30, [37, 1, 42], [20, 3, 1, 56]],
        side=["none", "left"],
    ),
)
def test_new_queries_behind_a_cache_get_what_the_whole_sequence_gets(
    options: dict[str, Any], sizes: list[int], side: str
) -> None:
    mechanism = make(causal=True, **options)
    length, mask = sum(sizes), padding(sum(sizes), side)
    q, k, v = (x.detach() for x in tensors(length))
    whole = naive(q, k, v, plain_mask(mechanism.options, context_of(length, True, mask), 2, length, length))
    start = 0
    for size in sizes:
        end = start + size
        call = call_of(context_of(size, True, None if mask is None else mask[:, :end], keys=end))
        out, _ = run(mechanism, q[:, :, start:end], k[:, :, :end], v[:, :, :end], **call)
        torch.testing.assert_close(out, whole[:, :, start:end], atol=1e-5, rtol=0)
        start = end


def test_a_step_reads_the_window_alone() -> None:
    """Whatever stands outside may be anything, even no number at all."""
    mechanism = make(causal=True, global_tokens=1)
    q, k, v = (x.detach() for x in tensors(1, keys=60))
    for x in (k, v):
        x[:, :, 1:51] = float("nan")
    assert run(mechanism, q, k, v, **call_of(context_of(1, True, keys=60)))[0].isfinite().all()


def test_named_global_tokens_and_a_cache_do_not_go_together() -> None:
    q, k, v = tensors(1, keys=9)
    with pytest.raises(ValueError, match=r"^global_attention_mask: not together with a cache"):
        run(make(causal=True), q, k, v, **call_of(context_of(1, True, keys=9, global_mask=torch.ones(2, 1))))


# --- the choice of the way, and options ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [4, 5, 30])
def test_short_inputs_take_the_dense_way_with_the_same_result(
    causal: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = make(causal=causal, global_tokens=1, implementation="auto")
    reach = context_of(length, causal, padding(length, "right"))
    inputs = tensors(length)
    expected = naive(*inputs, plain_mask(mechanism.options, reach, 2, length, length))
    monkeypatch.setattr(kernel._BlockSparseAttention, "apply", lambda *_: pytest.fail("not dense"))
    assert_same(run(mechanism, *inputs, **call_of(reach))[0], expected, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_those_of_the_mask(causal: bool) -> None:
    mechanism = make(causal=causal, global_tokens=1)
    reach = context_of(30, causal, padding(30, "right"))
    q, k, v = tensors(30)
    out, weights = run(mechanism, q, k, v, **call_of(reach, taps=weights_tap()))
    mask = plain_mask(mechanism.options, reach, 2, 30, 30)
    assert weights is not None and weights.dtype == torch.float32 and weights.masked_select(~mask).abs().max() == 0
    torch.testing.assert_close(weights @ v, naive(q, k, v, mask), atol=1e-5, rtol=0)
    torch.testing.assert_close(out, weights @ v, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_flex_has_the_same_pattern(causal: bool) -> None:
    """Its rule, run here without its compiler and without gradients."""
    options = SlidingWindowOptions(window=8, dilation=2, global_tokens=1)
    reach = context_of(40, causal, padding(40, "left"))
    q, k, v = (x.detach() for x in tensors(40))
    rule = flex_rule(options.reach(causal=reach.causal), options.dilation, global_tokens(options, reach), start=0)
    found = attend_flex(AttentionInputs(q, k, v, reach, SCALE), rule)
    torch.testing.assert_close(found, naive(q, k, v, plain_mask(options, reach, 2, 40, 40)), atol=1e-5, rtol=0)


def test_a_model_with_flex_runs_without_cuda_by_blocks() -> None:
    found, _ = run(make(implementation="flex"), *tensors(30), **call_of(context_of(30)))
    expected, _ = run(make(implementation="blocks"), *tensors(30), **call_of(context_of(30)))
    assert torch.equal(found, expected)


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
