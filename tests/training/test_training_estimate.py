"""The memory estimate: exact where it can be, and of the right order where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tformer.recipe.model import Model
from tformer.training.estimate import MemoryEstimate, estimate_memory

MODEL = Model.model_validate({"d_model": 32, "decoder": {"num_layers": 2, "num_heads": 4}})


def estimate(**changes: Any) -> MemoryEstimate:
    options: dict[str, Any] = {
        "num_parameters": 1000, "optimizer": "adamw", "tokens_per_micro_batch": 64, "dtype": torch.bfloat16,
        "activation_checkpointing": False, "ema": False,
    }  # fmt: skip
    return estimate_memory(MODEL, **{**options, **changes})


def test_parameters_gradients_and_moments_are_fp32() -> None:
    found = estimate()
    assert (found.weights, found.gradients, found.optimizer) == (4000, 4000, 8000)
    assert found.total == sum((found.weights, found.gradients, found.optimizer, found.activations))


def test_an_average_is_another_copy_of_the_weights() -> None:
    assert estimate(ema=True).weights == 2 * estimate().weights


def test_activations_grow_with_tokens_and_bytes_and_shrink_with_checkpointing() -> None:
    base = estimate().activations
    assert estimate(tokens_per_micro_batch=128).activations == 2 * base
    assert estimate(dtype=torch.float32).activations == 2 * base
    assert estimate(activation_checkpointing=True).activations < base / 4


def test_activations_are_of_the_order_of_what_autograd_keeps() -> None:
    from tformer.build import build_model

    model = build_model(MODEL, vocab_size=8)
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size() if tensor.shape[:1] == (4,) else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        _ = model(torch.zeros(4, 16, dtype=torch.long)).hidden
    guess = estimate(dtype=torch.float32).activations
    assert kept / 3 < guess < kept * 3


def of_kind(attention: dict[str, Any], dtype: torch.dtype) -> int:
    """Activations of one token in two encoder layers of width 32 with a feed-forward of 128."""
    stack = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "attention": attention}
    model = Model.model_validate({"d_model": 32, "max_seq_len": 64, "encoder": stack})
    sizes: dict[str, Any] = {"num_parameters": 0, "optimizer": "adamw", "tokens_per_micro_batch": 1, "ema": False}
    return estimate_memory(model, dtype=dtype, activation_checkpointing=False, **sizes).activations


QKV, VALUES = 32 + 2 * 16, 2 * 32 + 32 + 2 * 16 + 32 + 2 * 32 + 2 * 128


@pytest.mark.parametrize("kind", ["full", "additive", "sliding_window", "bigbird"])
def test_kinds_that_make_their_scores_again_keep_queries_keys_values_and_output(kind: str) -> None:
    assert of_kind({"kind": kind}, torch.float32) == 2 * VALUES * 4
    assert of_kind({"kind": kind}, torch.bfloat16) == 2 * VALUES * 2


def test_linformer_keeps_the_projected_keys_and_values_too() -> None:
    assert of_kind({"kind": "linformer", "rank": 32}, torch.float32) == 2 * 4 * (VALUES + 2 * 32 * 16 // 64)


def test_performer_keeps_fp32_copies_where_the_rest_is_narrower() -> None:
    assert of_kind({"kind": "performer"}, torch.float32) == 2 * 4 * VALUES
    assert of_kind({"kind": "performer"}, torch.bfloat16) == 2 * (2 * VALUES + 4 * QKV)


def test_a_layer_counts_with_its_own_attention_and_feedforward() -> None:
    layers = {1: {"attention": {"rank": 32}, "feedforward": {"d_ff": 8}}}
    stack = {"num_layers": 2, "num_heads": 4, "attention": {"kind": "linformer", "rank": 16}, "layers": layers}
    model = Model.model_validate({"d_model": 32, "max_seq_len": 64, "encoder": stack})
    sizes: dict[str, Any] = {"num_parameters": 0, "optimizer": "adamw", "tokens_per_micro_batch": 1, "ema": False}
    found = estimate_memory(model, dtype=torch.float32, activation_checkpointing=False, **sizes).activations
    same = 2 * 32 + 4 * 32 + 2 * 32
    assert found == 4 * (2 * same + 2 * 128 + 2 * 8 + 2 * (16 + 32) * 32 // 64)
