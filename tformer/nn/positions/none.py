"""No position information at all ("NoPE"): order must come from the causal mask alone (arXiv 2305.19466)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.positions.base import Positions


@dataclass(frozen=True)
class NoPositionsOptions:
    kind: Literal["none"] = "none"


class NoPositions(Positions):
    """Every hook neutral."""
