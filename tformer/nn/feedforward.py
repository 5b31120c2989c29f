"""The position-wise feed-forward network (1706.03762), plain or gated (GLU variants, 2002.05202).

    plain  down(act(up(x)))
    gated  down(act(gate(x)) · up(x)), gate and up being one matrix product: rows [gate; up]

relu2 is Primer's squared ReLU (2109.08668); gelu_tanh is GPT-2's approximation of gelu (1606.08415).
"""

# Shapes: x [..., D]; hidden [..., F] (F = d_ff).

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.fused import dropout, relu2
from tformer.nn.linear import Linear
from tformer.nn.options import require_positive


@dataclass(frozen=True)
class FeedForwardOptions:
    d_ff: int | None = None  # null: 4 * d_model
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"] = "gelu"
    gated: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        require_positive(d_ff=self.d_ff)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """d_model → d_ff → d_model, the same for every position.

    `activation_dropout` drops numbers of the hidden layer, after the activation (and the gate).
    """

    def __init__(self, d_model: int, options: FeedForwardOptions, *, activation_dropout: float = 0.0) -> None:
        super().__init__()
        d_ff = 4 * d_model if options.d_ff is None else options.d_ff
        self.gated = options.gated
        self.activation = ACTIVATIONS[options.activation]
        self.dropout = activation_dropout
        self.up = Linear(d_model, 2 * d_ff if options.gated else d_ff, bias=options.bias)
        self.down = Linear(d_ff, d_model, bias=options.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * value
        else:
            hidden = self.activation(hidden)
        if self.dropout:
            hidden = dropout(hidden, self.dropout, self.training)
        return self.down(hidden)
