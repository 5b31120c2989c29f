"""A cache of fixed shape takes over what a prefill left, moves rows within its memory, gives way to a larger one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tformer.build import build_model
from tformer.model import Transformer
from tformer.nn.cache import ModelCache
from tformer.nn.fixed_cache import FixedCache
from tformer.recipe.model import Model

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
    cache.step_done()
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
    again.cross, again.encoder_mask = cache.known_of_encoder(2)
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
