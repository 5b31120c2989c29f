from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require_positive


@dataclass(frozen=True)
class Patch2dOptions:
    kind: Literal["patch2d"] = "patch2d"
    base: float = 10000.0

    def __post_init__(self) -> None:
        require_positive(base=self.base)
