"""Merging, hiding, rollout, summary and packing: properties, and small cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.viz.attention_models import attention_of, random_attention, side
from tformer.viz.attention.packing import COARSEST, FINEST, pack, unpack
from tformer.viz.attention.reshape import Changes, changed, changed_matrix
from tformer.viz.attention.rollout import rollout
from tformer.viz.attention.summary import divergence, summarise

WORDS = ["[CLS]", " un", "able", " dog", "s", "[SEP]"]


def softmax(seed: int, *shape: int) -> np.ndarray:
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (scores * 2).softmax(-1).numpy()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), hide=st.booleans(), merge=st.booleans(), causal=st.booleans())
def test_rows_still_sum_to_one(seed: int, hide: bool, merge: bool, causal: bool) -> None:
    weights = softmax(seed, 1, 2, 6, 6)
    if causal:
        weights = np.tril(weights)
        weights /= weights.sum(-1, keepdims=True)
    found = changed(attention_of(weights, WORDS, kind="decoder" if causal else "encoder"), Changes(hide, merge))
    layer = found.layers[0]
    sums = layer.weights_HTS.sum(-1)
    np.testing.assert_allclose(sums[:, layer.visible_TS.any(-1) & (sums[0] > 0)], 1, atol=1e-5)
    assert (layer.weights_HTS[:, ~layer.visible_TS] == 0).all()
    assert layer.weights_HTS.shape[1:] == (len(found.queries), len(found.keys)) == layer.visible_TS.shape


def test_a_word_sums_its_keys_and_averages_its_queries() -> None:
    weights = softmax(0, 6, 6)
    merged = changed_matrix(weights, side(WORDS), side(WORDS), Changes(merge_subwords=True))
    assert merged.shape == (4, 4)
    np.testing.assert_allclose(merged[1, 2], (weights[1, 3:5].sum() + weights[2, 3:5].sum()) / 2, rtol=1e-5)
    assert changed(attention_of(weights[None, None], WORDS), Changes(False, True)).keys.tokens == (
        "[CLS]", " unable", " dogs", "[SEP]",
    )  # fmt: skip


def test_hidden_tokens_leave_rows_that_are_divided_by_what_is_left() -> None:
    weights = softmax(1, 6, 6)
    hidden = changed_matrix(weights, side(WORDS), side(WORDS), Changes(hide_special=True))
    np.testing.assert_allclose(hidden, weights[1:5, 1:5] / weights[1:5, 1:5].sum(-1, keepdims=True), rtol=1e-5)
    assert "divided by what is left" in Changes(hide_special=True).notes()[0]


# --- rollout ---------------------------------------------------------------------------------------------------------


def test_rollout_is_the_product_of_halves() -> None:
    weights = softmax(2, 3, 4, 5, 5)
    eye, expected = np.eye(5), np.eye(5)
    for layer in weights:
        expected = (0.5 * layer.mean(0) + 0.5 * eye) @ expected
    found = rollout("encoder", {"encoder": attention_of(weights, list("abcde"))})
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)


def test_rollout_of_tokens_that_look_at_themselves_is_the_identity() -> None:
    own = np.broadcast_to(np.eye(4), (2, 3, 4, 4))
    np.testing.assert_allclose(rollout("encoder", {"encoder": attention_of(own, list("abcd"))}), np.eye(4))


def test_rollout_through_cross_attention_keeps_half_a_layer_for_the_decoder() -> None:
    encoder = attention_of(softmax(3, 2, 2, 4, 4), list("abcd"))
    decoder = attention_of(np.broadcast_to(np.eye(3), (2, 1, 3, 3)), list("xyz"), kind="decoder")
    cross = attention_of(softmax(4, 2, 2, 3, 4), list("xyz"), kind="cross", keys=list("abcd"))
    found = rollout("cross", {"encoder": encoder, "decoder": decoder, "cross": cross})
    # Two layers, each keeping half: 1/2 + 1/4 of every row came from the source.
    np.testing.assert_allclose(found.sum(-1), 0.75, atol=1e-5)
    assert found.shape == (3, 4)


# --- summary ---------------------------------------------------------------------------------------------------------


def test_measures_of_heads_made_by_hand() -> None:
    size = 6
    even = np.full((size, size), 1 / size)
    previous = np.eye(size, k=-1)
    previous[0, 0] = 1
    first = np.zeros((size, size))
    first[:, 0] = 1
    rows, divergences = summarise(attention_of(np.stack([even, previous, first, even])[None], WORDS))
    by_head = dict(enumerate(rows))
    assert by_head[0].entropy == pytest.approx(1) and by_head[1].entropy == pytest.approx(0)
    assert by_head[1].previous == pytest.approx(1) and by_head[0].itself == pytest.approx(1 / size)
    assert by_head[2].first == pytest.approx(1) == by_head[2].special, "[CLS] is special"
    assert by_head[0].max == pytest.approx(1 / size) and by_head[2].distance == pytest.approx((size - 1) / 2)
    assert by_head[0].nearest == "0.3" and by_head[0].nearest_divergence == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(divergences.between_NN, divergences.between_NN.T)
    assert (divergences.rows, divergences.of) == (size, size)


def test_entropy_counts_the_keys_that_can_be_seen() -> None:
    even = np.tril(np.ones((5, 5)))
    even /= even.sum(-1, keepdims=True)
    [row], _ = summarise(attention_of(even[None, None], list("abcde"), kind="decoder"))
    assert row.entropy == pytest.approx(1), "even over what is visible"


def test_places_of_two_sequences_are_not_compared() -> None:
    rows, _ = summarise(attention_of(softmax(5, 1, 2, 3, 4), list("xyz"), kind="cross", keys=list("abcd")))
    assert rows[0].distance is None and rows[0].previous is None and rows[0].itself is None


def test_divergence_is_one_bit_between_heads_that_share_no_key() -> None:
    left, right = np.zeros((4, 4)), np.zeros((4, 4))
    left[:, 0] = right[:, 1] = 1
    between = divergence(attention_of(np.stack([left, right])[None], list("abcd"))).between_NN
    np.testing.assert_allclose(between, [[0, 1], [1, 0]], atol=1e-6)


# --- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [FINEST, 127, COARSEST])
def test_packed_weights_are_near(steps: int) -> None:
    weights = random_attention(2, 2, 40).layers[0].weights_HTS
    near = unpack(pack(weights, steps=steps), weights.shape)
    assert (np.abs(near - weights) <= np.sqrt(weights) / steps + 0.25 / steps**2 + 1e-7).all()


def test_even_attention_over_512_tokens_does_not_vanish() -> None:
    even = np.full((1, 512), 1 / 512, dtype=np.float32)
    assert unpack(pack(even), even.shape)[0, 0] == pytest.approx(1 / 512, rel=0.05)
    assert math.isclose(float(unpack(pack(np.ones((1, 1), np.float32)), (1, 1))[0, 0]), 1)


def test_negative_weights_keep_their_sign() -> None:
    weights = np.array([[-2.0, 0.0, 0.5]], dtype=np.float32)
    near = unpack(pack(weights, signed=True), weights.shape)
    np.testing.assert_allclose(near, weights, atol=0.02)
    assert near[0, 1] == 0
