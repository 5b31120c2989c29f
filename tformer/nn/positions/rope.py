from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require, require_positive


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling for contexts longer than those of pre-training."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        require_positive(
            factor=self.factor, low_freq_factor=self.low_freq_factor, original_max_seq_len=self.original_max_seq_len
        )
        require(
            self.high_freq_factor > self.low_freq_factor,
            f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}",
        )


@dataclass(frozen=True)
class RopeOptions:
    kind: Literal["rope"] = "rope"
    layout: Literal["halves", "interleaved"] = "halves"
    base: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        require_positive(base=self.base)
