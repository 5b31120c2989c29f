"""Small trainings by one process and by several, which are forked from this one and have a limit of time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.training.small_steps import FIRST_WORD, LAST_WORD, LENGTH, context, small_recipe
from tformer.data.shards.corpus import Example
from tformer.data.shards.pair_tokens import PairExample
from tformer.data.sources.images import ImageExample
from tformer.evaluation.predict import GivenSamples
from tformer.model import Transformer
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.objectives.distillation import Distillation
from tformer.optim.shards import local
from tformer.recipe.recipe import Recipe
from tformer.support.device import DTYPES
from tformer.tasks.base import TrainingData
from tformer.training import assemble
from tformer.training.loop import Trainer
from tformer.training.parallel import DataParallel, Parallel
from tformer.training.teacher import layer_pairs

SECONDS = 100.0
"""Limit of a group of processes; then all are killed."""

EXAMPLES = 11
"""With batches of 6 and two micro-batches: 3 and 3 rows, then 3 and 2, so some of four processes have none."""

ADAM_EPS = 1.0e-4
"""A key's bias has no gradient but for rounding, which Adam would magnify to a whole step."""

Tensors = Mapping[str, Tensor]


def in_processes(
    world_size: int, work: Callable[[Parallel], Tensors], folder: Path, *, seconds: float = SECONDS
) -> list[dict[str, Tensor]]:
    """What `work` returns in each of `world_size` forked processes. AssertionError if one fails or hangs."""
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch cannot compute gradients in a fork of a process that has computed some")
    folder.mkdir()
    children: dict[int, int] = {}
    try:
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                os._exit(_child(rank, world_size, work, folder, seconds))
            children[pid] = rank
        _wait(children, folder, seconds)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(world_size)]


def _child(rank: int, world_size: int, work: Callable[[Parallel], Tensors], folder: Path, seconds: float) -> int:
    try:
        torch.set_num_threads(1)  # the threads of the process that was forked do not exist here
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        store = dist.FileStore(str(folder / "store"), world_size)
        limit = timedelta(seconds=seconds)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        found = {name: tensor.detach().clone() for name, tensor in work(DataParallel()).items()}
        save_file(found, folder / f"{rank}.safetensors")
        dist.barrier()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        return 1
    return 0


def _wait(children: dict[int, int], folder: Path, seconds: float) -> None:
    """Wait for all children; those that have ended leave the dict. The first that fails ends the wait."""
    end = time.monotonic() + seconds
    while children:
        for pid, rank in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del children[pid]
                error = folder / f"{rank}.error"
                assert status == 0, error.read_text() if error.exists() else f"rank {rank} ended with status {status}"
        assert time.monotonic() < end, f"ranks {sorted(children.values())} still run after {seconds:g} s"
        time.sleep(0.002)


def merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, section by section; a section that is absent stays absent."""
    found = dict(values)
    for key, change in changes.items():
        own = found.get(key)
        if isinstance(change, Mapping) and "kind" not in change and isinstance(own, dict):
            found[key] = merged(own, change)
        elif own is not None or not isinstance(change, Mapping) or "kind" in change:
            found[key] = change
    return found


def recipe_of(preset: str, changes: Mapping[str, Any] = {}) -> Recipe:
    """A preset at a small size without dropout: 3 examples in a micro-batch, 2 of them in a step, clipping at 0.5."""
    recipe = small_recipe(preset, dropout=False)
    values = recipe.model_dump(by_alias=True, warnings=False)
    for head in values["model"]["heads"]:
        head |= {"dropout": 0.0} if "dropout" in head else {}
    values["training"] |= {"batch_size": 3, "grad_accum": 2, "precision": "fp32"}
    values["optimizer"] |= {"clip_grad_norm": 0.5, "eps": ADAM_EPS}
    values["schedule"] |= {"warmup_steps": 0, "warmup_ratio": 0.0}
    return Recipe.model_validate(merged(values, changes))


def samples_of(recipe: Recipe) -> GivenSamples:
    """Eleven examples of random words: texts of several lengths, but windows for causal models."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(LENGTH // 3, LENGTH + 1, EXAMPLES)
    words = [rng.integers(FIRST_WORD, LAST_WORD, length) for length in lengths]
    kind = recipe.objectives[0].kind
    given: Sequence[Any]
    if recipe.model.patches is not None:
        pixels = rng.integers(0, 256, (EXAMPLES, 3, 16, 16)).astype(np.uint8)
        given = [ImageExample(image, label=row % 2) for row, image in enumerate(pixels)]
    elif kind == "seq2seq":
        given = [PairExample(text, other) for text, other in zip(words, reversed(words), strict=True)]
    else:
        given = [Example(text, label=row % 2) for row, text in enumerate(words)]
    return GivenSamples(given, LENGTH + 8, lengths)


