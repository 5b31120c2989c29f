"""LayerNorm (arXiv 1607.06450), RMSNorm (1910.07467), and the base class of all norms.

    layernorm  g · (x − mean(x)) / sqrt(var(x) + eps) + b
    rmsnorm    g · x / sqrt(mean(x²) + eps)

The gain g is the parameter `weight` w, or with `unit_offset` 1 + w, computed in fp32 (Gemma, arXiv 2403.08295).

Norms compute in fp32 and return the dtype of their input, so that statistics of a bf16 residual stream stay exact.
"""

# Shapes: x [..., D]; gain and bias [D].

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tformer.nn.linear import accumulation_dtype, eager_on_cpu

FP32_BYTES = 4


class _RmsNorm(torch.autograd.Function):
    """y = x r g with r = (mean(x^2) + eps)^-1/2;  dx = r (u - x r^2 mean(x u)) with u = dy g;  dg = sum(dy x r).

    Eager `F.rms_norm` on a CPU takes five broadcast passes forward and a dozen backward.

    The gradient of `c v / n`, the weight normalization of row v with gain c and norm n, is c/n (u - v (u.v) / n^2).
    With c = sqrt(D) and n = c / r that is dx, computed by PyTorch's one-pass kernel. Its c has x's dtype:
    in bf16 the share of u along x is removed to within 0.4 % where sqrt(D) is no bf16 number, below bf16's own noise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        wide_x = x.to(accumulation_dtype(x.dtype))
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
    """dx of `_RmsNorm`, in x's dtype, for x with at least one element."""
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
    if eager_on_cpu(x):
        return _RmsNorm.apply(x, gain, eps)
    return F.rms_norm(x, x.shape[-1:], None if gain is None else gain.to(x.dtype), eps)


class Norm(nn.Module):
    """Base class: a gain `weight` [D] and a `bias` [D] in fp32, each None where the options or the kind omit it."""

    has_bias: ClassVar[bool] = True
    has_groups: ClassVar[bool] = False
    kernel: ClassVar[str | None] = None
    """Name of the C kernel that computes this norm together with the next product; None if there is none."""
    fp32_copies: ClassVar[int] = 0
    """Number of fp32 copies of the input saved for the backward pass; 0: the input itself and two statistics."""
    mixes_rows: ClassVar[bool] = False
    """Whether the output of a row depends on other rows of the batch: then a batch cannot be split over processes."""

    def __init__(
        self, dim: int, *, eps: float, learned: bool = True, bias: bool = True, unit_offset: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.unit_offset = dim, eps, unit_offset
        self.weight = nn.Parameter(torch.full((dim,), 0.0 if unit_offset else 1.0)) if learned else None
        self.bias = nn.Parameter(torch.zeros(dim)) if learned and bias and self.has_bias else None

    @classmethod
    def saved_bytes(cls, dim: int, itemsize: int, *, on_cpu: bool) -> int:
        """Bytes saved for the backward pass of one vector of `dim` numbers."""
        return dim * FP32_BYTES * cls.fp32_copies if cls.fp32_copies else dim * itemsize + 2 * FP32_BYTES

    def linear_at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """The linear map [..., D] -> [..., D] that this norm is with the statistics of `x` [..., D] held fixed.

        norm(x) is linear_at(x)(x) and a constant (the bias), so that a sum of vectors can be normalized part by part.
        """
        raise NotImplementedError(f"{type(self).__name__} has no linear form with fixed statistics")

    @property
    def gain(self) -> Tensor | None:
        """The factor of each feature [D]: `weight`, or 1 + `weight` in fp32; None: there is none."""
        return self.weight if self.weight is None or not self.unit_offset else 1.0 + self.weight.float()

    def gained(self, x: Tensor) -> Tensor:
        """`x` times the gain, if there is one."""
        return x if (gain := self.gain) is None else x * gain

    def reset_parameters(self) -> None:
        """Gain 1 and bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LayerNorm(Norm):
    """`torch.nn.LayerNorm` over the last dimension, with fp32 parameters beside an input of any dtype."""

    kernel = "layernorm"

    @classmethod
    def saved_bytes(cls, dim: int, itemsize: int, *, on_cpu: bool) -> int:
        """The same; on a GPU the input is widened to fp32."""
        return super().saved_bytes(dim, itemsize if on_cpu else FP32_BYTES, on_cpu=on_cpu)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.gain, self.bias
        if weight is None or weight.dtype == x.dtype or x.device.type == "cpu":  # the CPU kernel mixes dtypes itself
            return F.layer_norm(x, (self.dim,), weight, bias, self.eps)
        return F.layer_norm(x.float(), (self.dim,), weight.float(), as_fp32(bias), self.eps).to(x.dtype)

    def linear_at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        rate = (x.var(-1, unbiased=False, keepdim=True) + self.eps).rsqrt()
        return lambda part: self.gained((part - part.mean(-1, keepdim=True)) * rate)


class RMSNorm(Norm):
    """LayerNorm without the mean and without a bias."""

    has_bias = False
    kernel = "rmsnorm"

    def forward(self, x: Tensor) -> Tensor:
        if self.unit_offset:  # the gain is not rounded to x's dtype
            return rms_norm(x.to(accumulation_dtype(x.dtype)), self.gain, self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)

    def linear_at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        rate = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return lambda part: self.gained(part * rate)


def as_fp32(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.float()
