"""One tokenizer, or one for each side of an encoder-decoder: under which names they lie, and telling them apart again.

tokenizer.json                                  of both sides, or of the only one
tokenizer.source.json, tokenizer.target.json    where source and target have vocabularies of their own
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tformer.checkpoint.bounded_json import read_bounded
from tformer.checkpoint.manifest import FILE_NAMES, Manifest
from tformer.errors import InputError

SOURCE_NAME = "tokenizer.source.json"
ROLES = ("tokenizer", "target_tokenizer")
MAX_TOKENIZER_BYTES = 256 << 20


def file_names(*, separate: bool) -> dict[str, str]:
    """{role: file} of all that a checkpoint can hold."""
    return FILE_NAMES | {"tokenizer": SOURCE_NAME} if separate else FILE_NAMES


def mix_up(folder: Path, manifest: Manifest) -> InputError | None:
    """The error of a checkpoint whose tokenizer files took each other's place; None when that is not what is wrong."""
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


def missing_file(path: Path) -> InputError:
    """The error of a checkpoint that lacks a file, and whose tokenizer it was."""
    side = {SOURCE_NAME: "source", FILE_NAMES["target_tokenizer"]: "target"}.get(path.name)
    whose = f", the tokenizer of the {side} side," if side else ""
    return InputError(f"{path}{whose} is missing, but the manifest lists it")


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_bounded(path, max_bytes=MAX_TOKENIZER_BYTES)).hexdigest()
    except InputError:
        return None
