from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require_positive, require_probability


@dataclass(frozen=True)
class CausalLmOptions:
    kind: Literal["causal_lm"] = "causal_lm"
    label_smoothing: float = 0.0
    smoothing_kind: Literal["uniform", "off_target"] = "uniform"  # torch: eps over all K; fairseq: eps/(K-1) off the target
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(label_smoothing=self.label_smoothing)
        require_positive(weight=self.weight)
