"""Additive attention: its scale, positions, chunks and cost, and crossing; the rest is in the contract of all kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.attention_cases import arange, context_of, run
from tests.nn.kind_cases import definition
from tformer.nn.attention import AttentionContext, AttentionSizes, routes
from tformer.nn.attention.additive import AdditiveAttention, AdditiveOptions
from tformer.nn.attention.context import causal_mask
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.cache import CrossCache
from tformer.nn.positions import PositionSizes
from tformer.nn.positions.biases import AlibiOptions
from tformer.nn.positions.shaw import ShawOptions

Tensors = tuple[Tensor, Tensor, Tensor]


def mechanism(*, scale: Any = "auto") -> AdditiveAttention:
    torch.manual_seed(1)
    layer = AdditiveAttention(AdditiveOptions(scale=scale), AttentionSizes(24, 4, 2, 5, 3)).double()
    nn.init.normal_(layer.weight)
    return layer


def draw(*, t: int = 6, s: int = 6) -> Tensors:
    generator = torch.Generator().manual_seed(t + 31 * s)
    shapes = ((2, 4, t, 5), (2, 2, s, 5), (2, 2, s, 3))
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes)
    return q, k, v


def call(t: int, s: int, *, causal: bool = False, key_mask: Tensor | None = None, **others: Any) -> dict[str, Any]:
    """Named arguments of the mechanism."""
    context = AttentionContext(arange(t, s - t), arange(s), causal=causal, key_mask=key_mask)
    return {"context": context.with_mask(), "x_BTD": torch.empty(0), **others}


def test_scale_is_one_unless_it_is_given() -> None:
    assert mechanism().scale == 1.0 and mechanism(scale=0.3).scale == 0.3
    layer, qkv = mechanism(scale=0.3), draw()
    expected = definition(layer, *qkv, context_of(6, True))
    torch.testing.assert_close(run(layer, *qkv, **call(6, 6, causal=True))[0], expected)


def test_position_bias_joins_the_scores() -> None:
    positions = (
        AlibiOptions()
        .build(
            PositionSizes(
                d_model=24, num_heads=4, head_dim=5, value_dim=3, max_seq_len=8, bidirectional=False, grid=None
            )
        )
        .double()
    )
    layer, qkv, pos = mechanism(), draw(), torch.arange(6).unsqueeze(0)
    bias = positions.bias(pos, pos)[0].double()
    q, k, v = qkv
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("bhtsd,hd->bhts", (q.unsqueeze(3) + k.unsqueeze(2)).tanh(), layer.weight) + bias
    expected = scores.masked_fill(~causal_mask(6, 6), -1e30).softmax(-1) @ v
    out, _ = run(layer, *qkv, **call(6, 6, causal=True, positions=positions))
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_relative_positions_on_keys_and_values_train() -> None:
    positions = (
        ShawOptions(clip=2)
        .build(
            PositionSizes(
                d_model=24, num_heads=4, head_dim=5, value_dim=3, max_seq_len=8, bidirectional=True, grid=None
            )
        )
        .double()
    )
    layer, qkv = mechanism(), draw()
    out, _ = run(layer, *qkv, **call(6, 6, positions=positions))
    grads = torch.autograd.grad(out.sum(), list(positions.parameters()))
    assert all(bool(grad.any()) for grad in grads)


def test_a_chunk_holds_a_bounded_number_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    layer, qkv = mechanism(), draw(t=40, s=40)
    scores = layer._scores

    def counted(q: Tensor, k: Tensor, rows: slice) -> Tensor:
        sizes.append(q.numel() * k.shape[2])
        return scores(q, k, rows)

    monkeypatch.setattr(layer, "_scores", counted)
    monkeypatch.setattr(routes, "CHUNK_ELEMENTS", 2 * 4 * 40 * 5 * 7)
    run(layer, *qkv, **call(40, 40))[0].sum().backward()
    assert max(sizes) <= 2 * 4 * 40 * 5 * 7 and len(sizes) == 2 * 6  # six chunks, forward and again backward


def test_cached_self_attention_equals_uncached() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(24, AdditiveOptions(), num_heads=4, num_kv_heads=2, causal=True).double().eval()
    nn.init.normal_(layer.mechanism.get_parameter("weight"))
    x, pos = torch.randn(2, 7, 24, dtype=torch.float64), torch.arange(7).unsqueeze(0)
    expected = layer(x, context_of(7, causal=True))
    state = layer.mechanism.new_state(batch_size=2, capacity=7, device="cpu", dtype=torch.float64)
    steps = [AttentionContext(pos[:, i : i + 1], pos[:, : i + 1], causal=True) for i in range(7)]
    outs = [layer(x[:, i : i + 1], steps[i], cache=state) for i in range(7)]
    torch.testing.assert_close(torch.cat(outs, dim=1), expected)


def test_cross_attention_reads_a_cache_shared_by_beams() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(24, AdditiveOptions(), num_heads=4, memory_dim=10).double().eval()
    nn.init.normal_(layer.mechanism.get_parameter("weight"))
    x, memory = torch.randn(6, 1, 24, dtype=torch.float64), torch.randn(2, 5, 10, dtype=torch.float64)
    mask, pos = torch.tensor([[1, 1, 1, 0, 0], [1] * 5]).bool()[:, None, None], torch.zeros(1, 1, dtype=torch.long)
    each = AttentionContext(pos, pos, mask=mask.repeat_interleave(3, 0), memory=memory.repeat_interleave(3, 0))
    expected, cache = layer(x, each), CrossCache()
    context = AttentionContext(pos, pos, mask=mask, memory=memory)
    layer(x[::3], context, cache=cache)
    torch.testing.assert_close(layer(x, context, cache=cache), expected)


def test_one_vector_for_each_head_and_its_cost() -> None:
    layer = mechanism()
    assert [tuple(p.shape) for p in layer.parameters()] == [(4, 5)]
    layer.reset_parameters(0.02)
    assert 0.005 < float(layer.weight.detach().std()) < 0.05
    assert layer.flops(10, 100) == 1.5 * 10 * 100 * 4 * 2 * (5 + 3)
