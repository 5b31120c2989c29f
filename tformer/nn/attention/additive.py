"""Additive attention (Bahdanau et al., arXiv 1409.0473): scores from a small network instead of a product.

    score(q, k) = w . tanh(q + k)

with one learned vector w per head; the matrices of the paper's W q + U k are the projections of queries and keys, which
every kind has. No factor 1/sqrt(head_dim) is applied beyond the kind's `scale` (auto: 1).

Shape legend: B batch, H query heads, K kv heads, T queries, S keys, h head_dim, v value_dim, t queries of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.attention.mechanism import ProjectionOptions


@dataclass(frozen=True)
class AdditiveOptions(ProjectionOptions):
    """Options of additive attention."""

    kind: Literal["additive"] = "additive"
