"""Vectors of n-grams: each token together with the one to n - 1 tokens before it, added to the token's own vector.

A language model then need not spend its first layers on finding which tokens stand side by side. All n-grams share one
table, in which a hash gives each its row, as in fastText (arXiv 1607.04606) and, for the inputs of a Transformer,
arXiv 2501.16975. With token ids x and R rows:

    h_1 = x_t + 1,    h_k = P h_(k-1) xor (x_(t-k+1) + 1),    row_k = mix(h_k) mod R,    k = 2 ... n
    out = sum_k table[row_k]

A place before the text, of padding, or in another document counts as -1. The table starts at zero: a new model computes
what it would compute without it.
"""

# Shapes: B batch, T positions, N = n - 1 tokens before a position, E embedding size, R rows.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOTHING = -1
"""Id of a place without a token."""
PRIME, MIX, SHIFT = 1_000_003, 2_654_435_761, 15
"""Constants of the hash, which is computed in 64 bits with overflow: multipliers (FNV's kind; Knuth's) and a shift."""


class NgramEmbedding(nn.Module):
    """A table [R, E] of vectors for sequences of 2 to `longest` tokens."""

    def __init__(self, size: int, *, longest: int, rows: int) -> None:
        super().__init__()
        self.longest = longest
        self.weight = nn.Parameter(torch.zeros(rows, size))

    def forward(
        self,
        ids_BT: Tensor,
        *,
        real_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        before_BN: Tensor | None = None,
    ) -> Tensor:
        """The sum of the vectors of the n-grams that end at each position, [B, T, E].

        real_BT: where a token is real. document_ids_BT: n-grams stay within a document. before_BN: the ids before the
        first position, of decoding with a cache.
        """
        return F.embedding(self.rows(ids_BT, real_BT, document_ids_BT, before_BN), self.weight).sum(dim=2)

    def rows(
        self, ids_BT: Tensor, real_BT: Tensor | None, document_ids_BT: Tensor | None, before_BN: Tensor | None
    ) -> Tensor:
        """The row of each n-gram, [B, T, N]."""
        length, most = ids_BT.shape[1], self.longest - 1
        known_BT = ids_BT if real_BT is None else ids_BT.masked_fill(~real_BT.bool(), NOTHING)
        if before_BN is None:
            line = F.pad(known_BT, (most, 0), value=NOTHING)
        else:
            line = torch.cat([before_BN, known_BT], dim=1)
        documents = None if document_ids_BT is None else F.pad(document_ids_BT, (most, 0), value=NOTHING)
        hashes, rows = ids_BT + 1, []
        for distance in range(1, self.longest):
            there = slice(most - distance, most - distance + length)
            earlier_BT = line[:, there]
            if documents is not None:
                earlier_BT = earlier_BT.masked_fill(documents[:, there] != documents[:, most:], NOTHING)
            hashes = (hashes * PRIME) ^ (earlier_BT + 1)
            mixed = hashes * MIX + distance
            rows.append((mixed ^ (mixed >> SHIFT)) % self.weight.shape[0])
        return torch.stack(rows, dim=2)
