"""Processes that train one model together: what the training loop asks of them, for one process and for DDP.

The global batch, its micro-batches and the loss do not depend on the number of processes: each process takes rows
`rank::world_size` of every micro-batch (`Share`), and loss terms are divided by counts of the whole global batch, so
gradients are added over the processes, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tformer.errors import InputError
from tformer.recipe.sections import Parallelism

Run = Callable[[Callable[[], Any]], Any]
"""Calls a function without arguments inside the forward pass of the trained models, and returns its result."""


class Parallel(Protocol):
    """A group of processes. All of them make the same calls in the same order, except of the attributes.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes."""

    def agree(self, flag: bool) -> bool:
        """True if `flag` is True in any process: all processes stop, fail and save together."""

    def wrap(self, models: nn.Module, *, some_unused: bool = False) -> Run:
        """Prepare models whose `forward(function)` returns `function()`. Backward passes then add up gradients.

        some_unused: a step may leave parameters without a gradient: heads without an objective, skipped layers.
        """

    def accumulating(self, run: Run, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are exchanged in the `last` one of a step only."""


class SingleProcess:
    """A group of one process."""

    rank = 0
    world_size = 1

    def sum(self, value: Tensor) -> Tensor:
        return value

    def agree(self, flag: bool) -> bool:
        return flag

    def wrap(self, models: nn.Module, *, some_unused: bool = False) -> Run:
        return models

    def accumulating(self, run: Run, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()


class DataParallel:
    """The processes of the default process group, each with all weights (`torch.distributed`, DDP).

    The group must exist. Flags and counts travel as CPU tensors, which wait for no GPU: with GPUs the group needs a
    backend for both, `cpu:gloo,cuda:nccl`.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def sum(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    def agree(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor(int(flag))))

    def wrap(self, models: nn.Module, *, some_unused: bool = False) -> Run:
        # torch 2.13 has a new name for the copy of buffers from process 0 at every forward. They are equal already.
        renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
        wrapped = DistributedDataParallel(
            models, find_unused_parameters=some_unused, gradient_as_bucket_view=True, **options
        )
        # A function without annotations: DDP compares them with its types, and here they are strings.
        wrapped.register_comm_hook(None, lambda _, bucket: sum_of(bucket.buffer()))
        return wrapped

    def accumulating(self, run: Run, *, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(run, DistributedDataParallel)
        return nullcontext() if last else run.no_sync()


PARALLEL: dict[str, type[DataParallel]] = {"ddp": DataParallel}
"""Kinds of `training.parallel.kind`; `auto` is the first."""


def parallel_of(options: Parallelism) -> Parallel:
    """The default process group of torch.distributed, or one process where there is none.

    Raises InputError for a kind that trains nothing yet.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SingleProcess()
    kind = next(iter(PARALLEL)) if options.kind == "auto" else options.kind
    if kind not in PARALLEL:
        raise InputError(
            f"training.parallel.kind: found {kind}, expected {' or '.join(PARALLEL)} for training",
            hint=f"--dry-run estimates what {kind} would take",
        )
    return PARALLEL[kind]()


def sum_of(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """The sum over all processes, formed while the backward pass goes on; DDP alone would divide it."""
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
