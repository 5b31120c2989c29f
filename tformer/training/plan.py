"""The plan of a training by time (`training.minutes`): the size of the model, and how many steps to expect.

The sizes of the family (`recipe/sizes.py`) are tried from the smallest on: a few real steps of each are timed, once for
each machine and shape. The largest size that sees enough tokens for its parameters is trained. A step that would take
too much of the time gets a smaller batch: operations say so before it is timed. From then on the clock
(`training/clock.py`) counts.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tformer.cost.flops import example_flops, mean_lengths
from tformer.objectives.base import Objective
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import BATCH_SIZES
from tformer.recipe.sections import Training as Section
from tformer.recipe.sizes import with_dropout
from tformer.support.device import Precision, measured_once
from tformer.support.errors import InputError
from tformer.support.formatting import in_words, plural
from tformer.training import assemble
from tformer.training.clock import NEVER
from tformer.training.loop import Trainer
from tformer.training.prepare import freeze, measure_peak, prepare
from tformer.training.request import recipe_of_leader
from tformer.training.training import SizeChoice, Training
from tformer.workers.work import Work
from tformer.workers.worker import Worker

TIMED_STEPS, TIMED_SECONDS = 8, 1.0
"""A size is timed for this number of steps, or at least two of them in this time; one more warms up."""

LONGEST_STEP, LONGEST_EXAMPLE = 1 / 20, 1 / 4
"""Maximum of a step as a part of the time, by a smaller batch; of one example, which no batch makes smaller."""

SLOWEST = 16
"""A step of a small model on a busy machine takes up to this number of times as long as its products alone."""

VALIDATIONS, FEW_STEPS = 4, 20
"""Of a training by time, the last one included; one of fewer steps is validated at its end."""

STEPS_SHARE = 0.9
"""Part of the time that is left for steps, as far as the plan knows."""

WARMUP_SHARE = 0.1
"""Maximum of warm-up, as a part of the steps."""


@dataclass(frozen=True)
class Alternative:
    """A size of model with its forecast for the time: seconds of a step, steps, tokens for each parameter."""

    size: str
    parameters: int
    step_seconds: float
    steps: int
    tokens_per_parameter: float
    fits: bool

    def __str__(self) -> str:
        return (
            f"{self.size}: {self.parameters:,} parameters, {plural(self.steps, 'step')} of {self.step_seconds:.3g} s, "
            f"{self.tokens_per_parameter:.2g} tokens for each parameter"
        )


def plan(training: Training, *, began: float, work: Work, worker: Worker) -> Training:
    """The training in the size that fits the time best, the leader's choice. Notes the plan in one line.

    began: `time.monotonic()` when the command started.
    """
    minutes, resumed = training.recipe.training.minutes, training.resumed
    assert minutes is not None
    given, needed, total = training.sizes.recipes, training.sizes.tokens_per_parameter, 60 * minutes
    sizes = list(given)
    of_size = partial(_with_size, training, work=work, processes=worker.local_size)
    tried: list[Training] = []
    found: list[Alternative] = []
    if worker.leads:
        enough = time.monotonic() + 2 * LONGEST_STEP * total
        with work.progress("timing steps"):
            for index, size in enumerate(given):
                left = max(1.0, began + total - time.monotonic())
                longest = min(LONGEST_STEP * total, left / 5) * worker.world_size
                sizes[index], seconds = _with_short_steps(size, of_size, longest, total)
                tried.append(of_size(sizes[index]))
                # A size that needs a smaller batch is too large for the time, whatever it would read.
                least = needed if sizes[index] is size else math.inf
                found.append(_alternative(tried[-1], seconds / worker.world_size, began + total, least))
                if not found[-1].fits or time.monotonic() >= enough:
                    break
    fitting = [number for number, alternative in enumerate(found) if alternative.fits]
    number, steps = worker.share(lambda: (number := max(fitting, default=0), found[number].steps))
    if worker.leads and resumed is None:
        limit = ", the most that suits the data" if steps == training.recipe.training.max_steps else ""
        few = "; 20 would be usual: give it more minutes" if found[number].tokens_per_parameter < needed else ""
        work.note(f"plan for {in_words(total)}: {found[number]}{limit}{few}")
        if sizes[number] is not given[number]:
            whole, own = (each.training for each in (given[number], sizes[number]))
            unit = "" if own.batch_size else " tokens"
            smaller = f"batch size {_batch(own):,}{unit} instead of {_batch(whole):,}"
            work.note(f"{smaller}, so that a step takes at most a twentieth of the time")
    chosen = tried[number] if tried else of_size(sizes[number])
    passes = steps * chosen.tokens_per_step / max(1.0, len(chosen.data.samples) * chosen.mean_length)
    most, rate = training.sizes.dropout or (math.inf, 0.0)
    if passes > most:
        chosen = of_size(with_dropout(sizes[number], rate))
        if worker.leads:
            work.note(f"dropout {rate:g}, as the training reads its data {passes:.0f} times")
    recipe, precision = _settled(chosen.recipe, sizes[number].training, steps), chosen.precision
    if worker.world_size > 1:
        recipe = recipe_of_leader(recipe, worker)
        assert recipe.training.precision != "auto"
        precision = Precision(recipe.training.precision, precision.reason)
    return replace(
        chosen, recipe=recipe, precision=precision, planned_steps=steps, alternatives=tuple(found), sizes=SizeChoice()
    )


def _with_size(training: Training, size: Recipe, *, work: Work, processes: int) -> Training:
    """The training with the model, the optimizer and the schedule of another size than its first."""
    if size is training.sizes.recipes[0]:
        return training
    if size.seq_len != training.recipe.seq_len:  # the windows of the data change, and are cut again
        quiet = replace(work, note=lambda text: None)
        training = prepare(replace(training, recipe=size), quiet, processes=processes)
    own: dict[str, Any] = {name: getattr(size, name) for name in ("model", "generator", "optimizer", "schedule")}
    own["training"] = size.training.model_copy(update={"precision": training.precision.name})  # is measured once
    recipe, precision = freeze(training.recipe.model_copy(update=own), training.data, training.device)
    shapes = assemble.make_models(recipe, torch.device("meta"), dtype=precision.dtype)
    return replace(training, recipe=recipe, shapes=shapes)


def _with_short_steps(
    size: Recipe, of_size: Callable[[Recipe], Training], longest: float, total: float
) -> tuple[Recipe, float]:
    """A size and the approximate seconds of its step; the batch is smaller if a step would exceed `longest`.

    It times a batch that its operations predict to be short; longer batches take at most proportionally longer.
    Raises InputError where even the products of one example take too long.
    """
    whole = of_size(size)
    source, target = mean_lengths(whole.data.samples, whole.data.tokens_per_sample)
    models = whole.shapes.main, whole.shapes.generator
    flops = example_flops(whole.recipe, *models, source_length=source, target_length=target).training
    of_example = flops / measure_peak(whole)
    if of_example > LONGEST_EXAMPLE * total:
        raise InputError(
            f"--minutes: a step on one example takes at least {in_words(of_example)} here, more than "
            f"{in_words(total)} allow",
            hint=f"choose a smaller model, or --minutes {math.ceil(of_example / LONGEST_STEP / 60)}",
        )
    examples = max(1.0, whole.tokens_per_step / whole.mean_length)
    most = 1.0 if whole.resumed else examples  # the batch of a resumed run stays

    def times_smaller(seconds: float) -> int:
        """Power of two that divides the batch so that a step of `seconds` fits."""
        return 2 ** math.ceil(math.log2(min(most, max(1.0, seconds / longest))))

    timed = times_smaller(SLOWEST * examples * of_example)
    short = of_size(_smaller(size, timed))
    seconds = timed * measured_once(_key(short), lambda: _time_steps(short, longest))
    times = times_smaller(seconds)
    return _smaller(size, times), seconds / times


def _smaller(recipe: Recipe, times: int) -> Recipe:
    """The recipe with its batch divided by `times`: fewer micro-batches first, then smaller ones."""
    if times == 1:
        return recipe
    training = recipe.training
    rest = max(1, times // training.grad_accum)
    updates = {name: max(1, size // rest) for name in BATCH_SIZES if (size := getattr(training, name)) is not None}
    updates["grad_accum"] = max(1, training.grad_accum // times)
    return recipe.model_copy(update={"training": training.model_copy(update=updates)})


def _batch(training: Section) -> int:
    """Examples or tokens of an optimizer step."""
    return training.grad_accum * (training.batch_size or training.batch_tokens or 1)


def _alternative(training: Training, seconds: float, end: float, needed: float) -> Alternative:
    recipe, parameters = training.recipe, training.num_parameters
    left = max(0.0, end - time.monotonic())
    steps = max(1, min(int(STEPS_SHARE * left / seconds), recipe.training.max_steps))
    model = recipe.model
    # Of a table of n-grams every text reads a few rows.
    table = model.embedding.ngram_rows * model.d_model if model.embedding.ngram > 1 else 0
    ratio = steps * training.tokens_per_step / (parameters - table)
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    size = f"{' + '.join(str(stack.num_layers) for stack in stacks)} layers of width {model.d_model}"
    # A size that has read its data often enough leaves time for a larger one.
    has_read_all = recipe.training.max_epochs is not None and steps == recipe.training.max_steps
    return Alternative(size, parameters, seconds, steps, ratio, fits=ratio >= needed or has_read_all)


def _key(training: Training) -> tuple[Any, ...]:
    """Key of everything that affects the time of a step, besides the machine."""
    recipe = training.recipe
    parts = recipe.model_dump_json(include={"model", "generator", "objectives", "optimizer"})
    batch = recipe.training.model_dump_json(include={"batch_size", "batch_tokens", "grad_accum", "precision"})
    lengths = mean_lengths(training.data.samples, training.data.tokens_per_sample)
    return parts, batch, str(training.device), [round(length, -1) for length in lengths]


def _time_steps(training: Training, longest: float) -> float:
    """Seconds of an optimizer step, by a few real ones of a model that is then dropped; by the first if it is long."""
    recipe, data, device = training.recipe, training.data, training.device
    models = assemble.make_models(recipe, device, dtype=training.precision.dtype)
    objective: Objective = assemble.make_objective(recipe, data.context, models)
    batches = assemble.PlannedBatches(recipe, data, objective, cursor=None, device=device)
    trainer = Trainer(recipe, models, objective, batches, device=device)
    try:
        seconds: list[float] = []
        while sum(seconds) < longest and (
            len(seconds) < 3 or (len(seconds) <= TIMED_STEPS and sum(seconds[1:]) < TIMED_SECONDS)
        ):
            began = time.perf_counter()
            trainer.train_step()
            trainer.wait()
            seconds.append(time.perf_counter() - began)
        timed = seconds[1:] or seconds
        return sum(timed) / len(timed)
    finally:
        batches.close()
        del trainer, models, objective
        gc.collect()


def _settled(recipe: Recipe, given: Section, steps: int) -> Recipe:
    """The recipe with validations and a warm-up that suit this number of steps.

    given: the section `training` with the steps between validations as they were asked for.
    """
    every = steps // VALIDATIONS if steps >= FEW_STEPS else NEVER
    training = recipe.training.model_copy(
        update={"eval_every": given.eval_every or every, "save_every": given.save_every or given.eval_every or every}
    )
    warmup = recipe.schedule.warmup_steps or round(recipe.schedule.warmup_ratio * steps)
    schedule = recipe.schedule.model_copy(
        update={"warmup_steps": min(warmup, int(WARMUP_SHARE * steps)), "warmup_ratio": 0.0}
    )
    return recipe.model_copy(update={"training": training, "schedule": schedule})
