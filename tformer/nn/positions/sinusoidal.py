"""Fixed sines and cosines of geometrically spaced wavelengths, added to the embeddings (arXiv 1706.03762, 3.5).

The paper: PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos(pos / base^(2i/D)). Three layouts are published:
- interleaved: the paper's.
- halves: [sin | cos], the same frequencies (Marian); a permutation of the paper's columns.
- fairseq: [sin | cos] with exponent i / (D/2 - 1), so that the last wavelength is exactly base (tensor2tensor).
"""

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
