"""Integrity of the files of a checkpoint, of all checkpoints of a run, or of a Hugging Face folder.

Checks the manifest (sizes, SHA-256, no file beside it), that texts are readable, that the recipe is valid and
buildable, that the state of the training has its types, that the tokenizer is that of training and fits the embedding
table, names and shapes of tensors, and that all numbers are finite. Reports every problem, one a line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tformer.build import add_adapters, build_model
from tformer.checkpoint.catalog import BEST, LATEST, is_complete, read_pointer
from tformer.checkpoint.manifest import FILE_NAMES, FileRecord, read_manifest
from tformer.checkpoint.read import Checkpoint, differences, read_checkpoint
from tformer.checkpoint.resolve import newest_checkpoint
from tformer.checkpoint.run import CHECKPOINTS, RunDirectory, is_run, writer
from tformer.interop.opening import is_foreign, open_checkpoint
from tformer.loading import embedding_rows
from tformer.model import Transformer
from tformer.recipe.load import recipe_from_yaml
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe, with_roles
from tformer.support.errors import InputError, NotFiniteError
from tformer.support.files import MANIFEST
from tformer.support.formatting import short_hash
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work

POINTER_READINGS = 3  # a training may move a pointer and remove its former checkpoint between two system calls


@dataclass(frozen=True)
class Verdict:
    """Problems of one folder. Without problems, `tensors` and `bytes` say how much was read."""

    path: Path
    problems: tuple[str, ...]
    tensors: int = 0
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "ok": not self.problems, "problems": list(self.problems),
                "tensors": self.tensors, "bytes": self.bytes}  # fmt: skip


def verify(path: str | Path | None, *, work: Work = QUIET) -> list[Verdict]:
    """One verdict for each checkpoint in `path` (None: the newest run), and one for the run itself.

    Raises:
        InputError: nothing to verify.
        Interrupted: `work` was stopped.
    """
    folder = newest_checkpoint(which="latest").parents[1] if path is None else Path(path)
    if is_foreign(folder):
        return [_verdict(folder, lambda: open_checkpoint(folder), work)]
    if is_run(folder):
        return _verify_run(folder, work)
    if folder.name == CHECKPOINTS and folder.is_dir():
        return _verify_run(folder.parent, work)
    if (folder / MANIFEST).is_file() or (folder / FILE_NAMES["recipe"]).is_file():
        return [_verify_folder(folder, work)]
    return [_verify_folder(open_checkpoint(folder).path, work)]  # a pointer, or an error


def _verify_run(run: Path, work: Work) -> list[Verdict]:
    steps = sorted(
        entry for entry in (run / CHECKPOINTS).iterdir() if entry.is_dir() and entry.name.startswith("step-")
    )
    verdicts = [_verify_folder(step, work) for step in steps]
    if writer(run) is not None:  # a training removes old checkpoints, the manifest first
        verdicts = [verdict for verdict in verdicts if not verdict.problems or is_complete(verdict.path)]
    problems = [] if steps else ["the run has no checkpoint yet"]
    for name in (LATEST, BEST):
        pointer = run / CHECKPOINTS / name
        readings = (read_pointer(pointer) for _ in range(POINTER_READINGS))
        if pointer.exists() and not any(step and is_complete(pointer.parent / step) for step in readings):
            problems.append(f"{CHECKPOINTS}/{name} points at no checkpoint of the run")
    recipe = run / FILE_NAMES["recipe"]
    if recipe.is_file():
        problems += _problems_of(lambda: RunDirectory(run).recipe(name=recipe.name))
    return [*verdicts, *([Verdict(run, tuple(problems))] if problems else [])]


def _verify_folder(folder: Path, work: Work) -> Verdict:
    """Verify a checkpoint: first the bytes of every file, then, if all are intact, their contents."""
    problems: list[str] = []
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return Verdict(folder, (_one_line(error.message, folder),))
    for record in manifest.files:
        problems += _file_problems(folder / record.name, record, work)
    listed = {record.name for record in manifest.files}
    strays = [name for name in FILE_NAMES.values() if name not in listed and (folder / name).exists()]
    problems += [f"{name} is not in the manifest" for name in strays]
    if problems:
        return Verdict(folder, tuple(problems))
    return _verdict(folder, lambda: read_checkpoint(folder, verify=False), work)


def _file_problems(path: Path, record: FileRecord, work: Work) -> Iterator[str]:
    try:
        size = path.stat().st_size
        if size != record.size:
            yield f"{path.name} has {size:,} bytes, expected {record.size:,} by the manifest"
            return
        digest = hashlib.sha256()
        with open(path, "rb") as stream:
            while part := stream.read(16 << 20):
                work.raise_if_stopped("while verifying")
                digest.update(part)
    except OSError as error:
        yield f"{path.name} cannot be read: {error.strerror}"
        return
    if digest.hexdigest() != record.sha256:
        found, recorded = short_hash(digest.hexdigest()), short_hash(record.sha256)
        yield f"{path.name} is damaged: sha256 {found}, expected {recorded} by the manifest"


def _verdict(folder: Path, opened: Callable[[], Checkpoint], work: Work) -> Verdict:
    """Verify the contents of a checkpoint, and that its parts fit together."""
    try:
        checkpoint = opened()
        recipe = recipe_from_yaml(checkpoint.recipe_text, name=FILE_NAMES["recipe"])
    except InputError as error:
        return Verdict(folder, (_one_line(error.message, folder),))
    problems: list[str] = []
    name, step = FILE_NAMES["trainer"], checkpoint.trainer.get("step", checkpoint.step)
    if step != checkpoint.step:
        problems.append(f"{name}: step: expected {checkpoint.step} as in the manifest, found {step!r}")
    if checkpoint.has("optimizer"):  # otherwise it is not of a training, and its state may hold anything
        from tformer.training.state import TrainerState  # not needed by inspect without --verify

        problems += _problems_of(lambda: TrainerState.from_json(checkpoint.trainer, name=name))
    problems += _tokenizer_problems(checkpoint, recipe)
    counts = {"tensors": 0, "bytes": 0}
    for role in ("weights", "ema", "generator", "optimizer"):
        if checkpoint.has(role):
            work.raise_if_stopped("while verifying")
            problems += _tensor_problems(checkpoint, recipe, role, counts)
    return Verdict(folder, tuple(_one_line(problem, folder) for problem in problems), **counts)


def _tokenizer_problems(checkpoint: Checkpoint, recipe: Recipe) -> Iterator[str]:
    if checkpoint.tokenizer_json is None:
        if recipe.model.patches is None:
            yield "a text model without tokenizer.json"
        return
    given = (
        ("tokenizer", checkpoint.tokenizer_json, checkpoint.tokenizer_sha256, "vocab_size"),
        ("target tokenizer", checkpoint.target_tokenizer_json, checkpoint.target_tokenizer_sha256, "target_vocab_size"),
    )
    stored = embedding_rows(checkpoint)
    found: list[Tokenizer] = []
    for name, text, recorded, key in given:
        if text is None:
            continue
        try:
            tokenizer = Tokenizer.from_json(text)
        except InputError as error:
            yield f"{name}: {error.message}"
            continue
        found.append(tokenizer)
        if recorded is not None and tokenizer.sha256 != recorded:
            yield f"{name} is not the one that the model was trained with: its sha256 is {short_hash(tokenizer.sha256)}"
        most = stored[key] if stored[key] is not None else getattr(recipe.model, key)
        if most is not None and tokenizer.vocab_size > most:
            yield f"{name} has {tokenizer.vocab_size:,} ids, the model's table only {most:,} rows"
    if found:
        yield from _problems_of(
            lambda: with_roles(recipe.tokenizer.special_ids, found[0], found[1] if len(found) > 1 else None)
        )


def _tensor_problems(checkpoint: Checkpoint, recipe: Recipe, role: str, counts: dict[str, int]) -> Iterator[str]:
    read = {"weights": checkpoint.weights, "ema": checkpoint.ema, "generator": checkpoint.generator,
            "optimizer": checkpoint.optimizer}[role]  # fmt: skip
    try:
        tensors = read() or {}
        section = recipe.generator if role == "generator" else recipe.model
        model = None if section is None else _built(section, recipe, checkpoint)
        state = {} if model is None else model.state_dict()
    except (InputError, NotFiniteError) as error:
        yield f"{role}: {error.message}"
        return
    counts["tensors"] += len(tensors)
    counts["bytes"] += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    # A run with adapters holds these, what is trained in full beside them, and what its base lacks.
    base = frozenset() if model is None else model.base_names
    if role == "weights":
        wanted = {name: each for name, each in state.items() if name not in base or name in tensors}
        problems = differences(wanted, tensors, aliases=checkpoint.tied)
    elif role == "optimizer":
        parameters = set(_built(recipe.model, recipe, checkpoint).state_dict())
        if recipe.generator is not None:
            parameters |= {f"generator.{name}" for name in _built(recipe.generator, recipe, checkpoint).state_dict()}
        strays = sorted({name.rpartition(".")[0] for name in tensors} - parameters)
        problems = [f"state of {strays[0]} and {len(strays) - 1} more, which are no parameters"] if strays else []
    else:  # averages are those of parameters, a generator omits shared ones
        averaged = {name for name, _ in model.named_parameters()} if role == "ema" and model is not None else set()
        wanted = {name: state[name] for name in state.keys() & tensors.keys() | averaged - base}
        problems = differences(wanted, tensors, aliases={})
    tied = {} if model is None or role == "optimizer" else model.tied_names()
    for alias, owner in tied.items():
        one, other = tensors.get(alias), tensors.get(owner)
        if one is not None and other is not None and one is not other and not torch.equal(one, other):
            problems = [*problems, f"{alias} and {owner} are tied, but differ in the file"]
    yield from (f"{role} and recipe disagree: {problem}" for problem in problems)


def _built(model: Model, recipe: Recipe, checkpoint: Checkpoint) -> Transformer:
    """The model of a recipe on the meta device, with its adapters: names, shapes and ties."""
    rows = embedding_rows(checkpoint)
    built = build_model(
        model,
        vocab_size=rows["vocab_size"],
        target_vocab_size=rows["target_vocab_size"],
        num_labels=len(recipe.data.labels) or None,
        device="meta",
    )
    if recipe.lora is not None and model is recipe.model:
        with torch.device("meta"):
            add_adapters(built, model, recipe.lora)
    return built


def _problems_of(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except InputError as error:
        return [error.message]
    return []


def _one_line(message: str, folder: Path) -> str:
    """A message in one line, without the folder, which is printed before it."""
    return " ".join(message.replace(f"{folder}/", "").replace(f"{folder}: ", "").split())
