"""No position information at all ("NoPE"): order must come from the causal mask alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NoPositionsOptions:
    kind: Literal["none"] = "none"
