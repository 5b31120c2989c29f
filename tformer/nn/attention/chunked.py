"""Attention with its scores in the open, a chunk of queries at a time: memory O(chunk x S), also while training.

Every chunk is recomputed in the backward pass (`torch.utils.checkpoint`), so only its inputs are kept. Recomputation
restores the random state: a chunk drops the same weights both times. A causal chunk reads no key beyond its own end.
Products run in the inputs' dtype; scores, bias and softmax in fp32 (fp64 for fp64).

Shape legend: B batch, H query heads, K kv heads, G = H / K, T queries, S keys, h head_dim, v value_dim, t chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tformer.nn.attention.masks import MASKED_SCORE
from tformer.nn.dropout import dropout

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
