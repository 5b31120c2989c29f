"""Decoding caches: the cached decoder equals the uncached one; rows move; fixed shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tformer.build import build_model
from tformer.model import Transformer
from tformer.nn.attention import AttentionContext, FullAttentionOptions
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.cache import FEW_SLOTS, CrossCache, LayerCache, ModelCache, fastest_dtype
from tformer.nn.fixed_cache import FixedCache
from tformer.nn.positions import PositionSizes
from tformer.nn.positions.base import LearnedOptions, NoPositionsOptions
from tformer.nn.positions.biases import AlibiOptions, T5BiasOptions
from tformer.nn.positions.fixed import SinusoidalOptions
from tformer.nn.positions.rope import RopeOptions, RopeScaling
from tformer.nn.positions.shaw import ShawOptions
from tformer.recipe.model import Model

KINDS = [
    NoPositionsOptions(), SinusoidalOptions(), LearnedOptions(), RopeOptions(), RopeOptions(layout="interleaved"),
    RopeOptions(share=0.67), RopeOptions(scaling=RopeScaling(kind="yarn", original_max_seq_len=8)),
    RopeOptions(scaling=RopeScaling(kind="dynamic", original_max_seq_len=8)),
    RopeOptions(scaling=RopeScaling(original_max_seq_len=8)), AlibiOptions(), AlibiOptions(rounded=True),
    T5BiasOptions(), ShawOptions(clip=2),
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
    module = options.build(
        PositionSizes(d_model=16, num_heads=4, head_dim=6, value_dim=5, max_seq_len=8, bidirectional=False)
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    valid = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]]).bool()
    pos = (valid.cumsum(1) - 1).clamp(min=0)
    x = torch.randn(2, 8, 16)

    def whole() -> Tensor:
        context = AttentionContext(pos, pos, causal=True, key_mask=valid).with_mask()
        return layer(module.embed(x, pos), context, positions=module)

    cache = ModelCache([layer_cache(2, 10, layer)], batch_size=2, capacity=10, device="cpu")
    outs, start = [], 0
    for step in steps:
        now = slice(start, start + step)
        k_pos, key_valid = cache.advance(pos[:, now], valid[:, now])
        context = AttentionContext(pos[:, now], k_pos, causal=True, key_mask=key_valid).with_mask()
        outs.append(layer(module.embed(x[:, now], pos[:, now]), context, positions=module, cache=cache.layers[0]))
        start += step
    found, expected = torch.cat(outs, dim=1), whole()
    torch.testing.assert_close(found[valid], expected[valid], atol=1e-5, rtol=1e-5)


def test_cross_cache_computes_the_encoder_side_once() -> None:
    layer = MultiHeadAttention(16, FullAttentionOptions(qk_norm=True), num_heads=4, memory_dim=12).eval()
    x, memory, pos = torch.randn(2, 3, 16), torch.randn(2, 5, 12), torch.arange(3).unsqueeze(0)
    expected, cache = layer(x, AttentionContext(pos, pos, memory=memory)), CrossCache()
    assert not cache.filled
    first = layer(x[:, :1], AttentionContext(pos[:, :1], pos[:, :1], memory=memory), cache=cache)
    layer.kv = None  # type: ignore[assignment]  # must not be needed again
    rest = layer(x[:, 1:], AttentionContext(pos[:, 1:], pos[:, 1:]), cache=cache)
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


def random_slots(cache: ModelCache, count: int, *, by_kernel: bool) -> None:
    """New slots in every layer, written as kernels write them or as PyTorch's operators."""
    cache.advance(torch.arange(cache.length, cache.length + count).unsqueeze(0))
    for layer in cache.layers:
        assert isinstance(layer, LayerCache)
        torch.manual_seed(cache.length)
        k, v = torch.randn(2, cache.batch_size, 2, count, 4)
        if by_kernel:
            keys, values, end = layer.extend(count)
            keys[:, :, end - count : end], values[:, :, end - count : end] = k, v
        else:
            layer.append(k, v)


