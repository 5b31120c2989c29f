"""Averages of the weights, kept in fp32: average <- average + share (weight - average) after each step.

Evaluating and saving the average instead of the last weights smooths the noise of the last steps (Polyak averaging).

    share = 1 - decay

So that the random initial weights count less, the decay rises with the step as min(decay, (1 + step) / (10 + step)), as
in TensorFlow's ExponentialMovingAverage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tformer.support.errors import InputError


class Ema:
    """The exponential average of `named_parameters`, initialized with their current values."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(named_parameters)
        self._averages = {
            name: parameter.detach().to(torch.float32, copy=True) for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int | None = None) -> None:
        """Add the current weights, once after each optimizer step (`step` counts from 1; None: constant decay)."""
        weights = [parameter.float() for parameter in self._parameters.values()]
        decay = self.decay if step is None else min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 - decay)

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name, fp32: the live tensors, not copies."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load saved averages. Raises InputError when names, shapes or dtypes differ from the model's."""
        if state.keys() != self._averages.keys():
            differing = sorted(state.keys() ^ self._averages.keys())
            raise InputError(
                f"the saved weight average does not fit the model: {len(differing)} names differ, first {differing[0]}"
            )
        for name, average in self._averages.items():
            if (state[name].shape, state[name].dtype) != (average.shape, average.dtype):
                found, expected = (f"{tuple(value.shape)} {value.dtype}" for value in (state[name], average))
                raise InputError(f"the saved weight average of {name} is {found}, expected {expected}")
            average.copy_(state[name])

    @torch.no_grad()
    def copy_to(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Write the averages into the parameters of the same names, in their dtype."""
        for name, parameter in named_parameters:
            parameter.copy_(self._averages[name])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the `with` the parameters hold the averages; afterwards their own values again, bit for bit."""
        weights = [parameter.detach().clone() for parameter in self._parameters.values()]
        self.copy_to(self._parameters.items())
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, weight in zip(self._parameters.values(), weights, strict=True):
                    parameter.copy_(weight)
