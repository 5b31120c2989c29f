"""Implementations of dense attention beside PyTorch's fused kernel: chunked, blocked, few queries.

Shape legend: B batch, H query heads, K kv heads, G = H / K, T queries, S keys, h head_dim, v value_dim; b, t, s the
same of a block or chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tformer.nn.attention.context import MASKED_SCORE
from tformer.nn.dropout import dropout
from tformer.nn.products import get_kernels

# Scores of one chunk, over batch and heads: 64 MiB in fp32. Tests make it small.
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class _Terms:
    """What is the same for every chunk."""

    scale: float
    mask: Tensor | None
    is_causal: bool
    bias_fn: Callable[[slice], Tensor] | None
    score_fn: Callable[[Tensor, slice], Tensor] | None
    mix_fn: Callable[[Tensor, slice], Tensor] | None
    dropout: float
    pair_fn: Callable[[Tensor, Tensor], Tensor] | None


def attend_chunked(
    q_BHTh: Tensor,
    k_BKSh: Tensor,
    v_BKSv: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    bias_fn: Callable[[slice], Tensor] | None,
    score_fn: Callable[[Tensor, slice], Tensor] | None,
    mix_fn: Callable[[Tensor, slice], Tensor] | None,
    dropout: float,
    need_weights: bool,
    pair_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    pair_size: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """See `core.attend`, which checks the arguments. Weights, when asked for, are T x S by nature.

    pair_fn(q_BHth, k_BKsh) -> [B, H, t, s], in fresh memory: scores that stand in for q.k, from `pair_size` numbers for
    each pair, which count in the size of a chunk.
    """
    batch, heads, num_queries, _ = q_BHTh.shape
    num_keys = k_BKSh.shape[2]
    terms = _Terms(scale, mask, is_causal, bias_fn, score_fn, mix_fn, dropout, pair_fn)
    size = max(1, CHUNK_ELEMENTS // max(1, batch * heads * num_keys * pair_size))
    chunks = [slice(start, min(start + size, num_queries)) for start in range(0, num_queries, size)]
    recompute = len(chunks) > 1 and torch.is_grad_enabled() and not need_weights
    outs, all_weights = [], []
    for rows in chunks:
        if recompute:
            out = checkpoint(
                _chunk_output,
                q_BHTh,
                k_BKSh,
                v_BKSv,
                rows,
                terms,
                use_reentrant=False,
                preserve_rng_state=dropout > 0.0,
            )
        else:
            out, weights = _attend_chunk(q_BHTh, k_BKSh, v_BKSv, rows, terms)
            if need_weights:
                all_weights.append(F.pad(weights, (0, num_keys - weights.shape[-1])))
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    if not need_weights:
        return out, None
    return out, torch.cat(all_weights, dim=2)


def _chunk_output(q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, rows: slice, terms: _Terms) -> Tensor:
    return _attend_chunk(q_BHTh, k_BKSh, v_BKSv, rows, terms)[0]


def _attend_chunk(q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, rows: slice, terms: _Terms) -> tuple[Tensor, Tensor]:
    """Output [B, H, t, v] and weights [B, H, t, s] of the given query rows, s <= S the keys that were read."""
    q = q_BHTh[:, :, rows]
    num_kv_heads = k_BKSh.shape[1]
    end = rows.stop if terms.is_causal else k_BKSh.shape[2]
    keys, values = k_BKSh[:, :, :end], v_BKSv[:, :, :end]
    scores = _products(q, keys) if terms.pair_fn is None else terms.pair_fn(q, keys)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if terms.score_fn is not None:
        scores.add_(terms.score_fn(q, rows)[..., :end])
    scores.mul_(terms.scale)
    if terms.bias_fn is not None:
        scores.add_(terms.bias_fn(rows)[..., :end])
    allowed = _allowed(terms, rows, end, q.device)
    if allowed is not None:
        scores.masked_fill_(~allowed, MASKED_SCORE)
    weights = scores.softmax(dim=-1)
    if terms.mask is not None and allowed is not None:
        weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    mixed = weights.to(q.dtype)
    if terms.dropout > 0.0:
        mixed = dropout(mixed, terms.dropout, training=True)
    mixed_BKGts = mixed.unflatten(1, (num_kv_heads, -1))
    out_BKGtv = (mixed_BKGts.flatten(2, 3) @ values).view(*mixed_BKGts.shape[:4], values.shape[-1])
    out = out_BKGtv.flatten(1, 2)
    if terms.mix_fn is not None:
        out = out + terms.mix_fn(mixed, rows)
    return out, weights


def _products(q_BHth: Tensor, k_BKsh: Tensor) -> Tensor:
    """q.k, [B, H, t, s]. The G query heads that share a key head are stacked: [B, K, G t, h] x [B, K, h, s]."""
    q_BKGth = q_BHth.unflatten(1, (k_BKsh.shape[1], -1))
    products = q_BKGth.flatten(2, 3) @ k_BKsh.transpose(-1, -2)
    return products.view(*q_BKGth.shape[:4], k_BKsh.shape[2]).flatten(1, 2)


def _allowed(terms: _Terms, rows: slice, end: int, device: torch.device) -> Tensor | None:
    """The mask of a chunk, broadcastable to [B, H, t, end]; None when every key may be seen."""
    if terms.mask is not None:
        chosen = terms.mask[..., :end]
        return chosen if chosen.shape[-2] == 1 else chosen[..., rows, :]
    if not terms.is_causal:
        return None
    query_slots = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    return torch.arange(end, device=device) <= query_slots


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


FEW = 8  # queries
WIDTH = 16  # of a vector register, in fp32


def few_are_faster(q_BHTh: Tensor) -> bool:
    """bf16 in eager mode on a CPU, for a single query; without a gradient for a few more (the beams of a sentence)."""
    on_cpu = q_BHTh.device.type == "cpu" and q_BHTh.dtype == torch.bfloat16
    most = 1 if torch.is_grad_enabled() else FEW
    return on_cpu and q_BHTh.shape[2] <= most and not torch.compiler.is_compiling()


def few_may_have_bias() -> bool:
    """Only our own kernel adds one to the scores."""
    return get_kernels() is not None and not torch.is_grad_enabled()


def attend_few(
    q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, *, mask: Tensor | None, bias: Tensor | None = None, scale: float
) -> Tensor:
    """[B, H, T, v]; arguments as in `core.attend`, the bias as it is added.

    Scores are rounded to bf16 once, the softmax computes in fp32.
    A kernel of our own, where there is one, reads keys and values once and rounds nothing between.
    """
    kernels = get_kernels()
    if kernels is not None and not torch.is_grad_enabled():
        return kernels.attend(q_BHTh, k_BKSh, v_BKSv, mask=mask, bias=bias, scale=scale)
    assert bias is None
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
    padded_BHTS = F.pad(scores_BHTS, (0, -num_keys % WIDTH), value=-torch.inf)
    weights_BHTS = padded_BHTS.softmax(dim=-1)[..., :num_keys]
    if mask is not None:
        weights_BHTS = weights_BHTS.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    out_BKRv = weights_BHTS.reshape(batch, num_kv_heads, rows, num_keys) @ v_BKSv
    return out_BKRv.view(batch, heads, num_queries, v_BKSv.shape[-1])
