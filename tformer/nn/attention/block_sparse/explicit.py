"""Block-sparse attention with explicit scores, for dropout and for positions that add a bias or terms to the scores.

Blocks of queries and the keys they read are folded into the batch, so that `core.attend` and the positions work on
short sequences. A chunk of blocks is recomputed in the backward pass (`torch.utils.checkpoint`), so only the scores of
one chunk are kept, beside copies of the keys, one per block that reads them: O(T).

Shape legend: B batch, H query heads, K kv heads, T queries, S keys, N blocks of queries, h head_dim, v value_dim,
x one of them, w queries of a block, s keys of a span, R shared keys, r random blocks of a block, n blocks of a chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tformer.nn.attention.block_sparse.pattern import BlockGroup, KeysAndValues, Pattern, part_masks
from tformer.nn.attention.context import AttentionContext, AttentionInputs
from tformer.nn.attention.core import attend

CHUNK_ELEMENTS = 2**22  # scores of one chunk, over batch and heads. Tests make it small.


def recomputes(pattern: Pattern, num_blocks: int, *, rows: int, keys: int) -> tuple[int, bool]:
    """Blocks of a chunk, and whether there are several chunks, which are recomputed. rows: batch times heads."""
    size = max(1, CHUNK_ELEMENTS // (rows * pattern.block * keys))
    return size, size < num_blocks


class _Read(NamedTuple):
    """Keys, values or positions that the blocks of a chunk read. For positions K and x are 1."""

    span: Tensor  # [B or 1, K, n, s, x]
    shared: Tensor | None  # [B or 1, K, R, x]
    random: Tensor | None  # [B or 1, K, n, r w, x]

    def joined(self, batch: int) -> Tensor:
        """[B n, K, s + R + r w, x]"""
        shared = None if self.shared is None else self.shared.unsqueeze(2).expand(-1, -1, self.span.shape[2], -1, -1)
        parts = [part.expand(batch, -1, -1, -1, -1) for part in (self.span, shared, self.random) if part is not None]
        return torch.cat(parts, dim=3).transpose(1, 2).flatten(0, 1)


class _Chunk(NamedTuple):
    """Some blocks of queries and what they read. first: the number of the first block."""

    first: int
    queries: Tensor  # [B, H, n, w, h]
    q_pos: Tensor  # [B or 1, 1, n, w, 1]
    keys: _Read
    values: _Read
    positions: _Read


def attend_blocks_explicit(inputs: AttentionInputs, pattern: Pattern, shared: KeysAndValues | None) -> Tensor:
    """[B, H, T, v]; arguments as in `kernel.attend_sparse`."""
    q_BHTh, k_BKSh, v_BKSv = inputs[:3]
    batch, heads, num_queries, _ = q_BHTh.shape
    num_keys, block, keys = k_BKSh.shape[2], pattern.block, pattern.keys
    q_pos, k_pos = pattern.q_pos, keys.positions
    assert q_pos is not None and k_pos is not None
    num_blocks, span = -(-num_queries // block), pattern.before + block + pattern.after
    keys_per_block = span + pattern.random_keys + (0 if shared is None else shared[0].shape[2])
    size, several = recomputes(pattern, num_blocks, rows=batch * heads, keys=keys_per_block)
    # More slots at both ends, so that every span is whole. Masks do not read positions.
    lead = max(0, pattern.before - pattern.start)
    trail = max(0, pattern.start + num_blocks * block + pattern.after - num_keys)
    if keys.valid is None and (lead or trail):
        keys = keys._replace(valid=torch.ones(1, num_keys, dtype=torch.bool, device=k_BKSh.device))
    random = pattern.random
    whole = replace(
        pattern,
        start=pattern.start + lead,
        keys=keys._replace(positions=None).map(lambda x: F.pad(x, (lead, trail))),
        random=None if random is None else random._replace(blocks=random.blocks + lead // block),
    )

    def queries(x_BHTx: Tensor) -> tuple[Tensor, ...]:
        """[B or 1, H, T, x] -> chunks [B or 1, H, n, w, x]"""
        padded = F.pad(x_BHTx, (0, 0, 0, num_blocks * block - num_queries))
        return padded.unflatten(-2, (num_blocks, block)).split(size, dim=2)

    def read(x_BKSx: Tensor, shared_BKRx: Tensor | None) -> list[_Read]:
        """The slots of x [B or 1, K, S, x] that each chunk reads."""
        low = whole.start - pattern.before
        slots = F.pad(x_BKSx, (0, 0, lead, trail)).narrow(2, low, (num_blocks - 1) * block + span)
        # Splits of one tensor are one node of the graph: its backward joins the chunks' gradients once.
        spans = slots.unfold(2, span, block).transpose(-1, -2).split(size, dim=2)
        if whole.random is None:
            return [_Read(each, shared_BKRx, None) for each in spans]
        picked = _picked(F.pad(x_BKSx, (0, 0, lead, trail)), whole.random.blocks, block).split(size, dim=2)
        return [_Read(each, shared_BKRx, blocks) for each, blocks in zip(spans, picked, strict=True)]

    shared_k, shared_v = shared or (None, None)
    shared_pos = None if pattern.shared is None else pattern.shared.positions
    chunks = map(
        _Chunk,
        range(0, num_blocks, size),
        queries(q_BHTh),
        queries(q_pos[:, None, :, None]),
        read(k_BKSh, shared_k),
        read(v_BKSv, shared_v),
        read(k_pos[:, None, :, None], None if shared_pos is None else shared_pos[:, None, :, None]),
    )
    recompute = several and torch.is_grad_enabled()
    # A checkpoint keeps its arguments: these would be the whole queries, keys and values, which no chunk reads.
    nothing = q_BHTh.new_empty(0)
    inputs = inputs._replace(q_BHTh=nothing, k_BKSh=nothing, v_BKSv=nothing, x_BTD=None)
    outs = []
    for chunk in chunks:
        if recompute:
            keeps = inputs.dropout > 0.0
            outs.append(checkpoint(_attend_chunk, chunk, whole, inputs, use_reentrant=False, preserve_rng_state=keeps))
        else:
            outs.append(_attend_chunk(chunk, whole, inputs))
    return torch.cat(outs, dim=2).flatten(2, 3)[:, :, :num_queries]


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


def _attend_chunk(chunk: _Chunk, pattern: Pattern, inputs: AttentionInputs) -> Tensor:
    """The output of one chunk of blocks, [B, H, n, w, v]. inputs: scale, positions and dropout are read."""
    batch, _, count, width, _ = chunk.queries.shape

    def fold(x_BXnwx: Tensor) -> Tensor:
        """[B or 1, X, n, w, x] -> [B n, X, w, x]"""
        return x_BXnwx.expand(batch, -1, -1, -1, -1).transpose(1, 2).flatten(0, 1)

    group = BlockGroup(
        slice(0, batch),
        slice(0, 1),
        chunk.first,
        count,
        width,
        pattern.start + chunk.first * width - pattern.before,
        pattern.before + width + pattern.after,
    )
    sizes = [group.span]
    sizes += [] if chunk.keys.shared is None else [chunk.keys.shared.shape[2]]
    sizes += [] if chunk.keys.random is None else [chunk.keys.random.shape[3]]
    masks = []
    for size, mask in zip(sizes, part_masks(pattern, group), strict=True):
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=pattern.band.device) if mask is None else mask
        masks.append(seen.expand(batch, count, width, size))
    masks[0] = masks[0] & (pattern.band == 0.0)
    mask = torch.cat(masks, dim=-1).flatten(0, 1).unsqueeze(1)  # [B n, 1, w, s + R + r w]
    q_pos, k_pos = fold(chunk.q_pos)[:, 0, :, 0], chunk.positions.joined(batch)[:, 0, :, 0]
    out, _ = attend(
        AttentionInputs(
            fold(chunk.queries),
            chunk.keys.joined(batch),
            chunk.values.joined(batch),
            AttentionContext(q_pos, k_pos, mask=mask),
            inputs.scale,
            inputs.positions,
            inputs.dropout,
        )
    )
    return out.unflatten(0, (batch, count)).transpose(1, 2)
