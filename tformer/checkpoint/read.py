"""Reading of checkpoints from any source: every claim is checked, nothing is executed or memory-mapped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tformer.checkpoint import catalog
from tformer.checkpoint.manifest import (
    FILE_NAMES,
    MAX_TOKENIZER_BYTES,
    ROLES,
    SOURCE_NAME,
    FileRecord,
    Manifest,
    exchanged_tokenizers,
    index_role,
    plain_name,
    read_manifest,
)
from tformer.checkpoint.run import CHECKPOINTS, writer
from tformer.checkpoint.tensor_files import (
    MAX_HEADER_BYTES,
    TensorSpec,
    damaged_file,
    each_tensor,
    read_rows,
    read_specs,
    read_tensors,
)
from tformer.recipe.load import recipe_from_yaml
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError, NotFiniteError
from tformer.support.files import open_regular, parse_object, read_bounded
from tformer.support.formatting import listed, short_hash

MAX_LISTED = 8  # names of each kind in an error


def differences(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, aliases: Mapping[str, str]) -> list[str]:
    """The differences that prevent loading `weights` into `state`, as text; empty if there are none.

    state: of the model, or of one on the meta device without its tied names.
    aliases: further names of tied tensors, which may stand among the weights or not.
    """
    missing = sorted(state.keys() - weights.keys())
    unexpected = sorted(weights.keys() - state.keys() - aliases.keys())
    reshaped = [
        f"{name} {list(weights[name].shape)} (expected {list(state[name].shape)})"
        for name in sorted(state.keys() & weights.keys())
        if weights[name].shape != state[name].shape
    ]
    other_numbers = [
        f"{name} {_dtype(weights[name])} (expected {_dtype(state[name])})"
        for name in sorted(state.keys() & weights.keys())
        if weights[name].is_floating_point() != state[name].is_floating_point()
    ]
    problems = []
    if missing:
        problems.append(f"missing {listed(missing, MAX_LISTED)}")
    if unexpected:
        problems.append(f"unexpected {listed(unexpected, MAX_LISTED)}")
    if reshaped:
        problems.append(f"of another shape {listed(reshaped, MAX_LISTED)}")
    if other_numbers:
        problems.append(f"of another number format {listed(other_numbers, MAX_LISTED)}")
    return problems or _untied(state, weights)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _untied(state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    """Names of stored tensors that differ although they are one tensor in the model."""
    owners: dict[tuple[int, torch.Size], str] = {}
    for name, target in state.items():
        if target.is_meta or not target.numel():
            continue
        owner = owners.setdefault((target.data_ptr(), target.shape), name)
        if owner != name and weights[name] is not weights[owner] and not torch.equal(weights[name], weights[owner]):
            return [f"{name} and {owner} are tied in the recipe, but differ in the weights"]
    return []


_MAX_TEXT_BYTES = {"recipe": 1 << 20, **dict.fromkeys(ROLES, MAX_TOKENIZER_BYTES), "trainer": 64 << 20}


@dataclass
class Checkpoint:
    """A checkpoint on disk. Texts are read and checked at once; tensors when one of the methods is called.

    `notes` are warnings for the user. `resumed`: see `read_checkpoint`.
    """

    path: Path
    manifest: Manifest
    recipe_text: str
    tokenizer_json: str | None  # None for images; the source's if there is a target_tokenizer_json
    trainer: dict[str, Any]
    verify: bool = True
    target_tokenizer_json: str | None = None  # None: one tokenizer for both sides
    notes: list[str] = field(default_factory=list)
    resumed: bool = False
    streams: ClassVar[bool] = False  # whether loading into a model reads one tensor at a time

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def tied(self) -> Mapping[str, str]:
        """{alias: owner} of the weights."""
        return self.manifest.tied

    @property
    def tokenizer_sha256(self) -> str | None:
        return self.manifest.tokenizer_sha256

    @property
    def target_tokenizer_sha256(self) -> str | None:
        return self.manifest.target_tokenizer_sha256

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that the checkpoint was trained with."""
        return recipe_from_yaml(self.recipe_text, name=str(self.path / "recipe.yaml"))

    def tokenizer_path(self, side: str) -> Path:
        """The file of the tokenizer of a side, "source" for the only one, too."""
        return self.path / ("tokenizer.json" if self.target_tokenizer_json is None else f"tokenizer.{side}.json")

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds tensors of a role: weights, optimizer, ema, generator."""
        return bool(self.manifest.by_role(role))

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, on the CPU; an alias is the same tensor object as its owner."""
        return self._with_aliases(self._tensors("weights"))

    def ema(self) -> dict[str, Tensor] | None:
        """The averaged weights, or None when the run keeps none."""
        return self._with_aliases(self._tensors("ema")) if self.has("ema") else None

    def generator(self) -> dict[str, Tensor] | None:
        """The second model's weights (ELECTRA), or None."""
        return self._tensors("generator") if self.has("generator") else None

    def optimizer(self) -> dict[str, Tensor]:
        """The optimizer's state by name. Errors as in `require_optimizer`."""
        self.require_optimizer()
        return self._tensors("optimizer")

    def require_optimizer(self) -> None:
        """Raise InputError when no state of an optimizer was saved, so that training cannot be resumed exactly."""
        if not self.has("optimizer"):
            raise InputError(
                f"{self.path} has no optimizer state, so training cannot resume from it",
                hint="start a new run from its weights with --init-from",
            )

    def specs(self, role: str) -> dict[str, TensorSpec]:
        """Names, number formats and shapes of the tensors of a role, from headers alone; empty if there are none."""
        records = self.manifest.by_role(role)
        return {spec.name: spec for record in records for spec in read_specs(self.path / record.name)}

    def rows(self, role: str, wanted: Mapping[str, slice], *, rank: int = 0, processes: int = 1) -> dict[str, Tensor]:
        """Rows of stored tensors of a role, by name; only these rows are read from a file.

        The SHA-256 of each file is compared by one of several processes that all read the same checkpoint.

        Raises:
            InputError: a file is damaged, or a tensor is missing.
        """
        found: dict[str, Tensor] = {}
        with _recovery_hint(self.path, resumed=self.resumed):
            index = self._index(role)
            for number, record in enumerate(self.manifest.by_role(role)):
                path = self.path / record.name
                if self.verify and number % processes == rank:
                    with open_regular(path) as stream:
                        digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    if digest != record.sha256:
                        raise damaged_file(path, found=digest, expected=record.sha256)
                if index is not None:
                    _check_index(self.path, index, record.name, {spec.name for spec in read_specs(path)})
                found |= read_rows(path, wanted)
            if wanted.keys() != found.keys():
                raise InputError(f"{self.path} has no tensor {min(wanted.keys() - found.keys())} among its {role}")
        return found

    def each(self, role: str) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each stored tensor of a role, one at a time; errors as in `weights`, after the last one."""
        with _recovery_hint(self.path, resumed=self.resumed):
            for record in self.manifest.by_role(role):
                _check_size(self.path / record.name, record)
                for name, tensor in each_tensor(self.path / record.name, sha256=record.sha256 if self.verify else None):
                    if not all_finite(tensor):
                        self._refuse_not_finite(role, [name], len(self.specs(role)))
                    yield name, tensor

    @property
    def sha256(self) -> str:
        """SHA-256 of the file of the weights in use (averaged ones first), or of the list of several files."""
        records = self.manifest.by_role("ema") or self.manifest.by_role("weights")
        return joint_sha256([record.sha256 for record in records])

    def _tensors(self, role: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        with _recovery_hint(self.path, resumed=self.resumed):
            index = self._index(role)
            for record in self.manifest.by_role(role):
                path = self.path / record.name
                _check_size(path, record)
                part = read_tensors(path, sha256=record.sha256 if self.verify else None)
                twice = sorted(tensors.keys() & part.keys())
                if twice:
                    raise InputError(f"{path} holds tensor {twice[0]}, which another file of {self.path} holds as well")
                if index is not None:
                    _check_index(self.path, index, record.name, set(part))
                tensors |= part
            if index is not None and index.keys() != tensors.keys():
                raise InputError(
                    f"{self.path}: the index names tensor {min(index.keys() - tensors.keys())}, no file has it"
                )
            bad = [name for name, t in tensors.items() if t.is_floating_point() and not all_finite(t)]
            self._refuse_not_finite(role, bad, len(tensors))
        return tensors

    def _index(self, role: str) -> dict[str, str] | None:
        """{tensor name: file name} of a role with several files beside an index."""
        records = self.manifest.by_role(index_role(role))
        if not records:
            return None
        path = self.path / records[0].name
        data = _read_checked(path, records[0], max_bytes=MAX_HEADER_BYTES, verify=self.verify)
        weight_map = parse_object(data, name=str(path)).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InputError(f"{path} is damaged: it has no weight_map")
        known = {record.name for record in self.manifest.by_role(role)}
        for name in set(map(str, weight_map.values())):
            try:
                plain_name(name)
            except ValueError as error:
                raise InputError(f"{path} is refused: {error}") from None
            if name not in known:
                raise InputError(f"{path} names the file {name}, which the manifest does not")
        return weight_map

    def _with_aliases(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for alias, owner in self.tied.items():
            if alias not in tensors:
                if owner not in tensors:
                    raise InputError(f"{self.path} is damaged: {alias} is tied to {owner}, which is not stored")
                tensors[alias] = tensors[owner]
        return tensors

    def _refuse_not_finite(self, role: str, bad: Sequence[str], count: int) -> None:
        """Raise NotFiniteError if tensors of a role, `count` in all, are `bad`."""
        if bad:
            listing = ", ".join(bad[:3]) + (", ..." if len(bad) > 3 else "")
            raise NotFiniteError(
                f"{self.path}: {len(bad)} of {count} {role} tensors hold NaN or infinity ({listing})",
                hint="training diverged, or the file is damaged",
            )


def joint_sha256(hashes: Sequence[str]) -> str:
    """The SHA-256 of one file, or of the lines of several files' hashes."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()


