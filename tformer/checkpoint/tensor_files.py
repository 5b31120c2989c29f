"""safetensors files: writing in chunks with hashing, reading with every claim checked, without memory mapping.

    u64 little-endian N | N bytes of JSON {name: {"dtype", "shape", "data_offsets": [start, stop]}, …} | data

Reading checks every claim before anything is allocated for it. Layout follows the reference implementation
(larger types first, then names; header padded with spaces to 8 bytes), so equal tensors give equal bytes.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tformer.support.errors import InputError
from tformer.support.files import PICKLE_HINT, looks_like_pickle, open_regular, parse_object
from tformer.support.formatting import short_hash

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
LFS_POINTER = b"version "  # first bytes of a Git LFS pointer file

# In the order of the reference implementation, which gives the order of tensors in a file (last first).
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file: `start` and `stop` are bytes counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def plan_file(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """The header's bytes (length prefix included) and the names in the order of their data."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _RANKS:
            raise ValueError(f"tensor {name} has type {tensor.dtype}, which safetensors cannot hold")
    names = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files that do not say so
    position = 0
    for name in names:
        tensor = tensors[name]
        stop = position + tensor.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def read_header(stream: BinaryIO, *, name: str) -> tuple[bytes, list[TensorSpec]]:
    """Read and check the header of an open file; returns its bytes and the tensors in the order of their data.

    Raises:
        InputError: any claim that does not hold: lengths, JSON, types, shapes, offsets, holes, overlaps, truncation.
    """
    file_bytes = os.fstat(stream.fileno()).st_size
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    plausible = len(prefix) == 8 and 8 + length <= min(file_bytes, 8 + MAX_HEADER_BYTES)  # 640 as in a pickle
    if looks_like_pickle(prefix) and not plausible:
        raise InputError(f"{name} is a pickle, not a safetensors file", hint=PICKLE_HINT)
    if prefix == LFS_POINTER:
        raise InputError(f"{name} is a pointer of Git LFS, not the file that it stands for", hint="git lfs pull")
    if len(prefix) < 8:
        raise InputError(f"{name} is damaged: {file_bytes} bytes are too few for a safetensors file")
    if length > MAX_HEADER_BYTES:
        raise InputError(f"{name} is damaged: its header claims {length:,} bytes, the limit is {MAX_HEADER_BYTES:,}")
    if 8 + length > file_bytes:
        raise InputError(
            f"{name} is damaged or truncated: its header claims {length:,} bytes, the file has {file_bytes:,}"
        )
    text = stream.read(length)
    if not text.startswith(b"{"):
        raise InputError(f"{name} is damaged: its header is not a JSON object")
    entries = parse_object(text, name=f"{name} (header)")
    entries.pop("__metadata__", None)
    specs = sorted((_spec(key, entry, name=name) for key, entry in entries.items()), key=lambda s: (s.start, s.stop))
    position = 0
    for spec in specs:
        if spec.start != position:
            kind = "a hole" if spec.start > position else "an overlap"
            raise InputError(
                f"{name} is damaged: {kind} before tensor {spec.name} (starts at {spec.start}, expected {position})"
            )
        position = spec.stop
    found = file_bytes - 8 - length
    if position != found:
        raise InputError(
            f"{name} is damaged or truncated: its tensors take {position:,} bytes, {found:,} follow the header"
        )
    return prefix + text, specs


