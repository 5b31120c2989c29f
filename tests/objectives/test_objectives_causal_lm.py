"""Causal language modelling: what batches look like, and the loss against plain cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import CausalLmOptions, build_objective
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.tokenizer.special import SpecialIds

PAD, VOCAB, SEQ_LEN = 9, 11, 6


def make(options: CausalLmOptions = CausalLmOptions(), **sizes: Any) -> Objective:
    context = ObjectiveContext(SpecialIds(pad=PAD), **{"seq_len": SEQ_LEN, **sizes})
    return build_objective([options], context)


def collate(samples: Any, seed: int = 0, **sizes: Any) -> Batch:
    return make(**sizes).collate(samples, rng=np.random.default_rng(seed))


def rows(*lengths: int) -> list[np.ndarray]:
    return [np.arange(length) % 8 + 1 for length in lengths]


def test_a_window_array_is_shifted_and_nothing_is_padded() -> None:
    windows = np.arange(3 * 7).reshape(3, 7)
    batch = collate(windows)
    assert batch.input_ids is not None and batch.labels is not None
    assert batch.input_ids.tolist() == windows[:, :-1].tolist()
    assert batch.labels.tolist() == windows[:, 1:].tolist()
    assert batch.attention_mask is None and batch.position_ids is None and batch.document_ids is None
    assert batch.num_tokens == 18 and make().label_count(batch) == {"lm": 18}
    assert batch.input_ids.is_contiguous() and batch.labels.is_contiguous()


def test_a_narrow_array_is_padded_when_the_width_is_fixed() -> None:
    batch = collate(np.arange(8).reshape(2, 4), pad_to="max")
    assert batch.input_ids is not None and batch.input_ids.shape == (2, SEQ_LEN)
    assert batch.num_tokens == 6


@pytest.mark.parametrize(
    ("padding", "inputs", "labels"),
    [
        ("right", [1, 2, PAD, PAD], [2, 3, -100, -100]),
        ("left", [PAD, PAD, 1, 2], [-100, -100, 2, 3]),
    ],
)
def test_short_samples_are_padded_without_labels(padding: str, inputs: list[int], labels: list[int]) -> None:
    batch = collate(rows(5, 3), padding=padding)
    assert batch.input_ids is not None and batch.labels is not None and batch.attention_mask is not None
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], inputs]
    assert batch.labels.tolist() == [[2, 3, 4, 5], labels]
    assert batch.attention_mask.tolist() == [[True] * 4, [label != -100 for label in labels]]
    assert batch.num_tokens == 6 and make().label_count(batch) == {"lm": 6}


@given(
    st.lists(st.integers(2, SEQ_LEN + 1), min_size=1, max_size=5),
    st.sampled_from(["right", "left", "random"]),
    st.sampled_from(["longest", "max"]),
    st.integers(0, 5),
)
def test_padding_keeps_every_pair_of_input_and_label(lengths: list[int], padding: str, pad_to: str, seed: int) -> None:
    samples = rows(*lengths)
    batch = collate(samples, seed, padding=padding, pad_to=pad_to)
    assert batch.input_ids is not None and batch.labels is not None
    assert batch.input_ids.shape[1] == (SEQ_LEN if pad_to == "max" else max(lengths) - 1)
    mask = batch.attention_mask if batch.attention_mask is not None else torch.ones_like(batch.input_ids).bool()
    for index, sample in enumerate(samples):
        assert batch.input_ids[index][mask[index]].tolist() == sample[:-1].tolist()
        assert batch.labels[index][mask[index]].tolist() == sample[1:].tolist()
        assert set(batch.labels[index][~mask[index]].tolist()) <= {IGNORED_LABEL}
        assert set(batch.input_ids[index][~mask[index]].tolist()) <= {PAD}
        places = mask[index].nonzero().flatten()
        assert (places.diff() == 1).all()


def test_random_padding_comes_from_the_generator_alone() -> None:
    batches = [collate(rows(2, 2, 2, 2), seed, padding="random", pad_to="max").attention_mask for seed in (1, 1, 2)]
    first, again, other = batches
    assert first is not None and again is not None and other is not None
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_positions_restart_with_each_document() -> None:
    samples = [
        Example(np.array([1, 2, 3, 4, 5]), np.array([0, 0, 1, 1, 1])),
        Example(np.array([1, 2, 3]), np.array([0, 1, 1])),
    ]
    batch = collate(samples)
    assert batch.document_ids is not None and batch.position_ids is not None and batch.labels is not None
    assert batch.document_ids.tolist() == [[0, 0, 1, 1], [0, 1, -1, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 4, 5], [2, 3, -100, -100]]


def test_document_ids_are_dropped_where_every_sample_is_one_document() -> None:
    batch = collate([Example(np.array([1, 2, 3]), np.array([4, 4, 5])), Example(np.array([1, 2, 3]))])
    assert batch.document_ids is None and batch.position_ids is None


@pytest.mark.parametrize("samples", [rows(SEQ_LEN + 2), np.ones((2, SEQ_LEN + 2), dtype=np.int64)])
def test_a_sample_longer_than_the_window_is_refused(samples: Any) -> None:
    with pytest.raises(ValueError, match="2 to 7 ids, found 8"):
        collate(samples)


def test_a_sample_without_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="found 1"):
        collate(rows(1))


def test_without_a_pad_token_padding_is_id_zero() -> None:
    objective = build_objective([CausalLmOptions()], ObjectiveContext(SpecialIds(), seq_len=SEQ_LEN))
    batch = objective.collate(rows(4, 2), rng=np.random.default_rng(0))
    assert batch.input_ids is not None and batch.input_ids[1].tolist() == [1, 0, 0]


def test_the_model_gets_masks_and_positions_but_no_labels() -> None:
    samples = [Example(np.array([1, 2, 3]), np.array([0, 1, 1])), Example(np.array([1, 2]))]
    assert collate(samples).model_inputs().keys() == {"input_ids", "attention_mask", "position_ids", "document_ids"}
