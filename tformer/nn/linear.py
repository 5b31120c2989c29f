"""Linear layer, used for every matrix product: storage, precision and quantization of weights are decided here.

Weights keep their own dtype (fp32 masters in training) and are cast to that of the input on use, so that the dtype of
the residual stream decides the precision of every product. y = x W^T + b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.kernels.functions import Kernels
from tformer.nn.products import KernelProduct, Product, Quantize, prepare_product

HAND_WRITTEN_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def eager_on_cpu(x: Tensor) -> bool:
    """Whether functions of `x` use their hand-written gradients: in eager PyTorch on a CPU.

    There PyTorch has no fused kernels for RMSNorm, squared ReLU and rotary positions; elsewhere (accelerators,
    `torch.compile`) plain formulas are fused by the kernel library or the compiler.
    """
    return x.device.type == "cpu" and x.dtype in HAND_WRITTEN_DTYPES and not torch.compiler.is_dynamo_compiling()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, softmax and sums: fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Activation(NamedTuple):
    """A function between two products; `gated`: of the first half of the numbers, times the second half."""

    name: str
    gated: bool
    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.function(x)
        gate, value = x.chunk(2, dim=-1)
        return self.function(gate) * value


class Linear(nn.Module):
    """y = x W^T + b with weight [out_features, in_features] and an optional bias [out_features]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.normal_(self.weight, std=0.02)  # `init.initialize` draws again
        self.product: Product | None = None  # replaces the weight in inference
        self.adapter: Any = None  # `nn.lora.Adapter`, trained beside a frozen weight

    def forward(
        self,
        x: Tensor,
        *,
        norm: nn.Module | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[residual +] activation(norm(x) W^T + b), in x's dtype: one kernel where the prepared product has one.

        x [*, in_features] -> [*, out_features], half as many behind an activation with a gate.
        """
        product = self.product
        if isinstance(product, KernelProduct) and product.takes(x):
            name, gated = (None, False) if activation is None else activation[:2]
            if product.kernel.takes(norm, name):
                return product.kernel(x, norm=norm, activation=name, gated=gated, residual=residual)
        if norm is not None:
            x = norm(x)
        if product is not None:
            out = product(x)
        else:  # `Tensor.to` copies nothing when dtypes agree
            bias = None if self.bias is None else self.bias.to(x.dtype)
            out = F.linear(x, self.weight.to(x.dtype), bias)
        if self.adapter is not None:
            out = self.adapter(x, out, self)
        if activation is not None:
            out = activation(out)
        return out if residual is None else residual + out

    @torch.no_grad()
    def freeze(self, quantize: Quantize, rows: int | None = None, *, kernels: Kernels | None = None) -> None:
        """Prepare the product for inference and free the weight: its shape stays, its numbers become NaN."""
        assert self.product is None and self.adapter is None, "already frozen, or with an adapter"
        self.product = prepare_product(self.weight.detach(), self.bias, quantize, kernels=kernels, rows=rows)
        if self.product is not None:
            self.weight = nn.Parameter(self.weight.new_full((1, 1), torch.nan).expand_as(self.weight), False)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
