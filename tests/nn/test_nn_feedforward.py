"""Feed-forward: the formulas, the gradient of relu², the place of dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tformer.nn.feedforward import ACTIVATIONS, FeedForward, FeedForwardOptions

REFERENCES = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu2": lambda x: torch.relu(x) ** 2,
}


def make(**options: object) -> FeedForward:
    dropout = options.pop("activation_dropout", 0.0)
    module = FeedForward(6, FeedForwardOptions(**options), activation_dropout=dropout)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.5)
    return module


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("bias", [True, False])
def test_plain_formula(activation: str, bias: bool) -> None:
    module = make(d_ff=10, activation=activation, bias=bias)
    x = torch.randn(2, 3, 6)
    hidden = REFERENCES[activation](F.linear(x, module.up.weight, module.up.bias))
    torch.testing.assert_close(module(x), F.linear(hidden, module.down.weight, module.down.bias))
    assert (module.up.bias is not None) == bias == (module.down.bias is not None)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gated_formula_and_row_order(activation: str) -> None:
    module = make(d_ff=10, activation=activation, gated=True, bias=False)
    assert module.up.weight.shape == (20, 6)
    x = torch.randn(2, 3, 6)
    gate, value = F.linear(x, module.up.weight[:10]), F.linear(x, module.up.weight[10:])
    expected = F.linear(REFERENCES[activation](gate) * value, module.down.weight)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activation_gradients(activation: str) -> None:
    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ACTIVATIONS[activation], (x,))


def test_default_width_is_four_times_the_model() -> None:
    assert FeedForward(6, FeedForwardOptions()).up.weight.shape == (24, 6)


def test_activation_dropout_only_while_training() -> None:
    module = make(activation_dropout=0.5)
    x = torch.randn(4, 6)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
