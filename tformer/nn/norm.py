"""Normalisation: LayerNorm (1607.06450), RMSNorm (1910.07467), ScaleNorm (1910.05895), GroupNorm (1803.08494) and, for
comparison, BatchNorm (1502.03167; why it suits text badly: PowerNorm, 2003.07845).

    layernorm  g · (x − mean(x)) / sqrt(var(x) + eps) + b
    rmsnorm    g · x / sqrt(mean(x²) + eps)
    scalenorm  g · x / max(‖x‖, eps), one scalar g that starts at √d
    groupnorm  the formula of layernorm within each of `groups` equal groups of neighbouring features
    batchnorm  the formula of layernorm for each feature, mean and variance over all positions of the batch

All of them compute in fp32 and return the dtype of their input, so that statistics of a bf16 residual stream stay
exact; all but batchnorm treat each vector separately. Adding a kind: a subclass of `Norm` and a row in `NORMS`.
"""

# Shapes: x [..., D]; gain and bias [D] (scalenorm: gain [1]); N vectors in a batch.

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tformer.nn.linear import accumulation_dtype, eager_on_cpu
from tformer.nn.options import require, require_positive

FP32_BYTES = 4
DEFAULT_GROUPS = 32  # 1803.08494
BATCH_MOMENTUM = 0.1  # the weight of the newest batch in the running statistics of batchnorm


class _RmsNorm(torch.autograd.Function):
    """y = x r g with r = (mean(x^2) + eps)^-1/2;  dx = r (u - x r^2 mean(x u)) with u = dy g;  dg = sum(dy x r).

    Eager `F.rms_norm` on a CPU takes five broadcast passes forward and a dozen backward.

    The gradient of `c v / n`, the weight normalisation of row v with gain c and norm n, is c/n (u - v (u.v) / n^2).
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
    fp32_copies: ClassVar[int] = 0
    """Number of fp32 copies of the input saved for the backward pass; 0: the input itself and two statistics."""

    def __init__(self, dim: int, options: NormOptions) -> None:
        super().__init__()
        self.dim, self.eps = dim, options.eps
        self.weight = nn.Parameter(torch.ones(dim)) if options.learned else None
        self.bias = nn.Parameter(torch.zeros(dim)) if options.learned and options.bias and self.has_bias else None

    @classmethod
    def saved_bytes(cls, dim: int, itemsize: int, *, on_cpu: bool) -> int:
        """Bytes saved for the backward pass of one vector of `dim` numbers."""
        return dim * FP32_BYTES * cls.fp32_copies if cls.fp32_copies else dim * itemsize + 2 * FP32_BYTES

    def reset_parameters(self) -> None:
        """Gain 1 and bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LayerNorm(Norm):
    """`torch.nn.LayerNorm` over the last dimension, with fp32 parameters beside an input of any dtype."""

    @classmethod
    def saved_bytes(cls, dim: int, itemsize: int, *, on_cpu: bool) -> int:
        """The same; on a GPU the input is widened to fp32."""
        return super().saved_bytes(dim, itemsize if on_cpu else FP32_BYTES, on_cpu=on_cpu)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight is None or weight.dtype == x.dtype or x.device.type == "cpu":  # the CPU kernel mixes dtypes itself
            return F.layer_norm(x, (self.dim,), weight, bias, self.eps)
        return F.layer_norm(x.float(), (self.dim,), weight.float(), _as_fp32(bias), self.eps).to(x.dtype)


class RMSNorm(Norm):
    """LayerNorm without the mean and without a bias."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ScaleNorm(Norm):
    """Scales each vector to the length g."""

    has_bias = False
    fp32_copies = 2

    def __init__(self, dim: int, options: NormOptions) -> None:
        super().__init__(dim, options)
        self.weight = nn.Parameter(torch.full((1,), math.sqrt(dim))) if options.learned else None

    def forward(self, x: Tensor) -> Tensor:
        gain = math.sqrt(self.dim) if self.weight is None else self.weight.float()
        return (F.normalize(x.float(), dim=-1, eps=self.eps) * gain).to(x.dtype)

    def reset_parameters(self) -> None:
        """Gain √d."""
        if self.weight is not None:
            nn.init.constant_(self.weight, math.sqrt(self.dim))


class GroupNorm(Norm):
    """Normalises groups of neighbouring features of each vector. ValueError when `groups` does not divide `dim`."""

    has_groups = True
    fp32_copies = 2

    def __init__(self, dim: int, options: NormOptions) -> None:
        super().__init__(dim, options)
        self.groups = DEFAULT_GROUPS if options.groups is None else options.groups
        require(dim % self.groups == 0, f"norm.groups {self.groups} does not divide d_model {dim}")

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().unflatten(-1, (self.groups, -1))
        out = F.layer_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        if self.weight is not None:
            out = out * self.weight.float()
            out = out if self.bias is None else out + self.bias.float()
        return out.to(x.dtype)


class BatchNorm(Norm):
    """Normalises each feature over the N vectors of the batch; in evaluation by the running statistics of training.

    Statistics include masked positions: padding counts, and in a decoder the later positions. The running averages are
    buffers of the checkpoint. In evaluation positions are independent of each other, so no information leaks. A batch
    of one vector has no variance: it is normalised as in evaluation and does not change the statistics.
    """

    fp32_copies = 1
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, options: NormOptions) -> None:
        super().__init__(dim, options)
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))
        self.frozen = False  # use the statistics of the batch without updating the running ones: `frozen_statistics`

    def forward(self, x: Tensor) -> Tensor:
        rows_ND = x.flatten(0, -2).float()
        by_batch = self.training and len(rows_ND) > 1
        out_ND = F.batch_norm(
            rows_ND,
            self.running_mean,
            self.running_var,
            _as_fp32(self.weight),
            _as_fp32(self.bias),
            training=by_batch,
            momentum=0.0 if self.frozen else BATCH_MOMENTUM,
            eps=self.eps,
        )
        return out_ND.view_as(x).to(x.dtype)

    def reset_parameters(self) -> None:
        """Gain 1, bias 0, running mean 0 and running variance 1."""
        super().reset_parameters()
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)


def _as_fp32(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.float()


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Inside the `with`, the batch norms of `module` do not update their running statistics.

    For the second forward of activation checkpointing: the first has counted the batch already.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, BatchNorm)]
    for norm in norms:
        norm.frozen = True
    try:
        yield
    finally:
        for norm in norms:
            norm.frozen = False


NORMS: dict[str, type[Norm]] = {
    "layernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "scalenorm": ScaleNorm,
    "groupnorm": GroupNorm,
    "batchnorm": BatchNorm,
}

if TYPE_CHECKING:
    NormName = str
else:
    NormName = Literal[tuple(NORMS)]


@dataclass(frozen=True)
class NormOptions:
    kind: NormName = "layernorm"
    place: Literal["pre", "post"] = "pre"
    eps: float = 1.0e-5
    bias: bool = True  # layernorm, groupnorm and batchnorm only
    learned: bool = True  # a gain (and bias); False: plain normalisation
    groups: int | None = None  # groupnorm only; null: 32

    def __post_init__(self) -> None:
        require_positive(eps=self.eps, groups=self.groups)
        require(
            self.groups is None or NORMS[self.kind].has_groups,
            f"groups must be left out of {self.kind}: groupnorm alone has them, found {self.groups}",
        )


def build_norm(options: NormOptions, dim: int) -> Norm:
    """The normalisation that `options` describe, over vectors of `dim` features."""
    return NORMS[options.kind](dim, options)
