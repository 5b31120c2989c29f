"""Averaging of checkpoints: the check that they are of the same model, and the mean of their weights.

The check reads manifests, recipes and the headers of tensor files only; it precedes the reading of tensors.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer.checkpoint.manifest import file_names
from tformer.checkpoint.read import Checkpoint, read_checkpoint
from tformer.checkpoint.run import CHECKPOINTS, is_run
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.nn.attention import ATTENTION
from tformer.recipe.load import recipe_to_data
from tformer.support import files
from tformer.support.errors import InputError
from tformer.support.formatting import short_hash
from tformer.workers.work import QUIET, Work

AVERAGED_ROLES = ("weights", "generator")
# Parts of the recipe that must agree for weights to be averaged; all others may differ (another seed, more steps).
RECIPE_PARTS = (
    "model",
    "generator",
    "lora",
    "tokenizer.special_ids",
    "data.labels",
    "data.image_mean",
    "data.image_std",
)


def require_distinct(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise InputError when two paths lead to one folder."""
    seen: dict[str, Path] = {}
    for checkpoint in checkpoints:
        place = os.path.realpath(checkpoint.path)
        if place in seen:
            also = "" if seen[place] == checkpoint.path else f" (also as {seen[place]})"
            raise InputError(f"{checkpoint.path} is named twice{also}", hint="name each checkpoint once")
        seen[place] = checkpoint.path


