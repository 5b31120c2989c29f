"""The table of attention kinds: adding one is a file beside this one, a member of the union and a row in the table."""

from __future__ import annotations

from tformer.nn.attention.additive import AdditiveAttention, AdditiveOptions
from tformer.nn.attention.bigbird import BigBirdAttention, BigBirdOptions
from tformer.nn.attention.core import (
    FullAttention,
    FullAttentionOptions,
)
from tformer.nn.attention.linformer import LinformerAttention, LinformerOptions
from tformer.nn.attention.mechanism import AttentionSizes, Mechanism, MechanismMaker, ProjectionOptions, Reach
from tformer.nn.attention.performer import PerformerAttention, PerformerOptions
from tformer.nn.attention.sliding_window import SlidingWindowAttention, SlidingWindowOptions

AttentionOptions = (
    FullAttentionOptions | AdditiveOptions | SlidingWindowOptions | BigBirdOptions | LinformerOptions | PerformerOptions
)

ATTENTION: dict[str, MechanismMaker] = {
    "full": FullAttention,
    "additive": AdditiveAttention,
    "linformer": LinformerAttention,
    "performer": PerformerAttention,
    "sliding_window": SlidingWindowAttention,
    "bigbird": BigBirdAttention,
}

ENCODER_ONLY = frozenset({"linformer"})
"""Kinds without a causal mode: no decoder can have them."""

CROSS_ATTENTION = frozenset({"full", "additive"})
"""Kinds that suit queries and keys of two sequences; beside another kind, cross-attention is full."""

ONE_DOCUMENT = frozenset({"linformer", "performer"})
"""Kinds that mix a whole row: documents packed into one cannot be hidden from each other."""


def build_mechanism(options: ProjectionOptions, sizes: AttentionSizes) -> Mechanism:
    """The mechanism of a kind. ValueError when options and sizes do not suit each other."""
    return ATTENTION[options.kind](options, sizes)


__all__ = [
    "ATTENTION",
    "CROSS_ATTENTION",
    "ENCODER_ONLY",
    "ONE_DOCUMENT",
    "AttentionOptions",
    "AttentionSizes",
    "FullAttentionOptions",
    "Mechanism",
    "ProjectionOptions",
    "Reach",
    "build_mechanism",
]
