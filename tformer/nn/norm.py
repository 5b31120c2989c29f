"""Kinds of normalization: LayerNorm and RMSNorm (`layer_norm.py`), ScaleNorm (arXiv 1910.05895), GroupNorm (1803.08494)
and, for comparison, BatchNorm (1502.03167; its problems with text: PowerNorm, 2003.07845).

    scalenorm  g · x / max(‖x‖, eps), one scalar g that starts at √d
    groupnorm  the formula of layernorm within each of `groups` equal groups of neighbouring features
    batchnorm  the formula of layernorm for each feature, mean and variance over all positions of the batch

All but batchnorm treat each vector separately. Adding a kind: a subclass of `Norm` in a new file, and a row in
`NORMS`.
"""

# Shapes: x [..., D]; gain and bias [D] (scalenorm: gain [1]); N vectors in a batch.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.layer_norm import LayerNorm, Norm, RMSNorm, as_fp32
from tformer.nn.options import require, require_positive

DEFAULT_GROUPS = 32  # 1803.08494
BATCH_MOMENTUM = 0.1  # the weight of the newest batch in the running statistics of batchnorm


class ScaleNorm(Norm):
    """Scales each vector to the length g."""

    has_bias = False
    fp32_copies = 2

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__(dim, **options)
        if self.weight is not None:
            self.weight = nn.Parameter(torch.full((1,), math.sqrt(dim)))

    def forward(self, x: Tensor) -> Tensor:
        gain = math.sqrt(self.dim) if self.weight is None else self.weight.float()
        return (F.normalize(x.float(), dim=-1, eps=self.eps) * gain).to(x.dtype)

    def linear_at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        gain = math.sqrt(self.dim) if self.weight is None else self.weight
        rate = gain / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=self.eps)
        return lambda part: part * rate

    def reset_parameters(self) -> None:
        """Gain √d."""
        if self.weight is not None:
            nn.init.constant_(self.weight, math.sqrt(self.dim))


class GroupNorm(Norm):
    """Normalizes groups of neighbouring features of each vector. ValueError when `groups` does not divide `dim`."""

    has_groups = True
    fp32_copies = 2

    def __init__(self, dim: int, *, groups: int, **options: Any) -> None:
        super().__init__(dim, **options)
        require(dim % groups == 0, f"norm.groups {groups} does not divide d_model {dim}")
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().unflatten(-1, (self.groups, -1))
        out = F.layer_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        if self.weight is not None:
            out = out * self.weight.float()
            out = out if self.bias is None else out + self.bias.float()
        return out.to(x.dtype)

    def linear_at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        split = (self.groups, -1)
        rate = (x.unflatten(-1, split).var(-1, unbiased=False, keepdim=True) + self.eps).rsqrt()

        def normalized(part: Tensor) -> Tensor:
            grouped = part.unflatten(-1, split)
            return self.gained(((grouped - grouped.mean(-1, keepdim=True)) * rate).flatten(-2))

        return normalized


class BatchNorm(Norm):
    """Normalizes each feature over the N vectors of the batch; in evaluation by the running statistics of training.

    Statistics include masked positions: padding counts, and in a decoder the later positions. The running averages are
    buffers of the checkpoint. In evaluation positions are independent of each other, so no information leaks. A batch
    of one vector has no variance: it is normalized as in evaluation and does not change the statistics.
    """

    fp32_copies = 1
    mixes_rows = True
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__(dim, **options)
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
            as_fp32(self.weight),
            as_fp32(self.bias),
            training=by_batch,
            momentum=0.0 if self.frozen else BATCH_MOMENTUM,
            eps=self.eps,
        )
        return out_ND.view_as(x).to(x.dtype)

    def linear_at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        rate = (self.running_var + self.eps).rsqrt()
        return lambda part: self.gained(part * rate)

    def reset_parameters(self) -> None:
        """Gain 1, bias 0, running mean 0 and running variance 1."""
        super().reset_parameters()
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)


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
    """Normalization in the blocks and at the end of a stack (layernorm: arXiv 1607.06450; rmsnorm: 1910.07467)."""

    kind: NormName = "layernorm"
    # before a sublayer (arXiv 2002.04745), or after its addition (1706.03762); on its output before the addition
    # (res_post: 2111.09883), or before it and on its output (sandwich: 2105.13290)
    place: Literal["pre", "post", "res_post", "sandwich"] = "pre"
    eps: float = 1.0e-5  # added to the variance before the root
    bias: bool = True  # layernorm, groupnorm and batchnorm only
    learned: bool = True  # a gain (and bias); False: plain normalization
    unit_offset: bool = False  # layernorm and rmsnorm only: the gain is 1 + w, and w starts at 0 (Gemma)
    groups: int | None = None  # groupnorm only; null: 32

    def __post_init__(self) -> None:
        require_positive(eps=self.eps, groups=self.groups)
        require(
            self.groups is None or NORMS[self.kind].has_groups,
            f"groups must be left out of {self.kind}: groupnorm alone has them, found {self.groups}",
        )
        require(
            not self.unit_offset or (self.learned and self.kind in ("layernorm", "rmsnorm")),
            f"unit_offset: only for layernorm and rmsnorm with gains, found {self.kind}, learned: {self.learned}",
        )


def build_norm(options: NormOptions, dim: int) -> Norm:
    """The normalization that `options` describe, over vectors of `dim` features."""
    kind = NORMS[options.kind]
    values: dict[str, Any] = {name: getattr(options, name) for name in ("eps", "learned", "bias", "unit_offset")}
    if kind.has_groups:
        values["groups"] = options.groups or DEFAULT_GROUPS
    return kind(dim, **values)