def _spec(key: str, entry: object, *, name: str) -> TensorSpec:
    where = f"{name} is damaged: tensor {key}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{where} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"{where} has the unknown type {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(f"{where} has a malformed shape or malformed offsets")
    expected, span = math.prod(shape) * DTYPES[dtype].itemsize, offsets[1] - offsets[0]
    if span != expected:
        raise InputError(f"{where} of shape {shape} needs {expected:,} bytes, its offsets span {span:,}")
    return TensorSpec(key, DTYPES[dtype], tuple(shape), offsets[0], offsets[1])


def _naturals(value: object) -> bool:
    """Whether a JSON value is a short list of integers that fit a file offset."""
    if not isinstance(value, list) or len(value) > 64:
        return False
    return all(type(item) is int and 0 <= item < 1 << 62 for item in value)


READ_BYTES = 16 << 20  # chunk size: hashed while still in the processor's cache


def tensor_chunks(
    tensors: Mapping[str, Tensor], *, make: Callable[[str], Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor at a time, without a second copy of the model in memory.

    make: called with the name of each tensor when it is written; `tensors` then only have shapes and types (on the meta
        device).
    """
    header, names = plan_file(tensors)
    yield header
    for name in names:
        tensor = (tensors[name] if make is None else make(name)).detach().to("cpu").contiguous()
        if tensor.numel():
            yield _bytes_of(tensor)


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size in bytes of a file with these tensors."""
    return len(plan_file(tensors)[0]) + sum(tensor.nbytes for tensor in tensors.values())


def read_specs(path: Path) -> list[TensorSpec]:
    """Names, number formats and shapes of a file's tensors, from its header."""
    with open_regular(path) as stream:
        return read_header(stream, name=str(path))[1]


def read_tensors(path: Path, *, sha256: str | None) -> dict[str, Tensor]:
    """All tensors of a file by name; see `each_tensor`."""
    return dict(each_tensor(path, sha256=sha256))


def each_tensor(path: Path, *, sha256: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors of a file in the order of their data, on the CPU, each with separate storage.

    Raises:
        InputError: the file is damaged, or its SHA-256 is not the one given (at the end).
    """
    with open_regular(path) as stream:
        header, specs = read_header(stream, name=str(path))
        digest = None if sha256 is None else hashlib.sha256(header)
        for spec in specs:
            yield spec.name, _read(stream, spec, path, digest)
    if digest is not None and digest.hexdigest() != sha256:
        raise damaged_file(path, found=digest.hexdigest(), expected=str(sha256))


def _read(stream: BufferedReader, spec: TensorSpec, path: Path, digest: Any) -> Tensor:
    """The tensor at the position of the stream; a digest is updated with its bytes."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    view = _bytes_of(tensor) if tensor.numel() else memoryview(bytearray())
    for start in range(0, len(view), READ_BYTES):
        part = view[start : start + READ_BYTES]
        if _fill(stream, part) != len(part):
            raise InputError(f"{path} is truncated: it ends inside tensor {spec.name}")
        if digest is not None:
            digest.update(part)
    return tensor


def damaged_file(path: Path, *, found: str, expected: str) -> InputError:
    """The error for a file with another SHA-256 than the manifest's."""
    return InputError(f"{path} is damaged: its sha256 is {short_hash(found)}, the manifest says {short_hash(expected)}")


def read_rows(path: Path, wanted: Mapping[str, slice]) -> dict[str, Tensor]:
    """Rows of tensors of a file, by name; a scalar has one. Only the header and these bytes are read.

    Raises:
        InputError: the file is damaged.
    """
    found = {}
    with open_regular(path) as stream:
        header, specs = read_header(stream, name=str(path))
        for spec in specs:
            if spec.name in wanted:
                count, *width = spec.shape or (1,)
                start, stop, _ = wanted[spec.name].indices(count)
                rows = torch.empty(max(0, stop - start), *width, dtype=spec.dtype)
                if rows.numel():
                    stream.seek(len(header) + spec.start + start * math.prod(width) * spec.dtype.itemsize)
                    if _fill(stream, _bytes_of(rows)) != rows.nbytes:
                        raise InputError(f"{path} is truncated: it ends inside tensor {spec.name}")
                found[spec.name] = rows if spec.shape else rows[0]
    return found


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
    """{alias: owner} of tensors that share their memory; the owner is the first of them."""
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
    """The tensors without aliases. ValueError for an alias that differs from its owner."""
    for alias, owner in tied.items():
        if alias not in tensors:
            continue
        if owner not in tensors:
            raise ValueError(f"{alias} is tied to {owner}, which is not among the tensors")
        a, b = tensors[alias].detach(), tensors[owner].detach()
        alike = a.shape == b.shape and a.dtype == b.dtype
        if not (alike and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))):
            raise ValueError(f"{alias} is said to be tied to {owner}, but their values differ")
    return {name: tensor for name, tensor in tensors.items() if name not in tied}
