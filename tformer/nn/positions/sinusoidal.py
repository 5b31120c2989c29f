"""Fixed sines and cosines added to the embeddings: of positions (arXiv 1706.03762) or image patches (2111.06377)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tformer.nn.options import require_positive
from tformer.nn.positions.base import TabledPositions, inverse_frequencies


@dataclass(frozen=True)
class SinusoidalOptions:
    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves", "fairseq"] = "interleaved"
    base: float = 10000.0

    def __post_init__(self) -> None:
        require_positive(base=self.base)


def sinusoids(pos: Tensor, dim: int, *, layout: str, base: float) -> Tensor:
    """Positions [*] -> [*, dim], fp64 (fp32 on devices without it)."""
    half = dim // 2
    denominator = max(half - 1, 1) if layout == "fairseq" else half
    angles = pos.unsqueeze(-1) * inverse_frequencies(half, denominator, base, pos.device)
    if layout == "interleaved":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class SinusoidalPositions(TabledPositions):
    """Adds the sinusoid of each position to the embeddings. ValueError when d_model is odd."""

    has_embed = True

    def __init__(self, options: SinusoidalOptions, *, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model must be even for sinusoidal positions, found {d_model}")
        self.options = options
        self.d_model = d_model
        self.build_table(max_seq_len)

    def formula(self, pos: Tensor) -> Tensor:
        return sinusoids(pos, self.d_model, layout=self.options.layout, base=self.options.base)

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        return x_BTD + self.rows(pos_BT).to(x_BTD.dtype)


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
