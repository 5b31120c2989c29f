"""Contents of a checkpoint: `manifest.json` (files by role, sizes, SHA-256) and the names of its tokenizer files.

The manifest is written last, so that its presence proves that every other file is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tformer.support.errors import InputError
from tformer.support.files import MANIFEST, PICKLE_HINT, PICKLE_SUFFIXES, read_bounded, read_object
from tformer.support.formatting import finite_or_none

SOURCE_NAME = "tokenizer.source.json"
ROLES = ("tokenizer", "target_tokenizer")
MAX_TOKENIZER_BYTES = 256 << 20


def file_names(*, separate: bool) -> dict[str, str]:
    """{role: file name} of every file that a checkpoint can hold."""
    return FILE_NAMES | {"tokenizer": SOURCE_NAME} if separate else FILE_NAMES


def exchanged_tokenizers(folder: Path, manifest: Manifest) -> InputError | None:
    """The error for a checkpoint with exchanged tokenizer files; None when they are not exchanged."""
    records = [record for role in ROLES for record in manifest.by_role(role)]
    if len(records) != len(ROLES):
        return None
    source, target = records
    found = [_sha256(folder / record.name) for record in records]
    hint = "put the tokenizers of the checkpoint back, each under its own name"
    if found == [target.sha256, source.sha256]:
        return InputError(f"{folder}: {source.name} and {target.name} are swapped", hint=hint)
    for record, other, digest in zip(records, (target, source), found, strict=True):
        if digest == other.sha256 != record.sha256:
            return InputError(f"{folder / record.name} is not its own tokenizer but that of {other.name}", hint=hint)
    return None


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_bounded(path, max_bytes=MAX_TOKENIZER_BYTES)).hexdigest()
    except InputError:
        return None


FORMAT = 3  # 1: without `sha256`; 2: only weights may be several files
MAX_MANIFEST_BYTES = 16 << 20

TENSOR_FILES = {
    "weights": "model.safetensors",
    "optimizer": "optimizer.safetensors",
    "ema": "ema.safetensors",
    "generator": "generator.safetensors",
}
"""{role: file} of tensors, which may instead be several files beside an index."""
_PART = re.compile(r"-\d{5}-of-\d{5}\.safetensors")


def index_role(role: str) -> str:
    """The role of the index of a role's files."""
    return f"{role}_index"


def part_name(role: str, number: int, count: int) -> str:
    """The name of file `number` (from 1) of `count` files with a role's tensors, as transformers names them."""
    return f"{TENSOR_FILES[role].removesuffix('.safetensors')}-{number:05d}-of-{count:05d}.safetensors"


FILE_NAMES = TENSOR_FILES | {  # role -> file
    **{index_role(role): f"{name}.index.json" for role, name in TENSOR_FILES.items()},
    "recipe": "recipe.yaml",
    "tokenizer": "tokenizer.json",  # beside a target_tokenizer: tokenizer.source.json
    "target_tokenizer": "tokenizer.target.json",
    "trainer": "trainer.json",
}
_REQUIRED = ("weights", "recipe", "trainer")  # image models have no tokenizer