@pytest.mark.parametrize("ends", ["grows", "truncated", "kept", "moved again", "half of the layers"])
def test_rows_that_moved_by_table_hold_what_moved_rows_hold(ends: str) -> None:
    moved, table = model_cache(capacity=12), model_cache(capacity=12)
    orders = [torch.tensor(order) for order in ([2, 0, 0], [1, 1, 2], [0, 2, 1])]
    for cache, by_kernel in ((moved, False), (table, True)):
        random_slots(cache, 2, by_kernel=by_kernel)
        for order in orders:
            cache.reorder_beams(order)
            random_slots(cache, 1, by_kernel=by_kernel)
    storages = [layer.keys.data_ptr() for layer in table.layers]
    for layer in table.layers:
        layer.extend(0)
    table.reorder_beams(orders[0])
    moved.reorder_beams(orders[0])
    assert [layer.keys.data_ptr() for layer in table.layers] == storages  # nothing was copied
    for cache in (moved, table):
        if ends == "truncated":
            cache.truncate(3)
        elif ends == "kept":
            cache.keep_sentences(torch.tensor([0, 2]))
        elif ends == "half of the layers":
            cache.layers[0].append(torch.zeros(3, 2, 0, 4), torch.zeros(3, 2, 0, 4))
            cache.layers[0].extend(0)
            cache.reorder_beams(orders[1])
        elif ends == "moved again":
            cache.reorder_beams(orders[2])
            random_slots(cache, 1, by_kernel=False)
        else:
            random_slots(cache, 5, by_kernel=cache is table)
    for one, other in zip(moved.layers, table.layers, strict=True):
        nothing = torch.zeros(len(one.keys), 2, 0, 4)
        for found, expected in zip(other.append(nothing, nothing), one.append(nothing, nothing), strict=True):
            assert torch.equal(found, expected) and len(found)


def test_a_layer_whose_rows_moved_grows_and_keeps_every_slot() -> None:
    layer, order = model_cache(capacity=20).layers[0], torch.tensor([2, 0, 1])
    first, more = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 9, 4)
    layer.append(first, first + 1)
    layer.select_rows(order)
    assert layer.keys.shape[2] < 13  # room for few more slots
    keys, values = layer.append(more, more + 1)
    expected = torch.cat([first[order], more], dim=2)
    assert torch.equal(keys, expected) and torch.equal(values, expected + 1)


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
        assert layer.capacity == cache.capacity
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


def test_fanned_out_rows_stand_side_by_side_with_the_room_asked_for() -> None:
    cache = filled()
    cache.fan_out(2, capacity=9)
    assert cache.batch_size == 6 and cache.beams == 2 and cache.length == 4
    assert cache.key_positions[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert cache.key_valid[:, 0].tolist() == [False, False, True, True, True, True]
    assert cache.encoder_mask is not None and cache.encoder_mask[:, 0].tolist() == [0, 1, 2]
    assert cache.cross[0].batch_size == 3  # the encoder's side stays once per sentence
    for layer in cache.layers:
        assert layer.capacity == 9 and layer.keys[:, 0, 3, 0].tolist() == [0, 0, 1, 1, 2, 2]
        layer.append(torch.ones(6, 2, 5, 4), torch.ones(6, 2, 5, 4))
    cache.advance(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="the cache holds 9 positions, 10 are needed"):
        cache.advance(torch.tensor([[0]]))


def test_beams_move_and_sentences_leave() -> None:
    cache = filled()
    cache.fan_out(2, capacity=8)
    beam = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 2, 1, 4)
    cache.advance(torch.tensor([[4]]))
    for layer in cache.layers:
        layer.append(beam, 10 + beam)
    for order in ([1, 0, 3, 3, 5, 4], [1, 0, 2, 2, 4, 4]):
        cache.reorder_beams(torch.tensor(order))
    cache.keep_sentences(torch.tensor([0, 2]))
    cache.reorder_beams(torch.tensor([1, 1, 2, 3]))
    assert cache.batch_size == 4
    for layer in cache.layers:
        keys, values = layer.append(beam[:4], beam[:4])
        assert keys[:, 0, 4, 0].tolist() == [1, 1, 5, 5] and values[:, 1, 4, 3].tolist() == [11, 11, 15, 15]
        assert keys[:, 1, 2, 0].tolist() == [0, 0, 2, 2] and keys[:, 0, 5, 0].tolist() == [0, 1, 2, 3]
    assert cache.key_positions[:, 0].tolist() == [0, 0, 2, 2]
    assert cache.encoder_mask is not None and cache.encoder_mask[:, 0].tolist() == [0, 2]
    assert cache.cross[0].read()[0][:, 0, 0, 0].tolist() == [0, 2]


