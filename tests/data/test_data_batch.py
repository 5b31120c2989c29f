"""Batches and padding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.batching.batch import Batch
from tformer.data.batching.padding import pad_layout


def test_batch_counts_real_tokens_once_on_the_host() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert Batch(input_ids=ids).num_tokens == 6
    assert Batch(input_ids=ids, attention_mask=mask).num_tokens == 5
    assert Batch(input_ids=ids, decoder_input_ids=ids, decoder_attention_mask=mask).num_tokens == 11
    assert Batch(pixel_values=torch.zeros(4, 3, 2, 2)).num_tokens == 4
    assert Batch(input_ids=ids, attention_mask=mask, num_tokens=7).to("cpu").num_tokens == 7


def test_labels_are_counted_before_a_batch_leaves_the_host() -> None:
    ids = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert Batch(labels=ids).to("cpu").num_labels is None
    assert Batch(labels=ids).to("meta").num_labels == Batch(labels=ids).counted().num_labels == 3
    assert Batch(labels=ids.float()).counted().num_labels is None


def test_model_inputs_are_the_tensors_that_are_set_without_labels() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    batch = Batch(input_ids=ids, labels=ids, position_ids=ids)
    assert set(batch.model_inputs()) == {"input_ids", "position_ids"}


def test_batch_moves_every_tensor_and_is_frozen() -> None:
    batch = Batch(input_ids=torch.zeros(1, 2, dtype=torch.long), labels=torch.zeros(1, 2, dtype=torch.long))
    moved = batch.to("meta")
    assert moved.input_ids is not None and moved.input_ids.device.type == "meta"
    assert moved.labels is not None and moved.labels.device.type == "meta"
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.labels = None  # type: ignore[misc]


ROWS = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    side=st.sampled_from(["right", "left", "random"]),
    pad_to=st.sampled_from(["longest", "max"]),
    seed=st.integers(0, 99),
)
def test_padding_keeps_every_row_whole_and_masks_exactly_the_rest(
    lengths: list[int], side: str, pad_to: str, seed: int
) -> None:
    rows = [np.arange(1, length + 1) for length in lengths]
    rng = np.random.default_rng(seed)
    layout = pad_layout(lengths, side=side, pad_to=pad_to, max_len=9, rng=rng)  # type: ignore[arg-type]
    ids, mask = layout.fill(rows, 0), layout.mask()
    assert ids.shape == (len(rows), 9 if pad_to == "max" else max(lengths))
    mask = np.ones_like(ids, dtype=bool) if mask is None else mask
    assert ((ids != 0) == mask).all()
    for row, padded, kept in zip(rows, ids, mask, strict=True):
        assert (padded[kept] == row).all()
        places = np.flatnonzero(kept)
        assert (np.diff(places) == 1).all()
        if side == "right":
            assert places[0] == 0
        if side == "left":
            assert places[-1] == len(padded) - 1


def test_padding_mask_is_none_when_nothing_is_padded() -> None:
    assert pad_layout([2, 2]).mask() is None
    assert pad_layout([2], pad_to="max", max_len=3).mask() is not None


def test_ids_and_labels_of_an_example_are_padded_equally() -> None:
    layout = pad_layout([3, 1, 2], side="random", pad_to="max", max_len=8, rng=np.random.default_rng(3))
    ids, labels = layout.fill(ROWS, 0), layout.fill(ROWS, -100)
    assert ((ids == 0) == (labels == -100)).all()


def test_padding_random_is_a_function_of_its_generator() -> None:
    def starts(seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return pad_layout([1] * 20, side="random", pad_to="max", max_len=9, rng=rng).starts.tolist()

    assert starts(1) == starts(1) != starts(2)
    assert len(set(starts(1))) > 3


def test_padding_refuses_rows_over_the_maximum() -> None:
    with pytest.raises(AssertionError, match=r"3 tokens.*maximum of 2"):
        pad_layout([3, 1, 2], max_len=2)


def test_widths_are_rounded_up_where_something_is_padded_and_room_is_left() -> None:
    assert pad_layout([3, 5], multiple=8).width == 8
    assert pad_layout([9, 5], multiple=8, max_len=12).width == 12
    equal = pad_layout([5, 5], multiple=8)
    assert equal.width == 5 and equal.mask() is None
