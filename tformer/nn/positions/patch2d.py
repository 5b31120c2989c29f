"""Fixed two-dimensional sinusoids for image patches (MAE, arXiv 2111.06377; also Beyer et al., arXiv 2205.01580).

The first half of the features encodes the patch's column, the second its row, each as [sin | cos] with frequencies
base^(-i / (D/4)). Patches count row by row; a class token, when there is one, comes first and gets zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tformer.nn.options import require_positive
from tformer.nn.positions.base import TabledPositions
from tformer.nn.positions.sinusoidal import sinusoids


@dataclass(frozen=True)
class Patch2dOptions:
    kind: Literal["patch2d"] = "patch2d"
    base: float = 10000.0

    def __post_init__(self) -> None:
        require_positive(base=self.base)


class Patch2dPositions(TabledPositions):
    """grid: (rows, columns, has a class token). ValueError when d_model is not a multiple of 4."""

    has_embed = True

    def __init__(self, options: Patch2dOptions, *, d_model: int, grid: tuple[int, int, bool]) -> None:
        super().__init__()
        if d_model % 4:
            raise ValueError(f"d_model must be a multiple of 4 for patch2d positions, found {d_model}")
        self.options = options
        self.d_model = d_model
        self.num_columns, self.has_cls = grid[1], grid[2]
        self.build_table(grid[0] * grid[1] + grid[2])

    def formula(self, pos: Tensor) -> Tensor:
        patch = pos - int(self.has_cls)
        row = patch.div(self.num_columns, rounding_mode="floor")
        halves = [
            sinusoids(at, self.d_model // 2, layout="halves", base=self.options.base)
            for at in (patch - row * self.num_columns, row)
        ]
        return torch.cat(halves, dim=-1) * (patch >= 0).unsqueeze(-1)

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        return x_BTD + self.rows(pos_BT).to(x_BTD.dtype)
