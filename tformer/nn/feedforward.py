from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require_positive


@dataclass(frozen=True)
class FeedForwardOptions:
    d_ff: int | None = None  # null: 4 * d_model
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"] = "gelu"
    gated: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        require_positive(d_ff=self.d_ff)