def test_moving_beams_takes_turns_in_the_same_memory() -> None:
    cache = filled(cross=0)
    cache.encoder_mask = None
    cache.fan_out(2, capacity=8)

    def places() -> set[int]:
        return {tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)}

    seen = places()
    for _ in range(6):
        cache.reorder_beams(torch.tensor([1, 0, 3, 2, 5, 4]))
        assert len(places()) == 4  # no tensor lies in another's memory
        seen |= places()
    cache.keep_sentences(torch.tensor([1]))
    seen |= places()
    assert len(seen) == 5  # keys and values of two layers, and the one that is free


def test_positions_are_one_row_while_all_rows_agree() -> None:
    cache = model_cache()
    positions, valid = cache.advance(torch.arange(2).unsqueeze(0))
    assert positions.tolist() == [[0, 1]] and valid.shape == (3, 2) and not cache.padded
    positions, _ = cache.advance(torch.tensor([[2], [3], [4]]))
    assert positions.tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    cache.advance(torch.tensor([[5]]), torch.tensor([[True], [False], [True]]))
    assert cache.padded


def test_a_cache_takes_over_what_another_knows_of_the_encoder() -> None:
    old, new = filled(), model_cache(cross=1)
    assert old.has_encoder and not new.has_encoder and not model_cache().has_encoder
    new.cross, new.encoder_mask = old.cross, old.encoder_mask
    assert new.has_encoder and new.length == 0


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "device", "slots", "expected"),
    [
        (torch.bfloat16, CPU, FEW_SLOTS, torch.float32),
        (torch.bfloat16, CPU, FEW_SLOTS + 1, torch.bfloat16),
        (torch.float32, CPU, 1, torch.float32),
        (torch.float16, CPU, 1, torch.float16),
        (torch.bfloat16, torch.device("cuda"), 1, torch.bfloat16),
    ],
)
def test_only_few_slots_of_bf16_on_a_cpu_are_widened(
    dtype: torch.dtype, device: torch.device, slots: int, expected: torch.dtype
) -> None:
    assert fastest_dtype(dtype, device, slots=slots) == expected


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_wider_cache_gives_the_same_to_rounding_and_the_inputs_dtype(kv_heads: int) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, num_heads=4, num_kv_heads=kv_heads).bfloat16().eval()
    x = torch.randn(2, 5, 32).bfloat16()
    outputs = []
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            cache = LayerCache(
                batch_size=2, num_kv_heads=kv_heads, capacity=8, head_dim=8, value_dim=8, device="cpu", dtype=dtype
            )
            steps = [
                layer(x[:, at : at + 1], AttentionContext(*[torch.tensor([[at]])] * 2), cache=cache) for at in range(5)
            ]
            outputs.append(torch.cat(steps, dim=1))
    assert outputs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[1].float(), outputs[0].float(), atol=2e-2, rtol=2e-2)


IDS = torch.tensor([[0, 0, 3], [4, 5, 6], [0, 7, 8]])
MASK = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)
SOURCES = torch.tensor([[1, 2], [3, 4], [5, 6]])


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    side = {"num_layers": 2, "num_heads": 2, "positions": {"kind": "learned"}}
    section = Model.model_validate(
        {"d_model": 8, "max_seq_len": 16, "vocab_size": 11, "encoder": side, "decoder": side}
    )
    return build_model(section).eval()


@pytest.fixture
def read(model: Transformer) -> ModelCache:
    cache = model.new_cache(3, 3)
    with torch.no_grad():
        model(SOURCES, decoder_input_ids=IDS, decoder_attention_mask=MASK, cache=cache)
    return cache


def fixed(read: ModelCache, *, sentences: int = 4, beams: int = 2, slots: int = 8) -> FixedCache:
    cache = FixedCache(read, sentences=sentences, beams=beams, slots=slots, source_slots=4)
    cache.fill(read)
    return cache


def step(model: Transformer, cache: FixedCache, ids: list[int]) -> Tensor:
    cache.ids[: len(ids), 0] = torch.tensor(ids)
    cache.positions.fill_(5)
    with torch.no_grad():
        logits = model(decoder_input_ids=cache.ids, decoder_position_ids=cache.positions, cache=cache).logits_at(-1)
    cache.slot.add_(1)
    return logits[: len(ids)]


