"""Multi-head attention as a module: causality, padding, agreement with torch's own, taps, beams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.nn.attention_cases import (
    LAYER_KINDS,
    arange,
    attend,
    attend_few,
    calls_of_few,
    context_of,
    naive,
    positions_for,
    self_attention,
    tensors,
    weights_tap,
)
from tests.pairwise import pairwise
from tformer.nn.attention import ATTENTION, AttentionContext, FullAttentionOptions
from tformer.nn.attention.core import few_are_faster
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.attention.sliding_window import SlidingWindowOptions
from tformer.nn.cache import CrossCache
from tformer.nn.init import block_matrices
from tformer.nn.positions.rope import RopeOptions
from tformer.nn.structured_dropout import DropHead, drop_heads
from tformer.nn.taps import TapSink, check_taps


@pytest.mark.parametrize("options", LAYER_KINDS, ids=lambda options: options.kind)
@pytest.mark.parametrize("training", [False, True])
def test_the_future_cannot_change_the_past(options: Any, training: bool) -> None:
    layer = self_attention(num_kv_heads=2, head_dim=6, options=FullAttentionOptions(qk_norm=True)).train(training)
    module = positions_for(options, layer)
    x = torch.randn(2, 9, 16)
    changed = x.clone()
    changed[:, 5:] += torch.randn(2, 4, 16)
    before, after = (layer(y, context_of(9, True), positions=module) for y in (x, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("options", LAYER_KINDS, ids=lambda options: options.kind)
@pytest.mark.parametrize("causal", [False, True])
def test_relative_kinds_see_only_distances(options: Any, causal: bool) -> None:
    layer = self_attention()
    module = positions_for(options, layer, bidirectional=not causal)
    x = torch.randn(2, 6, 16)
    here, there = (
        layer(x, AttentionContext(pos, pos, causal=causal).with_mask(), positions=module)
        for pos in (arange(6), arange(6, 31))
    )
    torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", LAYER_KINDS, ids=lambda options: options.kind)
def test_padding_does_not_change_the_rest(options: Any) -> None:
    """Left padding with shifted positions equals no padding."""
    layer = self_attention()
    module = positions_for(options, layer)
    x = torch.randn(1, 5, 16)
    alone = layer(x, context_of(5, True), positions=module)
    padded_x = torch.cat([torch.randn(1, 3, 16), x], dim=1)
    keys = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    pos = (keys.cumsum(1) - 1).clamp(min=0)
    beside = layer(padded_x, AttentionContext(pos, pos, causal=True, key_mask=keys).with_mask(), positions=module)
    torch.testing.assert_close(beside[:, 3:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", LAYER_KINDS, ids=lambda options: options.kind)
def test_tapped_weights_are_those_that_were_used(options: Any) -> None:
    """The explicit path that shows weights gives the output of the path that does not."""
    layer = self_attention(num_kv_heads=2, value_dim=3).eval()
    module = positions_for(options, layer)
    x = torch.randn(2, 7, 16)
    taps = TapSink(frozenset({"decoder.0.self_attention.weights"}))
    scoped = taps.scope("decoder").scope(0).scope("self_attention")
    seen = layer(x, context_of(7, True), positions=module, taps=scoped)
    torch.testing.assert_close(seen, layer(x, context_of(7, True), positions=module), atol=1e-5, rtol=1e-5)
    weights = taps.values["decoder.0.self_attention.weights"]
    assert weights.shape == (2, 4, 7, 7) and not weights.triu(1).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7))


def test_unknown_taps_name_the_nearest() -> None:
    check_taps({"encoder.0.hidden"}, ["encoder.0.hidden"])
    with pytest.raises(ValueError, match=r"unknown tap 'encoder.0.hiden'; nearest: encoder.0.hidden"):
        check_taps({"encoder.0.hiden"}, ["encoder.0.hidden", "decoder.1.self_attention.weights"])


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_agrees_with_torch(causal: bool) -> None:
    layer = self_attention()
    other = nn.MultiheadAttention(16, 4, batch_first=True)
    other.load_state_dict(
        {
            "in_proj_weight": layer.qkv.weight, "in_proj_bias": layer.qkv.bias,
            "out_proj.weight": layer.out.weight, "out_proj.bias": layer.out.bias,
        }
    )  # fmt: skip
    x = torch.randn(2, 6, 16)
    keys = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    forbidden = ~torch.ones(6, 6, dtype=torch.bool).tril() if causal else None
    expected, _ = other(x, x, x, key_padding_mask=~keys, attn_mask=forbidden)
    torch.testing.assert_close(layer(x, context_of(6, causal, keys)), expected, atol=1e-5, rtol=1e-5)


def test_cross_attention_agrees_with_torch() -> None:
    layer = self_attention(memory_dim=12)
    other = nn.MultiheadAttention(16, 4, kdim=12, vdim=12, batch_first=True)
    k_weight, v_weight = layer.kv.weight.chunk(2)
    other.load_state_dict(
        {
            "q_proj_weight": layer.q.weight, "k_proj_weight": k_weight, "v_proj_weight": v_weight,
            "in_proj_bias": torch.cat([layer.q.bias, layer.kv.bias]),
            "out_proj.weight": layer.out.weight, "out_proj.bias": layer.out.bias,
        }
    )  # fmt: skip
    x, memory = torch.randn(2, 4, 16), torch.randn(2, 7, 12)
    keys = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]]).bool()
    expected, _ = other(x, memory, memory, key_padding_mask=~keys)
    context = context_of(4, key_mask=keys, memory=memory)
    torch.testing.assert_close(layer(x, context), expected, atol=1e-5, rtol=1e-5)


def test_sizes_of_the_fused_projections() -> None:
    layer = MultiHeadAttention(
        16, FullAttentionOptions(qkv_bias=False, out_bias=False), num_heads=6, num_kv_heads=2, head_dim=5, value_dim=3
    )
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {"qkv.weight": (6 * 5 + 2 * 5 + 2 * 3, 16), "out.weight": (16, 6 * 3)}
    found = {name: (matrix, rows) for name, matrix, rows in block_matrices(layer)}
    assert found == {".qkv": (layer.qkv, [30, 10, 6]), ".out": (layer.out, [16])}
    assert layer(torch.randn(2, 3, 16), context_of(3)).shape == (2, 3, 16)
    with pytest.raises(ValueError, match="d_model 16 is not divisible by num_heads 3"):
        MultiHeadAttention(16, num_heads=3)
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by num_kv_heads 3"):
        MultiHeadAttention(16, num_heads=4, num_kv_heads=3)


def test_scale_and_qk_norm_options() -> None:
    x = torch.randn(2, 5, 16)
    for options in (FullAttentionOptions(scale=1.0), FullAttentionOptions(qk_norm=True)):
        layer = self_attention(options=options)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.qkv(x).chunk(3, dim=-1))
        if options.qk_norm:
            q, k = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        out, _ = naive(q, k, v, mask=None, scale=1.0 if options.scale == 1.0 else 0.5)
        torch.testing.assert_close(
            layer(x, context_of(5)), layer.out(out.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5
        )


def test_one_norm_of_the_whole_width_is_that_of_all_heads_side_by_side() -> None:
    x = torch.randn(2, 5, 16)
    layer = self_attention(num_kv_heads=2, options=FullAttentionOptions(qk_norm="width"))
    assert (layer.q_norm.weight.shape, layer.k_norm.weight.shape) == ((16,), (8,))
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight.normal_(1.0, 0.3)
    q, k, v = layer.qkv(x).split([16, 8, 8], dim=-1)
    q, k = (torch.nn.functional.rms_norm(y, y.shape[-1:], norm.weight, 1e-6)
            for y, norm in ((q, layer.q_norm), (k, layer.k_norm)))  # fmt: skip
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
    out, _ = naive(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask=None, scale=0.5)
    torch.testing.assert_close(layer(x, context_of(5)), layer.out(out.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["layernorm", "groupnorm"])
def test_layer_norms_of_heads_share_gains_and_biases_or_have_gains_of_their_own(kind: str) -> None:
    x = torch.randn(2, 5, 16)
    layer = self_attention(num_kv_heads=2, options=FullAttentionOptions(qk_norm=kind, qk_norm_eps=1e-3))
    shapes = {name: tuple(value.shape) for name, value in layer.named_parameters() if "norm" in name}
    shared = {f"{one}_norm.{part}": (4,) for one in "qk" for part in ("weight", "bias")}
    assert shapes == (shared if kind == "layernorm" else {"q_norm.weight": (16,), "k_norm.weight": (8,)})
    with torch.no_grad():
        for value in (*layer.q_norm.parameters(), *layer.k_norm.parameters()):
            value.normal_(1.0, 0.3)
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in layer.qkv(x).split([16, 8, 8], dim=-1))
    q, k = (torch.nn.functional.layer_norm(y, (4,), eps=1e-3) * norm.weight.view(-1, 1, 4)
            + (0.0 if norm.bias is None else norm.bias)
            for y, norm in ((q, layer.q_norm), (k, layer.k_norm)))  # fmt: skip
    out, _ = naive(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask=None, scale=0.5)
    torch.testing.assert_close(layer(x, context_of(5)), layer.out(out.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5)


def test_gains_of_1_plus_w_of_queries_and_keys_start_at_zero() -> None:
    plain, offset = (self_attention(options=FullAttentionOptions(qk_norm=kind)) for kind in (True, "unit_offset"))
    offset.load_state_dict(plain.state_dict(), strict=False)
    for norm in (offset.q_norm, offset.k_norm):
        norm.reset_parameters()
    assert not offset.q_norm.weight.any() and not offset.k_norm.weight.any()
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(offset(x, context_of(5)), plain(x, context_of(5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_soft_cap_is_that_of_the_scaled_scores(dtype: torch.dtype) -> None:
    """c tanh(score / c), of full attention and of windows; a high cap changes nothing."""
    x = torch.randn(2, 7, 16, dtype=dtype) * 3
    layer = self_attention(options=FullAttentionOptions(softcap=0.7))
    nn.init.normal_(layer.qkv.weight, std=0.5)
    q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.qkv(x).chunk(3, dim=-1))
    weights = (0.7 * torch.tanh(0.5 * (q @ k.transpose(-1, -2)).float() / 0.7)).softmax(-1).to(dtype)
    expected = layer.out((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, context_of(7)), expected)
    windowed = self_attention(options=SlidingWindowOptions(softcap=0.7, window=20))
    windowed.load_state_dict(layer.state_dict())
    torch.testing.assert_close(windowed(x, context_of(7)), expected)
    high, plain = (self_attention(options=FullAttentionOptions(softcap=cap)) for cap in (1e5, None))
    high.load_state_dict(layer.state_dict())
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(high(x, context_of(7)), plain(x, context_of(7)), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["additive", "bigbird", "linformer", "performer"])
def test_a_soft_cap_belongs_to_full_and_sliding_window_attention(kind: str) -> None:
    with pytest.raises(ValueError, match=f"softcap: {kind} attention forms no scores that could be capped, found 5"):
        ATTENTION[kind](softcap=5.0)
    with pytest.raises(ValueError, match="implementation: flex has no softcap, expected auto or blocks"):
        SlidingWindowOptions(softcap=5.0, implementation="flex")


def test_learned_gains_multiply_the_normalized_queries_and_keys() -> None:
    x = torch.randn(2, 5, 16)
    plain, learned = (self_attention(options=FullAttentionOptions(qk_norm=kind)) for kind in (True, "learned"))
    assert plain.state_dict().keys() | {"q_norm.weight", "k_norm.weight"} == learned.state_dict().keys()
    learned.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for norm in (learned.q_norm, learned.k_norm):
            norm.reset_parameters()
        assert torch.equal(learned(x, context_of(5)), plain(x, context_of(5)))  # gains start at one
        learned.q_norm.weight.fill_(2.0)
        learned.k_norm.weight.fill_(0.5)
        torch.testing.assert_close(learned(x, context_of(5)), plain(x, context_of(5)))
        learned.k_norm.weight.fill_(1.0)
        assert not torch.allclose(learned(x, context_of(5)), plain(x, context_of(5)))


def test_grouped_heads_equal_repeated_heads() -> None:
    grouped = self_attention(num_kv_heads=2)
    whole = self_attention()
    q, k, v = grouped.qkv.weight.split([16, 8, 8])
    bias_q, bias_k, bias_v = grouped.qkv.bias.split([16, 8, 8])
    repeat = lambda y: y.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)  # noqa: E731
    whole.load_state_dict(
        {
            "qkv.weight": torch.cat([q, repeat(k), repeat(v)]),
            "qkv.bias": torch.cat([bias_q, repeat(bias_k), repeat(bias_v)]),
            "out.weight": grouped.out.weight, "out.bias": grouped.out.bias,
        }
    )  # fmt: skip
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(grouped(x, context_of(5, True)), whole(x, context_of(5, True)), atol=1e-5, rtol=1e-5)


def test_dropout_and_drophead_only_while_training() -> None:
    layer = self_attention(dropout=0.5, drophead=DropHead(0.5))
    x = torch.randn(2, 5, 16)
    layer.eval()
    assert torch.equal(layer(x, context_of(5)), layer(x, context_of(5)))
    layer.train()
    assert not torch.equal(layer(x, context_of(5)), layer(x, context_of(5)))


def test_drophead_keeps_one_head_at_least_and_the_sum() -> None:
    torch.manual_seed(0)
    gates = drop_heads(2000, 4, 0.6, torch.device("cpu")).view(2000, 4)
    torch.testing.assert_close(gates.sum(1), torch.full((2000,), 4.0))  # H / kept on each of the kept
    kept = (gates > 0).sum(1)
    assert kept.min() == 1 and (gates > 0).float().mean().item() == pytest.approx(0.4 + 0.6**4 / 4, abs=0.02)


def test_bf16_stream_with_fp32_weights() -> None:
    layer = self_attention()
    x = torch.randn(2, 5, 16)
    out = layer(x.bfloat16(), context_of(5, True), positions=positions_for(RopeOptions(), layer))
    exact = layer(x, context_of(5, True), positions=positions_for(RopeOptions(), layer))
    assert out.dtype == torch.bfloat16 and layer.qkv.weight.dtype == torch.float32
    torch.testing.assert_close(out.float(), exact, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_beams_share_the_keys_of_their_sentence(queries: int, kv_heads: int) -> None:
    torch.manual_seed(5)
    layer = MultiHeadAttention(16, num_heads=4, num_kv_heads=kv_heads, value_dim=5, memory_dim=12)
    memory, x = torch.randn(2, 5, 12), torch.randn(2 * 3, queries, 16)
    key_mask = torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    context, shared = context_of(queries, key_mask=key_mask), CrossCache()
    layer(x[:2], replace(context, memory=memory), cache=shared)
    sink, expected_sink = weights_tap(), weights_tap()
    found = layer(x, context, cache=shared, taps=sink)
    each = context_of(queries, key_mask=key_mask.repeat_interleave(3, 0), memory=memory.repeat_interleave(3, 0))
    expected = layer(x, each, taps=expected_sink)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sink.values["weights"], expected_sink.values["weights"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(layer(x, context, cache=shared), expected, atol=1e-6, rtol=1e-6)


def test_cross_attention_asks_with_one_side_and_answers_with_the_other() -> None:
    torch.manual_seed(6)
    layer = MultiHeadAttention(16, num_heads=4, memory_dim=16)
    x, memory = torch.randn(1, 4, 16), torch.randn(1, 4, 16)
    q = layer.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.kv(memory).chunk(2, dim=-1))
    expected, _ = naive(q, k, v, mask=None, scale=0.5)
    out = layer(x, context_of(4, memory=memory))
    torch.testing.assert_close(out, layer.out(expected.transpose(1, 2).flatten(2)), atol=1e-6, rtol=1e-6)
    assert (layer(memory, context_of(4, memory=x)) - out).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("lengths", "heads", "masked"),
    pairwise(
        lengths=[(1, 6), (1, 16), (2, 15), (3, 32), (8, 17), (8, 1)],
        heads=[(4, 5), (2, 5), (1, 7)],
        masked=[None, "rows", "queries"],
    ),
)
def test_few_queries_equal_the_formula(lengths: tuple[int, int], heads: tuple[int, int], masked: str | None) -> None:
    """Lengths on both sides of the padding of scores, and rows without visible keys."""
    (queries, keys), (kv_heads, value_dim) = lengths, heads
    q, k, v = (x.detach() for x in tensors(b=3, k=kv_heads, t=queries, s=keys, v=value_dim))
    torch.manual_seed(3)
    mask = None if masked is None else torch.rand(3, 1, queries if masked == "queries" else 1, keys) < 0.6
    if mask is not None:
        mask[2] = False
    before = [x.clone() for x in (q, k, v)]
    expected, _ = naive(q, k, v, mask=mask, scale=0.4)
    torch.testing.assert_close(attend_few(q, k, v, mask=mask, scale=0.4), expected)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))
    if mask is not None:
        assert not attend_few(q, k, v, mask=mask, scale=0.4)[2].any()


@pytest.mark.parametrize(("examples", "queries"), [(0, 1), (0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_no_examples_and_no_queries_give_an_empty_answer(examples: int, queries: int, kv_heads: int) -> None:
    """A last batch may be empty, and nobody may ask; a size of -1 would be ambiguous there."""
    q, k, v = (x.detach() for x in tensors(b=examples, k=kv_heads, t=queries, s=6, v=7))
    for mask in (None, torch.ones(examples, 1, queries, 6, dtype=torch.bool)):
        assert attend_few(q, k, v, mask=mask, scale=0.4).shape == (examples, 4, queries, 7)


def test_a_single_query_of_a_view_equals_the_formula() -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(b=3, k=2, t=4, s=6))
    torch.testing.assert_close(attend_few(q, k, v, mask=None, scale=0.4), naive(q, k, v, mask=None, scale=0.4)[0])


def test_a_single_query_has_a_gradient() -> None:
    q, k, v = tensors(b=2, k=2, t=1, s=6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()[:, None, None]
    found, expected = attend_few(q, k, v, mask=mask, scale=0.4), naive(q, k, v, mask=mask, scale=0.4)[0]
    for one, other in zip(
        *(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_bf16_on_a_cpu_takes_the_single_query_and_stays_close() -> None:
    q, k, v = (x.detach().bfloat16() for x in tensors(t=1))
    assert few_are_faster(q) and not few_are_faster(q.float()) and not few_are_faster(q.repeat(1, 1, 2, 1))
    with torch.no_grad():
        assert few_are_faster(q.repeat(1, 1, 8, 1)) and not few_are_faster(q.repeat(1, 1, 9, 1))
    expected, _ = naive(q.double(), k.double(), v.double(), mask=None, scale=0.4)
    torch.testing.assert_close(attend(q, k, v, scale=0.4)[0].double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 8, 9])
def test_few_queries_are_chosen_without_a_gradient_and_never_where_causal(
    queries: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.detach().bfloat16() for x in tensors(t=queries, s=queries if causal else 11))
    calls = calls_of_few(monkeypatch)
    mask = torch.ones(queries, queries, dtype=torch.bool).tril() if causal else None
    expected, _ = naive(q.double(), k.double(), v.double(), mask=mask, scale=0.4)
    for grad in (True, False):
        calls.clear()
        with torch.set_grad_enabled(grad):
            found, _ = attend(q, k, v, is_causal=causal, scale=0.4)
        torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)
        assert bool(calls) == (not causal and queries <= (1 if grad else 8))
