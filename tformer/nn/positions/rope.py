"""Rotary positions (RoPE, RoFormer, arXiv 2104.09864): pairs of query and key coordinates are rotated by the position.

Pair i of a head at position p is rotated by p * base^(-2i/h); the product of a query at p and a key at p' then depends
only on p - p'. Two layouts of the pairs: interleaved (2i, 2i + 1), as in the paper, and halves (i, i + h/2), as in
Llama's files; they differ by the permutation [evens, odds] of the projection rows of each head. Interleaved is faster
on a CPU. Where a share of each head is rotated, h stands for its size in these formulas.

Eager PyTorch on a CPU would rotate halves over short strided rows; the hand-written gradient takes as few full passes
over memory as stock operators allow.

Shape legend: B batch, T positions, H query heads, K kv heads, h head_dim, p = h/2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """Other frequencies of rotary positions.

    linear divides them all, dynamic raises the base with the current length, llama3 divides those of long wavelengths,
    yarn (arXiv 2309.00071) those with few turns, longrope (arXiv 2402.13753) each by another factor.

    dynamic and longrope depend on the current length, the last position of the batch plus one. Beyond
    `original_max_seq_len` a cache keeps the keys as they were turned, as `transformers` does, so that decoding differs
    from one pass over the whole text.
    """

    kind: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = "llama3"
    factor: float = 8.0  # of the context; longrope: decides attention_factor alone
    low_freq_factor: float = 1.0  # llama3: fewer turns in the original context than this: divided
    high_freq_factor: float = 4.0  # llama3: more turns than this: unchanged
    original_max_seq_len: int = 8192  # context length of pre-training
    beta_fast: float = 32.0  # yarn: more turns in the original context than this: unchanged
    beta_slow: float = 1.0  # yarn: fewer turns than this: divided
    truncate: bool = True  # yarn: whole numbers of pairs as the limits between them
    # yarn, longrope: factor of queries and keys; null: 0.1 ln f + 1, sqrt(1 + ln f / ln original_max_seq_len)
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()  # longrope: divisor of each pair's frequency up to original_max_seq_len
    long_factors: tuple[float, ...] = ()  # longrope: divisors of longer texts

    def __post_init__(self) -> None:
        require_positive(
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            beta_slow=self.beta_slow,
            attention_factor=self.attention_factor,
        )
        require(
            self.high_freq_factor > self.low_freq_factor,
            f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}",
        )
        require(self.original_max_seq_len > 1, f"original_max_seq_len must exceed 1, found {self.original_max_seq_len}")
        require(self.beta_fast > self.beta_slow, f"beta_fast {self.beta_fast} must exceed beta_slow {self.beta_slow}")
        for name in OWN_OPTIONS:
            stated, kinds = getattr(self, name) != getattr(RopeScaling, name), OWN_OPTIONS[name]
            require(not stated or self.kind in kinds, f"{name} must be left out: it belongs to {' and '.join(kinds)}")

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the current length."""
        return self.kind in ("dynamic", "longrope")

    @property
    def divisors(self) -> Tensor:
        """longrope's divisors [2, p], short and long, on the CPU."""
        return torch.tensor([self.short_factors, self.long_factors], device="cpu")

    @property
    def size(self) -> float:
        """The factor of cosines and sines, and so of queries and keys."""
        if self.kind not in ("yarn", "longrope") or self.attention_factor is not None:
            return self.attention_factor or 1.0
        growth = math.log(max(self.factor, 1.0))
        if self.kind == "yarn":
            return 0.1 * growth + 1.0
        return math.sqrt(1.0 + growth / math.log(self.original_max_seq_len))


OWN_OPTIONS = {
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
    **dict.fromkeys(("beta_fast", "beta_slow", "truncate"), ("yarn",)),
    **dict.fromkeys(("short_factors", "long_factors"), ("longrope",)),
    "attention_factor": ("yarn", "longrope"),
}
"""Options of scaling that not every kind has -> the kinds with it."""