def require_same_model(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise InputError, with the first difference, unless all checkpoints are of the same model.

    Compared are tokenizers, the `RECIPE_PARTS`, and names, shapes and number formats of tensors. Adapters must be of
    one run, in which their factors are close to each other.
    """
    first, *others = checkpoints
    recipe = recipe_to_data(first.recipe) if others else {}
    for other in others:
        _compare_tokenizers(first, other)
        found = recipe_to_data(other.recipe)
        for part in RECIPE_PARTS:
            for key, ours, theirs in value_differences(_at(recipe, part), _at(found, part), part):
                raise InputError(
                    f"{other.path / 'recipe.yaml'}: {key} is {_word(theirs)}, in {first.path} it is {_word(ours)}",
                    hint="only checkpoints of the same model can be averaged",
                )
        for role in AVERAGED_ROLES:
            _compare_tensors(first, other, role)
        if first.recipe.lora is not None and other.path.parent != first.path.parent:
            raise InputError(
                f"{other.path}: its adapters were not trained in the run of {first.path}; the mean of products B A is "
                "not the product of their means",
                hint=f"merge each first: tformer merge {other.path} --out FOLDER",
            )


def _compare_tokenizers(first: Checkpoint, other: Checkpoint) -> None:
    if (first.target_tokenizer_sha256 is None) != (other.target_tokenizer_sha256 is None):
        one, two = (f"{1 + (c.target_tokenizer_sha256 is not None)}" for c in (first, other))
        raise InputError(f"{other.path} has {two} vocabularies, expected as in {first.path}: {one}")
    names = file_names(separate=first.target_tokenizer_sha256 is not None)
    sides = {
        "tokenizer": (first.tokenizer_sha256, other.tokenizer_sha256),
        "target_tokenizer": (first.target_tokenizer_sha256, other.target_tokenizer_sha256),
    }
    for role, (expected, found) in sides.items():
        if expected != found:
            raise InputError(
                f"{other.path / names[role]} is not the tokenizer of {first.path}: its sha256 is {_short(found)}, "
                f"expected {_short(expected)}",
                hint="only checkpoints with the same vocabulary can be averaged",
            )


def _short(sha256: str | None) -> str:
    return "missing" if sha256 is None else short_hash(sha256)


def _at(data: Any, key: str) -> Any:
    for word in key.split("."):
        data = data[word]
    return data


def value_differences(expected: Any, found: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value, other value) of each difference between nested values."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in itertools.chain(expected, (name for name in found if name not in expected)):
            yield from value_differences(expected.get(name), found.get(name), f"{key}.{name}")
    elif expected != found:
        yield key, expected, found


def _word(value: Any) -> str:
    """A value as text in a message; sections and long lists are cut."""
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 and not isinstance(value, dict) else f"{text[:57]}..."


def _compare_tensors(first: Checkpoint, other: Checkpoint, role: str) -> None:
    expected, found = first.specs(role), other.specs(role)
    odd = sorted(expected.keys() ^ found.keys())
    if odd:
        has, lacks = (first, other) if odd[0] in expected else (other, first)
        raise InputError(f"{lacks.path} has no tensor {odd[0]} among its {role}, {has.path} has")
    for name, spec in expected.items():
        ours, theirs = (f"{s.dtype} {list(s.shape)}".removeprefix("torch.") for s in (spec, found[name]))
        if ours != theirs:
            raise InputError(f"{other.path}: {role} tensor {name} is {theirs}, in {first.path} it is {ours}")
    if role == "weights" and first.tied != other.tied:
        alias = min(dict(first.tied).items() ^ dict(other.tied).items())[0]
        raise InputError(f"{other.path}: tensor {alias} is not tied as it is in {first.path}")


LEFT_OUT = ("optimizer", "ema")
RANDOM_BUFFERS = tuple(
    f".mechanism.{name}" for options in ATTENTION.values() for name in options.mechanism.random_buffers
)
"""Endings of the names of buffers that are drawn at random: the last checkpoint's are taken, they have no mean."""


@dataclass(frozen=True, slots=True)
class Average:
    """Result of averaging: a checkpoint with the mean of `sources`, in the order of their steps; `step` is the last."""

    path: Path
    step: int
    sources: tuple[tuple[Path, int], ...]  # (folder, step)
    num_parameters: int  # tied ones counted once
    notes: tuple[str, ...]


def average_checkpoints(paths: Sequence[str | Path], out: str | Path, *, work: Work = QUIET) -> Average:
    """Write the mean of the checkpoints' weights (and of ELECTRA's generators) to a new folder.

    Recipe, tokenizers and the names of tied tensors are those of the checkpoint with the highest step. The result has
    no optimizer state, no EMA and no score; its `trainer.json` lists the averaged checkpoints.

    Args:
        paths: checkpoint folders, at least one; see `resolve_checkpoint` for other paths.
        out: a folder that does not exist yet, not among a run's own checkpoints.
        work: reports the checkpoints read, and is polled after each; once the result is being written, it is finished.

    Raises:
        InputError: `out` exists, a checkpoint is named twice or damaged, two of them are not the same model, an integer
            tensor differs, or a weight is not finite; nothing is written.
        StorageError: the disk is full or read-only; no part of the result is left.
        Interrupted: `work` was stopped; nothing is written.
    """
    target = Path(out)
    require_new(target)
    opened = [read_checkpoint(path) for path in paths]
    require_distinct(opened)
    # By the step, then by the content, so that the order of the arguments does not matter.
    checkpoints = sorted(opened, key=lambda one: (one.step, sorted(r.sha256 for r in one.manifest.by_role("weights"))))
    require_same_model(checkpoints)
    last = checkpoints[-1]
    files.require_writable_folder(target)
    files.require_room(target, sum(record.size for record in last.manifest.files if record.role not in LEFT_OUT))
    means = _means(checkpoints, work=work)
    # Name, run and step of each source, without a path of this machine.
    runs = [_run_of(checkpoint) for checkpoint in checkpoints]
    origins = [
        {"name": checkpoint.path.name, "run": run and run.name, "step": checkpoint.step}
        for checkpoint, run in zip(checkpoints, runs, strict=True)
    ]
    require_new(target)  # again: reading may have taken minutes
    write_checkpoint(
        target,
        last.step,
        CheckpointContents.derived(
            last,
            weights=means["weights"],
            trainer={"step": last.step, "averaged": origins},
            generator=means.get("generator"),
        ),
    )
    return Average(
        path=target,
        step=last.step,
        sources=tuple((checkpoint.path, checkpoint.step) for checkpoint in checkpoints),
        num_parameters=sum(tensor.numel() for tensor in means["weights"].values()),
        notes=tuple(_notes(checkpoints)),
    )


class RunningMean:
    """Running mean of tensors of one shape and number format, added one at a time.

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
    """Raise InputError when `out` exists, or lies in the folder in which a run keeps its checkpoints."""
    if os.path.lexists(out):
        raise InputError(f"{out} exists already", hint="choose a folder that does not exist yet")
    parent = Path(os.path.realpath(out)).parent
    if parent.name == CHECKPOINTS and is_run(parent.parent):
        raise InputError(
            f"{out} lies among the checkpoints of a run, which come and go with its training",
            hint=f"choose a folder outside, such as {parent.parent}-average",
        )


def _means(checkpoints: Sequence[Checkpoint], *, work: Work) -> dict[str, dict[str, Tensor]]:
    """{role: {name: mean}}, without aliases. One checkpoint at a time is in memory, beside the sums."""
    sums: dict[str, dict[str, RunningMean]] = {}
    for done, checkpoint in enumerate(checkpoints):
        for role in filter(checkpoint.has, AVERAGED_ROLES):
            means = sums.setdefault(role, {})
            tensors = checkpoint.weights() if role == "weights" else checkpoint.generator() or {}
            for alias in checkpoint.tied if role == "weights" else ():
                tensors.pop(alias, None)
            for name in list(tensors):
                tensor = tensors.pop(name)
                if name not in means or name.endswith(RANDOM_BUFFERS):
                    means[name] = RunningMean(tensor)
                    continue
                try:
                    means[name].add(tensor)
                except ValueError as error:
                    raise InputError(
                        f"{checkpoint.path}: {role} tensor {name} and that of the others: {error}"
                    ) from None
        work.raise_if_stopped("while averaging, nothing written")
        work.report(done + 1, len(checkpoints))
    # one by one, so that each sum is freed when its mean is made
    return {role: {name: values.pop(name).value() for name in list(values)} for role, values in sums.items()}


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
