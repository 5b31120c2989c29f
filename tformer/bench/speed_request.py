"""From what a person asks to a `SpeedBench`: the recipe with every size decided, the precision, and who runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tformer.bench.peers import choose_peers
from tformer.bench.speed import Entry, SpeedBench, task_of
from tformer.bench.subject import recipe_of
from tformer.bench.task import OURS, Work
from tformer.bench.works import WORKS
from tformer.build import count_parameters
from tformer.decoding.precision import require_quantize
from tformer.errors import InputError
from tformer.nn.hardware import DTYPES
from tformer.recipe import recipe_to_yaml
from tformer.recipe.recipe import Recipe
from tformer.training.precision import resolve_device, resolve_precision

CHARACTERS = 65
"""What a vocabulary of characters is taken to be: tinyshakespeare's."""

LENGTH_OPTIONS = {"generate": "--prompt-length", "translate": "--source-length"}  # of the others: --length

LABELS = ("0", "1")  # of a classifier whose recipe names none


@dataclass(frozen=True)
class SpeedRequest:
    """The flags. `run`: a run, checkpoint or Hugging Face folder, whose sizes are taken, not its weights.

    quantize: formats of our matrices to measure: `none` (as the precision says) and `int8`.
    """

    work: str
    arch: str | None = None
    preset: str | None = None
    config: Path | None = None
    run: str | None = None
    sets: Sequence[str] = ()
    batch_sizes: Sequence[int] = ()
    length: int | None = None
    precision: str = "auto"
    compile: bool = False
    device: str = "auto"
    threads: int | None = None
    peers: Sequence[str] = ()
    peer_precisions: Sequence[str] | None = None
    quantize: Sequence[str] = ("none",)
    repeats: int = 10
    max_seconds: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict)


def resolve(request: SpeedRequest) -> tuple[SpeedBench, list[str]]:
    """The bench and what was decided for the user. Raises InputError before anything is measured."""
    work = WORKS[request.work]
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    device = resolve_device(request.device)
    for kind in request.quantize:
        require_quantize(kind, device, DTYPES.get(request.precision))
        if request.compile and kind != "none":
            raise InputError(f"--compile and --quantize {kind} exclude each other", hint="measure them in turn")
    entries = choose_peers(request.work, request.peers, request.peer_precisions, device=device)
    recipe, name, notes = _recipe_of(request, work, device)
    length = request.length or work.length(recipe)
    if length > recipe.model.max_seq_len:
        option = LENGTH_OPTIONS.get(request.work, "--length")
        raise InputError(f"{option}: found {length}, the model reads {recipe.model.max_seq_len} positions at most")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": length})})
    bench = SpeedBench(
        work=work.name,
        model=name,
        recipe_yaml=recipe_to_yaml(recipe),
        entries=(),
        batch_sizes=tuple(request.batch_sizes or work.batch_sizes),
        length=length,
        precision="fp32",
        device=str(device),
        compile=request.compile,
        threads=torch.get_num_threads(),
        repeats=request.repeats,
        max_seconds=request.max_seconds,
        options=dict(request.options),
    )
    work.check(task_of(bench, max(bench.batch_sizes)))
    precision = _precision(bench, request.precision, work, device)
    own = [Entry(OURS, precision if kind == "none" else kind) for kind in dict.fromkeys(request.quantize)]
    peers = [Entry(*entry) for entry in entries]
    settled = {**bench.to_json(), "precision": precision, "entries": [*own, *peers]}
    parameters = count_parameters(recipe.model, num_labels=len(recipe.data.labels) or None)
    return SpeedBench.from_json(settled), [*notes, f"model: {name}, {parameters:,} parameters"]


def peer_versions(bench: SpeedBench) -> dict[str, str]:
    """Of every library that ours is compared with."""
    return {entry.name: metadata.version(entry.name) for entry in bench.entries if entry.name != OURS}


def _precision(bench: SpeedBench, asked: str, work: Work, device: torch.device) -> str:
    if work.product is None:
        return ""
    if asked not in ("auto", "fp32", "bf16", "fp16"):
        raise InputError(f"--precision: found '{asked}', expected auto, fp32, bf16 or fp16")
    rows, d_model, d_ff = work.product(task_of(bench, max(bench.batch_sizes)))
    return resolve_precision(asked, device, rows=rows, d_model=d_model, d_ff=d_ff).name


def _recipe_of(request: SpeedRequest, work: Work, device: torch.device) -> tuple[Recipe, str, list[str]]:
    """The recipe, what to call it, and notes."""
    recipe, name = recipe_of(
        arch=request.arch,
        preset=request.preset,
        config=request.config,
        run=request.run,
        sets=request.sets,
        device=device,
        usual_arch=work.arch,
        objective=work.objective,
        bench=work.name,
    )
    return _sized(recipe, name)


def _sized(recipe: Recipe, name: str) -> tuple[Recipe, str, list[str]]:
    """The recipe with its vocabularies decided, and what was assumed."""
    model, notes = recipe.model, []
    if model.patches is not None:
        raise InputError(f"{name}: models of images are not benched")
    train = recipe.tokenizer.train
    size = CHARACTERS if train.model == "char" else train.vocab_size
    sides = ["vocab_size", *(["target_vocab_size"] if recipe.separate_vocabularies else [])]
    missing = {side: size for side in sides if getattr(model, side) is None}
    if missing:
        notes.append(f"vocabulary: {size:,} tokens (--set model.vocab_size=N for another)")
    changes: dict[str, Any] = {"model": model.model_copy(update=missing)}
    if any(getattr(head, "num_labels", 1) is None for head in model.heads) and not recipe.data.labels:
        changes["data"] = recipe.data.model_copy(update={"labels": LABELS})
    return recipe.model_copy(update=changes), name, notes