def scale_frequencies(
    frequencies: Tensor,
    scaling: RopeScaling,
    *,
    base: float = 10000.0,
    length: Tensor | int = 0,
    divisors: Tensor | None = None,
) -> Tensor:
    """The frequencies base^(-i/p) of p pairs, as `scaling` changes them in a text of `length` tokens.

    divisors: of longrope, `scaling.divisors` on the device of `frequencies`.
    """
    pairs, factor, original = len(frequencies), scaling.factor, scaling.original_max_seq_len
    number = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
    match scaling.kind:
        case "linear":
            return frequencies / factor
        case "dynamic":  # base * growth^(2p/(2p-2))
            growth = factor * torch.as_tensor(length).to(frequencies).clamp(min=original) / original - (factor - 1)
            return frequencies * growth ** (-number / max(pairs - 1, 1))
        case "longrope":
            short, long = (scaling.divisors if divisors is None else divisors).to(frequencies)
            return frequencies / torch.where(torch.as_tensor(length, device=short.device) > original, long, short)
        case "yarn":  # number of the pair that turns that often within the original context
            first, last = (
                pairs * math.log(original / (2 * math.pi * turns)) / math.log(base)
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * pairs - 1)
            keep = 1 - ((number - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
        case "llama3":
            turns = original * frequencies / (2 * math.pi)  # full turns over the original context
            keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / factor)


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
    """Rotates queries and keys, or the first coordinates of each head. ValueError when these are an odd number."""

    kind = "rope"
    about = "Pairs of query and key coordinates turn by an angle that grows with the position (arXiv 2104.09864)."

    def __init__(self, options: RopeOptions, *, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.options, self.head_dim, self.width = options, head_dim, options.width(head_dim)
        part = "" if options.share == 1.0 else f" of which {options.share:g} are rotated"
        if self.width % 2 or not self.width:
            raise ValueError(f"head_dim must be even for rope positions, found {head_dim}{part}")
        scaling = options.scaling
        if scaling is not None and scaling.by_length:
            max_seq_len = min(max_seq_len, scaling.original_max_seq_len)  # rows that do not depend on the length
        if scaling is not None and scaling.kind == "longrope":
            for name in ("short_factors", "long_factors"):
                if (count := len(getattr(scaling, name))) != (pairs := self.width // 2):
                    raise ValueError(f"scaling.{name} has {count} numbers, expected {pairs}, one for each pair")
        self.divisors: Tensor | None = None
        self.build_table(max_seq_len)
        self._place_divisors()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RopePositions:
        self.divisors = None
        super()._apply(fn, recurse)
        self._place_divisors()
        return self

    def _place_divisors(self) -> None:
        """Put longrope's divisors where the table is; a copy from the CPU has no place in a CUDA graph."""
        if self.options.scaling is not None and self.options.scaling.kind == "longrope":
            self.divisors = self.options.scaling.divisors.to(self.table.device)

    def formula(self, pos: Tensor) -> Tensor:
        """[*] -> [*, 2p]: p cosines, then p sines."""
        half, scaling = self.width // 2, self.options.scaling
        frequencies = inverse_frequencies(half, half, self.options.base, pos.device)
        if scaling is not None:
            length = pos.max() + 1 if scaling.by_length else 0
            base, divisors = self.options.base, self.divisors
            frequencies = scale_frequencies(frequencies, scaling, base=base, length=length, divisors=divisors)
        angles = pos.unsqueeze(-1) * frequencies
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return table if scaling is None else table * scaling.size

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
        of_queries = prepared or self.prepare(q_BHTh, q_pos_BT, heads=q_BHTh.shape[1])
        of_keys = of_queries
        if prepared is None and k_pos_BT is not q_pos_BT:
            of_keys = self.prepare(k_BKTh, k_pos_BT, heads=k_BKTh.shape[1])
        return self._rotated(q_BHTh, of_queries), self._rotated(k_BKTh, of_keys)

    def _rotated(self, x_BHTh: Tensor, rotation: Rotation) -> Tensor:
        if self.width == self.head_dim:
            return rotation.rotate(x_BHTh)
        turned, kept = x_BHTh.split_with_sizes((self.width, self.head_dim - self.width), dim=-1)
        return torch.cat((rotation.rotate(turned), kept), dim=-1)


@dataclass(frozen=True)
class RopeOptions:
    """Rotary positions: queries and keys are rotated by their position (arXiv 2104.09864)."""

    module: ClassVar = RopePositions
    kind: Literal["rope"] = "rope"
    layout: Literal["halves", "interleaved"] = "halves"  # pairs (i, i + h/2), as in Llama, or (2i, 2i + 1)
    base: float = 10000.0  # base of the angles base^(-2i/h)
    share: float = 1.0  # part of each head that is rotated, from its first coordinate on (arXiv 2204.06745)
    scaling: RopeScaling | None = None  # for contexts longer than those of pre-training; null: none

    def __post_init__(self) -> None:
        require_positive(base=self.base)
        yarn = self.scaling is not None and self.scaling.kind == "yarn"
        require(self.base > 1.0 or not yarn, f"base must exceed 1 with scaling yarn, found {self.base}")
        require(0.0 < self.share <= 1.0, f"share must be above 0 and at most 1, found {self.share}")

    def width(self, head_dim: int) -> int:
        """The number of coordinates of a head that are rotated."""
        return int(self.share * head_dim + 1e-6)  # a share of 3/7 is not less than 3 of 7

    def build(self, sizes: PositionSizes) -> Positions:
        return RopePositions(self, head_dim=sizes.head_dim, max_seq_len=sizes.max_seq_len)
