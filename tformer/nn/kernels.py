"""Kernels beyond PyTorch's, where whoever runs the model has brought some: products and attention of few rows.

The core knows what they do, not where they come from; without them it uses PyTorch's operators for the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """What `tformer.kernels` offers for tensors on a CPU."""

    def linear(
        self, weight_OD: Tensor, bias_O: Tensor | None, *, scales_O: Tensor | None, out_dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """x -> x W^T + b for a weight in bf16, or in int8 where `scales_O` says what 1 stands for in each row."""
        ...

    def round_rows(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """x in 8 bits, uint8 [N, D] with 128 for zero, and fp32 [N]: what 1 stands for in each row."""
        ...

    def rescale_rows(self, y_NO: Tensor, scales_N: Tensor, bias_O: Tensor | None) -> Tensor:
        """y scales + bias, in place."""
        ...

    def attend(
        self,
        q_BHTh: Tensor,
        k_BKSh: Tensor,
        v_BKSv: Tensor,
        *,
        scale: float,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T scale + bias) v in bf16, [B, H, T, v]."""
        ...


_brought: Kernels | None = None


def bring(kernels: Kernels | None) -> None:
    """From now on use these, in this process; None: PyTorch's alone."""
    global _brought
    _brought = kernels


def brought() -> Kernels | None:
    """The kernels there are."""
    return _brought
