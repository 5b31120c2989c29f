"""The mean of several checkpoints' weights, as a checkpoint of its own.

    mean = (w_1 + ... + w_n) / n

The last checkpoints of a run lie around the bottom of a valley; their mean lies nearer to it. "Attention Is All You
Need" (arXiv 1706.03762, sec. 6.1) averages the last 5 (base) and 20 (big). Sums are taken in fp64 and rounded once to
the stored type, in an order that depends on the checkpoints only: equal sets give equal bytes. Random tables
(Performer's), which training redraws and never learns, have no mean: the last checkpoint's is taken.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer.checkpoint import files, probe
from tformer.checkpoint.alike import AVERAGED_ROLES, require_alike, require_distinct
from tformer.checkpoint.read import Checkpoint, read_checkpoint
from tformer.checkpoint.run import CHECKPOINTS, is_run, make_folders
from tformer.checkpoint.save import write_checkpoint
from tformer.errors import InputError, Interrupted
from tformer.nn.attention.performer import TABLE

LEFT_OUT = ("optimizer", "ema")
DRAWN = f".mechanism.{TABLE}"  # how the names of random tables end


@dataclass(frozen=True, slots=True)
class Average:
    """A checkpoint that was made as the mean of `sources`, in the order of their steps; `step` is the last of these."""

    path: Path
    step: int
    sources: tuple[tuple[Path, int], ...]  # (folder, step)
    num_parameters: int  # tied ones once
    notes: tuple[str, ...]


def average_checkpoints(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    progress: Callable[..., None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Average:
    """Writes the mean of the weights (and of ELECTRA's generator) of some checkpoints to a new folder.

    What else the result holds comes from the checkpoint with the highest step: recipe, tokenizers, the names of tied
    tensors. It has no optimizer state, no EMA and no score, and `trainer.json` says what it was made of.

    Args:
        paths: checkpoint folders, at least one; see `resolve_checkpoint` for what a person may name.
        out: a folder that does not exist yet, not among a run's own checkpoints.
        progress: called with (checkpoints read, all).
        should_stop: polled after each checkpoint; once the result is being written, it is finished.

    Raises:
        InputError: `out` exists, a checkpoint is named twice or damaged, two of them are not the same model, an integer
            tensor differs, or a weight is not finite; nothing is written.
        StorageError: the disk refuses; no part of the result is left.
        Interrupted: `should_stop` said so; nothing is written.
    """
    target = Path(out)
    require_new(target)
    opened = [read_checkpoint(path) for path in paths]
    require_distinct(opened)
    checkpoints = sorted(opened, key=_order)
    require_alike(checkpoints)
    last = checkpoints[-1]
    probe.require_writable(target)
    probe.require_room(target, sum(record.size for record in last.manifest.files if record.role not in LEFT_OUT))
    means = _means(checkpoints, progress=progress, should_stop=should_stop)
    with files.storage_errors(target):
        make_folders(target.absolute().parent)
    require_new(target)  # reading took its time
    write_checkpoint(
        target,
        last.step,
        weights=means["weights"],
        tied=last.tied,
        recipe_yaml=last.recipe_text,
        tokenizer_json=last.tokenizer_json,
        tokenizer_sha256=last.tokenizer_sha256,
        target_tokenizer_json=last.target_tokenizer_json,
        target_tokenizer_sha256=last.target_tokenizer_sha256,
        trainer={"step": last.step, "averaged": [_origin(checkpoint) for checkpoint in checkpoints]},
        generator=means.get("generator"),
    )
    return Average(
        path=target,
        step=last.step,
        sources=tuple((checkpoint.path, checkpoint.step) for checkpoint in checkpoints),
        num_parameters=sum(tensor.numel() for tensor in means["weights"].values()),
        notes=tuple(_notes(checkpoints)),
    )


class RunningMean:
    """The mean of tensors of one shape and type, in that type; they are added one at a time.

    Whole numbers and truth values have no mean: they must be equal (ValueError), and stay as they are.
    """

    def __init__(self, first: Tensor) -> None:
        self._dtype = first.dtype
        self._count = 1
        self._total = first.to(torch.float64, copy=True) if first.dtype.is_floating_point else first

    def add(self, tensor: Tensor) -> None:
        assert tensor.dtype == self._dtype and tensor.shape == self._total.shape, (tensor.dtype, tensor.shape)
        self._count += 1
        if self._dtype.is_floating_point:
            self._total += tensor.to(torch.float64)
        elif not torch.equal(self._total, tensor):
            raise ValueError("whole numbers, which have no mean, differ")

    def value(self) -> Tensor:
        return (self._total / self._count).to(self._dtype) if self._dtype.is_floating_point else self._total


def require_new(out: Path) -> None:
    """Raises InputError when something stands at `out`, or when it is where a run keeps its own checkpoints."""
    if os.path.lexists(out):
        raise InputError(f"{out} exists already", hint="choose a folder that does not exist yet")
    parent = Path(os.path.realpath(out)).parent
    if parent.name == CHECKPOINTS and is_run(parent.parent):
        raise InputError(
            f"{out} lies among the checkpoints of a run, which come and go with its training",
            hint=f"choose a folder outside, such as {parent.parent}-average",
        )


def _means(
    checkpoints: Sequence[Checkpoint],
    *,
    progress: Callable[..., None] | None,
    should_stop: Callable[[], bool] | None,
) -> dict[str, dict[str, Tensor]]:
    """{role: {name: mean}}, without aliases. One checkpoint at a time is in memory, beside the sums."""
    sums: dict[str, dict[str, RunningMean]] = {}
    for done, checkpoint in enumerate(checkpoints):
        for role in AVERAGED_ROLES:
            if checkpoint.has(role):
                _add(sums.setdefault(role, {}), checkpoint, role)
        if should_stop is not None and should_stop():
            raise Interrupted("averaging interrupted, nothing written", signal_number=signal.SIGINT)
        if progress is not None:
            progress(done + 1, len(checkpoints))
    # one by one, so that the sums go as the means come
    return {role: {name: values.pop(name).value() for name in list(values)} for role, values in sums.items()}


def _add(sums: dict[str, RunningMean], checkpoint: Checkpoint, role: str) -> None:
    tensors = _read(checkpoint, role)
    if checkpoint.notes:  # of numbers that are not finite
        raise InputError(checkpoint.notes[0], hint="leave this checkpoint out: the average would hold them too")
    for name in list(tensors):
        tensor = tensors.pop(name)
        if name not in sums or name.endswith(DRAWN):
            sums[name] = RunningMean(tensor)
            continue
        try:
            sums[name].add(tensor)
        except ValueError as error:
            raise InputError(f"{checkpoint.path}: {role} tensor {name} and that of the others: {error}") from None


def _read(checkpoint: Checkpoint, role: str) -> dict[str, Tensor]:
    """The stored tensors of a role, every one once."""
    if role == "generator":
        return checkpoint.generator() or {}
    return {name: tensor for name, tensor in checkpoint.weights().items() if name not in checkpoint.tied}


def _order(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """By step; between runs by content, so that the order in which they were named does not matter."""
    return checkpoint.step, sorted(record.sha256 for record in checkpoint.manifest.by_role("weights"))


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where a summand came from, without naming a place on this machine."""
    run = _run_of(checkpoint)
    return {"name": checkpoint.path.name, "run": run and run.name, "step": checkpoint.step}


def _run_of(checkpoint: Checkpoint) -> Path | None:
    folder = Path(os.path.realpath(checkpoint.path)).parent
    return folder.parent if folder.name == CHECKPOINTS else None


def _notes(checkpoints: Sequence[Checkpoint]) -> list[str]:
    notes = []
    runs = {run for checkpoint in checkpoints if (run := _run_of(checkpoint))}
    if len(runs) > 1:
        notes.append(f"they come from {len(runs)} runs: weights that grew from different starts rarely average well")
    if any(checkpoint.has("ema") for checkpoint in checkpoints):
        notes.append("the weights themselves are averaged; the moving averages (EMA) beside them are left out")
    if any(checkpoint.has("generator") for checkpoint in checkpoints):
        notes.append("the generator is averaged too")
    return notes
