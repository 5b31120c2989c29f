"""The frame in which BigBird's blocks are counted: slot 0 holds the first real token of every row, blocks are whole.

Rows that do not begin with padding stay as they are. Others are moved (and moved back), as each row's blocks begin
elsewhere.

Shape legend: B batch, X heads, T queries, S keys, F slots of the frame, x head_dim or value_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """num_slots: F. start: the frame's slot of the first query row. lead: rows of no query before the first query.

    source: long [B, F], the slot that each slot of the frame holds; None: the same one. offset: long [B, 1].
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
        if key_mask is None or _none_for_free(offset):
            start = earlier // block * block
            return Frame(num_queries, num_keys, num_slots, start, earlier - start, offset, None)
        source = torch.arange(num_slots, device=offset.device) + offset
        return Frame(num_queries, num_keys, num_slots, 0, earlier, offset, source)

    def keys(self, x_BXSx: Tensor) -> Tensor:
        """[B, X, S, x] -> [B, X, F, x]"""
        if self.source is None:
            more = self.num_slots - self.num_keys
            return F.pad(x_BXSx, (0, 0, 0, more)) if more else x_BXSx
        index = self.source.clamp(max=self.num_keys - 1)[:, None, :, None]
        return x_BXSx.gather(2, index.expand(-1, x_BXSx.shape[1], -1, x_BXSx.shape[-1]))

    def queries(self, x_BXTx: Tensor) -> Tensor:
        """[B, X, T, x] -> [B, X, rows from `start` on, x]"""
        padded = F.pad(x_BXTx, (0, 0, self.lead, 0)) if self.lead else x_BXTx
        return padded if self.source is None else self.keys(padded)

    def back(self, x_BXTx: Tensor) -> Tensor:
        """The inverse of `queries`; queries before the first real token get zeros."""
        if self.source is None:
            return x_BXTx[:, :, self.lead :]
        target = torch.arange(self.num_keys - self.num_queries, self.num_keys, device=self.offset.device) - self.offset
        index = target.clamp(min=0)[:, None, :, None]
        found = x_BXTx.gather(2, index.expand(-1, x_BXTx.shape[1], -1, x_BXTx.shape[-1]))
        return found.masked_fill((target < 0)[:, None, :, None], 0.0)

    def key_places(self, x_BS: Tensor) -> Tensor:
        """Numbers [B or 1, S] -> [B or 1, F]"""
        if self.source is None:
            return F.pad(x_BS, (0, self.num_slots - self.num_keys))
        return x_BS.expand(self.source.shape[0], -1).gather(1, self.source.clamp(max=self.num_keys - 1))

    def query_places(self, x_BT: Tensor) -> Tensor:
        """Numbers [B or 1, T] -> [B or 1, rows from `start` on]"""
        padded = F.pad(x_BT, (self.lead, 0))
        return padded if self.source is None else self.key_places(padded)

    def valid(self, key_mask: Tensor | None) -> Tensor | None:
        """bool [B or 1, F], where a slot of the frame holds a token; None: everywhere."""
        if key_mask is None:
            if self.num_slots == self.num_keys:
                return None
            return (torch.arange(self.num_slots, device=self.offset.device) < self.num_keys).unsqueeze(0)
        found = self.key_places(key_mask.bool())
        return found if self.source is None else found & (self.source < self.num_keys)


def _none_for_free(offset: Tensor) -> bool:
    """Whether no row begins with padding, asked only where the answer costs no synchronisation."""
    return offset.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(offset.any())
