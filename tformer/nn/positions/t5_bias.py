from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require


@dataclass(frozen=True)
class T5BiasOptions:
    kind: Literal["t5_bias"] = "t5_bias"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        require(self.buckets >= 4, f"buckets must be at least 4, found {self.buckets}")
        require(
            self.max_distance > self.buckets // 2,
            f"max_distance {self.max_distance} must exceed half the buckets ({self.buckets // 2})",
        )
