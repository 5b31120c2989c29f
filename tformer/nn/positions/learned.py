from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require


@dataclass(frozen=True)
class LearnedOptions:
    kind: Literal["learned"] = "learned"
    offset: int = 0
    ids: Literal["arange", "nonpad_cumsum"] = "arange"

    def __post_init__(self) -> None:
        require(self.offset >= 0, f"offset must be at least 0, found {self.offset}")
