"""The weight files of a Hugging Face folder: one model.safetensors, or several beside an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tformer.checkpoint.tensor_files import read_specs, read_tensors
from tformer.checkpoint.tensor_header import TensorSpec

SINGLE = "model.safetensors"


@dataclass(frozen=True)
class WeightFiles:
    """specs: every tensor of every file, from headers alone; files: the file of each."""

    folder: Path
    specs: Mapping[str, TensorSpec]
    files: Mapping[str, Path]

    def file_of(self, name: str) -> Path:
        return self.files[name]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name, on the CPU, as stored."""
        wanted = set(names)
        found: dict[str, Tensor] = {}
        for path in sorted({self.files[name] for name in wanted}):
            found |= {name: tensor for name, tensor in read_tensors(path, sha256=None).items() if name in wanted}
        return found


def open_weights(folder: Path) -> WeightFiles:
    """TODO(owner of weight_files): index, pickles, traversal, duplicates."""
    path = folder / SINGLE
    specs = {spec.name: spec for spec in read_specs(path)}
    return WeightFiles(folder, specs, dict.fromkeys(specs, path))
