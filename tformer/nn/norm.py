from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require_positive


@dataclass(frozen=True)
class NormOptions:
    kind: Literal["layernorm", "rmsnorm", "scalenorm"] = "layernorm"
    place: Literal["pre", "post"] = "pre"
    eps: float = 1.0e-5
    bias: bool = True  # layernorm only
    learned: bool = True  # a gain (and bias); False: plain normalisation

    def __post_init__(self) -> None:
        require_positive(eps=self.eps)
