"""Normalisation: LayerNorm (1607.06450), RMSNorm (1910.07467), ScaleNorm (1910.05895).

    layernorm  g · (x − mean(x)) / sqrt(var(x) + eps) + b
    rmsnorm    g · x / sqrt(mean(x²) + eps)
    scalenorm  g · x / max(‖x‖, eps), one scalar g that starts at √d

All of them reduce over the last dimension in fp32 and return the dtype they were given, so that a bf16 residual
stream never loses its statistics.
"""

# Shapes: x [..., D]; gain and bias [D] (scalenorm: gain [1]).

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.fused import rms_norm
from tformer.nn.options import require_positive


@dataclass(frozen=True)
class NormOptions:
    kind: Literal["layernorm", "rmsnorm", "scalenorm"] = "layernorm"
    place: Literal["pre", "post"] = "pre"
    eps: float = 1.0e-5
    bias: bool = True  # layernorm only
    learned: bool = True  # a gain (and bias); False: plain normalisation

    def __post_init__(self) -> None:
        require_positive(eps=self.eps)


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


def _layernorm(options: NormOptions, dim: int) -> nn.Module:
    return LayerNorm(dim, eps=options.eps, learned=options.learned, bias=options.bias)


def _rmsnorm(options: NormOptions, dim: int) -> nn.Module:
    return RMSNorm(dim, eps=options.eps, learned=options.learned)


def _scalenorm(options: NormOptions, dim: int) -> nn.Module:
    return ScaleNorm(dim, eps=options.eps, learned=options.learned)


NORMS: dict[str, Callable[[NormOptions, int], nn.Module]] = {
    "layernorm": _layernorm,
    "rmsnorm": _rmsnorm,
    "scalenorm": _scalenorm,
}


def build_norm(options: NormOptions, dim: int) -> nn.Module:
    """The normalisation that `options` describe, over vectors of `dim` numbers."""
    return NORMS[options.kind](options, dim)
