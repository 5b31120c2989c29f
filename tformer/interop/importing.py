"""Import of Hugging Face folders: opened in place wherever a run may be named, or written as an ordinary checkpoint.

An import is checked before anything is written: every tensor of the files has its place or a reason to be left out,
none is missing, all have the shapes that config.json promises, and every id of the tokenizer has a row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer.build import build_model
from tformer.checkpoint.average import require_new
from tformer.checkpoint.read import all_finite
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.interop.foreign_checkpoint import ForeignCheckpoint, open_folder
from tformer.support import files
from tformer.support.device import DTYPES
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work


@dataclass(frozen=True)
class ImportReport:
    """Result of an import: the architecture, sizes, tokens and labels that were read, and the new checkpoint.

    bytes: of the written tensors. memory: bytes that the tensors take at most while they are read, converted and held.
    """

    path: Path | None  # None: nothing was written, and no place was named
    class_name: str
    model_type: str
    arch: str
    layers: Mapping[str, int]  # encoder, decoder
    heads: Mapping[str, int]  # of attention
    d_model: int
    parameters: int
    tensors: int  # read from the files
    left_out: tuple[str, ...]  # tensors of the files that are no part of this class
    stored_as: str  # in the folder
    dtype: str  # of the tensors that were written: fp32, bf16, fp16
    bytes: int
    memory: int
    vocab_size: int | None  # rows of the embedding
    tokenizer_size: int | None  # ids
    special_tokens: Mapping[str, str]  # role -> token, of a model of text
    labels: tuple[str, ...]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The JSON document of `tformer import --json`."""
        found = {"class" if name == "class_name" else name: value for name, value in asdict(self).items()}
        lists = {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
        return found | lists | {"path": None if self.path is None else str(self.path)}


def import_folder(
    folder: str | Path,
    out: str | Path | None,
    *,
    tokenizer: Path | None = None,
    target_tokenizer: Path | None = None,
    ignore: Collection[str] = (),
    dtype: torch.dtype = torch.float32,
    dry_run: bool = False,
    work: Work = QUIET,
) -> ImportReport:
    """Write a Hugging Face folder as a checkpoint of step 0, which every command takes.

    Args:
        folder, tokenizer, target_tokenizer, ignore: see `open_folder`.
        out: a folder that does not exist yet; None: none, for a dry run.
        dtype: of the tensors to write.
        dry_run: check configuration, headers of the weights and tokenizer, and write nothing.
        work: reports the weight files read, and is polled after each; once the checkpoint is being written, it is
            finished.

    Raises:
        InputError: see `open_folder`; or `out` exists, or a number does not fit into `dtype`; nothing is written.
        StorageError: the disk refuses; no part of the result is left.
        Interrupted: `work` was stopped; nothing is written.
    """
    target = None if out is None else Path(out)
    if target is not None:
        require_new(target)
    checkpoint = open_folder(folder, tokenizer=tokenizer, target_tokenizer=target_tokenizer, ignore=ignore)
    report = _report(checkpoint, target, dtype)
    if dry_run or target is None:
        return report
    files.require_writable_folder(target)
    files.require_room(target, report.bytes)

    def file_read(done: int, total: int) -> None:
        work.report(done, total)
        work.raise_if_stopped("while importing, nothing written")

    # `map` holds no tensor while the next one is read, as a loop would.
    weights = dict(map(partial(_cast, checkpoint.path, dtype), checkpoint.each("weights", file_read=file_read)))
    bare = build_model(checkpoint.foreign.model, device="meta").state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in bare.items() if name not in checkpoint.tied}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    # The folder was checked when it was opened.
    assert found == expected, (
        f"the table of {checkpoint.foreign.class_name} is wrong: {found.items() ^ expected.items()}"
    )
    require_new(target)  # again: reading may have taken minutes
    write_checkpoint(target, checkpoint.step, CheckpointContents.derived(checkpoint, weights, checkpoint.trainer))
    return report


def _cast(folder: Path, dtype: torch.dtype, found: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """A named tensor in another number format. InputError for a finite number that overflows in it."""
    name, tensor = found
    result = tensor.to(dtype)
    if not all_finite(result) and all_finite(tensor):
        largest = float(tensor.abs().max())
        raise InputError(
            f"--dtype {name_of(dtype)}: {name} of {folder} holds {largest:.4g}, which does not fit",
            hint="--dtype bf16 and fp32 hold larger numbers",
        )
    return name, result


def _report(checkpoint: ForeignCheckpoint, target: Path | None, dtype: torch.dtype) -> ImportReport:
    foreign, recipe = checkpoint.foreign, checkpoint.recipe
    specs = foreign.specs().values()
    parameters = sum(math.prod(spec.shape) for spec in specs)
    # Beside the result: a tensor of a file, the one that is made of it, and its copy in the other format.
    passing = max(math.prod(spec.shape) * (2 * spec.dtype.itemsize + dtype.itemsize) for spec in specs)
    model = foreign.model
    stacks = model.stacks
    text = checkpoint.tokenizer_json
    tokenizer = None if text is None else Tokenizer.from_json(text)
    special: dict[str, str] = {}
    if tokenizer is not None:
        ids = recipe.tokenizer.special_ids.model_dump(exclude_none=True)
        known = {role: token for role, token in ids.items() if token < tokenizer.vocab_size}
        special = {role: tokenizer.tokens[token] or "" for role, token in known.items()}
    notes = list(checkpoint.notes)
    rows, size = (None, None) if tokenizer is None else (model.vocab_size, tokenizer.vocab_size)
    if rows is not None and size is not None and size < rows:
        notes.append(f"the embedding has {rows:,} rows for {size:,} ids of the tokenizer: {rows - size:,} are unused")
    return ImportReport(
        path=target,
        class_name=foreign.class_name,
        model_type=foreign.architecture.model_type,
        arch=recipe.arch,
        layers={side: stack.num_layers for side, stack in stacks.items()},
        heads={side: stack.num_heads for side, stack in stacks.items()},
        d_model=model.d_model,
        parameters=parameters,
        tensors=len(foreign.names),
        left_out=foreign.skipped,
        stored_as=", ".join(sorted({name_of(spec.dtype) for spec in specs})),
        dtype=name_of(dtype),
        bytes=parameters * dtype.itemsize,
        memory=parameters * dtype.itemsize + passing,
        vocab_size=rows,
        tokenizer_size=size,
        special_tokens=special,
        labels=recipe.data.labels,
        notes=tuple(notes),
    )


def name_of(dtype: torch.dtype) -> str:
    return next((name for name, kind in DTYPES.items() if kind == dtype), str(dtype).removeprefix("torch."))
