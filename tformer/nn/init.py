from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require_positive


@dataclass(frozen=True)
class InitOptions:
    """How fresh weights are drawn; `init.py` is the one place that does it.

    normal: N(0, std). xavier: uniform, fan-in + fan-out (the original). scaled: U(+-sqrt(3/fan_in)) * gain (Muon recipes).
    """

    kind: Literal["normal", "xavier", "scaled"] = "normal"
    std: float = 0.02
    residual_scale: bool = True  # projections into the residual stream: std / sqrt(2 * num_layers), GPT-2
    zero_out: bool = False  # those projections start at zero instead
    embedding_std: float | None = None  # null: std
    output_std: float | None = None  # an untied output projection; null: std; 0 allowed

    def __post_init__(self) -> None:
        require_positive(std=self.std, embedding_std=self.embedding_std)
