"""Communication between training processes; one process is the only implementation so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Parallel(Protocol):
    """The operations of the training loop on a group of processes."""

    rank: int
    world_size: int

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes."""

    def agree(self, flag: bool) -> bool:
        """True if `flag` is True in any process: all processes stop, fail and save together."""

    def wrap(self, model: torch.nn.Module) -> Callable[..., Any]:
        """The model to call in training; with several processes it averages gradients."""


class SingleProcess:
    """A group of one process."""

    rank = 0
    world_size = 1

    def sum(self, value: Tensor) -> Tensor:
        return value

    def agree(self, flag: bool) -> bool:
        return flag

    def wrap(self, model: torch.nn.Module) -> Callable[..., Any]:
        return model
