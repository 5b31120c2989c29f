"""Which blocks a block of queries reads at random: a pure function of (seed, layer, block, number of blocks).

No generator and no table: a hash of these numbers picks among the candidates, so that the pattern is the same on every
device, at every length of a causal sequence and behind any padding.

Shape legend: B batch, N blocks of queries, r random blocks of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd 64-bit constants of the splitmix64 generator and of golden-ratio hashing; products wrap around.
STEP = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
POSITIVE = (1 << 63) - 1


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _mixed(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of x, long [*]; at least 0."""
    x = (x ^ ((x >> 30) & (POSITIVE >> 29))) * _signed(FIRST)
    x = (x ^ ((x >> 27) & (POSITIVE >> 26))) * _signed(SECOND)
    return (x ^ ((x >> 31) & (POSITIVE >> 30))) & POSITIVE


def random_blocks(
    blocks: Tensor, num_blocks: Tensor, *, count: int, seed: int, layer: int, side: int, num_global: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Blocks to read, long [B or 1, N, count], and whether each exists, bool.

    blocks: long [B or 1, N], the blocks of queries. num_blocks: long [B or 1, 1], those of the whole sequence. Neither
    the window of `side` blocks around a block's own, nor the `num_global` first (and, unless causal, last) ones are
    drawn, and none twice; where fewer candidates are left, the rest do not exist. Causal: only earlier blocks.
    """
    first = torch.full_like(blocks, num_global)
    if causal:
        end = (blocks - side).clamp(min=num_global)
        skipped_from, skipped = end, torch.zeros_like(blocks)
    else:
        blocks, end = torch.broadcast_tensors(blocks, num_blocks - num_global)
        skipped_from = torch.maximum(blocks - side, first)
        skipped = (torch.minimum(blocks + side + 1, end) - skipped_from).clamp(min=0)
    candidates = (end - first - skipped).clamp(min=0)
    start = _signed((seed * 0x632BE59BD9B4E019 + layer + 1) * STEP)
    ranks: list[Tensor] = []
    for draw in range(count):
        key = _mixed(blocks * _signed(SECOND) + _signed(start + (draw + 1) * FIRST))
        rank = key % (candidates - draw).clamp(min=1)
        for earlier in torch.stack(ranks).sort(dim=0).values if ranks else ():
            rank = rank + (rank >= earlier)  # the rank among all candidates of one among those that are left
        ranks.append(rank)
    if not ranks:
        empty = blocks.unsqueeze(-1)[..., :0]
        return empty, empty.bool()
    chosen = torch.stack(ranks, dim=-1)
    exists = torch.arange(count, device=blocks.device) < candidates.unsqueeze(-1)
    found = chosen + num_global
    found = found + torch.where(found >= skipped_from.unsqueeze(-1), skipped.unsqueeze(-1), 0)
    return found.masked_fill(~exists, 0), exists
