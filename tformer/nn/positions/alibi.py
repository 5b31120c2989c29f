from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AlibiOptions:
    kind: Literal["alibi"] = "alibi"
