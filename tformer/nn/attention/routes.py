"""Implementations of dense attention beside PyTorch's fused kernel: chunked, blocked, few queries.

chunked   Forms the scores explicitly, a chunk of queries at a time: memory O(chunk x S), also while training. It
          supports everything: biases that are learned, Shaw's terms, dropout on a CPU, returned weights. Each chunk is
          recomputed in the backward pass (`torch.utils.checkpoint`); recomputation restores the random state, so a
          chunk drops the same weights both times. Products run in the inputs' dtype; scores, bias and softmax in fp32
          (fp64 for fp64).
blocked   For bf16 on a CPU. PyTorch's fused CPU kernel multiplies tiles of a few dozen rows; on cores with bf16
          instructions one batched product per block is two to six times faster, forward and backward. Blocks of scores
          fit into the core's cache. The weights are kept for the backward pass while they are few, else recomputed
          there. Scores are rounded to bf16 once, the softmax computes in fp32.
few       For the steps of decoding in bf16 on a CPU. PyTorch's fused kernel reads the keys a row at a time there; one
          batched product of queries and keys is three to thirty times faster.

A causal chunk or block reads no key beyond its own end.

Shape legend: B batch, H query heads, K kv heads, G = H / K, T queries, S keys, h head_dim, v value_dim; b, t, s the
same of a block or chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tformer.nn.attention.context import MASKED_SCORE, AttentionInputs, Weighted
from tformer.nn.dropout import dropout

CHUNK_ELEMENTS = 2**24  # scores of one chunk, over batch and heads: 64 MiB in fp32. Tests make it small.


# --- chunked ---------------------------------------------------------------------------------------------------------


def dot_products(q_BHth: Tensor, k_BKsh: Tensor, rows: slice = slice(None)) -> Tensor:
    """q.k, [B, H, t, s]. The G query heads that share a key head are stacked: [B, K, G t, h] x [B, K, h, s]."""
    q_BKGth = q_BHth.unflatten(1, (k_BKsh.shape[1], -1))
    products = q_BKGth.flatten(2, 3) @ k_BKsh.transpose(-1, -2)
    return products.view(*q_BKGth.shape[:4], k_BKsh.shape[2]).flatten(1, 2)


def attend_chunked(
    inputs: AttentionInputs,
    *,
    compute_scores: Callable[[Tensor, Tensor, slice], Tensor] = dot_products,
    numbers_per_pair: int = 1,
) -> Weighted:
    """Attention by explicit scores. Returned weights are T x S by nature.

    compute_scores(q_BHth, k_BKsh, rows) -> [B, H, t, s], in fresh memory: the scores of the queries in `rows` before
    positions and scale, made of `numbers_per_pair` numbers for each query and key, which count in the size of a chunk.
    """
    batch, heads, num_queries, _ = inputs.q_BHTh.shape
    num_keys = inputs.k_BKSh.shape[2]
    need_weights = inputs.need_weights
    if inputs.taps_scores or inputs.replaces_weights or inputs.for_all_sizes:
        chunks = [slice(0, num_queries)]
    else:
        size = max(1, CHUNK_ELEMENTS // max(1, batch * heads * num_keys * numbers_per_pair))
        chunks = [slice(start, min(start + size, num_queries)) for start in range(0, num_queries, size)]
    recompute = len(chunks) > 1 and torch.is_grad_enabled() and not need_weights
    outs, all_weights = [], []
    for rows in chunks:
        if recompute:
            out = checkpoint(
                _attend_chunk,
                inputs,
                rows,
                compute_scores,
                use_reentrant=False,
                preserve_rng_state=inputs.dropout > 0.0,
            )[0]
        else:
            out, weights = _attend_chunk(inputs, rows, compute_scores)
            if need_weights:
                all_weights.append(F.pad(weights, (0, num_keys - weights.shape[-1])))
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out, torch.cat(all_weights, dim=2) if need_weights else None


def _attend_chunk(
    inputs: AttentionInputs, rows: slice, compute_scores: Callable[[Tensor, Tensor, slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """Output [B, H, t, v] and weights [B, H, t, s] of the given query rows, s <= S the keys that were read."""
    context, positions, q = inputs.context, inputs.positions, inputs.q_BHTh[:, :, rows]
    end = rows.stop if context.is_causal else inputs.k_BKSh.shape[2]
    scores = compute_scores(q, inputs.k_BKSh[:, :, :end], rows)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if positions is not None and positions.has_score:
        of_positions = positions.score(q, context.q_pos[:, rows], context.k_pos)
        of_positions = inputs.tap("position_scores", of_positions)
        scores.add_(of_positions[..., :end])
    scores.mul_(inputs.scale)
    if inputs.softcap is not None:
        scores = scores.div_(inputs.softcap).tanh_() * inputs.softcap
    if inputs.has_bias:
        bias = inputs.tap("bias", inputs.bias(None if inputs.for_all_sizes else rows))
        scores.add_(bias[..., :end])
    visible = None  # broadcastable to [B, H, t, end]; None: every key is visible
    if context.mask is not None:
        visible = context.mask[..., :end]
        visible = visible if visible.shape[-2] == 1 else visible[..., rows, :]
    elif context.is_causal:
        slots = torch.arange(end, device=q.device)
        visible = slots <= slots[rows].unsqueeze(1)
    if visible is not None:
        scores.masked_fill_(~visible, MASKED_SCORE)
    weights = inputs.tap("scores", scores).softmax(dim=-1)
    if context.mask is not None and visible is not None:
        weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    if inputs.taps is not None and inputs.taps_weights:
        weights = inputs.taps.replaced("weights", weights)
    return mix_values(inputs, weights, rows), weights


def mix_values(inputs: AttentionInputs, weights: Tensor, rows: slice = slice(None)) -> Tensor:
    """Output [B, H, t, v] of the given query rows by their weights [B, H, t, s] on the first s keys."""
    context, positions, end = inputs.context, inputs.positions, weights.shape[-1]
    mixed = weights.to(inputs.q_BHTh.dtype)
    if inputs.dropout > 0.0:
        mixed = dropout(mixed, inputs.dropout, training=True)
    mixed_BKGts, values = mixed.unflatten(1, (inputs.k_BKSh.shape[1], -1)), inputs.v_BKSv[:, :, :end]
    out_BKGtv = (mixed_BKGts.flatten(2, 3) @ values).view(*mixed_BKGts.shape[:4], values.shape[-1])
    out = out_BKGtv.flatten(1, 2)
    if positions is not None and positions.has_mix:
        of_positions = positions.mix(mixed, context.q_pos[:, rows], context.k_pos[:, :end])
        out = out + inputs.tap("position_values", of_positions)
    return out


# --- blocked ---------------------------------------------------------------------------------------------------------

BLOCK_ELEMENTS = 2**20  # scores of a block, 2 MiB: about a core's own cache
QUERY_BLOCK = 128  # queries of a block; larger ones read more masked keys if causal, smaller ones multiply slowly
KEPT_ELEMENTS = 2**24  # weights kept for the backward pass, 32 MiB


class _QueryBlock(NamedTuple):
    """Some examples and some queries, with the keys that they read."""

    examples: slice
    rows: slice
    end: int  # keys before it are read


def _blocks(q_BHTh: Tensor, num_keys: int, is_causal: bool) -> Iterator[_QueryBlock]:
    batch, heads, num_queries, _ = q_BHTh.shape
    size = min(QUERY_BLOCK, max(16, BLOCK_ELEMENTS // (heads * num_keys)))
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        end = stop if is_causal else num_keys
        count = max(1, BLOCK_ELEMENTS // (heads * (stop - start) * end))
        for example in range(0, batch, count):
            yield _QueryBlock(slice(example, example + count), slice(start, stop), end)


def _group(x_bHtx: Tensor, num_kv_heads: int) -> Tensor:
    """[b, H, t, x] -> [b, K, G t, x]: the query heads that share a key head become one matrix."""
    return x_bHtx if x_bHtx.shape[1] == num_kv_heads else x_bHtx.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _block_weights(
    q_BHTh: Tensor, k_BKSh: Tensor, mask: Tensor | None, is_causal: bool, scale: float, block: _QueryBlock
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
    sees_any = allowed.any(-1, keepdim=True)
    return weights if sees_any.all() else weights.masked_fill_(~sees_any, 0.0)


class _BlockedAttention(torch.autograd.Function):
    """With W the weights and G the output's gradient:

    dV = W^T G,  dS = W (G V^T - rowsum(W G V^T)) scale,  dQ = dS K,  dK = dS^T Q.
    """

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


def attend_blocked(inputs: AttentionInputs) -> Weighted:
    """[B, H, T, v], in memory order [B, T, H, v], and no weights."""
    q_BHTh, k_BKSh, v_BKSv, context, scale, *_ = inputs
    return _BlockedAttention.apply(q_BHTh, k_BKSh, v_BKSv, context.mask, context.is_causal, scale), None


# --- few queries -----------------------------------------------------------------------------------------------------

REGISTER_WIDTH = 16  # fp32 numbers of a vector register


def attend_few(inputs: AttentionInputs) -> Weighted:
    """Attention output [B, H, T, v] for few queries, without weights.

    A C kernel, if there is one, reads keys and values once and does not round in between.

    A single query goes to the right, K q: products with one row on the left are slow. So is a softmax over rows that do
    not fill vector registers: scores are padded to a multiple of 16. Only the C kernel adds a bias.
    """
    q_BHTh, k_BKSh, v_BKSv, context, scale, *_ = inputs
    mask = context.mask
    if inputs.kernels is not None and not torch.is_grad_enabled():
        bias = inputs.bias().float() if inputs.has_bias else None
        return inputs.kernels.attend(q_BHTh, k_BKSh, v_BKSv, mask=mask, bias=bias, scale=scale), None
    assert not inputs.has_bias
    (batch, heads, num_queries, head_dim), (num_kv_heads, num_keys) = q_BHTh.shape, k_BKSh.shape[1:3]
    rows = heads // num_kv_heads * num_queries  # G T: the query heads that share a key head become one matrix
    q_BKRh = q_BHTh.reshape(batch, num_kv_heads, rows, head_dim)
    if rows == 1:
        scores_BKRS = (k_BKSh @ q_BKRh.transpose(-1, -2)).transpose(-1, -2)
    else:
        scores_BKRS = q_BKRh @ k_BKSh.transpose(-1, -2)
    scores_BHTS = scores_BKRS.mul_(scale).view(batch, heads, num_queries, num_keys)
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill_(~mask, MASKED_SCORE)
    padded_BHTS = F.pad(scores_BHTS, (0, -num_keys % REGISTER_WIDTH), value=-torch.inf)
    weights_BHTS = padded_BHTS.softmax(dim=-1)[..., :num_keys]
    if mask is not None:
        weights_BHTS = weights_BHTS.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    out_BKRv = weights_BHTS.reshape(batch, num_kv_heads, rows, num_keys) @ v_BKSv
    return out_BKRv.view(batch, heads, num_queries, v_BKSv.shape[-1]), None
