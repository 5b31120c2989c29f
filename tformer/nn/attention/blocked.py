"""Attention for bf16 on a CPU: blocks of scores small enough for the cache, made by batched products.

PyTorch's fused CPU kernel multiplies tiles of a few dozen rows; on cores with bf16 instructions one batched product per
block is two to six times faster, forward and backward. Blocks run over examples and queries; a causal block reads no
key beyond its own end. The weights are kept for the backward pass while they are few, else made again there, so memory
stays O(block). Scores are rounded to bf16 once, the softmax computes in fp32.

The gradient, with W the weights and G the output's gradient: dV = W^T G, dS = W (G V^T - rowsum(W G V^T)) scale,
dQ = dS K, dK = dS^T Q.

Shape legend: B batch, H query heads, K kv heads, G = H / K, T queries, S keys, h head_dim, v value_dim;
b, t, s the same of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tformer.nn.attention.masks import MASKED_SCORE

BLOCK_ELEMENTS = 2**20  # scores of a block, 2 MiB: about a core's own cache
QUERY_BLOCK = 128  # queries of a block: more read more keys in vain when causal, fewer make small products
KEPT_ELEMENTS = 2**24  # weights kept for the backward pass, 32 MiB


class _Block(NamedTuple):
    examples: slice
    rows: slice
    end: int  # keys before it are read


def _blocks(q_BHTh: Tensor, num_keys: int, is_causal: bool) -> Iterator[_Block]:
    batch, heads, num_queries, _ = q_BHTh.shape
    size = min(QUERY_BLOCK, max(16, BLOCK_ELEMENTS // (heads * num_keys)))
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        end = stop if is_causal else num_keys
        count = max(1, BLOCK_ELEMENTS // (heads * (stop - start) * end))
        for example in range(0, batch, count):
            yield _Block(slice(example, example + count), slice(start, stop), end)


def _group(x_bHtx: Tensor, num_kv_heads: int) -> Tensor:
    """[b, H, t, x] -> [b, K, G t, x]: the query heads that share a key head become one matrix."""
    return x_bHtx if x_bHtx.shape[1] == num_kv_heads else x_bHtx.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _block_weights(
    q_BHTh: Tensor, k_BKSh: Tensor, mask: Tensor | None, is_causal: bool, scale: float, block: _Block
) -> Tensor:
    """[b, H, t, s]"""
    examples, rows, end = block
    q_bHth, num_kv_heads = q_BHTh[examples, :, rows], k_BKSh.shape[1]
    scores = _group(q_bHth, num_kv_heads) @ k_BKSh[examples, :, :end].transpose(-1, -2)
    scores = scores.view(*q_bHth.shape[:3], end).mul_(scale)
    if mask is None:
        if is_causal:  # the block's last columns are its own rows
            size = rows.stop - rows.start
            later = torch.ones(size, size, dtype=torch.bool).triu_(1)
            scores[..., rows.start :].masked_fill_(later, MASKED_SCORE)
        return scores.softmax(dim=-1)
    allowed = mask[examples if mask.shape[0] > 1 else slice(None), :, rows if mask.shape[2] > 1 else slice(None), :end]
    weights = scores.masked_fill_(~allowed, MASKED_SCORE).softmax(dim=-1)
    alive = allowed.any(-1, keepdim=True)
    return weights if alive.all() else weights.masked_fill_(~alive, 0.0)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        batch, heads, num_queries, _ = q_BHTh.shape
        num_kv_heads, num_keys = k_BKSh.shape[1:3]
        out = q_BHTh.new_empty(batch, num_queries, heads, v_BKSv.shape[-1]).transpose(1, 2)
        keep = any(ctx.needs_input_grad) and batch * heads * num_queries * num_keys <= KEPT_ELEMENTS
        kept = []
        for block in _blocks(q_BHTh, num_keys, is_causal):
            weights = _block_weights(q_BHTh, k_BKSh, mask, is_causal, scale, block)
            mixed = _group(weights, num_kv_heads) @ v_BKSv[block.examples, :, : block.end]
            out[block.examples, :, block.rows] = mixed.view(*weights.shape[:3], -1)
            if keep:
                kept.append(weights)
        ctx.save_for_backward(q_BHTh, k_BKSh, v_BKSv, mask, *kept)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTv: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTh, k_BKSh, v_BKSv, mask, *kept = ctx.saved_tensors
        num_kv_heads, num_keys = k_BKSh.shape[1:3]
        grad_q = torch.empty_like(q_BHTh.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        # Blocks of queries add up in fp32.
        grad_k, grad_v = (
            torch.zeros_like(x.transpose(1, 2), dtype=torch.float32, memory_format=torch.contiguous_format).transpose(
                1, 2
            )
            for x in (k_BKSh, v_BKSv)
        )
        for index, block in enumerate(_blocks(q_BHTh, num_keys, ctx.is_causal)):
            examples, rows, end = block
            weights = kept[index] if kept else _block_weights(q_BHTh, k_BKSh, mask, ctx.is_causal, ctx.scale, block)
            grad_out = _group(grad_BHTv[examples, :, rows], num_kv_heads)
            grad_v[examples, :, :end] += _group(weights, num_kv_heads).transpose(-1, -2) @ grad_out
            grad_weights = (grad_out @ v_BKSv[examples, :, :end].transpose(-1, -2)).view(weights.shape)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grouped = _group(grad_scores, num_kv_heads)
            grad_q[examples, :, rows] = (grouped @ k_BKSh[examples, :, :end]).view_as(grad_q[examples, :, rows])
            grad_k[examples, :, :end] += grouped.transpose(-1, -2) @ _group(q_BHTh[examples, :, rows], num_kv_heads)
        grad_q.mul_(ctx.scale)
        return grad_q, grad_k.mul_(ctx.scale).to(k_BKSh.dtype), grad_v.to(v_BKSv.dtype), None, None, None


def blocks_are_faster(q_BHTh: Tensor) -> bool:
    """bf16 in eager mode on a CPU, for more than a single query."""
    on_cpu = q_BHTh.device.type == "cpu" and q_BHTh.dtype == torch.bfloat16
    return on_cpu and q_BHTh.shape[2] > 1 and not torch.compiler.is_compiling()


def attend_blocked(
    q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """[B, H, T, v]; arguments as in `core.attend`, which checks them. Memory order [B, T, H, v]."""
    return _BlockedAttention.apply(q_BHTh, k_BKSh, v_BKSv, mask, is_causal, scale)