class Training:
    """Steps of the training loop on `samples_of` a recipe, by one process of a group."""

    def __init__(
        self, recipe: Recipe, parallel: Parallel, *, precision: str = "fp32", teacher: Transformer | None = None
    ) -> None:
        device = torch.device("cpu")
        self.recipe = recipe
        rows = parallel.own_rows()
        self.models = assemble.make_models(recipe, device, dtype=DTYPES[precision], rows=rows)
        assemble.require_separate_rows(self.models, parallel.world_size)
        given: ObjectiveContext = replace(context(recipe), padding=recipe.data.padding)
        data = TrainingData(
            tokenizer=None,
            samples=samples_of(recipe),
            validate=lambda *_: {},
            context=given,
            fingerprint="",
        )
        objective: Objective = assemble.make_objective(recipe, given, self.models)
        taught = None
        if teacher is not None:
            taught = Distillation(
                objective,
                teacher.requires_grad_(False).eval(),
                temperature=2.0,
                alpha=0.5,
                hidden=0.5,
                attention=0.5,
                hidden_pairs=layer_pairs(self.models.main, teacher, "hidden"),
                attention_pairs=layer_pairs(self.models.main, teacher, "attention"),
                image_positions=recipe.seq_len if recipe.model.patches is not None else None,
            )
        self.shards = parallel.shard(self.models, rows, device)
        batches = assemble.PlannedBatches(
            recipe, data, objective, cursor=None, device=device, rank=parallel.rank, world_size=parallel.world_size
        )
        self.trainer = Trainer(
            recipe, self.models, objective, batches, device=device, taught=taught, parallel=parallel, shards=self.shards
        )
        self.ema, self.optimizer = self.trainer.ema, self.trainer.optimizer

    def run(self, steps: int) -> dict[str, Tensor]:
        """Sums of each step (loss, gradient norm, terms), tokens, weights and averages after `steps` steps."""
        before = self.weights()
        for _ in range(steps):
            self.trainer.train_step()
        found = {"sums": torch.tensor([[float(value) for value in row] for row in self.trainer._sums])}
        found["tokens"] = torch.tensor(self.trainer.state.tokens)
        after = self.weights()
        found |= {f"weight {name}": value for name, value in after.items()}
        found["moved"] = torch.stack([(value - before[name]).abs().max() for name, value in after.items()]).max()
        if self.ema is None:
            return found
        averages = self.ema.state()
        if self.shards is not None:
            shapes = {name: value.shape for name, value in self.models.main.named_parameters()}
            averages = {name: self.shards.complete(rows, shapes[name]) for name, rows in averages.items()}
        return found | {f"average {name}": value for name, value in averages.items()}

    def weights(self) -> dict[str, Tensor]:
        """Copies of all weights by name, whole."""
        parameters = dict(self.models.trained_parameters())
        if self.shards is None:
            return {name: value.detach().clone() for name, value in parameters.items()}
        return {name: self.shards.complete(local(value), value.shape) for name, value in parameters.items()}


def largest_difference(one: Tensors, other: Tensors) -> float:
    """Of losses, gradient norms, weights and averages."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
