"""BigBird's random blocks, its pattern for FlexAttention and its options; the rest is in the contract of all kinds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.nn.attention_cases import context_of
from tests.nn.kind_cases import KINDS, REACHES, SCALE, definition, drawn, mechanism_of, padding, tensors
from tformer.nn.attention.bigbird import BigBirdAttention, BigBirdOptions
from tformer.nn.attention.block_sparse.flex import attend_flex
from tformer.nn.attention.context import AttentionInputs


def test_flex_has_the_same_pattern() -> None:
    """Its rule, run here without its compiler and without gradients."""
    for causal, side in REACHES:
        mechanism, reach = mechanism_of(KINDS["bigbird-0"], causal=causal), context_of(40, causal, padding(40, side))
        assert isinstance(mechanism, BigBirdAttention)
        q, k, v = (x.detach() for x in tensors(40))
        rule = mechanism.blocks(reach).rule(10, start=0)
        found = attend_flex(AttentionInputs(q, k, v, reach, SCALE), rule)
        torch.testing.assert_close(found, definition(mechanism, q, k, v, reach), atol=1e-5, rtol=0)


# --- random blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks_are_new_ones_and_as_many_as_there_are(causal: bool) -> None:
    options = BigBirdOptions(random_blocks=3)
    for num_blocks in (1, 2, 5, 6, 7, 30):
        for block in range(num_blocks):
            others = set(range(1, block - 1 if causal else num_blocks - 1))
            others -= {block - 1, block, block + 1}
            found = drawn(options, block, num_blocks, causal, 0)
            assert found <= others and len(found) == min(3, len(others))


def test_random_blocks_are_drawn_evenly_and_anew_for_every_layer_and_seed() -> None:
    options = BigBirdOptions(random_blocks=3)
    draws = {layer: tuple(sorted(drawn(options, 10, 30, False, layer))) for layer in range(2000)}
    counts = Counter(block for found in draws.values() for block in found)
    expected = 2000 * 3 / 25  # blocks 1 ... 28 without the window's three
    assert len(counts) == 25 and all(0.75 * expected < count < 1.25 * expected for count in counts.values())
    assert len(set(draws.values())) > 1000
    assert drawn(replace(options, seed=1), 10, 30, False, 0) != drawn(options, 10, 30, False, 0)
    assert drawn(options, 10, 30, False, 0) == drawn(options, 10, 30, False, 0)


def test_causal_random_blocks_do_not_depend_on_the_length() -> None:
    options = BigBirdOptions(random_blocks=2)
    assert drawn(options, 12, 13, True, 0) == drawn(options, 12, 400, True, 0)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_up_to_a_length_attention_is_full(side: str) -> None:
    options = BigBirdOptions(block=4, random_blocks=1, dense_up_to=40, implementation="blocks")
    whole, full, sparse = map(mechanism_of, (options, KINDS["full"], replace(options, dense_up_to=0)))
    for length in (40, 41):
        context = context_of(length, False, padding(length, side))
        q, k, v = (x.detach() for x in tensors(length))
        inputs = AttentionInputs(q, k, v, context, SCALE, x_BTD=torch.zeros(2, length, q.shape[1] * q.shape[-1]))
        found, expected = whole(inputs)[0], (full if length == 40 else sparse)(inputs)[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert whole.visible_mask(context).all(1).equal((full if length == 40 else sparse).visible_mask(context).all(1))
    with pytest.raises(ValueError, match=r"^dense_up_to: found 40"):
        mechanism_of(options, causal=True)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "words"), [
    ({"block": 0}, "block must be greater than 0, found 0"),
    ({"window_blocks": 4}, "window_blocks: expected an odd number, found 4"),
    ({"global_blocks": -1}, "global_blocks must be at least 0, found -1"),
    ({"random_blocks": -2}, "random_blocks must be at least 0, found -2"),
    ({"dense_up_to": -1}, "dense_up_to must be at least 0, found -1"),
])  # fmt: skip
def test_options_out_of_range_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        BigBirdOptions(**values)
