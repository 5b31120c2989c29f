"""Preparation of a training: data, tokenizer, sizes and precision, resolved before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tformer.checkpoint.run import LOCK_NAME, RunLock
from tformer.cost.flops import mean_lengths, product_shape
from tformer.cost.memory import MemoryEstimate, training_memory
from tformer.data.batching.mixture import Samples
from tformer.data.batching.padding import padded_lengths
from tformer.recipe import recipe_to_yaml
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Training
from tformer.support.device import (
    Precision,
    bound_products,
    matmul_flops_per_second,
    resolve_device,
    resolve_precision,
)
from tformer.support.errors import InputError
from tformer.support.files import RUNS, require_writable_folder
from tformer.support.formatting import plural
from tformer.support.processes import resident_bytes
from tformer.tasks import task_of
from tformer.tasks.base import TrainingData
from tformer.tasks.example import example_document
from tformer.training.assemble import (
    Models,
    PlannedBatches,
    make_models,
    make_objective,
    plan_of,
    require_separate_rows,
    vocabulary_size,
)
from tformer.training.embeddings import Vectors, read_embeddings
from tformer.training.request import Start
from tformer.training.teacher import check_vocabulary
from tformer.workers.work import Work

DEFAULT_EVERY = 500
"""Default maximum of steps between validations, and between checkpoints, of a training without epochs."""

MAX_VALIDATIONS = 20
"""Maximum number of validations of a training by epochs, evenly spread."""


@dataclass
class Prepared:
    """A training that is ready to start: data, device and precision. Every `auto` of `recipe` is resolved.

    Attributes:
        shapes: the models on the meta device, for counts and estimates.
        max_minutes: limit of this command, not part of the recipe.
        vectors: of tokens, by the name of the table that starts with them.
        planned_steps: expected of a training by time.
        alternatives: the sizes among which such a training chose.
    """

    recipe: Recipe
    start: Start
    data: TrainingData
    device: torch.device
    precision: Precision
    shapes: Models
    max_minutes: float | None
    vectors: dict[str, Vectors]
    planned_steps: int = 0
    alternatives: tuple[Any, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Parameters of the main model, tied ones counted once."""
        return self.shapes.main.num_parameters()

    @property
    def longest(self) -> tuple[int, int]:
        """Largest number of positions of a sample in the encoder and in the decoder, padded.

        With `batch_tokens` both values are the larger one.
        """
        recipe = self.recipe
        found = mean_lengths(self.data.samples, self.data.tokens_per_sample, of=np.max)
        most = recipe.seq_len, recipe.target_seq_len
        source, target = np.minimum(padded_lengths(np.array(found)), most).astype(int).tolist()
        return (source, target) if recipe.training.batch_tokens is None else (max(source, target),) * 2

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of a micro-batch of the longest samples."""
        training = self.recipe.training
        return training.batch_size or max(1, (training.batch_tokens or 1) // max(self.longest))

    @property
    def mean_length(self) -> float:
        """Tokens of an example, of the longer side."""
        return max(mean_lengths(self.data.samples, self.data.tokens_per_sample))

    @property
    def tokens_per_step(self) -> float:
        """Tokens of an optimizer step; of pairs, tokens of the longer side."""
        training = self.recipe.training
        return training.grad_accum * (training.batch_tokens or (training.batch_size or 1) * self.mean_length)


COMPILED_STEPS, COMPILED_MINUTES = 5000, 5
"""Shorter trainings are not compiled by `auto`: compiling would take longer than it saves."""

VARYING_PRODUCTS = 16
"""Shapes of products that are kept in training on varying lengths: each costs megabytes, and the next step has new
ones."""


def check_target(start: Start) -> None:
    """Check that the run directory can be used, before the data is read.

    Errors: InputError for one that is not empty (without --resume); StorageError where nothing can be written.
    """
    target = start.out if start.out is not None else RUNS
    if start.out is not None and not start.may_exist and target.exists():
        if not target.is_dir():
            raise InputError(f"{target} is a file, expected a run directory")
        found = sorted(entry.name for entry in target.iterdir() if entry.name != LOCK_NAME)
        if found:
            if (target / LOCK_NAME).exists():
                RunLock(target).release()  # an error where another process holds it
            raise InputError(
                f"{target} is not empty (it holds {found[0]})",
                hint="continue that run with --resume, or choose another directory with --out",
            )
    require_writable_folder(target)


def prepare(start: Start, work: Work, *, processes: int = 1) -> Prepared:
    """Read the data, train or load the tokenizer, resolve sizes and precision. Writes to the cache only.

    processes: of this training on this machine; they share its threads.
    """
    recipe, minutes = start.recipe, start.recipe.training.max_minutes
    device = resolve_device(recipe.training.device)
    if recipe.training.threads is not None:
        torch.set_num_threads(max(1, recipe.training.threads // processes))
    data = task_of(recipe).training_data(start, work)
    if data.samples.lengths is not None:
        bound_products(VARYING_PRODUCTS)
    if start.resumed is not None:
        _check_fingerprint(data, str(start.resumed.trainer.get("data_fingerprint", "")))
    if start.teacher is not None:
        check_vocabulary(data.recipe, start.teacher, data.tokenizer, data.target_tokenizer)
    recipe, precision = freeze(data, device, processes=processes)
    shapes = make_models(recipe, torch.device("meta"), dtype=precision.dtype)
    if data.tokenizer is not None:
        work.note(f"tokenizer: {data.tokenizer.kind}, {data.tokenizer.vocab_size:,} ids")
    if recipe.training.max_epochs is not None:
        work.note(f"{plural(recipe.training.max_epochs, 'epoch')}: at most {recipe.training.max_steps:,} steps")
    generator = ""
    if shapes.generator is not None:
        count = shapes.generator.num_parameters()
        generator = f", and a generator of {count:,} with the same token table, not counted"
    if recipe.training.minutes is None or start.resumed is not None:
        work.note(f"model: {shapes.main.num_parameters():,} parameters{generator}")
    together = f"{processes} processes of " if processes > 1 else ""
    threads = f"{together}{plural(torch.get_num_threads(), 'thread')}"
    work.note(f"number format: {precision.name} ({precision.reason}); {device}, {threads}")
    vectors = read_embeddings(recipe, data, work) if start.resumed is None else {}
    return Prepared(recipe, start, data, device, precision, shapes, minutes, vectors)


def _check_fingerprint(data: TrainingData, recorded: str) -> None:
    """Raise InputError when the data of a resumed run has changed. Runs of version 0.1.0 recorded no samples."""
    if not data.fingerprint.startswith(recorded):
        raise InputError(
            "the training or validation data has changed since this run began",
            hint="restore the data, or start a new run from these weights with --init-from",
        )


def whole_steps(every: float, max_steps: int) -> int:
    """A number of steps, or a share of all steps, as a number of steps."""
    return int(every) if every >= 1 else max(1, int(every * max_steps))


def settle_steps(recipe: Recipe, samples: Samples) -> Recipe:
    """The recipe with numbers of steps in place of epochs, defaults and shares, by the number of batches per epoch."""
    training, schedule = recipe.training, recipe.schedule
    per_epoch = plan_of(recipe, samples).batches_per_epoch()
    max_steps = training.max_steps
    if training.max_epochs is not None:
        max_steps = min(max_steps, max(1, math.ceil(training.max_epochs * per_epoch)))
    every = max(per_epoch, math.ceil(max_steps / MAX_VALIDATIONS))
    if training.max_epochs is None:
        every = min(every, DEFAULT_EVERY)
    eval_every = whole_steps(training.eval_every or min(every, max_steps), max_steps)
    save_every = whole_steps(training.save_every or eval_every, max_steps)
    updates = {"max_steps": max_steps, "eval_every": eval_every, "save_every": save_every}
    if schedule.warmup_ratio and not schedule.warmup_steps:
        warmup_steps = round(schedule.warmup_ratio * max_steps)
        schedule = schedule.model_copy(update={"warmup_steps": warmup_steps, "warmup_ratio": 0.0})
    return recipe.model_copy(update={"training": training.model_copy(update=updates), "schedule": schedule})


def freeze(data: TrainingData, device: torch.device, *, processes: int = 1) -> tuple[Recipe, Precision]:
    """The recipe with every `auto` replaced by the choice, so that a resumed run makes the same choices."""
    recipe = settle_steps(data.recipe, data.samples)
    model, generator = recipe.model, recipe.generator
    if data.tokenizer is not None:
        vocabulary = {"vocab_size": vocabulary_size(model.vocab_size, data.tokenizer)}
        if data.target_tokenizer is not None:
            own = vocabulary_size(model.target_vocab_size, data.target_tokenizer, key="target_vocab_size")
            vocabulary["target_vocab_size"] = own
        model = model.model_copy(update=vocabulary)
        generator = None if generator is None else generator.model_copy(update=vocabulary)
    training = recipe.training
    rows, d_model, d_ff = product_shape(recipe, data.tokens_per_sample)
    precision = resolve_precision(training.precision, device, rows=rows, d_model=d_model, d_ff=d_ff)
    updates: dict[str, object] = {"precision": precision.name, "max_minutes": None}
    if training.compile == "auto":
        updates["compile"] = "on" if compiling_pays(training, device) else "off"
    if device.type == "cpu":
        updates["threads"] = training.threads or torch.get_num_threads() * processes
    training = training.model_copy(update=updates)
    return recipe.model_copy(update={"model": model, "generator": generator, "training": training}), precision


def compiling_pays(training: Training, device: torch.device) -> bool:
    """Whether `auto` compiles the model. Compiling takes half a minute and saves a fifth of a step on a GPU."""
    is_long = training.max_steps >= COMPILED_STEPS and (training.minutes or math.inf) >= COMPILED_MINUTES
    return device.type == "cuda" and is_long


def measure_peak(prepared: Prepared) -> float:
    """Measured FLOP/s of the feed-forward product in the compute dtype, the reference for throughput."""
    rows, d_model, d_ff = product_shape(prepared.recipe, prepared.data.tokens_per_sample)
    return matmul_flops_per_second(
        prepared.precision.dtype, prepared.device, rows=min(rows, 8192), inner=d_model, columns=d_ff
    )


def describe(prepared: Prepared, *, devices: int = 1) -> dict[str, Any]:
    """The report of --dry-run: recipe_yaml, parameters, memory (bytes by purpose), shapes of a batch, an example.

    A training by time has `sizes`, among which it chose. Memory is that of one of `devices`, with ddp.
    """
    recipe = prepared.recipe
    objective = make_objective(recipe, prepared.data.context)
    batches = PlannedBatches(recipe, prepared.data, objective, cursor=None, device=prepared.device)
    samples = batches.next_samples()
    [batch, *_] = batches.next()
    batches.close()
    require_separate_rows(prepared.shapes, devices)
    memory = _memory_of(prepared, -(-prepared.rows_per_micro_batch // devices))
    shapes = {name: list(tensor.shape) for name, tensor in batch.model_inputs().items()}
    tokenizers = prepared.data.tokenizer, prepared.data.target_tokenizer
    report = {
        "recipe_yaml": recipe_to_yaml(recipe),
        "parameters": prepared.num_parameters,
        "memory": memory.to_json(),
        "batch": {**shapes, "tokens": batch.num_tokens},
        "example": example_document(objective, samples, batch, tokenizers, labels=recipe.data.labels),
    }
    if prepared.alternatives:
        report["sizes"] = [str(alternative) for alternative in prepared.alternatives]
    return report


def _memory_of(prepared: Prepared, rows: int) -> MemoryEstimate:
    """Memory of one process whose micro-batches have at most this number of rows, all of the longest samples."""
    recipe, teacher = prepared.recipe, prepared.start.teacher
    (source, target), on_cpu = prepared.longest, prepared.device.type == "cpu"
    is_beside = teacher is not None and recipe.teacher is not None and recipe.teacher.kind == "soft"
    found = training_memory(
        recipe,
        prepared.shapes.all,
        tokens_per_micro_batch=rows * source,
        dtype=prepared.precision.dtype,
        teacher_parameters=teacher.model.num_parameters() if teacher is not None and is_beside else 0,
        seq_len=source,
        target_seq_len=target,
        on_cpu=on_cpu,
    )
    return replace(found, process=resident_bytes() or 0) if on_cpu else found
