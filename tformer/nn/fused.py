"""Elementwise functions with hand-written gradients for eager PyTorch on a CPU: RMSNorm, squared ReLU, rotation,
dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Parameters, Result], *, recursive: bool = True) -> Callable[Parameters, Result]:
    """`function`, which a compiler does not look into; with `recursive` false, what it calls may be compiled again."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():
            found: Result = torch.compiler.disable(function, recursive=recursive)(*args, **kwargs)
            return found
        return function(*args, **kwargs)

    return call


_BY_HAND_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _by_hand(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _BY_HAND_DTYPES and not torch.compiler.is_compiling()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and products: fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _RmsNorm(torch.autograd.Function):
    """y = x r g with r = (mean(x^2) + eps)^-1/2;  dx = r (u - x r^2 mean(x u)) with u = dy g;  dg = sum(dy x r).

    The gradient of `c v / n`, the weight normalisation of row v with gain c and norm n, is c/n (u - v (u.v) / n^2).
    With c = sqrt(D) and n = c / r that is dx, so PyTorch's one-pass kernel for it does the work. Its c has x's dtype:
    in bf16 the share of u along x is removed to within 0.4 % where sqrt(D) is no bf16 number, below bf16's own noise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        wide_x = x.to(_wide(x.dtype))
        norm = torch.linalg.vector_norm(wide_x, dim=-1, keepdim=True)
        rate = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rate, gain)
        out = wide_x * rate if wide_x is x else wide_x.mul_(rate)
        if gain is not None:
            out.mul_(gain)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, rate, gain = ctx.saved_tensors
        grad_x = grad_gain = None
        if gain is not None and ctx.needs_input_grad[1]:
            grad_gain = x.to(rate.dtype).mul(rate).mul_(grad).flatten(0, -2).sum(0).to(gain.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = _rms_norm_grad(x, rate, gain, grad) if x.numel() else torch.zeros_like(x)
        return grad_x, grad_gain, None


def _rms_norm_grad(x: Tensor, rate: Tensor, gain: Tensor | None, grad: Tensor) -> Tensor:
    """dx of `_RmsNorm`, in x's dtype; the kernel refuses to be given nothing at all."""
    dim = x.shape[-1]
    if gain is not None:
        grad = (grad * gain).to(x.dtype)
    rows, row_grads = x.reshape(-1, dim).contiguous(), grad.reshape(-1, dim).contiguous()
    root = torch.full((rows.shape[0], 1), math.sqrt(dim), dtype=x.dtype)
    norm = root.to(rate.dtype) / rate.view(-1, 1)
    return torch.ops.aten._weight_norm_interface_backward(row_grads, rows, root, norm, 0)[0].view(x.shape)


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension (arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * gain, in x's dtype.

    Statistics are in fp32 whatever the dtype of `x` [*, D]; `gain` [D] may stay fp32 beside a bf16 `x`.
    """
    if _by_hand(x):
        return _RmsNorm.apply(x, gain, eps)
    return F.rms_norm(x, x.shape[-1:], None if gain is None else gain.to(x.dtype), eps)


class _ReluSquared(torch.autograd.Function):
    """y = max(x, 0)^2;  dx = 2 max(x, 0) dy, one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, positive, value=2.0)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (Primer, arXiv 2109.08668), in x's dtype and shape."""
    if _by_hand(x):
        return _ReluSquared.apply(x)
    return F.relu(x).square()


class _Rotate(torch.autograd.Function):
    """Every pair of coordinates turned by its angle; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.interleaved = interleaved
        return _turn_pairs(x, first) if interleaved else _turn_halves(x, first, second, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        first, second = ctx.saved_tensors
        turned = _turn_pairs(grad, second) if ctx.interleaved else _turn_halves(grad, first, second, -1.0)
        return turned, None, None, None


def _turn_pairs(x_BHTh: Tensor, turn_BTHp: Tensor) -> Tensor:
    """Complex products in fp32, heads innermost in memory."""
    x_BTHh = x_BHTh.transpose(1, 2)
    wide = x_BTHh.to(_wide(x_BTHh.dtype)).contiguous()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    pairs = pairs * turn_BTHp if wide.data_ptr() == x_BHTh.data_ptr() else pairs.mul_(turn_BTHp)
    return torch.view_as_real(pairs).flatten(-2).to(x_BHTh.dtype).transpose(1, 2)


def _turn_halves(x_BHTh: Tensor, cos_BTHh: Tensor, sin_BTHh: Tensor, sign: float) -> Tensor:
    """y = x cos + sign partner(x) [-sin, sin] in x's dtype, where the partner is x with its halves exchanged."""
    x_BTHh = x_BHTh.transpose(1, 2).contiguous()
    partner = x_BTHh.roll(x_BTHh.shape[-1] // 2, dims=-1)
    return (x_BTHh * cos_BTHh).addcmul_(partner, sin_BTHh, value=sign).transpose(1, 2)


class Rotation:
    """Cosines and sines of some positions, laid out once for all that is turned by them: queries, keys, every layer.

    Args:
        cos_BTp, sin_BTp: [B or 1, T, h/2], without gradient.
        dtype: of what will be turned.
        interleaved: a pair of coordinates is (2i, 2i + 1), else (i, i + h/2).
        heads: the most heads that will be turned; with positions of [1, T] the tables are repeated for them, because
            full-width passes are twice as fast as broadcast ones.
        by_hand: lay out the tables of the hand-written function too, beside those of the plain formula, which compiled
            code uses in any case.
    """

    def __init__(
        self, cos_BTp: Tensor, sin_BTp: Tensor, *, dtype: torch.dtype, interleaved: bool, heads: int, by_hand: bool
    ) -> None:
        self.interleaved = interleaved
        self.cos_B1Tp, self.sin_B1Tp = cos_BTp.unsqueeze(1).to(dtype), sin_BTp.unsqueeze(1).to(dtype)
        self.by_hand: tuple[Tensor, Tensor] | None = None
        if not by_hand:
            return
        if interleaved:
            cos, sin = (table.to(_wide(dtype)) for table in (cos_BTp, sin_BTp))
            tables = (torch.complex(cos, sin), torch.complex(cos, -sin))  # there and back
        else:
            tables = (
                torch.cat([cos_BTp, cos_BTp], dim=-1).to(dtype),
                torch.cat([-sin_BTp, sin_BTp], dim=-1).to(dtype),
            )
        heads = heads if cos_BTp.shape[0] == 1 else 1
        first, second = (table.unsqueeze(2).expand(-1, -1, heads, -1).contiguous() for table in tables)
        self.by_hand = (first, second)

    def turn(self, x_BHTh: Tensor) -> Tensor:
        """`x` [B, H, T, h] turned, in its dtype; by hand the memory order is [B, T, H, h], as attention likes it."""
        if self.by_hand is not None and not torch.compiler.is_compiling():
            first_BTHp, second_BTHp = (table[:, :, : x_BHTh.shape[1]] for table in self.by_hand)
            return _Rotate.apply(x_BHTh, first_BTHp, second_BTHp, self.interleaved)
        cos, sin = self.cos_B1Tp, self.sin_B1Tp
        if self.interleaved:
            first, second = x_BHTh.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        first, second = x_BHTh.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def prepare_rotation(cos_BTp: Tensor, sin_BTp: Tensor, like: Tensor, *, interleaved: bool, heads: int) -> Rotation:
    """The rotation (RoPE, arXiv 2104.09864) of tensors with the dtype and device of `like`; see `Rotation`."""
    return Rotation(cos_BTp, sin_BTp, dtype=like.dtype, interleaved=interleaved, heads=heads, by_hand=_by_hand(like))


def rotate_pairs(x_BHTh: Tensor, cos_BTp: Tensor, sin_BTp: Tensor, *, interleaved: bool) -> Tensor:
    """Turn each pair of coordinates of `x` [B, H, T, h] by the angle whose cosine and sine [B or 1, T, h/2] are given.

    A pair is (2i, 2i + 1) when `interleaved`, else (i, i + h/2). Returns x's shape and dtype.
    """
    return prepare_rotation(cos_BTp, sin_BTp, x_BHTh, interleaved=interleaved, heads=x_BHTh.shape[1]).turn(x_BHTh)


LANES = 4  # decisions in one 64-bit draw
LEVELS = 1 << 16


class _Dropout(torch.autograd.Function):
    """y = x m / (1 - p) with m drawn once and kept for the gradient, dx = dy m / (1 - p)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        keep = keep_mask(x.numel(), p).view(x.shape)
        noise = keep.to(x.dtype).div_(1.0 - p)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (noise,) = ctx.saved_tensors
        return grad * noise, None


def keep_mask(count: int, p: float) -> Tensor:
    """bool [count] on the CPU: each True with probability 1 - p, rounded to a multiple of 2^-16."""
    threshold = round(p * LEVELS) - LEVELS // 2  # lanes are signed: -32768 ... 32767
    if threshold >= LEVELS // 2:
        return torch.zeros(count, dtype=torch.bool)
    draws = torch.empty(-(-count // LANES), dtype=torch.int64).random_(-(1 << 63), None)
    return draws.view(torch.int16)[:count] >= threshold


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`x` with each element zero with probability p and the others divided by 1 - p; `x` itself outside training."""
    if not training or p == 0.0:
        return x
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _Dropout.apply(x, p)
    return F.dropout(x, p, training=True)
