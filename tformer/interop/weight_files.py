"""The weight files of a Hugging Face folder: one model.safetensors, or several beside an index.

The folder may come from an untrusted source, so everything is checked: the index names plain files of its own folder,
each of its tensors lies in the file it says and nowhere else, and no file holds a tensor that the index does not name.
Weights in any other format are refused by name; a pickle is never opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

from tformer.checkpoint.manifest import plain_name
from tformer.checkpoint.tensor_files import (
    MAX_HEADER_BYTES,
    TensorSpec,
    each_tensor,
    read_specs,
)
from tformer.interop.mapping import Fixed, Link
from tformer.support.errors import InputError
from tformer.support.files import read_object

FileRead = Callable[[int, int], None]  # (files read, number of files)

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"

_CONVERT = (
    "where you trust the file, load it with transformers and save it again: "
    "AutoModel... .from_pretrained(DIR).save_pretrained(NEW_DIR) writes model.safetensors"
)
_PICKLE = f"tformer never unpickles, for a pickle can run any code; {_CONVERT}"

# Other weight formats, for the error message: (pattern, name of the format, hint), in this order.
OTHER_FORMATS = (
    ("*.bin", "pickled weights", _PICKLE),
    ("*.bin.index.json", "an index of pickled weights", _PICKLE),
    ("*.pt", "pickled weights", _PICKLE),
    ("*.pth", "pickled weights", _PICKLE),
    ("*.ckpt*", "pickled weights", _PICKLE),
    ("*.pkl", "pickled weights", _PICKLE),
    ("*.h5", "TensorFlow weights", _CONVERT),
    ("*.msgpack", "Flax weights", _CONVERT),
    ("adapter_model*.safetensors", "an adapter (PEFT), not a model", "import its folder with adapter_config.json"),
    ("*.gguf", "GGUF weights", "tformer import FILE.gguf reads such a file"),
    ("*.onnx", "an ONNX graph", "look for the original model, which has model.safetensors"),
    ("*.safetensors", "safetensors under another name", f"a single file must be called {SINGLE}"),
)


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder. specs: every tensor of every file, from headers alone; files: the file of each."""

    folder: Path
    specs: Mapping[str, TensorSpec]
    files: Mapping[str, Path]

    def read(self, names: Iterable[str], *, file_read: FileRead = lambda done, total: None) -> dict[str, Tensor]:
        """Tensors by name; see `each`."""
        return dict(self.each(names, file_read=file_read))

    def each(
        self, names: Iterable[str], *, file_read: FileRead = lambda done, total: None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) file by file, on the CPU, as stored; one at a time. `file_read` is called after each file.

        Raises InputError for a file that has changed since its header was read, or is damaged.
        """
        left = set(names)

        def is_wanted(found: tuple[str, Tensor]) -> bool:
            wanted = found[0] in left and tuple(found[1].shape) == self.specs[found[0]].shape
            left.discard(found[0] if wanted else "")
            return wanted

        paths = sorted({self.files[name] for name in left})
        for done, path in enumerate(paths, start=1):
            yield from filter(is_wanted, each_tensor(path))  # a loop would hold the tensor while the caller works
            file_read(done, len(paths))
        if left:
            name = min(left)
            raise InputError(f"{self.files[name]} has changed while it was read: tensor {name} is not what it was")


def refuse_dangling(path: Path) -> None:
    """Raise InputError for a broken link, as an emptied cache of downloads leaves."""
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{path} is a link to {os.readlink(path)}, which is not there",
            hint="download the folder again, with every file",
        )


def open_weights(folder: Path) -> WeightFiles:
    """The weight files of a folder, from their headers. A single file takes precedence over an index.

    Raises:
        InputError: no safetensors (names what is there instead), a damaged or truncated file, an index that names a
            file outside the folder, a file that is missing, or tensors that are not where it says.
    """
    refuse_dangling(folder / SINGLE)
    refuse_dangling(folder / INDEX)
    if (folder / SINGLE).exists():
        path = folder / SINGLE
        specs = {spec.name: spec for spec in read_specs(path)}
        return WeightFiles(folder, specs, dict.fromkeys(specs, path))
    if (folder / INDEX).exists():
        return _open_indexed(folder)
    names = sorted(entry.name for entry in folder.iterdir())
    for pattern, what, hint in OTHER_FORMATS:
        found = next((name for name in names if fnmatch(name, pattern)), None)
        if found is not None:
            raise InputError(f"{folder} has no {SINGLE} but {found}: {what}", hint=hint)
    raise InputError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def _open_indexed(folder: Path) -> WeightFiles:
    index = folder / INDEX
    weight_map = _weight_map(index)
    specs: dict[str, TensorSpec] = {}
    files: dict[str, Path] = {}
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        held = sum(file == absent[0] for file in weight_map.values())
        raise InputError(
            f"{folder / absent[0]} is missing: {held:,} tensors are in it by {index.name} "
            f"({len(absent)} of {len(names)} files are missing)",
            hint="download the folder again, with every file",
        )
    for name in names:
        path = folder / name
        for spec in read_specs(path):
            if spec.name in specs:
                raise InputError(f"{path} holds tensor {spec.name}, which {files[spec.name].name} holds as well")
            if weight_map.get(spec.name) != name:
                expected = weight_map.get(spec.name)
                says = f"says {expected}" if expected else "does not name it"
                raise InputError(f"{path} holds tensor {spec.name}, but {index.name} {says}")
            specs[spec.name], files[spec.name] = spec, path
    lacking = sorted(weight_map.keys() - specs.keys())
    if lacking:
        more = f" (and {len(lacking) - 1:,} more)" if len(lacking) > 1 else ""
        raise InputError(f"{folder / weight_map[lacking[0]]} lacks tensor {lacking[0]}{more}, which {index.name} names")
    return WeightFiles(folder, specs, files)


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: file} of the index; InputError unless every file is a plain name, inside the index's folder."""
    found = read_object(index, max_bytes=MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InputError(f"{index} is damaged: it has no weight_map")
    for name in found.values():
        try:
            plain_name(name)
        except ValueError:
            raise InputError(
                f"{index}: weight_map: found the file {name!r}, expected a file of this very folder",
                hint="an index that leads elsewhere is refused",
            ) from None
        if not name.endswith(SUFFIX):
            raise InputError(f"{index}: weight_map: found the file {name!r}, expected one that ends in {SUFFIX}")
    return found


@dataclass(frozen=True)
class Outgoing:
    """Tensors to write, by name on disk. shapes: on the meta device; make: computes one tensor when it is written."""

    shapes: Mapping[str, Tensor]
    make: Callable[[str], Tensor]


def outgoing(
    links: Sequence[Link], fixed: Sequence[Fixed], weights: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> Outgoing:
    """The tensors that a class's table makes of tformer's tensors (owners only).

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
    """The tensor in another number format. InputError when a number is too large for it."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if not bool(torch.isfinite(result).all()) and bool(torch.isfinite(tensor).all()):
        largest = float(tensor.abs().max())
        raise InputError(
            f"tensor {name} does not fit {str(dtype).removeprefix('torch.')}: it holds {largest:g}, the most there is "
            f"{torch.finfo(dtype).max:g}",
            hint="--dtype bf16 and fp32 hold larger numbers",
        )
    return result


def plan_shards(tensors: Outgoing, shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """{file: {name: shape}} of the files to write, filled in the order of the tensors.

    A tensor above `shard_bytes` gets its own file.
    """
    groups: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.shapes.items():
        if not groups or tensor.nbytes > room:
            groups.append({})
            room = shard_bytes
        groups[-1][name] = tensor
        room -= tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    stem, _, suffix = SINGLE.partition(".")
    return {f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}": group for number, group in enumerate(groups, start=1)}


def main_dtype(tensors: Outgoing) -> torch.dtype:
    """The number format of most parameters."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors.shapes.values():
        if tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda kind: counts[kind])


def index_document(tensors: Outgoing, shards: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """{file name: text} of the index; {} when there is a single weight file."""
    if len(shards) == 1:
        return {}
    shapes = tensors.shapes.values()
    document = {
        "metadata": {
            "total_parameters": sum(tensor.numel() for tensor in shapes),
            "total_size": sum(tensor.nbytes for tensor in shapes),
        },
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
    return {INDEX: json.dumps(document, indent=2, sort_keys=True) + "\n"}


def _part(entry: Link, index: int, weights: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    return lambda: entry.layout.split(weights[entry.ours])[index]
