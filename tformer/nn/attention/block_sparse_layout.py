"""BigBird's pattern (arXiv 2007.14062): where blocks stand in the rows of a batch, and which of them see each other.

Blocks are counted from a row's first real token and end with its last one, so that padding changes nothing. A place is
a slot counted from there.

Shape legend: B batch, T queries, S keys, N blocks of queries, r random blocks of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tformer.nn.attention.block_sparse_globals import GlobalTokens, all_true_for_free, joined
from tformer.nn.attention.block_sparse_random import random_blocks


@dataclass(frozen=True, slots=True)
class Layout:
    """The options of BigBird in plain numbers, the layer's among them, and the rows of a batch.

    side: blocks of the window before and after a block's own. offset: long [B or 1, 1], the slot of the first real
    token. num_blocks: long [B or 1, 1], blocks up to the last one.
    """

    block: int
    side: int
    num_global: int
    num_random: int
    seed: int
    layer: int
    causal: bool
    offset: Tensor
    num_blocks: Tensor

    def random(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """What blocks of queries [B or 1, N] read at random: see `random_blocks`."""
        return random_blocks(
            blocks,
            self.num_blocks,
            count=self.num_random,
            seed=self.seed,
            layer=self.layer,
            side=self.side,
            num_global=self.num_global,
            causal=self.causal,
        )

    def is_global(self, blocks: Tensor) -> Tensor:
        """bool, of blocks [B or 1, *]."""
        first = blocks < self.num_global
        if self.causal:
            return first
        return first | ((blocks >= self.num_blocks - self.num_global) & (blocks < self.num_blocks))

    def sees(self, q_places: Tensor, k_places: Tensor) -> Tensor:
        """bool [B or 1, T, S], by places [B or 1, T] and [B or 1, S]: the pattern, and causality."""
        q_blocks, k_blocks = q_places // self.block, k_places // self.block
        seen = (q_blocks.unsqueeze(2) - k_blocks.unsqueeze(1)).abs() <= self.side
        seen = seen | self.is_global(k_blocks).unsqueeze(1)
        if not self.causal:
            seen = seen | self.is_global(q_blocks).unsqueeze(2)
        index, exists = self.random(q_blocks)
        for draw in range(self.num_random):
            seen = seen | ((index[..., draw, None] == k_blocks.unsqueeze(1)) & exists[..., draw, None])
        seen = seen & (q_places >= 0).unsqueeze(2)
        return seen & (k_places.unsqueeze(1) <= q_places.unsqueeze(2)) if self.causal else seen

    def rule(self, total_blocks: int, *, start: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The same for single (example, query, key), without causality; query i stands at slot start + i."""
        numbers = torch.arange(total_blocks, device=self.offset.device).unsqueeze(0)
        index, exists = self.random(numbers)
        is_global = self.is_global(numbers)

        def sees(example: Tensor, query: Tensor, key: Tensor) -> Tensor:
            def row(x: Tensor) -> Tensor:
                return example if x.shape[0] > 1 else torch.zeros_like(example)

            offset = self.offset[row(self.offset), 0]
            q_block, k_block = (query + start - offset) // self.block, (key - offset) // self.block
            first = torch.clamp(q_block, min=0)
            seen = (q_block - k_block).abs() <= self.side
            seen = seen | is_global[row(is_global), torch.clamp(k_block, min=0)]
            if not self.causal:
                seen = seen | is_global[row(is_global), first]
            for draw in range(self.num_random):
                there = exists[row(index), first, draw]
                seen = seen | ((index[row(index), first, draw] == k_block) & there)
            return seen & (query + start >= offset)

        return sees

    def global_tokens(self, places: Tensor, num_keys: int) -> GlobalTokens | None:
        """The slots of global blocks in a frame where slots are `places` [1, F]; padding among them is not told."""
        size = self.num_global * self.block
        if size == 0:
            return None
        mask = self.is_global(places // self.block)
        index = places[:, :size]
        if self.causal:
            return GlobalTokens(index, None, mask)
        last = (self.num_blocks - self.num_global) * self.block + torch.arange(size, device=places.device)
        is_first = torch.arange(2 * size, device=places.device)[: index.shape[1] + size] < index.shape[1]
        index = joined(index, last)
        exists = (is_first | (index >= size)) & (index < num_keys)  # a block may be among the first and the last
        return GlobalTokens(index.clamp(0, num_keys - 1), None if all_true_for_free(exists) else exists, mask)

    def beside(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """What the queries between two places of at most two blocks read outside their windows: the slots of the global
        and the random blocks, long [B or 1, keys], and whether each counts, not being there twice, bool.

        ends: the first and the last place, [B or 1, 2], or the only one, [B or 1, 1].
        """
        index, counts = self.random(ends // self.block)
        if ends.shape[1] == 2:
            twice = ((index[:, 1, :, None] == index[:, 0, None]) & counts[:, 0, None]).any(-1)
            counts = torch.stack([counts[:, 0], counts[:, 1] & ~twice], dim=1)
        first = torch.arange(self.num_global, device=ends.device).expand(index.shape[0], -1)
        blocks = torch.cat([first, index.flatten(1)], dim=1)
        counts = torch.cat([torch.ones_like(first, dtype=torch.bool), counts.flatten(1)], dim=1)
        places = (blocks.unsqueeze(-1) * self.block + torch.arange(self.block, device=ends.device)).flatten(1)
        return places + self.offset, counts.repeat_interleave(self.block, dim=1)
