"""Block-sparse attention with explicit scores, for dropout and for positions that add a bias or terms to the scores.

Blocks of queries and the keys they read are folded into the batch, so that `core.attend` and the positions work on
short sequences. A chunk of blocks is recomputed in the backward pass (`torch.utils.checkpoint`), so only the scores of
one chunk are kept, beside copies of the keys, one per block that reads them: O(T).

Shape legend: B batch, H query heads, K kv heads, T queries, S keys, N blocks of queries, h head_dim, v value_dim,
w queries of a block, s keys of a span, R shared keys, r random blocks of a block, n blocks of a chunk.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tformer.nn.attention.block_sparse.pattern import Group, KeysAndValues, Pattern, part_masks
from tformer.nn.attention.context import AttentionContext, AttentionInputs
from tformer.nn.attention.core import attend
from tformer.nn.positions.base import Positions

CHUNK_ELEMENTS = 2**22  # scores of one chunk, over batch and heads. Tests make it small.


def recomputes(pattern: Pattern, num_blocks: int, *, rows: int, keys: int) -> tuple[int, bool]:
    """Blocks of a chunk, and whether there are several chunks, which are recomputed. rows: batch times heads."""
    size = max(1, CHUNK_ELEMENTS // (rows * pattern.block * keys))
    return size, size < num_blocks


def attend_blocks_explicit(inputs: AttentionInputs, pattern: Pattern, shared: KeysAndValues | None) -> Tensor:
    """[B, H, T, v]; arguments as in `kernel.attend_sparse`."""
    q_BHTh, k_BKSh, v_BKSv = inputs[:3]
    batch, heads, num_queries, _ = q_BHTh.shape
    num_keys, block = k_BKSh.shape[2], pattern.block
    num_blocks = -(-num_queries // block)
    lead = max(0, pattern.before - pattern.start)
    trail = max(0, pattern.start + num_blocks * block + pattern.after - num_keys)
    pattern = _padded(pattern, num_keys, lead, trail, k_BKSh.device)
    assert pattern.q_pos is not None and pattern.k_pos is not None
    q_pos, k_pos = pattern.q_pos, pattern.k_pos
    span = pattern.before + block + pattern.after
    keys_per_block = span + pattern.num_shared + pattern.random_keys
    size, several = recomputes(pattern, num_blocks, rows=batch * heads, keys=keys_per_block)
    low = pattern.start - pattern.before

    def spans(x: Tensor) -> Tensor:
        """[B, ..., S, x] -> [B, ..., N, x, s]"""
        dim = x.dim() - 2
        return F.pad(x, (0, 0, lead, trail)).narrow(dim, low, (num_blocks - 1) * block + span).unfold(dim, span, block)

    def queries(x: Tensor) -> Tensor:
        """[..., T, x] -> [..., N, w, x]"""
        return F.pad(x, (0, 0, 0, num_blocks * block - num_queries)).unflatten(-2, (num_blocks, block))

    # Splits of one tensor are one node of the graph: its backward joins the chunks' gradients once.
    pieces: list[tuple[Tensor | None, ...]] = [
        queries(q_BHTh).split(size, dim=2),
        spans(k_BKSh).transpose(-1, -2).split(size, dim=2),
        spans(v_BKSv).transpose(-1, -2).split(size, dim=2),
        queries(q_pos.unsqueeze(-1)).squeeze(-1).split(size, dim=1),
        spans(k_pos.unsqueeze(-1)).squeeze(-2).split(size, dim=1),
    ]
    if pattern.random is None:
        pieces += [(None,) * len(pieces[0])] * 3
    else:
        for x in (k_BKSh, v_BKSv, k_pos[:, None, :, None]):
            picked = _picked(F.pad(x, (0, 0, lead, trail)), pattern.random, block)
            pieces.append(picked.split(size, dim=2))
    attend_chunk = partial(
        _attend_chunk, pattern=pattern, scale=inputs.scale, positions=inputs.positions, dropout=inputs.dropout
    )
    recompute = several and torch.is_grad_enabled()
    outs = []
    for number, chunk in enumerate(zip(*pieces, strict=True)):
        arguments = (number * size, *chunk, *(shared or (None, None)))
        if recompute:
            outs.append(
                checkpoint(attend_chunk, *arguments, use_reentrant=False, preserve_rng_state=inputs.dropout > 0.0)
            )
        else:
            outs.append(attend_chunk(*arguments))
    return torch.cat(outs, dim=2).flatten(2, 3)[:, :, :num_queries]


def _padded(pattern: Pattern, num_keys: int, lead: int, trail: int, device: torch.device) -> Pattern:
    """The pattern among keys with `lead` and `trail` more slots, so that every span is whole."""

    def pad(x: Tensor | None) -> Tensor | None:
        return None if x is None else F.pad(x, (lead, trail))

    valid = pattern.key_valid
    if valid is None and (lead or trail):
        valid = torch.ones(1, num_keys, dtype=torch.bool, device=device)
    return replace(
        pattern,
        start=pattern.start + lead,
        key_valid=pad(valid),
        documents=pad(pattern.documents),
        slots=pad(pattern.slots),
        random=None if pattern.random is None else pattern.random + lead // pattern.block,
    )


def _picked(x_BKSx: Tensor, random: Tensor, block: int) -> Tensor:
    """The blocks read at random, [B, K, N, r w, x]."""
    batch, heads, num_keys, width = x_BKSx.shape
    num_blocks = num_keys // block
    rows = torch.arange(batch * heads, device=x_BKSx.device).view(batch, heads, 1, 1) * num_blocks
    if random.shape[0] > batch:  # positions that all examples share, of blocks that they do not
        return _picked(x_BKSx.expand(random.shape[0], -1, -1, -1), random, block)
    index = rows + random.unsqueeze(1)
    found = x_BKSx.reshape(-1, block, width).index_select(0, index.flatten())
    return found.view(batch, heads, random.shape[1], -1, width)


def _attend_chunk(
    first: int,
    q_BHnwh: Tensor,
    k_BKnsh: Tensor,
    v_BKnsv: Tensor,
    q_pos_Bnw: Tensor,
    k_pos_Bns: Tensor,
    random_k: Tensor | None,
    random_v: Tensor | None,
    random_pos: Tensor | None,
    shared_k_BKRh: Tensor | None,
    shared_v_BKRv: Tensor | None,
    *,
    pattern: Pattern,
    scale: float,
    positions: Positions | None,
    dropout: float,
) -> Tensor:
    """The output of one chunk of blocks, [B, H, n, w, v]."""
    batch, _, count, width, _ = q_BHnwh.shape

    def keys(span: Tensor, shared: Tensor | None, random: Tensor | None) -> Tensor:
        """[B n, K, s + R + r w, x]"""
        parts = [span]
        if shared is not None:
            parts.append(shared.unsqueeze(2).expand(-1, -1, count, -1, -1))
        if random is not None:
            parts.append(random)
        return torch.cat(parts, dim=3).transpose(1, 2).flatten(0, 1)

    def fold(x: Tensor) -> Tensor:
        """[B or 1, n, *] -> [B n, *]"""
        return x.expand(batch, *x.shape[1:]).flatten(0, 1)

    k_pos = [fold(k_pos_Bns)]
    if pattern.shared_pos is not None:
        k_pos.append(fold(pattern.shared_pos.unsqueeze(1).expand(-1, count, -1)))
    if random_pos is not None:
        k_pos.append(fold(random_pos.squeeze(1).squeeze(-1)))
    mask = _mask(pattern, first, batch, count, width)
    out, _ = attend(
        AttentionInputs(
            q_BHnwh.transpose(1, 2).flatten(0, 1),
            keys(k_BKnsh, shared_k_BKRh, random_k),
            keys(v_BKnsv, shared_v_BKRv, random_v),
            AttentionContext(fold(q_pos_Bnw), torch.cat(k_pos, dim=-1), mask=mask),
            scale,
            positions,
            dropout,
        )
    )
    return out.unflatten(0, (batch, count)).transpose(1, 2)


def _mask(pattern: Pattern, first: int, batch: int, count: int, width: int) -> Tensor:
    """bool [B n, 1, w, s + R + r w]"""
    span = pattern.before + width + pattern.after
    low = pattern.start + first * width - pattern.before
    group = Group(slice(0, batch), slice(0, 1), first, count, width, low, span)
    sizes = [span]
    sizes += [pattern.num_shared] if pattern.num_shared else []
    sizes += [pattern.random_keys] if pattern.random is not None else []
    whole = []
    for size, mask in zip(sizes, part_masks(pattern, group), strict=True):
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=pattern.band.device) if mask is None else mask
        whole.append(seen.expand(batch, count, width, size))
    whole[0] = whole[0] & (pattern.band == 0.0)
    return torch.cat(whole, dim=-1).flatten(0, 1).unsqueeze(1)
