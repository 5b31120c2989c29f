"""Preparation of a training: data, tokenizer, sizes and precision, resolved before anything is written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tformer.checkpoint.run import LOCK_NAME, RunLock, require_empty
from tformer.cost.flops import product_shape
from tformer.cost.memory import MemoryEstimate, training_memory
from tformer.data.batching.mixture import Samples
from tformer.recipe import recipe_to_yaml
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Training as Section
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
from tformer.tasks.base import TrainingData
from tformer.tasks.example import example_document
from tformer.tasks.table import task_of
from tformer.training.assemble import (
    PlannedBatches,
    make_models,
    make_objective,
    plan_of,
    require_separate_rows,
    vocabulary_size,
)
from tformer.training.embeddings import read_embeddings
from tformer.training.teacher import check_vocabulary
from tformer.training.training import Training
from tformer.workers.work import Work

DEFAULT_EVERY = 500
"""Default maximum of steps between validations, and between checkpoints, of a training without epochs."""

MAX_VALIDATIONS = 20
"""Maximum number of validations of a training by epochs, evenly spread."""


COMPILED_STEPS, COMPILED_MINUTES = 5000, 5
"""Shorter trainings are not compiled by `auto`: compiling would take longer than it saves."""

VARYING_PRODUCTS = 16
"""Shapes of products that are kept in training on varying lengths: each costs megabytes, and the next step has new
ones."""


def check_target(training: Training) -> None:
    """Check that the run directory can be used, before the data is read.

    Errors: InputError for one that is not empty (without --resume); StorageError where nothing can be written.
    """
    target = training.out if training.out is not None else RUNS
    if training.out is not None and not training.may_exist and target.exists():
        if not target.is_dir():
            raise InputError(f"{target} is a file, expected a run directory")
        if (target / LOCK_NAME).exists():
            RunLock(target).release()  # an error where another process holds it
        require_empty(target)
    require_writable_folder(target)


def prepare(training: Training, work: Work, *, processes: int = 1) -> Training:
    """Read the data, train or load the tokenizer, resolve sizes and precision. Writes to the cache only.

    processes: of this training on this machine; they share its threads.
    """
    section = training.recipe.training
    device = resolve_device(section.device)
    if section.threads is not None:
        torch.set_num_threads(max(1, section.threads // processes))
    recipe, data = task_of(training.recipe).training_data(training, work)
    if data.samples.lengths is not None:
        bound_products(VARYING_PRODUCTS)
    if training.resumed is not None:
        _check_fingerprint(data, str(training.resumed.trainer.get("data_fingerprint", "")))
    if training.teacher is not None:
        check_vocabulary(recipe, training.teacher, data.tokenizer, data.target_tokenizer)
    sizes = training.sizes if training.sizes.recipes else replace(training.sizes, recipes=(recipe,))
    recipe, precision = freeze(recipe, data, device, processes=processes)
    shapes = make_models(recipe, torch.device("meta"), dtype=precision.dtype)
    if data.tokenizer is not None:
        work.note(f"tokenizer: {data.tokenizer.kind}, {data.tokenizer.vocab_size:,} ids")
    if section.max_epochs is not None:
        work.note(f"{plural(section.max_epochs, 'epoch')}: at most {recipe.training.max_steps:,} steps")
    generator = ""
    if shapes.generator is not None:
        count = shapes.generator.num_parameters()
        generator = f", and a generator of {count:,} with the same token table, not counted"
    if section.minutes is None or training.resumed is not None:
        work.note(f"model: {shapes.main.num_parameters():,} parameters{generator}")
    together = f"{processes} processes of " if processes > 1 else ""
    threads = f"{together}{plural(torch.get_num_threads(), 'thread')}"
    work.note(f"number format: {precision.name} ({precision.reason}); {device}, {threads}")
    return replace(
        training,
        recipe=recipe,
        sizes=sizes,
        data=data,
        device=device,
        precision=precision,
        shapes=shapes,
        max_minutes=section.max_minutes,
        vectors=read_embeddings(recipe, data, work) if training.resumed is None else {},
    )


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


def freeze(recipe: Recipe, data: TrainingData, device: torch.device, *, processes: int = 1) -> tuple[Recipe, Precision]:
    """The recipe with every `auto` replaced by the choice, so that a resumed run makes the same choices."""
    recipe = settle_steps(recipe, data.samples)
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


def compiling_pays(training: Section, device: torch.device) -> bool:
    """Whether `auto` compiles the model. Compiling takes half a minute and saves a fifth of a step on a GPU."""
    is_long = training.max_steps >= COMPILED_STEPS and (training.minutes or math.inf) >= COMPILED_MINUTES
    return device.type == "cuda" and is_long


def measure_peak(training: Training) -> float:
    """Measured FLOP/s of the feed-forward product in the compute dtype, the reference for throughput."""
    rows, d_model, d_ff = product_shape(training.recipe, training.data.tokens_per_sample)
    return matmul_flops_per_second(
        training.precision.dtype, training.device, rows=min(rows, 8192), inner=d_model, columns=d_ff
    )


def describe(training: Training, *, devices: int = 1) -> dict[str, Any]:
    """The report of --dry-run: recipe_yaml, parameters, memory (bytes by purpose), shapes of a batch, an example.

    A training by time has `sizes`, among which it chose. Memory is that of one of `devices`, with ddp.
    """
    recipe = training.recipe
    objective = make_objective(recipe, training.data.context)
    batches = PlannedBatches(recipe, training.data, objective, cursor=None, device=training.device)
    samples = batches.next_samples()
    [batch, *_] = batches.next()
    batches.close()
    require_separate_rows(training.shapes, devices)
    memory = _memory_of(training, -(-training.rows_per_micro_batch // devices))
    shapes = {name: list(tensor.shape) for name, tensor in batch.model_inputs().items()}
    tokenizers = training.data.tokenizer, training.data.target_tokenizer
    report = {
        "recipe_yaml": recipe_to_yaml(recipe),
        "parameters": training.num_parameters,
        "memory": memory.to_json(),
        "batch": {**shapes, "tokens": batch.num_tokens},
        "example": example_document(objective, samples, batch, tokenizers, labels=recipe.data.labels),
    }
    if training.alternatives:
        report["sizes"] = [str(alternative) for alternative in training.alternatives]
    return report


def _memory_of(training: Training, rows: int) -> MemoryEstimate:
    """Memory of one process whose micro-batches have at most this number of rows, all of the longest samples."""
    recipe, teacher = training.recipe, training.teacher
    (source, target), on_cpu = training.longest, training.device.type == "cpu"
    is_beside = teacher is not None and recipe.teacher is not None and recipe.teacher.kind == "soft"
    found = training_memory(
        recipe,
        training.shapes.all,
        tokens_per_micro_batch=rows * source,
        dtype=training.precision.dtype,
        teacher_parameters=teacher.model.num_parameters() if teacher is not None and is_beside else 0,
        seq_len=source,
        target_seq_len=target,
        on_cpu=on_cpu,
    )
    return replace(found, process=resident_bytes() or 0) if on_cpu else found
