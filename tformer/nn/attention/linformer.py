"""Linformer (arXiv 2006.04768): keys and values are projected along the sequence, from T to `rank` of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.attention.mechanism import ProjectionOptions


@dataclass(frozen=True)
class LinformerOptions(ProjectionOptions):
    """Options of Linformer's low-rank attention."""

    kind: Literal["linformer"] = "linformer"
    rank: int = 128  # projected keys; at most max_seq_len
    # Which matrices [rank, max_seq_len] are one: none (keys and values of every head have their own), headwise (one for
    # keys and one for values of a layer), key_value (one for both), layerwise (one for all layers).
    sharing: Literal["none", "headwise", "key_value", "layerwise"] = "headwise"
