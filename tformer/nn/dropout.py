"""Dropout (Srivastava et al., 2014; residual dropout of arXiv 1706.03762, section 5.4), fast on a CPU.

Also `outside_graphs`, which excludes a function from compilation.

On a CPU `F.dropout` draws one random number per element, on one thread: a third of the step of a small model. Here one
64-bit draw decides four elements, 16 bits each: p is met to within 2^-17. The draws come from torch's global generator,
which the training loop seeds before every forward. Accelerators and compiled graphs use `F.dropout`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LANES = 4  # decisions in one 64-bit draw
LEVELS = 1 << 16


class _Dropout(torch.autograd.Function):
    """y = x m / (1 - p) with m drawn once, dx = dy m / (1 - p)."""

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
    """`x` with each element set to 0 with probability p, else divided by 1 - p; outside training `x` itself."""
    if not training or p == 0.0:
        return x
    if x.device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
        return _Dropout.apply(x, p)
    return F.dropout(x, p, training=True)


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Parameters, Result], *, recursive: bool = True) -> Callable[Parameters, Result]:
    """`function`, excluded from compilation; with `recursive` false, the functions that it calls may be compiled.

    For functions that depend on tensor values or loop in Python. `torch.compiler.disable` is used only while compiling:
    naming it loads the compiler, which takes longer than loading the rest of torch.
    """

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():
            found: Result = torch.compiler.disable(function, recursive=recursive)(*args, **kwargs)
            return found
        return function(*args, **kwargs)

    return call
