"""Position biases added to the attention scores, one per head: ALiBi (arXiv 2108.12409) and T5 (1910.10683)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.options import require
from tformer.nn.positions.base import Positions, TabledPositions


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


@dataclass(frozen=True)
class T5BiasOptions:
    kind: Literal["t5_bias"] = "t5_bias"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        require(self.buckets >= 4, f"buckets must be at least 4, found {self.buckets}")
        require(
            self.max_distance > self.buckets // 2,
            f"max_distance {self.max_distance} must exceed half the buckets ({self.buckets // 2})",
        )


def t5_bucket(relative: Tensor, *, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Bucket of each relative distance (key position minus query position), long, same shape."""
    first = torch.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        first = (relative > 0).long() * buckets
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    exact = buckets // 2
    # In fp32 and in this order, as released T5 models compute it: other roundings move a distance to another bucket.
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    logarithmic = exact + (ratio * (buckets - exact)).long()
    return first + torch.where(distance < exact, distance, logarithmic.clamp(max=buckets - 1))


class T5BiasPositions(Positions):
    """weight [buckets, H]."""

    has_bias = True

    def __init__(self, options: T5BiasOptions, *, num_heads: int, bidirectional: bool) -> None:
        super().__init__()
        self.options = options
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.zeros(options.buckets, num_heads))

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        bucket_BTS = t5_bucket(
            k_pos_BS.unsqueeze(1) - q_pos_BT.unsqueeze(2),
            buckets=self.options.buckets,
            max_distance=self.options.max_distance,
            bidirectional=self.bidirectional,
        )
        return F.embedding(bucket_BTS, self.weight).permute(0, 3, 1, 2)
