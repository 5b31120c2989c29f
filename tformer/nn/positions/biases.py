"""Position biases added to the scores of attention, one per head: ALiBi (fixed) and T5's buckets (learned).

MPNet (arXiv 2004.09297) has T5's biases beside learned vectors at the input.

ALiBi (arXiv 2108.12409): each head subtracts a slope times the distance. Head n of H = 2^m has the slope 2^(-8n/H), n
from 1. For other H the slopes of the power of two below come first, then every other slope of the power above. Before
the diagonal, -slope |j - i| is the paper's slope (j - i); without a causal mask the distance counts both ways.

T5 (arXiv 1910.10683, 2.1): a learned bias per head and bucket of relative distance. The first half of the buckets holds
one distance each; the second half grows logarithmically up to `max_distance`, and the last one takes everything beyond.
Bidirectional attention gives half of the buckets to keys after the query; causal attention counts every later key as
distance 0. One table serves all layers of a stack; UMT5 (arXiv 2304.09151) has one in every layer.

Shape legend: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.options import require
from tformer.nn.positions.base import LearnedOptions, LearnedPositions, Positions, PositionSizes
from tformer.nn.positions.fixed import TabledPositions


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope per head, the first the steepest of its series."""
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * n / below) for n in range(1, below + 1)]
    between = [2.0 ** (-4.0 * n / below) for n in range(1, 2 * (num_heads - below), 2)]
    return slopes + between


class AlibiPositions(TabledPositions):
    """Subtracts slope · distance from the scores; the table holds the slopes [H].

    rounded_scale: None: as in the paper. Else the product of the slope with the position of the key is computed in bf16
        and multiplied by this scale of the scores (Falcon).
    """

    kind = "alibi"
    about = "Each head subtracts a slope times the distance from its scores (arXiv 2108.12409)."
    per_head = True

    def __init__(self, *, num_heads: int, rounded_scale: float | None = None) -> None:
        super().__init__()
        self.num_heads, self.rounded_scale = num_heads, rounded_scale
        self.build_table(num_heads)

    def formula(self, pos: Tensor) -> Tensor:
        return torch.tensor(alibi_slopes(self.num_heads), device=pos.device)

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        if self.rounded_scale is not None:  # of the key alone: what is equal for all keys of a query changes nothing
            # The product of two numbers in bf16 is exact in fp32; graphs of ONNX have it there only.
            by_key = self.table.bfloat16().float().view(1, -1, 1, 1) * k_pos_BS[:, None, None].bfloat16().float()
            return by_key.bfloat16().float().expand(-1, -1, q_pos_BT.shape[1], -1) * self.rounded_scale
        distance = (k_pos_BS.unsqueeze(1) - q_pos_BT.unsqueeze(2)).abs_()
        return distance.unsqueeze(1) * -self.table.view(1, -1, 1, 1)


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
    """Adds a learned bias per bucket of distance to the scores: weight [buckets, H]."""

    kind = "t5_bias"
    about = "A learned bias per head and bucket of relative distance, added to the scores (arXiv 1910.10683)."
    trained = True
    per_head = True

    def __init__(self, options: T5BiasOptions, *, num_heads: int, bidirectional: bool) -> None:
        super().__init__()
        self.options = options
        self.per_layer = options.per_layer
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


class LearnedT5BiasPositions(LearnedPositions):
    """Learned vectors added to the embeddings, weight, and T5's biases of the scores, relative.weight."""

    kind = "learned_t5_bias"
    about = "A learned vector per position at the input, and T5's bias in the scores (MPNet, arXiv 2004.09297)."
    per_head = True

    def __init__(self, options: LearnedT5BiasOptions, *, sizes: PositionSizes) -> None:
        super().__init__(options, d_model=sizes.d_model, max_seq_len=sizes.max_seq_len)
        biases = T5BiasOptions(buckets=options.buckets, max_distance=options.max_distance)
        self.relative = T5BiasPositions(biases, num_heads=sizes.num_heads, bidirectional=sizes.bidirectional)

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        return self.relative.bias(q_pos_BT, k_pos_BS)


@dataclass(frozen=True)
class AlibiOptions:
    """Linear biases: scores fall with the distance, by a fixed slope per head (arXiv 2108.12409)."""

    module: ClassVar = AlibiPositions
    kind: Literal["alibi"] = "alibi"
    # Falcon's: the product of slope and position of the key in bf16, added before the scores are scaled
    rounded: bool = False

    def build(self, sizes: PositionSizes) -> Positions:
        require(not (self.rounded and sizes.bidirectional), "rounded must be false in an encoder, found true")
        return AlibiPositions(num_heads=sizes.num_heads, rounded_scale=sizes.head_dim**-0.5 if self.rounded else None)


@dataclass(frozen=True)
class T5BiasOptions:
    """Learned biases of scores by distance, in buckets (T5, arXiv 1910.10683)."""

    module: ClassVar = T5BiasPositions
    kind: Literal["t5_bias"] = "t5_bias"
    buckets: int = 32  # number of learned biases per head
    max_distance: int = 128  # distances from here on share the last bucket
    per_layer: bool = False  # every layer has its own biases, as in UMT5

    def __post_init__(self) -> None:
        require(self.buckets >= 4, f"buckets must be at least 4, found {self.buckets}")
        require(
            self.max_distance > self.buckets // 2,
            f"max_distance {self.max_distance} must exceed half the buckets ({self.buckets // 2})",
        )

    def build(self, sizes: PositionSizes) -> Positions:
        return T5BiasPositions(self, num_heads=sizes.num_heads, bidirectional=sizes.bidirectional)


@dataclass(frozen=True)
class LearnedT5BiasOptions(LearnedOptions):
    """Learned absolute positions, and T5's biases of scores beside them (MPNet, arXiv 2004.09297)."""

    module: ClassVar[type[LearnedPositions]] = LearnedT5BiasPositions
    kind: Literal["learned_t5_bias"] = "learned_t5_bias"  # type: ignore[assignment]
    buckets: int = 32  # number of learned biases per head
    max_distance: int = 128  # distances from here on share the last bucket

    def __post_init__(self) -> None:
        super().__post_init__()
        T5BiasOptions(buckets=self.buckets, max_distance=self.max_distance)

    def build(self, sizes: PositionSizes) -> Positions:
        return LearnedT5BiasPositions(self, sizes=sizes)
