"""Saving of checkpoints: files written and synced in a temporary folder, manifest last, one rename, then pruning.

A kill at any moment leaves the previous checkpoint or the new one, whole. The order of the syncs matters as much as
that of the renames (a rename can reach the disk before the data it names), and is asserted by a test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tformer.checkpoint import catalog
from tformer.checkpoint.manifest import FileRecord, Manifest, file_names
from tformer.checkpoint.parts import Companions, divide, write_files
from tformer.checkpoint.read import Checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.tensor_files import file_bytes, find_tied, without_aliases
from tformer.support import __version__, files
from tformer.support.formatting import finite_or_none, python_value
from tformer.tokenizer.tokenizer import canonical_sha256


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of a checkpoint.

    weights: by parameter name, any device, contiguous or not; names without wrappers' prefixes.
    tied: {alias: owner}; None finds the names that share memory. Aliases are not stored.
    tokenizer_json: None for a model of images; the source's where source and target have separate vocabularies.
    trainer: JSON values; everything exact resume needs beside tensors.
    score: the validation score of these weights, lower is better (negate a metric of which more is better).
    loss: that of the same validation.
    tokenizer_sha256: `Tokenizer.sha256`, to be compared when loading.
    target_tokenizer_json: the target's, None where one tokenizer serves both sides, or there is one side only.
    target_tokenizer_sha256: its `Tokenizer.sha256`.
    """

    weights: Mapping[str, Tensor]
    recipe_yaml: str
    tokenizer_json: str | None
    trainer: Mapping[str, Any]
    tied: Mapping[str, str] | None = None
    optimizer: Mapping[str, Tensor] | None = None
    ema: Mapping[str, Tensor] | None = None
    generator: Mapping[str, Tensor] | None = None
    score: float | None = None
    loss: float | None = None
    tokenizer_sha256: str | None = None
    target_tokenizer_json: str | None = None
    target_tokenizer_sha256: str | None = None

    def __post_init__(self) -> None:
        wrapped = [name for name in self.weights if re.match(r"(module|_orig_mod)\.|.*\._orig_mod\.", name)]
        if wrapped:
            raise ValueError(f"weights are named after a wrapper: {wrapped[0]}; pass those of the bare model")
        if self.target_tokenizer_json is not None and self.tokenizer_json is None:
            raise ValueError("a tokenizer of the target needs one of the source beside it")

    @classmethod
    def derived(
        cls, checkpoint: Checkpoint, weights: Mapping[str, Tensor], trainer: Mapping[str, Any], **changes: Any
    ) -> CheckpointContents:
        """Other weights with the recipe, the tokenizers and the tied names of a checkpoint. changes: other fields."""
        values = {
            "recipe_yaml": checkpoint.recipe_text,
            "tokenizer_json": checkpoint.tokenizer_json,
            "tied": checkpoint.tied,
            "tokenizer_sha256": checkpoint.tokenizer_sha256,
            "target_tokenizer_json": checkpoint.target_tokenizer_json,
            "target_tokenizer_sha256": checkpoint.target_tokenizer_sha256,
        }
        return cls(weights=weights, trainer=trainer, **(values | changes))


def save_checkpoint(
    run: RunDirectory,
    step: int,
    contents: CheckpointContents,
    *,
    keep_last: int = 2,
    together: Companions | None = None,
) -> Path:
    """Add `checkpoints/step-<step>` to a run, update the pointers `latest` and `best`, and prune old checkpoints.

    Args:
        run: held by this process (`RunDirectory.create`, or `open(lock=True)`).
        step: of the weights.
        contents: what the checkpoint holds.
        keep_last: number of last checkpoints to keep beside the best; at most `keep_last + 2` are on disk at any time.
        together: with other processes, which write the tensors that this one does not have; it leads.

    Raises:
        StorageError: names the bytes needed and the path; the checkpoints that were there are untouched.
    """
    folder = run.checkpoints_path
    target = folder / catalog.step_name(step)
    try:
        catalog.tidy(folder, keep_last=keep_last)  # an earlier save may have been interrupted before its pruning
        for log in (run.metrics_path, run.samples_path):  # the records up to a checkpoint are on disk before it
            if log.is_file():
                files.sync_file(log)
        write_checkpoint(target, step, contents, together=together)
        catalog.tidy(folder, keep_last=keep_last)
    except OSError as error:
        raise files.storage_error(target, error) from error
    return target


def write_checkpoint(
    target: Path, step: int, contents: CheckpointContents, *, together: Companions | None = None
) -> None:
    """Write a checkpoint folder to `target` by one rename, in a run or elsewhere; `together`: see `save_checkpoint`."""
    weights, ema, generator = contents.weights, contents.ema, contents.generator
    tied = find_tied(weights) if contents.tied is None else dict(contents.tied)
    tensors = {
        "weights": without_aliases(weights, tied),
        "optimizer": contents.optimizer,
        "ema": None if ema is None else without_aliases(ema, {a: o for a, o in tied.items() if a in ema}),
        "generator": None if generator is None else without_aliases(generator, find_tied(generator)),
    }
    own = {(role, name): tensor for role, each in tensors.items() for name, tensor in (each or {}).items()}
    division = divide(own) if together is None else together.division
    texts = {**division.indexes(), "recipe": contents.recipe_yaml}
    tokenizer_sha256, target_sha256 = contents.tokenizer_sha256, contents.target_tokenizer_sha256
    if contents.tokenizer_json is not None:
        texts["tokenizer"] = contents.tokenizer_json
        tokenizer_sha256 = tokenizer_sha256 or canonical_sha256(contents.tokenizer_json)
    if contents.target_tokenizer_json is not None:
        texts["target_tokenizer"] = contents.target_tokenizer_json
        target_sha256 = target_sha256 or canonical_sha256(contents.target_tokenizer_json)
    names = file_names(separate="target_tokenizer" in texts)
    texts["trainer"] = json.dumps(dict(contents.trainer), indent=1, default=python_value) + "\n"
    total = division.total_bytes() + sum(len(text.encode("utf-8")) for text in texts.values())

    def fill(folder: Path) -> None:
        written = write_files(folder, division, own)
        records = list(written) if together is None else together.gather(folder, written)
        for role, text in texts.items():
            size, sha256 = files.write_durably(folder / names[role], [text.encode("utf-8")])
            records.append(FileRecord(names[role], role, size, sha256))
        manifest = Manifest(
            step=step,
            files=tuple(records),
            tied=tied,
            tokenizer_sha256=tokenizer_sha256,
            target_tokenizer_sha256=target_sha256 if "target_tokenizer" in texts else None,
            score=finite_or_none(contents.score),
            loss=finite_or_none(contents.loss),
            version=__version__,
        )
        files.write_durably(folder / files.MANIFEST, [manifest.to_json().encode("utf-8")])

    files.require_room(target.parent, total)
    try:
        files.publish_directory(target, fill)
    except OSError as error:
        refused = files.storage_error(target, error, bytes_needed=total)
        if entries := catalog.scan(target.parent):
            hint = f"{refused.hint}; " if refused.hint else ""
            refused.hint = f"{hint}the checkpoint {entries[-1].path.name} is intact"
        raise refused from error


def checkpoint_bytes(*tensors: Mapping[str, Tensor] | None) -> int:
    """Size in bytes of a checkpoint with these sets of tensors, for `RunDirectory.check_writable`."""
    return sum(file_bytes(values) for values in tensors if values is not None) + (1 << 20)
