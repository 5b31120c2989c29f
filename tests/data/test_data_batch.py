from __future__ import annotations

import dataclasses

import pytest
import torch

from tformer.data.batch import Batch


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


def test_batch_model_inputs_are_what_is_set_without_labels() -> None:
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
