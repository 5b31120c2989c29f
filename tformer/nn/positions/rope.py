"""Rotary positions (RoFormer, arXiv 2104.09864): pairs of query and key coordinates turn with the position.

Pair i of a head at position p turns by p * base^(-2i/h); the product of a query at p and a key at p' then depends on
p - p' alone. Two layouts of the pairs: interleaved (2i, 2i + 1), the paper's, and halves (i, i + h/2), Llama's on disk;
they differ by the permutation [evens, odds] of each head's projection rows. Interleaved is the faster one on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tformer.nn.fused import Rotation, prepare_rotation
from tformer.nn.options import require, require_positive
from tformer.nn.positions.base import Positions, PositionSizes
from tformer.nn.positions.fixed import TabledPositions, inverse_frequencies


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling for contexts longer than those of pre-training."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        require_positive(
            factor=self.factor, low_freq_factor=self.low_freq_factor, original_max_seq_len=self.original_max_seq_len
        )
        require(
            self.high_freq_factor > self.low_freq_factor,
            f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}",
        )


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # full turns over the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class RopePositions(TabledPositions):
    """Turns queries and keys. ValueError when head_dim is odd."""

    kind = "rope"
    about = "Pairs of query and key coordinates turn by an angle that grows with the position (arXiv 2104.09864)."

    def __init__(self, options: RopeOptions, *, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rope positions, found {head_dim}")
        self.options = options
        self.head_dim = head_dim
        self.build_table(max_seq_len)

    def formula(self, pos: Tensor) -> Tensor:
        """[*] -> [*, h]: h/2 cosines, then h/2 sines."""
        half = self.head_dim // 2
        frequencies = inverse_frequencies(half, half, self.options.base, pos.device)
        if self.options.scaling is not None:
            frequencies = scale_frequencies(frequencies, self.options.scaling)
        angles = pos.unsqueeze(-1) * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def prepare(self, x: Tensor, pos_BT: Tensor, *, heads: int) -> Rotation:
        cos, sin = self.rows(pos_BT).chunk(2, dim=-1)
        return prepare_rotation(cos, sin, x, interleaved=self.options.layout == "interleaved", heads=heads)

    def rotate(
        self,
        q_BHTh: Tensor,
        k_BKTh: Tensor,
        q_pos_BT: Tensor,
        k_pos_BT: Tensor,
        prepared: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        if prepared is not None:
            return prepared.turn(q_BHTh), prepared.turn(k_BKTh)
        q_turn = self.prepare(q_BHTh, q_pos_BT, heads=q_BHTh.shape[1])
        k_turn = q_turn if k_pos_BT is q_pos_BT else self.prepare(k_BKTh, k_pos_BT, heads=k_BKTh.shape[1])
        return q_turn.turn(q_BHTh), k_turn.turn(k_BKTh)


@dataclass(frozen=True)
class RopeOptions:
    module: ClassVar = RopePositions
    kind: Literal["rope"] = "rope"
    layout: Literal["halves", "interleaved"] = "halves"
    base: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        require_positive(base=self.base)

    def build(self, sizes: PositionSizes) -> Positions:
        return RopePositions(self, head_dim=sizes.head_dim, max_seq_len=sizes.max_seq_len)
