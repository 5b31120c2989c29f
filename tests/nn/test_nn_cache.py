"""Caches: decoding step by step equals one pass, for every position kind and with left padding; row surgery."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tformer.nn.attention import FullAttentionOptions, MultiHeadAttention
from tformer.nn.attention.masks import make_mask
from tformer.nn.cache import CrossCache, LayerCache, ModelCache
from tformer.nn.positions import build_positions
from tformer.nn.positions.alibi import AlibiOptions
from tformer.nn.positions.learned import LearnedOptions
from tformer.nn.positions.none import NoPositionsOptions
from tformer.nn.positions.rope import RopeOptions, RopeScaling
from tformer.nn.positions.shaw import ShawOptions
from tformer.nn.positions.sinusoidal import SinusoidalOptions
from tformer.nn.positions.t5_bias import T5BiasOptions

KINDS = [
    NoPositionsOptions(), SinusoidalOptions(), LearnedOptions(), RopeOptions(), RopeOptions(layout="interleaved"),
    RopeOptions(scaling=RopeScaling(original_max_seq_len=8)), AlibiOptions(), T5BiasOptions(), ShawOptions(clip=2),
]  # fmt: skip


def layer_cache(batch: int, capacity: int, layer: MultiHeadAttention) -> LayerCache:
    return LayerCache(
        batch_size=batch,
        num_kv_heads=layer.num_kv_heads,
        capacity=capacity,
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        device="cpu",
        dtype=torch.float32,
    )


def model_cache(batch: int = 3, capacity: int = 6, cross: int = 0) -> ModelCache:
    layer = MultiHeadAttention(8, num_heads=2)
    layers = [layer_cache(batch, capacity, layer) for _ in range(2)]
    return ModelCache(layers, [CrossCache() for _ in range(cross)], batch_size=batch, capacity=capacity, device="cpu")


def attention() -> MultiHeadAttention:
    torch.manual_seed(0)
    layer = MultiHeadAttention(
        16, FullAttentionOptions(qk_norm=True), num_heads=4, num_kv_heads=2, head_dim=6, value_dim=5
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.eval()


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.kind)
@pytest.mark.parametrize("steps", [[1] * 8, [5, 1, 1, 1], [4, 3, 1]], ids=str)
def test_cached_equals_uncached_with_left_padding(options: Any, steps: list[int]) -> None:
    layer = attention()
    module = build_positions(
        options, d_model=16, num_heads=4, head_dim=6, value_dim=5, max_seq_len=8, bidirectional=False
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    valid = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]]).bool()
    pos = (valid.cumsum(1) - 1).clamp(min=0)
    x = torch.randn(2, 8, 16)

    def whole() -> Tensor:
        mask, is_causal = make_mask(causal=True, num_queries=8, key_mask=valid)
        return layer(module.embed(x, pos), q_pos=pos, mask=mask, is_causal=is_causal, positions=module)

    cache = ModelCache([layer_cache(2, 10, layer)], batch_size=2, capacity=10, device="cpu")
    outs, start = [], 0
    for step in steps:
        now = slice(start, start + step)
        k_pos, key_valid = cache.advance(pos[:, now], valid[:, now])
        mask, is_causal = make_mask(causal=True, num_queries=step, num_keys=k_pos.shape[1], key_mask=key_valid)
        outs.append(
            layer(
                module.embed(x[:, now], pos[:, now]),
                q_pos=pos[:, now],
                k_pos=k_pos,
                mask=mask,
                is_causal=is_causal,
                positions=module,
                cache=cache.layers[0],
            )
        )
        start += step
    found, expected = torch.cat(outs, dim=1), whole()
    torch.testing.assert_close(found[valid], expected[valid], atol=1e-5, rtol=1e-5)


def test_cross_cache_computes_the_encoder_side_once() -> None:
    layer = MultiHeadAttention(16, FullAttentionOptions(qk_norm=True), num_heads=4, memory_dim=12).eval()
    x, memory, pos = torch.randn(2, 3, 16), torch.randn(2, 5, 12), torch.arange(3).unsqueeze(0)
    expected, cache = layer(x, memory=memory, q_pos=pos), CrossCache()
    assert not cache.filled
    first = layer(x[:, :1], memory=memory, q_pos=pos[:, :1], cache=cache)
    layer.kv = None  # type: ignore[assignment]  # must not be needed again
    rest = layer(x[:, 1:], q_pos=pos[:, 1:], cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), expected, atol=1e-6, rtol=1e-6)


def test_append_returns_all_slots_and_refuses_overflow() -> None:
    cache = model_cache()
    layer = cache.layers[0]
    first, second = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 2, 4)
    layer.append(first, first)
    keys, values = layer.append(second, second)
    assert torch.equal(keys, torch.cat([first, second], dim=2)) and torch.equal(keys, values)
    assert keys.data_ptr() == layer.keys.data_ptr()  # views of preallocated storage
    with pytest.raises(ValueError, match="the cache holds 6 positions, 7 are needed"):
        layer.append(second[:, :, :1], second[:, :, :1])
    cache.advance(torch.arange(6).unsqueeze(0))
    with pytest.raises(ValueError, match="the cache holds 6 positions, 7 are needed"):
        cache.advance(torch.tensor([[6]]))


def filled(cross: int = 1) -> ModelCache:
    """Row b of every tensor holds the number b."""
    cache = model_cache(cross=cross)
    rows = torch.arange(3.0).view(3, 1, 1, 1)
    cache.advance(torch.arange(3).unsqueeze(1).expand(3, 4), torch.tensor([[0, 1, 1, 1], [1] * 4, [1] * 4]).bool())
    for layer in cache.layers:
        layer.append(rows.expand(3, 2, 4, 4), rows.expand(3, 2, 4, 4))
    for other in cache.cross:
        other.fill(rows.expand(3, 2, 5, 4), rows.expand(3, 2, 5, 4))
    cache.encoder_mask = torch.arange(3).unsqueeze(1).expand(3, 5)
    return cache


def rows_of(cache: ModelCache) -> list[int]:
    """The rows' numbers, after checking that every tensor agrees on them."""
    rows = cache.key_positions[:, 0].tolist()
    for layer in cache.layers:
        assert layer.keys[:, 0, 3, 0].tolist() == layer.values[:, 1, 0, 3].tolist() == rows
        assert layer.keys.shape[2] == cache.capacity
    for other in cache.cross:
        keys, values = other.read()
        assert keys[:, 0, 0, 0].tolist() == values[:, 0, 0, 0].tolist() == rows
    assert cache.encoder_mask is not None and cache.encoder_mask[:, 0].tolist() == rows
    assert cache.key_valid[:, 0].tolist() == [row != 0 for row in rows]
    return rows


def test_reorder_compact_and_expand_move_whole_rows() -> None:
    cache = filled()
    cache.reorder(torch.tensor([2, 0, 0]))
    assert rows_of(cache) == [2, 0, 0]
    cache.compact(torch.tensor([True, False, True]))
    assert rows_of(cache) == [2, 0] and cache.batch_size == 2
    cache.compact(torch.tensor([1]))
    assert rows_of(cache) == [0]
    other = filled()
    other.expand(2)
    assert rows_of(other) == [0, 0, 1, 1, 2, 2] and other.length == 4
    other.layers[0].append(torch.ones(6, 2, 2, 4), torch.ones(6, 2, 2, 4))  # there is still room


def test_truncate_forgets_the_latest_slots() -> None:
    cache = filled()
    cache.truncate(2)
    assert cache.length == 2 and all(layer.length == 2 for layer in cache.layers)
    k_pos, valid = cache.advance(torch.full((3, 1), 9))
    assert k_pos[1].tolist() == [1, 1, 9] and valid[0].tolist() == [False, True, True]
    with pytest.raises(ValueError, match="cannot truncate a cache of 3 slots to 4"):
        cache.truncate(4)