def read_checkpoint(path: str | Path, *, verify: bool = True, resumed: bool = False) -> Checkpoint:
    """Open a checkpoint folder.

    Args:
        path: the folder itself; see `resolve_checkpoint` for other paths.
        verify: compare every file with its SHA-256 (sizes and structure are checked in any case).
        resumed: this training, in this process or another one of it, holds the lock of the run.

    Raises:
        InputError: missing, cut off, damaged, or written by a newer tformer; names the file.
    """
    folder = Path(path)
    with _recovery_hint(folder, resumed=resumed):
        manifest = read_manifest(folder)
        texts = _read_texts(folder, manifest, verify=verify)
        trainer = parse_object(texts["trainer"].encode("utf-8"), name=str(folder / "trainer.json"))
    source, target = (texts.get(role) for role in ROLES)
    return Checkpoint(
        folder,
        manifest,
        texts["recipe"],
        source,
        trainer,
        verify=verify,
        target_tokenizer_json=target,
        resumed=resumed,
    )


@contextmanager
def _recovery_hint(folder: Path, *, resumed: bool) -> Iterator[None]:
    """Context manager that adds a hint to the error of a damaged checkpoint, if it has none."""
    try:
        yield
    except InputError as error:
        error.hint = error.hint or _others(folder, resumed=resumed)
        raise


