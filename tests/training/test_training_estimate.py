"""The memory estimate: exact where it can be, and of the right order where it cannot."""

from __future__ import annotations

from typing import Any

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
