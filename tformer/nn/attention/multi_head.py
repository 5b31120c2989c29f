from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require_positive


@dataclass(frozen=True)
class FullAttentionOptions:
    """Options of dense multi-head attention; sizes (heads, head_dim, ...) belong to the stack."""

    kind: Literal["full"] = "full"
    qkv_bias: bool = True
    out_bias: bool = True
    scale: Literal["auto"] | float = "auto"  # auto: 1/sqrt(head_dim); T5 uses 1.0
    qk_norm: bool = False  # RMS-normalise queries and keys per head, without learned gains

    def __post_init__(self) -> None:
        if self.scale != "auto":
            require_positive(scale=self.scale)