def _others(folder: Path, *, resumed: bool) -> str | None:
    """The hint for a damaged checkpoint: other checkpoints, and how a run resumes from the one before."""
    entries = catalog.scan(folder.parent)
    others = [entry.path.name for entry in entries if entry.path.name != folder.name]
    if folder.parent.name != CHECKPOINTS:
        return f"other checkpoints beside it: {', '.join(others)}" if others else None
    if not resumed and writer(folder.parents[1]) not in (None, str(os.getpid())):
        return "a training writes to this run, and may have removed this checkpoint: run the command again"
    listing = f"other checkpoints of this run: {', '.join(others)}" if others else "the run has no other checkpoint"
    if not entries or entries[-1].path.name != folder.name:
        return listing
    start = f"from {others[-1]}" if others else "from the start"
    return f"{listing}; to go on {start}, remove {folder}, then: tformer train --resume --out {folder.parents[1]}"


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        side = {SOURCE_NAME: "source", FILE_NAMES["target_tokenizer"]: "target"}.get(path.name)
        meaning = f", the tokenizer of the {side} side," if side else ""
        raise InputError(f"{path}{meaning} is missing, but the manifest lists it") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if size != record.size:
        word = "truncated" if size < record.size else "damaged"
        raise InputError(f"{path} is {word}: it has {size:,} bytes, the manifest says {record.size:,}")


def _read_texts(folder: Path, manifest: Manifest, *, verify: bool) -> dict[str, str]:
    """{role: text} of the text files, after a check of all file sizes."""
    try:
        for record in manifest.files:
            _check_size(folder / record.name, record)
        texts = {}
        for role, max_bytes in _MAX_TEXT_BYTES.items():
            for record in manifest.by_role(role)[:1]:
                path = folder / record.name
                data = _read_checked(path, record, max_bytes=max_bytes, verify=verify)
                try:
                    texts[role] = data.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise InputError(f"{path} is damaged: not UTF-8 at byte {error.start}") from None
        return texts
    except InputError as error:
        raise exchanged_tokenizers(folder, manifest) or error from None


def _read_checked(path: Path, record: FileRecord, *, max_bytes: int, verify: bool) -> bytes:
    data = read_bounded(path, max_bytes=max_bytes)
    found = hashlib.sha256(data).hexdigest()
    if verify and found != record.sha256:
        what = "is not the tokenizer this model was trained with" if record.role in ROLES else "is damaged"
        raise InputError(
            f"{path} {what}: its sha256 is {short_hash(found)}, the manifest says {short_hash(record.sha256)}"
        )
    return data


def _check_index(folder: Path, index: Mapping[str, str], name: str, found: set[str]) -> None:
    expected = {tensor for tensor, file in index.items() if file == name}
    if expected != found:
        odd = min(expected ^ found)
        raise InputError(f"{folder / name} and the index disagree about tensor {odd}")


def all_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; the sum is tested first, because that is faster."""
    if tensor.dtype.itemsize == 1:  # 8-bit floats have no kernels
        tensor = tensor.to(torch.float32)
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
