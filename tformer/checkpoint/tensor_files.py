"""Tensors to and from safetensors files: streamed, hashed on the way, copied and never memory-mapped.

A mapped file that is written over changes or zero-fills the tensors that came from it (safetensors #762); a copy costs
one pass over memory, and the same pass computes the SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from tformer.checkpoint.bounded_json import open_regular
from tformer.checkpoint.tensor_header import TensorSpec, plan_file, read_header
from tformer.errors import InputError

READ_BYTES = 16 << 20  # hashed while still in the processor's cache


def tensor_chunks(
    tensors: Mapping[str, Tensor], *, make: Callable[[str], Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor at a time: no second copy of the model is ever in memory.

    make: gives a tensor by name when its turn comes; `tensors` then tell shapes and types alone (on the meta device).
    """
    header, names = plan_file(tensors)
    yield header
    for name in names:
        tensor = (tensors[name] if make is None else make(name)).detach().to("cpu").contiguous()
        if tensor.numel():
            yield _bytes_of(tensor)


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The exact size of the file that would hold these tensors."""
    return len(plan_file(tensors)[0]) + sum(t.numel() * t.dtype.itemsize for t in tensors.values())


def read_specs(path: Path) -> list[TensorSpec]:
    """Names, types and shapes, from the header alone."""
    with open_regular(path) as stream:
        return read_header(stream, name=str(path))[1]


def read_tensors(path: Path, *, sha256: str | None) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU, each with storage of its own.

    Raises:
        InputError: the file is damaged, or its SHA-256 is not the one given.
    """
    with open_regular(path) as stream:
        header, specs = read_header(stream, name=str(path))
        digest = hashlib.sha256(header)
        tensors: dict[str, Tensor] = {}
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            view = _bytes_of(tensor) if tensor.numel() else memoryview(bytearray())
            for start in range(0, len(view), READ_BYTES):
                part = view[start : start + READ_BYTES]
                if _fill(stream, part) != len(part):
                    raise InputError(f"{path} is truncated: it ends inside tensor {spec.name}")
                if sha256 is not None:
                    digest.update(part)
            tensors[spec.name] = tensor
    if sha256 is not None and digest.hexdigest() != sha256:
        raise InputError(
            f"{path} is damaged: its sha256 is {digest.hexdigest()[:16]}..., the manifest says {sha256[:16]}..."
        )
    return tensors


def _fill(stream: BufferedReader, part: memoryview) -> int:
    filled = 0
    while filled < len(part):
        count = stream.readinto(part[filled:])
        if not count:
            break
        filled += count
    return filled


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def find_tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Which names are the very same memory: {alias: owner}, the owner being the first of them."""
    owners: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        owner = owners.setdefault(key, name)
        if owner != name:
            tied[name] = owner
    return tied


def without_aliases(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors that are stored: every alias left out, after making sure that it is its owner."""
    for alias, owner in tied.items():
        if alias in tensors and owner not in tensors:
            raise ValueError(f"{alias} is tied to {owner}, which is not among the tensors")
        if alias in tensors and not _same(tensors[alias], tensors[owner]):
            raise ValueError(f"{alias} is said to be tied to {owner}, but their values differ")
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.data_ptr() == b.data_ptr() or bool(torch.equal(a.detach(), b.detach()))