@dataclass(frozen=True, slots=True)
class FileRecord:
    name: str
    role: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`tied` maps each alias to the stored tensor it shares; `score` is the validation score, lower is better.

    `loss` is that of the same validation.

    `target_tokenizer_sha256` is None unless source and target have separate vocabularies.
    """

    step: int
    files: tuple[FileRecord, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    tokenizer_sha256: str | None = None
    score: float | None = None
    loss: float | None = None
    version: str = ""
    target_tokenizer_sha256: str | None = None

    def by_role(self, role: str) -> list[FileRecord]:
        return [record for record in self.files if record.role == role]

    def to_json(self) -> str:
        separate = {} if (sha := self.target_tokenizer_sha256) is None else {"target_tokenizer_sha256": sha}
        several = any(self.by_role(index_role(role)) for role in TENSOR_FILES)
        content: dict[str, Any] = {
            "format": FORMAT if several else 2,  # older versions read a checkpoint of single files
            "tformer": self.version,
            "step": self.step,
            "score": self.score,
            "loss": self.loss,
            "tokenizer_sha256": self.tokenizer_sha256,
            **separate,
            "tied": dict(sorted(self.tied.items())),
            "files": {r.name: {"role": r.role, "size": r.size, "sha256": r.sha256} for r in self.files},
        }
        content = finite_or_none(content)
        return json.dumps(content | {"sha256": content_sha256(content)}, indent=1, allow_nan=False) + "\n"


def content_sha256(content: Mapping[str, Any]) -> str:
    """Hash over a manifest's own content: canonical JSON without the key `sha256`."""
    own = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(own, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def refuse_pickles(path: Path) -> None:
    """Raise InputError for a file that is a pickle, and for a folder that holds one."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.suffix in PICKLE_SUFFIXES:
            raise InputError(f"{file} is a pickle, not a checkpoint of tformer", hint=PICKLE_HINT)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        InputError: there is none, it is damaged, it names files outside its folder, or a newer tformer wrote it.
    """
    path = folder / MANIFEST
    if not path.exists():
        try:
            refuse_pickles(folder)
        except OSError:
            raise InputError(f"{folder} is not a checkpoint folder") from None
        raise InputError(
            f"{folder} is not a checkpoint: it has no {MANIFEST}",
            hint="a checkpoint that was cut off while being written or removed looks like this; choose another one",
        )
    content = read_object(path, max_bytes=MAX_MANIFEST_BYTES)
    number = content.get("format")
    if type(number) is int and number > FORMAT:
        raise InputError(
            f"{folder} was written by a newer tformer (checkpoint format {number}, this one reads up to {FORMAT})",
            hint="upgrade tformer: pip install --upgrade tformer",
        )
    try:
        if type(number) is not int or number < 1:
            raise ValueError(f"format is {number!r}, expected 1 to {FORMAT}")
        if (number > 1 or "sha256" in content) and content["sha256"] != content_sha256(content):
            raise ValueError("its content does not have its own sha256")
        return _from_content(content)
    except KeyError as error:
        raise InputError(f"{path} is damaged: the key {error} is missing") from None
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InputError(f"{path} is damaged: {error}") from None


def _from_content(content: dict[str, Any]) -> Manifest:
    separate = content.get("target_tokenizer_sha256") is not None  # a key that was added after version 1 of the format
    records = tuple(
        FileRecord(
            plain_name(name),
            _role(entry["role"], name, separate=separate),
            _natural(entry["size"], "size"),
            str(entry["sha256"]),
        )
        for name, entry in content["files"].items()
    )
    tied = {str(alias): str(owner) for alias, owner in content["tied"].items()}
    tokenizer_sha256 = content["tokenizer_sha256"]
    target_sha256 = content.get("target_tokenizer_sha256")
    manifest = Manifest(
        step=_natural(content["step"], "step"),
        files=records,
        tied=tied,
        tokenizer_sha256=None if tokenizer_sha256 is None else str(tokenizer_sha256),
        score=_finite(content["score"]),
        loss=_finite(content.get("loss")),  # a later key, as `target_tokenizer_sha256`
        version=str(content["tformer"]),
        target_tokenizer_sha256=None if target_sha256 is None else str(target_sha256),
    )
    for role in _REQUIRED:
        if not manifest.by_role(role):
            raise ValueError(f"no file has the role '{role}'")
    if bool(manifest.by_role("target_tokenizer")) != (target_sha256 is not None):
        raise ValueError("target_tokenizer_sha256 and a file with the role 'target_tokenizer' go together")
    if target_sha256 is not None and not manifest.by_role("tokenizer"):
        raise ValueError("there is a tokenizer of the target, but none of the source")
    return manifest


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None


def _role(role: object, name: str, *, separate: bool) -> str:
    """The role of a file; ValueError if it is unknown or belongs to another file. Tensors may be several files."""
    expected = file_names(separate=separate).get(str(role))
    several = role == "weights" and name.endswith(".safetensors") and name not in FILE_NAMES.values()
    stem = TENSOR_FILES.get(str(role), "").removesuffix(".safetensors")
    several = several or bool(stem and name.startswith(stem) and _PART.fullmatch(name.removeprefix(stem)))
    if expected is None or (name != expected and not several):
        raise ValueError(f"the file {name} has the role {role!r}, which belongs to {expected or 'no file'}")
    return str(role)


def _natural(value: object, key: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{key} is {value!r}, expected a whole number")
    return value


def plain_name(name: object) -> str:
    """The file name; ValueError for one that leads outside its folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(mark in name for mark in ("/", "\\", "\0")):
        raise ValueError(f"the file name {name!r} leads outside the checkpoint")
    return name
