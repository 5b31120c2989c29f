"""What the tests of sparse attention share: inputs, a plain formula, and comparison of outputs and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tformer.nn.attention import AttentionContext, AttentionSizes, Mechanism, ProjectionOptions
from tformer.nn.positions import PositionSizes

WIDTH, HEADS, HEAD, SCALE = 24, 4, 6, 0.4
REACHES = [(causal, side) for causal in (False, True) for side in ("none", "right", "left")]


def mechanism_of(
    options: ProjectionOptions, *, causal: bool = False, kv_heads: int = HEADS, value_dim: int = HEAD, layer: int = 0
) -> Mechanism:
    torch.manual_seed(1)
    sizes = AttentionSizes(WIDTH, HEADS, kv_heads, HEAD, value_dim, layer=layer, causal=causal)
    mechanism = options.mechanism(options, sizes)
    mechanism.scale = SCALE
    for parameter in mechanism.parameters():
        nn.init.normal_(parameter, std=0.4)
    return mechanism


def tensors(
    length: int, *, batch: int = 2, kv_heads: int = HEADS, value_dim: int = HEAD, keys: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Queries, keys and values that ask for gradients."""
    torch.manual_seed(0)
    keys = length if keys is None else keys
    shapes = ((batch, HEADS, length, HEAD), (batch, kv_heads, keys, HEAD), (batch, kv_heads, keys, value_dim))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def call_of(context: AttentionContext, *, batch: int = 2, **values: Any) -> dict[str, Any]:
    """Named arguments of a mechanism."""
    return {"context": context, "x_BTD": torch.randn(batch, context.q_pos.shape[1], WIDTH), **values}


def padding(length: int, side: str) -> Tensor | None:
    """The second example is shorter, the first complete."""
    if side == "none":
        return None
    mask = torch.ones(2, length, dtype=torch.long)
    short = length // 3
    mask[1, :short] = 0 if side == "left" else 1
    mask[1, length - short :] = 1 if side == "left" else 0
    return mask


def hooks_of(kind: Any, *, causal: bool) -> Any:
    hooks = kind.build(
        PositionSizes(
            d_model=WIDTH, num_heads=HEADS, head_dim=HEAD, value_dim=HEAD, max_seq_len=64, bidirectional=not causal
        )
    )
    for parameter in hooks.parameters():
        nn.init.normal_(parameter)
    return hooks


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T scale) v with repeated heads; rows that may look nowhere are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~mask, -1e30)
    return (scores.softmax(-1) * mask.any(-1, keepdim=True)) @ v


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float = 1e-5) -> None:
    """Outputs, and gradients relative to the largest number of each."""
    up = torch.randn_like(expected)
    ours = torch.autograd.grad(found, inputs, up, retain_graph=True, allow_unused=True)
    theirs = torch.autograd.grad(expected, inputs, up, allow_unused=True)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    for a, b in zip(ours, theirs, strict=True):
        a = torch.zeros_like(b) if a is None else a
        largest = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, atol=tolerance * largest, rtol=0)
