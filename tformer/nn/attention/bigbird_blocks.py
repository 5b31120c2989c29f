"""Which blocks a block sees in BigBird (arXiv 2007.14062): a window around it, global blocks and random ones.

A slot is a column of the batch. A place counts from the row's first real token, which is in slot `offset`. A block is
`size` places. With an offset of 3 and blocks of 4:

    slot      0   1   2   3   4   5   6   7   8   9  10  11  12
    token     .   .   .   a   b   c   d   e   f   g   h   i   .
    place    -3  -2  -1   0   1   2   3   4   5   6   7   8   9
    block    -1  -1  -1   0   0   0   0   1   1   1   1   2   2        3 blocks: the last token is in block 2

So padding moves no block. Of 8 blocks, with a window of three, one global block at each end and one random block, each
row of this picture sees:

    block of keys    0   1   2   3   4   5   6   7
    queries of 0     g   g   g   g   g   g   g   g       g: global, as a key or as the query; a causal query of a global
               1     g   w   w   .   r   .   .   g          block sees no more than others
               4     g   .   r   w   w   w   .   g       w: window, `side` blocks before and after the query's own
               7     g   g   g   g   g   g   g   g       r: random

Random blocks are a function of (seed, layer, block, number of blocks) alone: a hash of these numbers picks among the
candidates. The pattern is the same on every device, at every length of a causal sequence and behind any padding.

Shape legend: B batch, T queries, S keys, N blocks of queries, r random blocks of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Odd 64-bit constants of the splitmix64 generator and of golden-ratio hashing; products wrap around.
STEP = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
POSITIVE = (1 << 63) - 1


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _hash(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of x, long [*]; at least 0."""
    x = (x ^ ((x >> 30) & (POSITIVE >> 29))) * _signed(FIRST)
    x = (x ^ ((x >> 27) & (POSITIVE >> 26))) * _signed(SECOND)
    return (x ^ ((x >> 31) & (POSITIVE >> 30))) & POSITIVE


