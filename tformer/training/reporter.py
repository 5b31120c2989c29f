"""The callbacks of a `Trainer` in a run: terminal, records, validations, samples and checkpoints.

The leader validates and writes, so that the results equal those of one process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tformer.checkpoint import catalog
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.cost.flops import mean_lengths, training_flops_per_token
from tformer.loading import load_generator, load_weights
from tformer.recipe import Recipe, recipe_to_data, recipe_to_yaml
from tformer.support.formatting import in_words
from tformer.training.clock import Clock, Points, expected_seconds
from tformer.training.display import Console, TrainingDisplay, formats_of
from tformer.training.loggers import LoggedRun, Loggers
from tformer.training.loop import Events, Score, Trainer, constant_metric
from tformer.training.prepare import measure_peak
from tformer.training.saving import Checkpoints
from tformer.training.training import Training
from tformer.training.validations import share_text
from tformer.workers.work import Work
from tformer.workers.worker import Worker

STEPS_BEFORE_FORECAST, FORECAST_SECONDS = 4, 2.0
"""Minimum of steps of this process, and of their time, after which the time of the others is estimated."""

SHORT_TRAINING = 20.0
"""Seconds of a training that needs no forecast."""

VALIDATIONS_OF_A_CONSTANT = 3
"""Validations in a row with the same value of `training.best_metric`, after which a note names it."""

RATE_DIGITS = 6
"""Digits of learned LayerDrop rates in log lines; enough that they still average to the configured rate."""


class RunReporter(Events):
    """Terminal, metrics.jsonl, loggers and checkpoints of one training.

    began: `time.monotonic()` when the command started.

    Attributes:
        work: of the parts of a training that take long; stopped by a signal, or late after the time of a training.
        deadline: `time.monotonic()` at which the training has to end.
        last_values, last_sample: of the last validation.
        final_values: of the best checkpoint on all held-out data.
    """

    def __init__(
        self,
        training: Training,
        trainer: Trainer,
        run: RunDirectory,
        checkpoints: Checkpoints,
        *,
        console: Console,
        work: Work,
        began: float,
        worker: Worker,
        log_to: Sequence[str] = (),
    ) -> None:
        self.training, self.trainer, self.worker = training, trainer, worker
        self.run, self.checkpoints = run, checkpoints
        self.console, self.began = console, began
        self.is_stopped = work.should_stop
        self.last_values: dict[str, Any] = {}
        self.final_values: dict[str, Any] | None = None
        self.last_sample = ""
        self._validations: list[dict[str, Any]] = []  # the last few
        self._named_constant = False
        self._steps, self._step_seconds, self._is_foreseen = 0, 0.0, False
        self._spent_before = trainer.state.spent
        clock = trainer.clock = self._clock()
        late = math.inf if clock is None else clock.deadline
        self.deadline = began + 60 * (training.max_minutes or math.inf)
        self.late = min(self.deadline, late)
        self.flops_per_token = self._flops_per_token()
        self._peak_flops = measure_peak(training) * worker.world_size if worker.leads else 0.0
        shown = {name: form for part in trainer.measured.members for name, form in part.shown_metrics.items()}
        self.display = TrainingDisplay(
            console,
            max_steps=training.recipe.training.max_steps if clock is None else clock.expected_steps,
            first_step=trainer.state.step,
            unit="tok" if training.data.tokenizer is not None else "img",
            processes=worker.world_size,
            progress=work.progress,
            seconds_left=self.seconds_left,
            shown_metrics=formats_of(training.recipe) | shown,
        )
        self.work = replace(
            work,
            progress=self.display.progress,
            should_stop=lambda: self.is_stopped() or time.monotonic() >= late,
        )
        logged = LoggedRun(
            path=run.path,
            first_step=trainer.state.step,
            recipe=recipe_to_data(training.recipe),
            recipe_yaml=recipe_to_yaml(training.recipe),
            environment=run.environment() or {},
        )
        self.loggers = Loggers(log_to, logged, work.note, enabled=worker.leads)

    # Events of the trainer.

    def should_stop(self) -> bool:
        """Raises StorageError for a checkpoint that could not be written in the background."""
        self.checkpoints.saver.raise_if_failed()
        return self.is_stopped()

    def stepped(self, seconds: float) -> None:
        self.display.stepped(self.trainer.state.step)
        self._steps, self._step_seconds = self._steps + 1, self._step_seconds + seconds
        if not self._is_foreseen and self._steps >= STEPS_BEFORE_FORECAST and self._step_seconds >= FORECAST_SECONDS:
            self._is_foreseen = True
            self._forecast()

    def skipped(self, step: int) -> None:
        self.display.skipped(step)

    def log(self, record: dict[str, Any]) -> None:
        if record["split"] == "train":
            record |= self._learned_rates()
            if self._peak_flops:
                record["peak_share"] = record["tokens_per_second"] * self.flops_per_token / self._peak_flops
        if self.worker.leads:
            self.run.append_metrics(record)
            self.loggers.record(record)
        self.display.log(record)

    def validate(self, step: int) -> tuple[dict[str, Any], str] | None:
        values = self._in_leader(self._measure)
        sample = None if values is None else self._sample(step)
        return None if sample is None else (values, sample)

    def sample(self, step: int, text: str) -> None:
        if self.worker.leads:
            self.run.append_sample(step, text)
            self.loggers.sample(step, text)
        self.display.sample(text)

    def save(self, score: Score | None) -> None:
        if self.training.recipe.training.minutes is not None:
            self.trainer.state.spent = self._spent_before + time.monotonic() - self.began
        self.checkpoints.save(self.run, score)

    def decide(self, step: int) -> Points | None:
        """The leader's new line of the rate, written into the recipe of the run and of its next checkpoints."""
        trainer, clock = self.trainer, self.trainer.clock
        assert clock is not None
        every = {"eval_every": trainer.eval_every, "save_every": trainer.save_every}
        shared = self.worker.share(lambda: clock.decide(step, **every))
        self.display.set_last_step(clock.expected_steps)
        if shared is None:
            return None
        points = tuple((int(finished), float(factor)) for finished, factor in shared)
        recipe = trainer.recipe
        schedule = recipe.schedule.model_copy(update={"points": points})
        training = recipe.training.model_copy(update={"max_steps": points[-1][0]})
        self._change_recipe(recipe.model_copy(update={"schedule": schedule, "training": training}))
        self.display.set_last_step(points[-1][0])
        return points

    # Time.

    def _clock(self) -> Clock | None:
        """The clock of a training by time; None where the line of its rate is already in the recipe of a new run."""
        training, recipe = self.training, self.training.recipe
        minutes, points = recipe.training.minutes, recipe.schedule.points
        if minutes is None or (points is not None and training.resumed is None):
            return None
        return Clock(
            self.trainer.pace,
            end=self.began + 60 * minutes - self._spent_before,
            total=60 * minutes,
            fraction=recipe.schedule.decay_fraction,
            floor=recipe.schedule.min_ratio,
            planned_steps=training.planned_steps,
            most_steps=recipe.training.max_steps,
            points=points or (),
        )

    def seconds_left(self, step: int) -> float | None:
        """Expected from finished step `step` to the end; None: not known yet."""
        trainer = self.trainer
        if trainer.pace.step_seconds() is None:
            return None
        last = trainer.last_step if trainer.clock is None else trainer.clock.expected_steps
        return trainer.pace.to_come(step, last, eval_every=trainer.eval_every, save_every=trainer.save_every)

    def _forecast(self) -> None:
        """Try out the validations and a sample, and say how long the training will take."""
        trainer, pace = self.trainer, self.trainer.pace
        step, alone = trainer.state.step, self.worker.world_size == 1
        left = self.seconds_left(step)
        is_short = left is not None and left < SHORT_TRAINING and trainer.clock is None
        if left is None or not alone or (is_short and not self._ends_on_all_data):
            return
        trainer.models.eval()
        write = self.training.data.sample
        with self.work.progress("trying out a validation"):
            if self._ends_on_all_data:
                pace.seconds["end"] = expected_seconds(partial(self._validate, share=1.0))
            seconds = self._limit_validations(expected_seconds(self._validate))
            began = time.monotonic()
            if write is not None and self.training.recipe.training.sample_every != 0:
                write(trainer.models.main, self.work.should_stop)
        pace.seconds.setdefault("validation", seconds + time.monotonic() - began)
        left, spent = self.seconds_left(step), time.monotonic() - self.began
        if trainer.clock is None and left is not None and left >= SHORT_TRAINING:
            ends = time.strftime("%H:%M", time.localtime(time.time() + left))
            end = pace.seconds.get("end")
            of_end = "" if end is None else f", {in_words(end)} of them for all held-out data at the end"
            self.console.print(f"expected: {in_words(spent + left)} in all, until {ends}{of_end}", markup=False)

    def _limit_validations(self, seconds: float) -> float:
        """Reduce the validations of a training by time to what they may take; the new seconds of one."""
        training, trainer, recipe = self.training, self.trainer, self.training.recipe
        if trainer.clock is None or training.resumed or training.share_is_given:
            return seconds
        part = trainer.clock.share_of_validations(trainer.state.step, seconds, eval_every=trainer.eval_every)
        if part < 1.0:
            share = float(f"{part * (recipe.training.valid_share or 1.0):.3g}")
            section = recipe.training.model_copy(update={"valid_share": share})
            self._change_recipe(recipe.model_copy(update={"training": section}))
            self.work.note(share_text(training, share))
        return part * seconds

    def _change_recipe(self, recipe: Recipe) -> None:
        """Write the recipe into the run and its next checkpoints."""
        self.training, self.trainer.recipe = replace(self.training, recipe=recipe), recipe
        self.checkpoints.recipe_yaml = recipe_to_yaml(recipe)
        if self.worker.leads:
            self.run.write_recipe(self.checkpoints.recipe_yaml)

    def _flops_per_token(self) -> float:
        models, data = self.trainer.models, self.training.data
        source, target = mean_lengths(data.samples, data.tokens_per_sample)
        lengths = {"source_length": source, "target_length": target}
        return training_flops_per_token(self.training.recipe, models.main, models.generator, **lengths)

    # Validations and samples.

    def _in_leader(self, function: Callable[[], Any]) -> Any:
        """The JSON value that `function`, which runs the models, returns in the leader, where alone it is called."""
        value = self.trainer.parallel.in_first(self.trainer.models, function)
        return self.worker.share(lambda: value)

    def _measure(self) -> dict[str, Any] | None:
        """The metrics of a validation; None when interrupted, or broken off at the deadline."""
        self.trainer.models.eval()
        polled: list[bool] = []

        def should_stop() -> bool:
            polled.append(self.work.should_stop())
            return polled[-1]

        values = self._validate(replace(self.work, should_stop=should_stop))
        if self.is_stopped() or any(polled):
            return None
        self.last_values = values
        self._validations = [*self._validations[1 - VALIDATIONS_OF_A_CONSTANT :], values]
        if len(self._validations) == VALIDATIONS_OF_A_CONSTANT and not self._named_constant:
            note = constant_metric(self._validations, self.training.recipe.training.best_metric)
            if note is not None:
                self.console.print(note, markup=False)
                self._named_constant = True
        return values

    def _validate(self, work: Work, share: float | None = None) -> dict[str, Any]:
        """The metrics of the models on a share of the held-out data; None: the run's share."""
        share = share or self.training.recipe.training.valid_share or 1.0
        return self.training.data.validate(self.trainer.models.main, self.trainer.measured, work, share)

    @property
    def _ends_on_all_data(self) -> bool:
        """Whether validations read a share of the held-out data, and the best checkpoint is measured on all of it."""
        section = self.training.recipe.training
        return bool(section.final_validation) and (section.valid_share or 1.0) < 1.0 and section.minutes is None

    def measure_best(self) -> None:
        """At the end of the training: the record `final`. A run that is stopped here measures it when it is resumed."""
        trainer, state = self.trainer, self.trainer.state
        is_done = state.finished or state.step >= self.training.recipe.training.max_steps
        if not self._ends_on_all_data or not is_done:
            return

        def unmeasured() -> str | None:
            """The best checkpoint, unless it has a record already."""
            best = catalog.best(self.run.checkpoints())
            done = {record.get("step") for record in self.run.metrics() if record.get("split") == "final"}
            return None if best is None or best.step in done else str(best.path)

        path = self.worker.share(unmeasured)
        if path is None:
            return
        checkpoint = read_checkpoint(Path(path))
        load_weights(trainer.models.main, checkpoint, ema=checkpoint.has("ema"), shards=trainer.shards)
        if trainer.models.generator is not None:
            load_generator(trainer.models.generator, checkpoint, shards=trainer.shards)
        work = replace(self.work, should_stop=lambda: self.is_stopped() or time.monotonic() >= self.deadline)

        def measure() -> dict[str, Any] | None:
            trainer.models.eval()
            values = self._validate(work, share=1.0)
            return None if work.should_stop() else values

        self.final_values = self._in_leader(measure)
        if self.final_values is not None:
            self.log({"split": "final", "step": checkpoint.step, **self.final_values, "is_best": True})
        elif not self.is_stopped():
            self.console.print(f"out of time for all held-out data; {self.how_to_continue}", markup=False)

    @property
    def how_to_continue(self) -> str:
        return f"continue with: tformer train --resume --out {self.run.path}"

    def _sample(self, step: int) -> str | None:
        """The sample of a step; "" if none is due; None: interrupted."""
        section, write = self.training.recipe.training, self.training.data.sample
        every = section.sample_every
        if write is None or every == 0 or (every is not None and step % every and step < section.max_steps):
            return ""

        def written() -> str | None:
            with self.work.progress("writing a sample"):
                text = write(self.trainer.models.main, self.work.should_stop)
                return text if text is not None or self.is_stopped() else ""

        text: str | None = self._in_leader(written)
        self.last_sample = text or self.last_sample
        return text

    def _learned_rates(self) -> dict[str, Any]:
        """Learned LayerDrop rates for log lines; empty for a model without them."""
        models = self.trainer.models
        stacks = {"encoder": models.main.encoder, "decoder": models.main.decoder}
        drops = {side: stack.layerdrop for side, stack in stacks.items() if stack is not None}
        learned = {side: drop for side, drop in drops.items() if drop is not None and drop.learned}
        if not learned:
            return {}
        rates = self.trainer.parallel.in_first(models, lambda: {side: drop.rates() for side, drop in learned.items()})
        rounded = {side: [round(rate, RATE_DIGITS) for rate in each] for side, each in (rates or {}).items()}
        return {"layerdrop_rates": rounded} if rounded else {}
