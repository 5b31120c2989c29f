"""Normalisation: LayerNorm (1607.06450), RMSNorm (1910.07467), ScaleNorm (1910.05895), GroupNorm (1803.08494) and, for
comparison, BatchNorm (1502.03167; why it suits text badly: PowerNorm, 2003.07845).

    layernorm  g · (x − mean(x)) / sqrt(var(x) + eps) + b
    rmsnorm    g · x / sqrt(mean(x²) + eps)
    scalenorm  g · x / max(‖x‖, eps), one scalar g that starts at √d
    groupnorm  layernorm's formula within each of `groups` equal groups of a vector's numbers
    batchnorm  layernorm's formula for each feature, mean and variance over all positions of all rows of the batch

All of them compute in fp32 and return the dtype they were given, so that a bf16 residual stream never loses its
statistics; all but batchnorm look at one vector at a time.
"""

# Shapes: x [..., D]; gain and bias [D] (scalenorm: gain [1]); N vectors in a batch.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.fused import rms_norm
from tformer.nn.options import require, require_positive

DEFAULT_GROUPS = 32  # 1803.08494
BATCH_MOMENTUM = 0.1  # the weight of the newest batch in batchnorm's running statistics


@dataclass(frozen=True)
class NormOptions:
    kind: Literal["layernorm", "rmsnorm", "scalenorm", "groupnorm", "batchnorm"] = "layernorm"
    place: Literal["pre", "post"] = "pre"
    eps: float = 1.0e-5
    bias: bool = True  # layernorm, groupnorm and batchnorm only
    learned: bool = True  # a gain (and bias); False: plain normalisation
    groups: int | None = None  # groupnorm only; null: 32

    def __post_init__(self) -> None:
        require_positive(eps=self.eps, groups=self.groups)
        require(
            self.groups is None or self.kind == "groupnorm",
            f"groups must be left out of {self.kind}: groupnorm alone has them, found {self.groups}",
        )


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm` over the last dimension, with fp32 parameters beside an input of any dtype."""

    def __init__(self, dim: int, *, eps: float, learned: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim)) if learned else None
        self.bias = nn.Parameter(torch.zeros(dim)) if learned and bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight is None or weight.dtype == x.dtype or x.device.type == "cpu":  # the CPU kernel mixes dtypes itself
            return F.layer_norm(x, (self.dim,), weight, bias, self.eps)
        return F.layer_norm(
            x.float(), (self.dim,), weight.float(), bias.float() if bias is not None else None, self.eps
        ).to(x.dtype)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(nn.Module):
    """LayerNorm without the mean and without a bias."""

    def __init__(self, dim: int, *, eps: float, learned: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)


class ScaleNorm(nn.Module):
    """Every vector gets the length g."""

    def __init__(self, dim: int, *, eps: float, learned: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.full((1,), math.sqrt(dim))) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        gain = math.sqrt(self.dim) if self.weight is None else self.weight.float()
        return (F.normalize(x.float(), dim=-1, eps=self.eps) * gain).to(x.dtype)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, math.sqrt(self.dim))


class GroupNorm(nn.Module):
    """Each vector by itself, in groups of neighbouring numbers. ValueError when `groups` does not divide `dim`."""

    def __init__(self, dim: int, *, groups: int, eps: float, learned: bool = True, bias: bool = True) -> None:
        super().__init__()
        require(dim % groups == 0, f"norm.groups {groups} does not divide d_model {dim}")
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(dim)) if learned else None
        self.bias = nn.Parameter(torch.zeros(dim)) if learned and bias else None

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().unflatten(-1, (self.groups, -1))
        out = F.layer_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        if self.weight is not None:
            out = out * self.weight.float()
            out = out if self.bias is None else out + self.bias.float()
        return out.to(x.dtype)

    def reset_parameters(self) -> None:
        _reset_affine(self.weight, self.bias)


class BatchNorm(nn.Module):
    """Each feature by its mean and variance over the N vectors of the batch; in evaluation over those seen in training.

    Training statistics take in what a mask hides: padding counts, and in a decoder the positions that come later.
    Evaluation uses running averages, which are buffers of the checkpoint, so there every position stands alone and
    nothing leaks. A batch of one vector has no variance: it is normalised as in evaluation, and leaves no trace.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, *, eps: float, learned: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if learned else None
        self.bias = nn.Parameter(torch.zeros(dim)) if learned and bias else None
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))
        self.frozen = False  # use the batch's statistics without taking them in: see `statistics_kept`

    def forward(self, x: Tensor) -> Tensor:
        rows_ND = x.flatten(0, -2).float()
        by_batch = self.training and len(rows_ND) > 1
        out_ND = F.batch_norm(
            rows_ND,
            self.running_mean,
            self.running_var,
            _wide(self.weight),
            _wide(self.bias),
            training=by_batch,
            momentum=0.0 if self.frozen else BATCH_MOMENTUM,
            eps=self.eps,
        )
        return out_ND.view_as(x).to(x.dtype)

    def reset_parameters(self) -> None:
        _reset_affine(self.weight, self.bias)
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)


def _wide(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.float()


def _reset_affine(weight: Tensor | None, bias: Tensor | None) -> None:
    if weight is not None:
        nn.init.ones_(weight)
    if bias is not None:
        nn.init.zeros_(bias)


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Inside the `with`, the batch norms of `module` take in no statistics: a recomputed forward has been counted."""
    norms = [norm for norm in module.modules() if isinstance(norm, BatchNorm)]
    for norm in norms:
        norm.frozen = True
    try:
        yield
    finally:
        for norm in norms:
            norm.frozen = False


def _layernorm(options: NormOptions, dim: int) -> nn.Module:
    return LayerNorm(dim, eps=options.eps, learned=options.learned, bias=options.bias)


def _rmsnorm(options: NormOptions, dim: int) -> nn.Module:
    return RMSNorm(dim, eps=options.eps, learned=options.learned)


def _scalenorm(options: NormOptions, dim: int) -> nn.Module:
    return ScaleNorm(dim, eps=options.eps, learned=options.learned)


def _groupnorm(options: NormOptions, dim: int) -> nn.Module:
    groups = DEFAULT_GROUPS if options.groups is None else options.groups
    return GroupNorm(dim, groups=groups, eps=options.eps, learned=options.learned, bias=options.bias)


def _batchnorm(options: NormOptions, dim: int) -> nn.Module:
    return BatchNorm(dim, eps=options.eps, learned=options.learned, bias=options.bias)


NORMS: dict[str, Callable[[NormOptions, int], nn.Module]] = {
    "layernorm": _layernorm,
    "rmsnorm": _rmsnorm,
    "scalenorm": _scalenorm,
    "groupnorm": _groupnorm,
    "batchnorm": _batchnorm,
}


def build_norm(options: NormOptions, dim: int) -> nn.Module:
    """The normalisation that `options` describe, over vectors of `dim` numbers."""
    return NORMS[options.kind](options, dim)