def draw_ranks(numbers: Tensor, candidates: Tensor, *, count: int, seed: int, layer: int) -> Tensor:
    """`count` different ranks below `candidates`, long [*, count], for each of the numbers, long [*].

    If there are fewer candidates, the last ranks are too large.
    """
    start = _signed((seed * 0x632BE59BD9B4E019 + layer + 1) * STEP)
    ranks: list[Tensor] = []
    for draw in range(count):
        key = _hash(numbers * _signed(SECOND) + _signed(start + (draw + 1) * FIRST))
        rank = key % (candidates - draw).clamp(min=1)
        for earlier in torch.stack(ranks).sort(dim=0).values if ranks else ():
            rank = rank + (rank >= earlier)  # the rank among all candidates of one among those that are left
        ranks.append(rank)
    return torch.stack(ranks, dim=-1) if ranks else numbers.unsqueeze(-1)[..., :0]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of the rows of a batch.

    size: places of a block. side: blocks of the window before and after a block's own. num_global: global blocks at the
    beginning and, unless causal, at the end. num_random, seed, layer: of the random blocks. offset: long [B or 1, 1],
    the slot of the first real token. count: long [B or 1, 1], the number of blocks up to the last real token.
    """

    size: int
    side: int
    num_global: int
    num_random: int
    seed: int
    layer: int
    causal: bool
    offset: Tensor
    count: Tensor

    def sees(self, q_block: Tensor, k_block: Tensor, random: Iterable[tuple[Tensor, Tensor]], count: Tensor) -> Tensor:
        """Whether the queries in block `q_block` see the keys in block `k_block`; the numbers are broadcast.

        random: for each draw, the block that queries of q_block read and whether it exists, see `random`. count: of
        their rows. Causality within blocks is not part of it.
        """
        seen = (q_block - k_block).abs() <= self.side
        seen = seen | self.is_global(k_block, count)
        if not self.causal:
            seen = seen | self.is_global(q_block, count)
        for block, exists in random:
            seen = seen | ((block == k_block) & exists)
        return seen & (q_block >= 0)

    def is_global(self, block: Tensor, count: Tensor) -> Tensor:
        """bool, by numbers of blocks and the number that their row has."""
        first = block < self.num_global
        return first if self.causal else first | ((block >= count - self.num_global) & (block < count))

    def random(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The random blocks of blocks of queries [B or 1, N], long [B or 1, N, r], and whether each exists, bool.

        Neither blocks of the window nor global ones are drawn, and none twice; if there are fewer candidates, the rest
        do not exist. Causal: only earlier blocks.
        """
        first = torch.full_like(blocks, self.num_global)
        if self.causal:
            end = (blocks - self.side).clamp(min=self.num_global)
            skipped_from, skipped = end, torch.zeros_like(blocks)
        else:
            blocks, end = torch.broadcast_tensors(blocks, self.count - self.num_global)
            skipped_from = torch.maximum(blocks - self.side, first)
            skipped = (torch.minimum(blocks + self.side + 1, end) - skipped_from).clamp(min=0)
        candidates = (end - first - skipped).clamp(min=0)
        ranks = draw_ranks(blocks, candidates, count=self.num_random, seed=self.seed, layer=self.layer)
        exists = torch.arange(self.num_random, device=blocks.device) < candidates.unsqueeze(-1)
        found = ranks + self.num_global
        found = found + torch.where(found >= skipped_from.unsqueeze(-1), skipped.unsqueeze(-1), 0)
        return found.masked_fill(~exists, 0), exists

    def mask(self, q_places: Tensor, k_places: Tensor) -> Tensor:
        """bool [B or 1, T, S], by places [B or 1, T] and [B or 1, S]: the pattern, and causality."""
        q_blocks, k_blocks = q_places // self.size, k_places // self.size
        random = zip(*(x.unsqueeze(2).unbind(-1) for x in self.random(q_blocks)), strict=True)
        seen = self.sees(q_blocks.unsqueeze(2), k_blocks.unsqueeze(1), random, self.count.unsqueeze(2))
        return seen & (k_places.unsqueeze(1) <= q_places.unsqueeze(2)) if self.causal else seen

    def rule(self, most: int, *, start: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The pattern of single (example, query, key), without causality; query i is at slot start + i.

        most: the number of blocks that no row exceeds.
        """
        index, exists = self.random(torch.arange(most, device=self.offset.device).unsqueeze(0))

        def sees(example: Tensor, query: Tensor, key: Tensor) -> Tensor:
            def row(x: Tensor) -> Tensor:
                return example if x.shape[0] > 1 else torch.zeros_like(example)

            offset = self.offset[row(self.offset), 0]
            q_block, k_block = (query + start - offset) // self.size, (key - offset) // self.size
            at = row(index), torch.clamp(q_block, min=0)
            random = [(index[*at, draw], exists[*at, draw]) for draw in range(self.num_random)]
            return self.sees(q_block, k_block, random, self.count[row(self.count), 0])

        return sees

    def beside(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Keys outside the windows of the queries between two places, which lie in at most two blocks.

        Returns the slots of the global and the random blocks, long [B or 1, keys], and a bool mask of the same shape,
        False for missing and repeated blocks.
        ends: the first and the last place, [B or 1, 2], or the only one, [B or 1, 1].
        """
        index, counts = self.random(ends // self.size)
        if ends.shape[1] == 2:
            twice = ((index[:, 1, :, None] == index[:, 0, None]) & counts[:, 0, None]).any(-1)
            counts = torch.stack([counts[:, 0], counts[:, 1] & ~twice], dim=1)
        first = torch.arange(self.num_global, device=ends.device).expand(index.shape[0], -1)
        blocks = torch.cat([first, index.flatten(1)], dim=1)
        counts = torch.cat([torch.ones_like(first, dtype=torch.bool), counts.flatten(1)], dim=1)
        places = (blocks.unsqueeze(-1) * self.size + torch.arange(self.size, device=ends.device)).flatten(1)
        return places + self.offset, counts.repeat_interleave(self.size, dim=1)
