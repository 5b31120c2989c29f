"""Sliding-window attention with global tokens (Longformer, arXiv 2004.05150): query i sees keys |i - j| <= window / 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.attention.mechanism import ProjectionOptions


@dataclass(frozen=True)
class SlidingWindowOptions(ProjectionOptions):
    """Options of sliding-window attention."""

    kind: Literal["sliding_window"] = "sliding_window"
    window: int = 256  # keys in sight in all, the query's own not counted: half before, half after (causal: before only)
    block: int | None = None  # queries handled together; null: chosen. Must divide window / 2
    dilation: int = 1  # gap between the keys in sight
    global_tokens: int = 0  # so many first tokens see all and are seen by all
    global_projections: bool = False  # queries, keys and values of global tokens have matrices of their own
