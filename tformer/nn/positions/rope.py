"""Rotary positions (RoPE, RoFormer, arXiv 2104.09864): pairs of query and key coordinates are rotated by the position.

Pair i of a head at position p is rotated by p * base^(-2i/h); the product of a query at p and a key at p' then depends
only on p - p'. Two layouts of the pairs: interleaved (2i, 2i + 1), as in the paper, and halves (i, i + h/2), as in
Llama's files; they differ by the permutation [evens, odds] of the projection rows of each head. Interleaved is faster
on a CPU.

Eager PyTorch on a CPU would rotate halves over short strided rows; the hand-written gradient takes as few full passes
over memory as stock operators allow.

Shape legend: B batch, T positions, H query heads, K kv heads, h head_dim, p = h/2 pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tformer.nn.linear import accumulation_dtype, eager_on_cpu
from tformer.nn.options import require, require_positive
from tformer.nn.positions.base import Positions, PositionSizes
from tformer.nn.positions.fixed import TabledPositions, inverse_frequencies


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of Llama 3.1 for contexts longer than those of pre-training."""

    factor: float = 8.0  # divides low frequencies
    low_freq_factor: float = 1.0  # fewer turns in the original context than this: divided
    high_freq_factor: float = 4.0  # more turns than this: unchanged
    original_max_seq_len: int = 8192  # context length of pre-training

    def __post_init__(self) -> None:
        require_positive(
            factor=self.factor, low_freq_factor=self.low_freq_factor, original_max_seq_len=self.original_max_seq_len
        )
        require(
            self.high_freq_factor > self.low_freq_factor,
            f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}",
        )


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: divides the frequency of long wavelengths by `factor`, keeps short ones, interpolates between."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # full turns over the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class _Rotate(torch.autograd.Function):
    """Rotates every pair of coordinates by its angle; rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.interleaved = interleaved
        return _rotate_pairs(x, first) if interleaved else _rotate_halves(x, first, second, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        first, second = ctx.saved_tensors
        rotated = _rotate_pairs(grad, second) if ctx.interleaved else _rotate_halves(grad, first, second, -1.0)
        return rotated, None, None, None


def _rotate_pairs(x_BHTh: Tensor, turn_BTHp: Tensor) -> Tensor:
    """Complex products in fp32, heads innermost in memory."""
    x_BTHh = x_BHTh.transpose(1, 2)
    wide = x_BTHh.to(accumulation_dtype(x_BTHh.dtype)).contiguous()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    pairs = pairs * turn_BTHp if wide.data_ptr() == x_BHTh.data_ptr() else pairs.mul_(turn_BTHp)
    return torch.view_as_real(pairs).flatten(-2).to(x_BHTh.dtype).transpose(1, 2)


def _rotate_halves(x_BHTh: Tensor, cos_BTHh: Tensor, sin_BTHh: Tensor, sign: float) -> Tensor:
    """y = x cos + sign partner(x) [-sin, sin] in x's dtype, where the partner is x with its halves exchanged."""
    x_BTHh = x_BHTh.transpose(1, 2).contiguous()
    partner = x_BTHh.roll(x_BTHh.shape[-1] // 2, dims=-1)
    return (x_BTHh * cos_BTHh).addcmul_(partner, sin_BTHh, value=sign).transpose(1, 2)


class Rotation:
    """Cosines and sines of some positions, computed once for queries and keys of every layer.

    Args:
        cos_BTp, sin_BTp: [B or 1, T, h/2], without gradient.
        like: a tensor with the dtype and device of those to be rotated.
        interleaved: a pair of coordinates is (2i, 2i + 1), else (i, i + h/2).
        heads: the largest number of heads to be rotated; with positions of [1, T] the tables are repeated for them,
            because full-width passes are twice as fast as broadcast ones.
    """

    def __init__(self, cos_BTp: Tensor, sin_BTp: Tensor, *, like: Tensor, interleaved: bool, heads: int) -> None:
        dtype = like.dtype
        self.interleaved = interleaved
        self.cos_B1Tp, self.sin_B1Tp = cos_BTp.unsqueeze(1).to(dtype), sin_BTp.unsqueeze(1).to(dtype)
        self.eager_tables: tuple[Tensor, Tensor] | None = None  # of the hand-written gradient
        if not eager_on_cpu(like):
            return
        if interleaved:
            cos, sin = (table.to(accumulation_dtype(dtype)) for table in (cos_BTp, sin_BTp))
            tables = (torch.complex(cos, sin), torch.complex(cos, -sin))  # forward and backward
        else:
            tables = (
                torch.cat([cos_BTp, cos_BTp], dim=-1).to(dtype),
                torch.cat([-sin_BTp, sin_BTp], dim=-1).to(dtype),
            )
        heads = heads if cos_BTp.shape[0] == 1 else 1
        first, second = (table.unsqueeze(2).expand(-1, -1, heads, -1).contiguous() for table in tables)
        self.eager_tables = (first, second)

    def rotate(self, x_BHTh: Tensor) -> Tensor:
        """`x` [B, H, T, h] rotated, in its dtype; eager on a CPU in the memory order [B, T, H, h]."""
        if self.eager_tables is not None and not torch.compiler.is_dynamo_compiling():
            first_BTHp, second_BTHp = (table[:, :, : x_BHTh.shape[1]] for table in self.eager_tables)
            return _Rotate.apply(x_BHTh, first_BTHp, second_BTHp, self.interleaved)
        cos, sin = self.cos_B1Tp, self.sin_B1Tp
        if self.interleaved:
            first, second = x_BHTh.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        first, second = x_BHTh.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RopePositions(TabledPositions):
    """Rotates queries and keys. ValueError when head_dim is odd."""

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
        return Rotation(cos, sin, like=x, interleaved=self.options.layout == "interleaved", heads=heads)

    def rotate(
        self,
        q_BHTh: Tensor,
        k_BKTh: Tensor,
        q_pos_BT: Tensor,
        k_pos_BT: Tensor,
        prepared: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        if prepared is not None:
            return prepared.rotate(q_BHTh), prepared.rotate(k_BKTh)
        of_queries = self.prepare(q_BHTh, q_pos_BT, heads=q_BHTh.shape[1])
        of_keys = of_queries if k_pos_BT is q_pos_BT else self.prepare(k_BKTh, k_pos_BT, heads=k_BKTh.shape[1])
        return of_queries.rotate(q_BHTh), of_keys.rotate(k_BKTh)


@dataclass(frozen=True)
class RopeOptions:
    """Rotary positions: queries and keys are rotated by their position (arXiv 2104.09864)."""

    module: ClassVar = RopePositions
    kind: Literal["rope"] = "rope"
    layout: Literal["halves", "interleaved"] = "halves"  # pairs (i, i + h/2), as in Llama, or (2i, 2i + 1)
    base: float = 10000.0  # base of the angles base^(-2i/h)
    scaling: RopeScaling | None = None  # for contexts longer than those of pre-training; null: none

    def __post_init__(self) -> None:
        require_positive(base=self.base)

    def build(self, sizes: PositionSizes) -> Positions:
        return RopePositions(self, head_dim=sizes.head_dim, max_seq_len=sizes.max_seq_len)
