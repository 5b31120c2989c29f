"""The average of the weights: its formula, its state, and giving the model its own weights back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tformer.optim.ema import Ema
from tformer.support.errors import InputError


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def drift(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_the_average_is_the_written_out_sum() -> None:
    model = make_model()
    ema = Ema(model.named_parameters(), decay=0.9)
    expected = model.weight.detach().double()
    for _ in range(5):
        drift(model)
        ema.update()
        expected = 0.9 * expected + 0.1 * model.weight.detach().double()
    torch.testing.assert_close(ema.state()["weight"].double(), expected, atol=1e-6, rtol=0)


def test_given_the_step_the_decay_warms_up() -> None:
    model = make_model()
    ema = Ema(model.named_parameters(), decay=0.999)
    before = model.bias.detach().clone()
    drift(model)
    ema.update(1)
    torch.testing.assert_close(ema.state()["bias"], torch.lerp(before, model.bias.detach(), 1 - 2 / 11))


def test_swapped_gives_the_weights_back_bit_for_bit_even_after_an_error() -> None:
    model = make_model()
    ema = Ema(model.named_parameters(), decay=0.5)
    drift(model)
    ema.update()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="inside"), ema.swapped():
        assert torch.equal(model.weight, ema.state()["weight"])
        assert not torch.equal(model.weight, own["weight"])
        raise RuntimeError("inside")
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


def test_state_round_trip_is_exact() -> None:
    model = make_model()
    first = Ema(model.named_parameters(), decay=0.9)
    drift(model)
    first.update()
    saved = {name: value.clone() for name, value in first.state().items()}
    second = Ema(model.named_parameters(), decay=0.9)
    second.load_state(saved)
    drift(model)
    first.update()
    second.update()
    assert all(torch.equal(value, second.state()[name]) for name, value in first.state().items())


def test_the_average_stays_in_float32_for_a_bfloat16_model() -> None:
    model = make_model().bfloat16()
    ema = Ema(model.named_parameters(), decay=0.999)
    drift(model)
    ema.update()
    assert {value.dtype for value in ema.state().values()} == {torch.float32}
    ema.copy_to(model.named_parameters())
    assert model.weight.dtype == torch.bfloat16


def test_a_state_that_does_not_fit_is_an_input_error() -> None:
    ema = Ema(make_model().named_parameters(), decay=0.9)
    with pytest.raises(InputError, match="bias"):
        ema.load_state({"weight": torch.zeros(2, 3)})
    with pytest.raises(InputError, match=r"\(4,\) torch.float32, expected \(2,\)"):
        ema.load_state({"weight": torch.zeros(2, 3), "bias": torch.zeros(4)})
