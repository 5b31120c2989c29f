"""Processes, as the training loop sees them. One process is the trivial case, and the only one so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Parallel(Protocol):
    """What the loop asks of a group of processes."""

    rank: int
    world_size: int

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes."""

    def agree(self, flag: bool) -> bool:
        """True as soon as one process says so: stopping, failing and saving are decided together."""

    def wrap(self, model: torch.nn.Module) -> Callable[..., Any]:
        """The callable that is trained: it averages gradients where there are several processes."""


class SingleProcess:
    """One process: nothing to sum, nobody to ask."""

    rank = 0
    world_size = 1

    def sum(self, value: Tensor) -> Tensor:
        return value

    def agree(self, flag: bool) -> bool:
        return flag

    def wrap(self, model: torch.nn.Module) -> Callable[..., Any]:
        return model
