"""Weights in the files that `from_pretrained` reads: one model.safetensors, or shards beside an index.

Tensors are renamed, cut and converted one at a time, as their turn to be written comes: beside the model there is never
more than one tensor in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tformer.checkpoint.tensor_files import file_bytes, tensor_chunks
from tformer.errors import InputError
from tformer.interop.mapping import Fixed, Link
from tformer.interop.weight_files import INDEX, SINGLE

Chunks = Iterator[bytes | memoryview]


@dataclass(frozen=True)
class Outgoing:
    """Tensors by their names on disk. shapes: on the meta device; make: the numbers of one, when they are needed."""

    shapes: Mapping[str, Tensor]
    make: Callable[[str], Tensor]

    def num_bytes(self, names: Iterable[str] | None = None) -> int:
        chosen = self.shapes if names is None else names
        return sum(self.shapes[name].numel() * self.shapes[name].dtype.itemsize for name in chosen)

    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.shapes.values())


@dataclass(frozen=True)
class Shard:
    """One file: its name and the tensors in it."""

    name: str
    tensors: tuple[str, ...]


def outgoing(
    links: Sequence[Link], fixed: Sequence[Fixed], weights: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> Outgoing:
    """What a class's table makes of our tensors (owners only).

    dtype: of every floating tensor; None: as they are.
    """
    sources: dict[str, Callable[[], Tensor]] = {}
    shapes: dict[str, Tensor] = {}

    def add(name: str, source: Callable[[], Tensor], like: Tensor) -> None:
        kind = dtype if dtype is not None and like.is_floating_point() else like.dtype
        sources[name], shapes[name] = source, torch.empty(like.shape, dtype=kind, device="meta")

    for entry in links:
        for index, part in enumerate(entry.layout.split(weights[entry.ours].to("meta"))):
            add(entry.theirs[index], _part(entry, index, weights), part)
    for constant in fixed:
        if constant.written:
            add(constant.name, constant.make, constant.make())
    return Outgoing(shapes, lambda name: converted(sources[name](), shapes[name].dtype, name=name))


def converted(tensor: Tensor, dtype: torch.dtype, *, name: str) -> Tensor:
    """A tensor in another type. InputError when a number is too large for it."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if not bool(torch.isfinite(result).all()) and bool(torch.isfinite(tensor).all()):
        largest = float(tensor.abs().max())
        raise InputError(
            f"tensor {name} does not fit {str(dtype).removeprefix('torch.')}: it holds {largest:g}, the most there is "
            f"{torch.finfo(dtype).max:g}",
            hint="export as bf16 or fp32",
        )
    return result


def plan_shards(tensors: Outgoing, shard_bytes: int) -> list[Shard]:
    """The files, filled in the order of the tensors; one that is larger than `shard_bytes` has a file to itself."""
    groups: list[list[str]] = []
    room = 0
    for name in tensors.shapes:
        size = tensors.num_bytes([name])
        if not groups or size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return [Shard(SINGLE, tuple(groups[0]))]
    stem, _, suffix = SINGLE.partition(".")
    return [
        Shard(f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}", tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def shard_bytes_on_disk(tensors: Outgoing, shards: Sequence[Shard]) -> int:
    """The sizes of the files together."""
    return sum(file_bytes({name: tensors.shapes[name] for name in shard.tensors}) for shard in shards)


def shard_chunks(tensors: Outgoing, shard: Shard, *, written: Callable[[], None] = lambda: None) -> Chunks:
    """The bytes of one file; `written` is called after each tensor."""
    for chunk in tensor_chunks({name: tensors.shapes[name] for name in shard.tensors}, make=tensors.make):
        yield chunk
        written()


def main_dtype(tensors: Outgoing) -> torch.dtype:
    """The type that most numbers have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors.shapes.values():
        if tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda kind: counts[kind])


def index_document(tensors: Outgoing, shards: Sequence[Shard]) -> dict[str, str]:
    """{name: text} of the index; {} where one file holds all."""
    if len(shards) == 1:
        return {}
    document = {
        "metadata": {"total_parameters": tensors.num_parameters(), "total_size": tensors.num_bytes()},
        "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
    }
    return {INDEX: json.dumps(document, indent=2, sort_keys=True) + "\n"}


def _part(entry: Link, index: int, weights: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    return lambda: entry.layout.split(weights[entry.ours])[index]
