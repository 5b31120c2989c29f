"""How much memory a training run needs, before it starts. A count of what the loop allocates, not a measurement.

Per parameter: the weight, its gradient, and the optimizer's moments, all fp32. Per token and layer, for the backward
pass (after Korthikanti et al., arXiv 2205.05198, with fused attention, which keeps no T x T scores): the inputs of the
norms and of the matrix products, Q, K, V, the attention output and the feed-forward activations, in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tformer.recipe.model import Model, Stack

FP32_BYTES = 4
MOMENTS = {"adamw": 2, "adam": 2, "muon": 1}  # muon keeps one, for the hidden matrices; the rest is little


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def to_json(self) -> dict[str, int]:
        return {
            "weights_bytes": self.weights,
            "gradients_bytes": self.gradients,
            "optimizer_bytes": self.optimizer,
            "activations_bytes": self.activations,
            "total_bytes": self.total,
        }


def estimate_memory(
    model: Model,
    *,
    num_parameters: int,
    optimizer: str,
    tokens_per_micro_batch: int,
    dtype: torch.dtype,
    activation_checkpointing: bool,
    ema: bool,
) -> MemoryEstimate:
    """Bytes that training allocates for one process at these sizes."""
    weights = num_parameters * FP32_BYTES
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    per_token = sum(_stack_values_per_token(stack, model.d_model, activation_checkpointing) for stack in stacks)
    return MemoryEstimate(
        weights=weights * (2 if ema else 1),
        gradients=weights,
        optimizer=weights * MOMENTS[optimizer],
        activations=tokens_per_micro_batch * per_token * dtype.itemsize,
    )


def _stack_values_per_token(stack: Stack, d_model: int, checkpointing: bool) -> int:
    width = stack.d_model or d_model
    if checkpointing:
        return stack.num_layers * width
    d_ff = stack.feedforward.d_ff or 4 * width
    head_dim = stack.head_dim or width // stack.num_heads
    kv_heads = stack.num_kv_heads or stack.num_heads
    heads = stack.num_heads * head_dim
    attention = 2 * width + heads + 2 * kv_heads * head_dim + heads  # norm input and output, Q, K and V, output
    feedforward = 2 * width + d_ff * (3 if stack.feedforward.gated else 2)
    return stack.num_layers * (attention + feedforward)
