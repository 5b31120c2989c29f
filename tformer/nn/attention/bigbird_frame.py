"""The frame of BigBird's blocks: every row begins with its first real token, so that slots are places.

    slots of the batch    0   1   2   3   4   5   6   7
    row 0                 a   b   c   d   e   f   g   h
    row 1                 .   .   .   i   j   k   l   m        its offset is 3

    slots of the frame    0   1   2   3   4   5   6   7
    row 0                 a   b   c   d   e   f   g   h
    row 1                 i   j   k   l   m   m   m   m        no token: `valid` is False

A frame has whole blocks. Queries are the last T of the S slots; rows without a query stand before them, so that the
first row is the beginning of a block. Without padding on the left, the frame's slots are those of the batch, and its
queries begin with the block of the first of them:

    slots             0   1   2   3   4   5   6   7   8        blocks of 4, three queries x y z behind six cached keys
    queries                           -   -   x   y   z        start = 4, lead = 2

Shape legend: B batch, X heads, T queries, S keys, F slots of the frame, x head_dim or value_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.context import all_true_on_cpu


@dataclass(frozen=True, slots=True)
class Frame:
    """num_slots: F. start: the frame's slot of the first query row. lead: rows of no query before the first query.

    source: long [B, F], the slot of the batch that each slot of the frame holds; None: the same one. offset: long
    [B, 1].
    """

    num_queries: int
    num_keys: int
    num_slots: int
    start: int
    lead: int
    offset: Tensor
    source: Tensor | None

    @staticmethod
    def of(offset: Tensor, key_mask: Tensor | None, num_queries: int, num_keys: int, block: int) -> Frame:
        num_slots, earlier = -(-num_keys // block) * block, num_keys - num_queries
        if key_mask is None or all_true_on_cpu(offset == 0):
            start = earlier // block * block
            return Frame(num_queries, num_keys, num_slots, start, earlier - start, offset, None)
        source = torch.arange(num_slots, device=offset.device) + offset
        return Frame(num_queries, num_keys, num_slots, 0, earlier, offset, source)

    def keys(self, x_BXSx: Tensor) -> Tensor:
        """[B, X, S, x] -> [B, X, F, x]"""
        if self.source is None:
            more = self.num_slots - self.num_keys
            return F.pad(x_BXSx, (0, 0, 0, more)) if more else x_BXSx
        return _gathered(x_BXSx, self.source.clamp(max=self.num_keys - 1))

    def queries(self, x_BXTx: Tensor) -> Tensor:
        """[B, X, T, x] -> [B, X, rows from `start` on, x]"""
        padded = F.pad(x_BXTx, (0, 0, self.lead, 0)) if self.lead else x_BXTx
        return padded if self.source is None else self.keys(padded)

    def back(self, x_BXTx: Tensor) -> Tensor:
        """The inverse of `queries`; queries before the first real token get zeros."""
        if self.source is None:
            return x_BXTx[:, :, self.lead :]
        target = torch.arange(self.num_keys - self.num_queries, self.num_keys, device=self.offset.device) - self.offset
        return _gathered(x_BXTx, target.clamp(min=0)).masked_fill((target < 0)[:, None, :, None], 0.0)

    def key_numbers(self, x_BS: Tensor) -> Tensor:
        """Numbers [B or 1, S] -> [B or 1, F]"""
        return self.keys(x_BS[:, None, :, None])[:, 0, :, 0]

    def query_numbers(self, x_BT: Tensor) -> Tensor:
        """Numbers [B or 1, T] -> [B or 1, rows from `start` on]"""
        return self.queries(x_BT[:, None, :, None])[:, 0, :, 0]

    def valid(self, key_mask: Tensor | None) -> Tensor | None:
        """bool [B or 1, F], where a slot of the frame holds a token; None: everywhere."""
        if key_mask is None:
            if self.num_slots == self.num_keys:
                return None
            return (torch.arange(self.num_slots, device=self.offset.device) < self.num_keys).unsqueeze(0)
        found = self.key_numbers(key_mask.bool())
        return found if self.source is None else found & (self.source < self.num_keys)


def _gathered(x_BXSx: Tensor, index_BF: Tensor) -> Tensor:
    """[B, X, F, x]: the slots `index` of x, whose examples may be one."""
    index = index_BF[:, None, :, None].expand(-1, x_BXSx.shape[1], -1, x_BXSx.shape[-1])
    return x_BXSx.expand(len(index), -1, -1, -1).gather(2, index)
