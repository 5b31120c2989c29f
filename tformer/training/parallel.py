"""Processes that train one model together: their interface for the training loop; one process, DDP and FSDP2.

The global batch, its micro-batches and the loss do not depend on the number of processes: each process takes rows
`rank::world_size` of every micro-batch (`Share`), and loss terms are divided by counts of the whole global batch, so
gradients are added over the processes, never averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tformer.nn.own_rows import OwnRows
from tformer.optim.shards import Shards, local, rows_of
from tformer.recipe.sections import Parallelism
from tformer.support.device import DTYPES
from tformer.support.errors import InputError
from tformer.training.assemble import TrainedModels

Result = TypeVar("Result")
Run = Callable[[Callable[[], Any]], Any]
"""Calls a function without arguments inside the forward pass of the trained models, and returns its result."""


class Parallel:
    """A group of processes; this base class is a group of one. All must call the same methods in the same order.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
    """

    rank, world_size = 0, 1

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes."""
        return value

    def agree(self, flag: bool) -> bool:
        """True if `flag` is True in any process: all processes stop, fail and save together."""
        return flag

    def own_rows(self) -> OwnRows | None:
        """Object that keeps this process's rows while models are built; None: each process has all rows."""
        return None

    def shard(self, models: TrainedModels, rows: OwnRows | None, device: torch.device) -> Shards | None:
        """Spread models that were made with `rows` over the processes; before the optimizer is made."""
        return None

    def wrap(self, models: nn.Module, *, some_unused: bool = False) -> Run:
        """Prepare models whose `forward(function)` returns `function()`. Backward passes then add up gradients.

        some_unused: a step may leave parameters without a gradient: heads without an objective, skipped layers.
        """
        return lambda function: function()  # nothing to synchronize

    def accumulating(self, run: Run, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are exchanged in the `last` one of a step only."""
        return nullcontext()

    def in_first(self, models: TrainedModels, function: Callable[[], Result]) -> Result | None:
        """Run `function`, which runs the models without gradients, in process 0; returns None in the others.

        For work that is not divided: validation and samples. The others only send their rows of the weights.
        """
        return function()


class ProcessGroup(Parallel):
    """The default process group of torch.distributed: what all kinds of parallelism share.

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


class DataParallel(ProcessGroup):
    """Processes that have all weights each (DDP).

    Args:
        reduce_dtype: number format in which gradients are added up.
    """

    def __init__(self, *, reduce_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._reduce_dtype = reduce_dtype

    def wrap(self, models: nn.Module, *, some_unused: bool = False) -> Run:
        # torch 2.13 has a new name for the copy of buffers from process 0 at every forward. They are equal already.
        renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
        # A frozen base is equal in all processes already; a rounded matrix has no numbers that could be sent.
        names = [name for name, each in models.named_parameters(remove_duplicate=False) if not each.requires_grad]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(models, names)
        wrapped = DistributedDataParallel(
            models, find_unused_parameters=some_unused, gradient_as_bucket_view=True, **options
        )
        # A function without annotations: DDP compares them with its types, and here they are strings.
        wrapped.register_comm_hook(None, lambda _, bucket: sum_of(bucket.buffer(), self._reduce_dtype))
        return wrapped

    def accumulating(self, run: Run, *, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(run, DistributedDataParallel)
        return nullcontext() if last else run.no_sync()

    def in_first(self, models: TrainedModels, function: Callable[[], Result]) -> Result | None:
        return function() if self.rank == 0 else None


class FullySharded(ProcessGroup):
    """Processes that have some rows of every weight, gradient and tensor of optimizer state each (FSDP2, 2304.11277).

    The units that are gathered at once are the blocks, and all that is outside of them. Gradients are reduced in every
    micro-batch: whole ones are never kept.

    Args:
        reshard: free the weights of a block after its forward pass.
        compute_dtype: number format of gathered blocks, whose products cast to it anyway. All else is gathered in fp32:
            an embedding adds up the gradients of many tokens in the format of its table.
        reduce_dtype: number format in which gradients are added up.
    """

    def __init__(
        self,
        *,
        reshard: bool = True,
        compute_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._compute_dtype, self._reduce_dtype = compute_dtype, reduce_dtype
        self.reshard = reshard

    def own_rows(self) -> OwnRows | None:
        return OwnRows(partial(rows_of, rank=self.rank, size=self.world_size))

    def shard(self, models: TrainedModels, rows: OwnRows | None, device: torch.device) -> Shards | None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        uses = Counter(id(parameter) for block in models.blocks for parameter in block.parameters())
        if shared := [name for name, each in models.named_parameters() if uses[id(each)] > 1]:
            raise InputError(
                f"training.parallel.kind: several layers have one {shared[0]}, and fsdp divides weights by layers",
                hint="--parallel ddp",
            )
        assert rows is not None
        kept = rows.take(models.named_parameters())
        mesh = init_device_mesh(device.type, (self.world_size,))
        formats = MixedPrecisionPolicy(torch.float32, self._reduce_dtype, cast_forward_inputs=False)
        of_blocks = replace(formats, param_dtype=self._compute_dtype)
        for block in models.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard, mp_policy=of_blocks)
        fully_shard(models, mesh=mesh, reshard_after_forward=False, mp_policy=formats)
        for module in models.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum
        models._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        with torch.no_grad():
            for name, parameter in models.named_parameters():
                local(parameter).copy_(kept.pop(name))
        return Shards()

    def wrap(self, models: nn.Module, *, some_unused: bool = False) -> Run:
        return models

    def in_first(self, models: TrainedModels, function: Callable[[], Result]) -> Result | None:
        """Process 0 announces each block before it runs it; the processes with the other rows then help to gather it.

        So a process never holds more than one block beside its rows and the root, and the number of forward passes,
        random draws and interruptions depend on process 0 alone.
        """
        units = cast("list[Any]", models.blocks)
        with torch.no_grad():
            done: Future[Result | None] = models(
                partial(self._lead if self.rank == 0 else self._follow, units, function)
            )
        # The root, like a block that is kept, would otherwise not see weights that change outside of a step.
        for unit in (models, *units):
            unit.reshard()
        return done.result()

    def _lead(self, units: list[Any], function: Callable[[], Result]) -> Future[Result | None]:
        """The result of `function`, or its error: FSDP2 must see the end of the forward pass of its root."""

        def announce(number: int, unit: Any, *_: Any) -> None:
            self._announced(units, number)
            with torch.inference_mode(False):  # training uses the tensors that are made for the first gathered weights
                unit.unshard()

        hooks = [
            unit.register_forward_pre_hook(partial(announce, number), prepend=True) for number, unit in enumerate(units)
        ]
        done: Future[Result | None] = Future()
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)
        finally:
            for hook in hooks:
                hook.remove()
            self._announced(units, len(units))
        return done

    def _follow(self, units: list[Any], function: Callable[[], Result]) -> Future[Result | None]:
        """Gather the blocks that process 0 runs, until it ends."""
        while (number := self._announced(units)) < len(units):
            units[number].unshard()
            if self.reshard:
                units[number].reshard()
        done: Future[Result | None] = Future()
        done.set_result(None)
        return done

    def _announced(self, units: list[Any], number: int = 0) -> int:
        """The number that process 0 gives here."""
        announced = torch.tensor(number, device=next(units[0].parameters()).device)
        dist.broadcast(announced, src=0)
        return int(announced)


def parallel_of(options: Parallelism, *, compute_dtype: torch.dtype = torch.float32) -> Parallel:
    """The default process group of torch.distributed with the kind in `options`; one process without a group.

    compute_dtype: of the trained models.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Parallel()
    reduce_dtype = DTYPES[options.reduce]
    if options.kind == "ddp":
        return DataParallel(reduce_dtype=reduce_dtype)
    return FullySharded(reshard=options.reshard, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)


def sum_of(gradients: Tensor, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    """The sum over all processes in `dtype`, formed while the backward pass goes on; DDP alone would divide it."""
    sent = gradients.to(dtype)
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None

    def received(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients if sent is gradients else gradients.copy_(sent)

    future: torch.futures.Future[Tensor] = work.get_future().then(received)
    return future
