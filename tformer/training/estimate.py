"""How much memory a training run needs, before it starts. A count of what the loop allocates, not a measurement.

Per parameter: the weight, its gradient, and the optimizer's moments, all fp32. Per token and layer, for the backward
pass (after Korthikanti et al., arXiv 2205.05198, with fused attention, which keeps no T x T scores): the inputs of the
norms and of the matrix products, Q, K, V, the attention output and the feed-forward activations, in the compute dtype.

Every kind of attention makes its scores again in the backward pass, so that all keep Q, K, V and the output. Beyond:
Linformer the projected keys and values, 2 rank h a key head and sequence, a 1/max_seq_len of which falls to a token
(shorter sequences keep more a token); Performer Q, K and V in fp32, where the compute dtype is narrower. What is kept
only up to a fixed size (weights or features of short inputs) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tformer.build import layer_sizes
from tformer.nn.attention.linformer import LinformerOptions
from tformer.nn.attention.performer import PerformerOptions
from tformer.recipe.layers import layer_sections
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
    teacher: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.teacher

    def to_json(self) -> dict[str, int]:
        teacher = {"teacher_bytes": self.teacher} if self.teacher else {}
        return {
            "weights_bytes": self.weights,
            "gradients_bytes": self.gradients,
            "optimizer_bytes": self.optimizer,
            "activations_bytes": self.activations,
            **teacher,
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
    teacher_parameters: int = 0,
) -> MemoryEstimate:
    """Bytes that training allocates for one process at these sizes; a teacher has weights in `dtype` and no more."""
    weights = num_parameters * FP32_BYTES
    sides = [side for side in ("encoder", "decoder") if getattr(model, side) is not None]
    per_token = sum(_stack_values_per_token(model, side, dtype, activation_checkpointing) for side in sides)
    return MemoryEstimate(
        weights=weights * (2 if ema else 1),
        gradients=weights,
        optimizer=weights * MOMENTS[optimizer],
        activations=tokens_per_micro_batch * per_token * dtype.itemsize,
        teacher=teacher_parameters * dtype.itemsize,
    )


def _stack_values_per_token(model: Model, side: str, dtype: torch.dtype, checkpointing: bool) -> int:
    stack: Stack = getattr(model, side)
    width = stack.d_model or model.d_model
    if checkpointing:
        return stack.num_layers * width
    values = 0
    for layer, sizes in zip(layer_sections(stack, path=f"model.{side}"), layer_sizes(model, side), strict=True):
        d_ff = layer.feedforward.d_ff or 4 * width
        heads, kv_heads = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        values += 2 * width + heads + 2 * kv_heads + heads  # norm input and output, Q, K and V, output
        values += 2 * width + d_ff * (3 if layer.feedforward.gated else 2)
        if isinstance(layer.attention, LinformerOptions):
            values += 2 * layer.attention.rank * kv_heads // model.max_seq_len
        elif isinstance(layer.attention, PerformerOptions) and dtype.itemsize < FP32_BYTES:
            values += (heads + 2 * kv_heads) * FP32_BYTES // dtype.itemsize
    return values