def test_every_beam_goes_on_from_its_sentence(model: Transformer, read: ModelCache) -> None:
    cache = fixed(read)
    found = step(model, cache, [1, 1, 1, 1, 1, 1])
    read.fan_out(2, capacity=8)
    with torch.no_grad():
        ids = torch.ones(6, 1, dtype=torch.long)
        expected = model(decoder_input_ids=ids, decoder_position_ids=torch.full_like(ids, 5), cache=read).logits_at(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert cache.slot.item() == 4 and cache.key_valid[:, 3].all()


def test_rows_and_sentences_move_within_their_memory(model: Transformer, read: ModelCache) -> None:
    cache = fixed(read)
    addresses = [tensor.data_ptr() for tensor in cache.tensors()]
    first = step(model, cache, [1, 2, 3, 4, 5, 6])
    swapped = fixed(read)
    step(model, swapped, [1, 2, 3, 4, 5, 6])
    swapped.move_rows(torch.tensor([1, 0, 2, 3, 5, 5]), length=4)
    swapped.keep_sentences(torch.tensor([0, 2]), length=4)
    expected = step(model, cache, [7, 7, 7, 7, 7, 7])[[1, 0, 5, 5]]
    torch.testing.assert_close(step(model, swapped, [7, 7, 7, 7]), expected, atol=1e-6, rtol=0)
    assert first.shape == (6, 11)
    assert [tensor.data_ptr() for tensor in cache.tensors()] == addresses


def test_the_next_bucket_takes_over(model: Transformer, read: ModelCache) -> None:
    small = fixed(read, slots=4)
    step(model, small, [1, 2, 3, 4, 5, 6])
    large = FixedCache(small, sentences=3, beams=2, slots=16, source_slots=4)
    large.copy_from(small, sentences=3, length=4)
    wide = fixed(read, slots=16)
    step(model, wide, [1, 2, 3, 4, 5, 6])
    found, expected = (step(model, cache, [7, 8, 9, 1, 2, 3]) for cache in (large, wide))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_what_a_batch_before_left_is_not_seen(model: Transformer, read: ModelCache) -> None:
    used = fixed(read)
    for _ in range(4):
        step(model, used, [9, 9, 9, 9, 9, 9])
    used.fill(read)
    fresh = fixed(read)
    torch.testing.assert_close(step(model, used, [1] * 6), step(model, fresh, [1] * 6), atol=0, rtol=0)


@pytest.mark.parametrize("larger", [False, True])
def test_nor_are_its_numbers_that_were_none(model: Transformer, read: ModelCache, larger: bool) -> None:
    used, fresh = fixed(read), fixed(read)
    parts = [part for layer in used.layers for part in (layer.keys, layer.values)]
    for part in [*parts, *(part for cross in used.cross for part in cross.read())]:
        part.fill_(torch.nan)
    if larger:
        used.copy_from(fixed(read, slots=4), sentences=3, length=3)
    else:
        used.fill(read)
    torch.testing.assert_close(step(model, used, [1] * 6), step(model, fresh, [1] * 6), atol=1e-6, rtol=0)


def test_what_is_known_of_the_encoder_serves_prefixes_that_are_read_again(model: Transformer, read: ModelCache) -> None:
    cache = fixed(read, beams=1)
    cache.keep_sentences(torch.tensor([2, 0]), length=3)
    again = model.new_cache(2, 3)
    again.cross, again.encoder_mask = cache.encoder_views(2)
    ids, mask = IDS[[2, 0]], MASK[[2, 0]]
    with torch.no_grad():
        found = model(decoder_input_ids=ids, decoder_attention_mask=mask, cache=again).logits_at(-1)
        expected = model(SOURCES[[2, 0]], decoder_input_ids=ids, decoder_attention_mask=mask).logits_at(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    before = cache.cross[0].read()[0][:2].clone()
    cache.fill(again)  # out of its own memory
    torch.testing.assert_close(cache.cross[0].read()[0][:2], before, atol=0, rtol=0)
    assert cache.encoder_mask is not None and cache.encoder_mask.sum(1).tolist() == [2, 2, 0, 0]


def test_a_layer_that_keeps_something_else_is_refused() -> None:
    side = {"num_layers": 1, "num_heads": 2, "attention": {"kind": "performer", "features": 8}}
    model = build_model(Model.model_validate({"d_model": 8, "max_seq_len": 16, "vocab_size": 11, "decoder": side}))
    with pytest.raises(ValueError, match="keeps keys and values, not a"):
        FixedCache(model.new_cache(1, 4), sentences=1, beams=1, slots=8, source_slots=0)
