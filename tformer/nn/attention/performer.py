"""Performer (FAVOR+, arXiv 2009.14794): softmax attention by positive random features, linear in the length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.attention.mechanism import ProjectionOptions


@dataclass(frozen=True)
class PerformerOptions(ProjectionOptions):
    """Options of FAVOR+ attention."""

    kind: Literal["performer"] = "performer"
    features: int | None = None  # random features per head; null: head_dim ln head_dim
    kernel: Literal["softmax", "relu"] = "softmax"
    redraw_steps: int = 1000  # training steps between new draws of the features; 0: never
