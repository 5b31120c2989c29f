from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require_positive


@dataclass(frozen=True)
class ShawOptions:
    kind: Literal["shaw"] = "shaw"
    clip: int = 16
    values: bool = True

    def __post_init__(self) -> None:
        require_positive(clip=self.clip)
