"""What FSDP2 allocates and sends in one of N ranks: a step of a model on fake tensors in a fake process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tformer.build import build_model
from tformer.cost.parallel import Layout
from tformer.optim.optimizers import Settings, build_optimizer
from tformer.recipe.model import Model

TOKENS = 8  # so few that activations are a small part
COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}


@dataclass
class Measured:
    """Bytes of rank 0. peak: most bytes of one step, without optimizer state; tensors: by collective, and its calls."""

    weights: int
    gradients: int
    optimizer: int
    peak: int
    tensors: Counter[str]
    calls: Counter[str]


class Exchanges(TorchDispatchMode):
    """Counts collectives, and the bytes of their largest tensor: the whole one of a gather or a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = COLLECTIVES[function._schema.name.removeprefix("c10d::")]
            self.calls[name] += 1
            self.tensors[name] += max(each.nbytes for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        return function(*args, **(kwargs or {}))


class Calling(nn.Module):
    """A module whose forward calls a function: FSDP2's root around forward pass and loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()


@contextmanager
def fake_group(ranks: int, shards: int) -> Iterator[DeviceMesh]:
    """A process group in which this process is rank 0 and no other exists."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        shape, names = (ranks // shards, shards), ("replicate", "shard")
        yield (
            init_device_mesh("cpu", shape, mesh_dim_names=names)
            if shards < ranks
            else init_device_mesh("cpu", (ranks,))
        )
    finally:
        dist.destroy_process_group()


def measure(section: Model, layout: Layout, *, frozen: str | None = None) -> Measured:
    """One step of a decoder-only model, each block a unit and the rest the root."""
    number = {2: torch.bfloat16, 4: torch.float32}
    formats = MixedPrecisionPolicy(torch.float32, number[layout.gradient_bytes], cast_forward_inputs=False)
    of_blocks = replace(formats, param_dtype=number[layout.weight_bytes])
    with fake_group(layout.ranks, layout.shards) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(section, device="meta")
        assert model.decoder is not None
        model.decoder.checkpointing = True
        model.compute_dtype = number[layout.weight_bytes]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is None or not name.startswith(frozen))
        root = Calling(model)
        for block in model.decoder.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=layout.reshard, mp_policy=of_blocks)
        fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=formats)
        root.to_empty(device="cpu")
        model.retie()
        positions = model.decoder.positions
        if positions is not None and hasattr(positions, "table"):
            positions.table = positions.table.to("meta")  # it is read by values, which fake tensors do not have
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        tracker, exchanges = FSDPMemTracker(root), Exchanges()
        with tracker, exchanges:
            root(lambda: model(input_ids=ids).logits.sum()).backward()
        trained = [(name, p) for name, p in root.named_parameters() if p.requires_grad]
        optimizer = build_optimizer(trained, Settings(kind="adamw", lr=1.0, device="cpu"))
        moments = [slot for name, slot in optimizer.state_by_name().items() if not name.endswith(".step")]
        snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        return Measured(
            weights=_local_bytes(root.parameters()),
            gradients=_local_bytes(p.grad for _, p in trained),
            optimizer=_local_bytes(moments),
            peak=snapshot["Total"],
            tensors=exchanges.tensors,
            calls=exchanges.calls,
        )


def _local_bytes(tensors: Any) -> int:
    return sum(tensor.to_local().nbytes for tensor in tensors)
