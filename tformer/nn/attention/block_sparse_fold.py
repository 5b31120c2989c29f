"""Dilation: slots of one residue modulo d become a sequence of their own, [B, *, S] -> [B d, *, ceil(S / d)].

Shape legend: B batch, X heads, S slots, d ways, x head_dim or value_dim, R shared keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.block_sparse_explicit import Places
from tformer.nn.attention.block_sparse_pattern import Pattern


@dataclass(frozen=True, slots=True)
class Fold:
    """batch: B; ways: d. Row b d + c of what is folded holds the slots c, c + d, c + 2 d, ... of row b."""

    batch: int
    ways: int

    def heads(self, x_BXSx: Tensor) -> Tensor:
        """[B, X, S, x] -> [B d, X, ceil(S / d), x]"""
        padded = F.pad(x_BXSx, (0, 0, 0, -x_BXSx.shape[2] % self.ways))
        return padded.unflatten(2, (-1, self.ways)).permute(0, 3, 1, 2, 4).flatten(0, 1)

    def back(self, x: Tensor, num_slots: int) -> Tensor:
        """The inverse of `heads`."""
        return x.unflatten(0, (self.batch, self.ways)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :num_slots]

    def slots(self, x_BS: Tensor) -> Tensor:
        """Numbers [B or 1, S] -> [B d, ceil(S / d)]"""
        x_BS = x_BS.expand(self.batch, -1)
        return F.pad(x_BS, (0, -x_BS.shape[1] % self.ways)).unflatten(1, (-1, self.ways)).transpose(1, 2).flatten(0, 1)

    def repeat(self, x_BRx: Tensor) -> Tensor:
        """What every residue reads, [B or 1, *] -> [B d or 1, *]"""
        return x_BRx if x_BRx.shape[0] != self.batch else x_BRx.repeat_interleave(self.ways, dim=0)

    def places(self, places: Places, lead: int) -> Places:
        """Positions; the queries are the last ones of the slots, behind `lead` others."""
        return Places(
            self.slots(F.pad(places.q_pos, (lead, 0))),
            self.slots(places.k_pos),
            None if places.shared_pos is None else self.repeat(places.shared_pos),
        )

    def pattern(self, pattern: Pattern, num_slots: int) -> Pattern:
        """The pattern among `num_slots` folded slots."""
        valid = pattern.key_valid
        if valid is None and num_slots % self.ways:
            valid = torch.ones(1, num_slots, dtype=torch.bool, device=pattern.band.device)

        def slots(x: Tensor | None) -> Tensor | None:
            return None if x is None else self.slots(x)

        def shared(x: Tensor | None) -> Tensor | None:
            return None if x is None else self.repeat(x)

        return replace(
            pattern,
            start=0,
            key_valid=slots(valid),
            documents=slots(pattern.documents),
            slots=slots(pattern.slots),
            shared_slots=shared(pattern.shared_slots),
            shared_valid=shared(pattern.shared_valid),
            shared_documents=shared(pattern.shared_documents),
        )
