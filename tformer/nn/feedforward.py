"""The position-wise feed-forward network (1706.03762), plain or gated (GLU variants, 2002.05202).

    plain  down(act(up(x)))
    gated  down(act(gate(x)) · up(x)), gate and up being one matrix product: rows [gate; up]

relu2 is Primer's squared ReLU (2109.08668); gelu_tanh is GPT-2's approximation of gelu (1606.08415). Adding an
activation: a function and a row in `ACTIVATIONS`.
"""

# Shapes: x [..., D]; hidden [..., F] (F = d_ff).

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tformer.nn.dropout import dropout
from tformer.nn.linear import Activation, Linear, eager_on_cpu
from tformer.nn.options import require_positive
from tformer.nn.taps import Tap, TapSink, tap


class _ReluSquared(torch.autograd.Function):
    """y = max(x, 0)^2;  dx = 2 max(x, 0) dy in one pass; eager PyTorch differentiates through `pow`."""

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
    if eager_on_cpu(x):
        return _ReluSquared.apply(x)
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu2": relu2,
}


@cache
def saved_tensors(activation: Callable[[Tensor], Tensor]) -> int:
    """Number of tensors of the input's size that autograd saves for an activation and a product with its output."""
    x = torch.linspace(-1.0, 1.0, 8, device="cpu", requires_grad=True)
    saved: list[Tensor] = []
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda unused: x):
        out = activation(x)
    return len({tensor.data_ptr() for tensor in [*saved, out] if tensor.numel() == x.numel()})


if TYPE_CHECKING:
    ActivationName = str
else:
    ActivationName = Literal[tuple(ACTIVATIONS)]


@dataclass(frozen=True)
class FeedForwardOptions:
    """Two products with an activation between them, at each position (arXiv 1706.03762)."""

    d_ff: int | None = None  # width of the hidden layer; null: 4 * d_model
    activation: ActivationName = "gelu"  # function between the two products
    gated: bool = False  # multiply by a second projection: GLU variants such as SwiGLU (arXiv 2002.05202)
    bias: bool = True  # biases of the projections

    def __post_init__(self) -> None:
        require_positive(d_ff=self.d_ff)

    @property
    def saved_copies(self) -> int:
        """Numbers saved for the backward pass for each hidden feature: inputs of the activation and of `down`."""
        return 4 if self.gated else saved_tensors(ACTIVATIONS[self.activation])

    def hidden_size(self, d_model: int) -> int:
        """Number of hidden features: d_ff, by default 4 d_model."""
        return 4 * d_model if self.d_ff is None else self.d_ff


class FeedForward(nn.Module):
    """d_model → d_ff → d_model, the same for every position.

    `activation_dropout` drops numbers of the hidden layer, after the activation (and the gate).
    """

    def __init__(self, d_model: int, options: FeedForwardOptions, *, activation_dropout: float = 0.0) -> None:
        super().__init__()
        d_ff = options.hidden_size(d_model)
        self.gated = options.gated
        self.activation = Activation(options.activation, options.gated, ACTIVATIONS[options.activation])
        self.dropout = activation_dropout
        self.up = Linear(d_model, 2 * d_ff if options.gated else d_ff, bias=options.bias)
        self.down = Linear(d_ff, d_model, bias=options.bias)

    def forward(
        self,
        x: Tensor,
        *,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
        taps: TapSink | None = None,
    ) -> Tensor:
        """down(act(up(norm(x)))), plus `residual`."""
        if taps is None:
            hidden = self.up(x, norm=norm, activation=self.activation)
        else:
            hidden = self.activation(tap(taps, "up", self.up(x, norm=norm)))
        if self.dropout:
            hidden = dropout(hidden, self.dropout, self.training)
        return tap(taps, "down", self.down(tap(taps, "active", hidden), residual=residual))

    def taps(self) -> list[Tap]:
        """Inner tensors."""
        up = ("2F", "gate and value") if self.gated else ("F", "widened")
        active = "activation of the gate, times the value" if self.gated else "after the activation"
        return [
            Tap("up", f"B T {up[0]}", up[1], parameters=("up",)),
            Tap("active", "B T F", active, dropout=self.dropout),
            Tap("down", "B T D", "back at the model's width", parameters=("down",)),
        ]
