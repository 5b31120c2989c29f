"""Attention with linear biases (arXiv 2108.12409): each head subtracts a slope times the distance from its scores.

Head n of H = 2^m has the slope 2^(-8n/H), n from 1. For other H the slopes of the power of two below come first, then
every other slope of the power above. Before the diagonal, -slope |j - i| is the paper's slope (j - i); without a causal
mask the distance counts both ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tformer.nn.positions.base import TabledPositions


@dataclass(frozen=True)
class AlibiOptions:
    kind: Literal["alibi"] = "alibi"


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope per head, the first the steepest of its series."""
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * n / below) for n in range(1, below + 1)]
    between = [2.0 ** (-4.0 * n / below) for n in range(1, 2 * (num_heads - below), 2)]
    return slopes + between


class AlibiPositions(TabledPositions):
    """The table holds the slopes, [H]."""

    has_bias = True

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.build_table(num_heads)

    def formula(self, pos: Tensor) -> Tensor:
        return torch.tensor(alibi_slopes(self.num_heads), device=pos.device)

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        distance = (k_pos_BS.unsqueeze(1) - q_pos_BT.unsqueeze(2)).abs_()
        return distance.unsqueeze(1) * -self.table.view(1, -1, 1, 1)
