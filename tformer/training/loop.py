"""The training loop: optimizer steps, log lines, validations and checkpoints.

One optimizer step trains on a global batch, which is cut into micro-batches, and each of them split over the processes.
The loss is
    sum over terms of weight * sum / count,
where the counts are those of the WHOLE global batch and are known before the first backward: accumulating gradients, or
having several processes, then gives exactly the gradient of one big batch.

Randomness is re-keyed before every forward by (seed, step, micro-batch, rank): a resumed run draws the same dropout.
Draws that all processes share have the key of rank 0 (`SharedDraws`).
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.metrics import HIGHER_IS_BETTER, lower_is_better
from tformer.nn.structured_dropout import DropHead, LayerDrop, SharedDraws, TrainingStep, step_listeners
from tformer.objectives import OBJECTIVES
from tformer.objectives.base import Objective, total_loss
from tformer.optim.schedules import build_schedule
from tformer.optim.shards import Shards
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Training
from tformer.support.device import keep_freed_memory, return_free_memory
from tformer.support.errors import InputError, NotFiniteError, OtherProcessError, did_you_mean
from tformer.training.assemble import TrainedModels, make_ema, make_optimizer
from tformer.training.clock import NEVER, Clock, Pace, Points
from tformer.training.parallel import Parallel
from tformer.training.state import LossScaler, RunningSums, TrainerState

MAX_SKIPPED_IN_A_ROW = 3
"""Consecutive steps without a finite gradient that end the run; fewer are skipped and counted."""

STEPS_BEFORE_FREEZE = 2
"""Steps of this process after which all long-lived objects exist."""


class Batches(Protocol):
    """Global batches in order, each as the micro-batches of this process."""

    def next(self) -> Sequence[Batch]: ...

    def cursor(self) -> dict[str, Any]:
        """The cursor of the batch that `next` returns next."""


class Events:
    """Callbacks of a `Trainer`: reports to a run, and questions to it. This base class is for steps without a run.

    All processes call each method. What takes long polls `should_stop` itself.
    """

    def should_stop(self) -> bool:
        return False

    def stepped(self, seconds: float) -> None:
        """Called after each step. seconds: its duration."""

    def skipped(self, step: int) -> None:
        """Called for a step whose gradient is not finite: the weights stay."""

    def log(self, record: dict[str, Any]) -> None:
        """Called with the record of the steps since the last record, or of a validation."""

    def validate(self, step: int) -> tuple[dict[str, Any], str] | None:
        """(metrics, what the model writes; "": no sample is due) at a step; None: interrupted."""
        return {}, ""

    def sample(self, step: int, text: str) -> None:
        """Called with the text that the model wrote, after a completed validation."""

    def save(self, score: Score | None) -> None:
        """Save a checkpoint. score: of the validation at this step, if there was one; lower is better."""

    def decide(self, step: int) -> Points | None:
        """A training by time: the new line of the learning rate, the same in all processes; None: as before."""
        return None


class Trainer:
    """One training in progress: its models, objective, optimizer and state, and the steps that change them.

    Args:
        objective: forms batches and measures.
        batches: global batches from `state.cursor` on.
        taught: the objective that is trained, where a teacher adds to it.
        forward: calls the main model, perhaps compiled; None: the model itself.
        shards: of models whose weights are spread over processes.

    Attributes:
        recipe: changes only where the clock decides something.
        max_steps: of the recipe at the beginning.
        pace: measures what takes time.
    """

    def __init__(
        self,
        recipe: Recipe,
        models: TrainedModels,
        objective: Objective,
        batches: Batches,
        *,
        device: torch.device,
        state: TrainerState | None = None,
        taught: Objective | None = None,
        forward: Callable[..., Any] | None = None,
        parallel: Parallel | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.recipe, self.models, self.batches, self.device = recipe, models, batches, device
        self.measured, self.objective = objective, taught or objective
        self.forward = models.main if forward is None else forward
        self.parallel, self.shards = parallel or Parallel(), shards
        self.state = state or TrainerState()
        self.optimizer = make_optimizer(recipe, models, device, shards)
        self.schedule = build_schedule(
            recipe.schedule, total_steps=recipe.training.max_steps, d_model=recipe.model.d_model
        )
        self.scaler = LossScaler(enabled=models.main.compute_dtype == torch.float16)
        self.ema = make_ema(recipe, models, shards)
        self.events = Events()
        self._step_listeners = step_listeners(models)
        self._shared_draws = [module for module in models.modules() if isinstance(module, DropHead | LayerDrop)]
        self._run_models = self.parallel.wrap(models, some_unused=models.skips_parameters(self.objective))
        training = recipe.training
        assert training.eval_every is not None and training.save_every is not None  # set by `settle_steps`
        self.eval_every, self.save_every = int(training.eval_every), int(training.save_every)
        self.max_steps = self.limit = training.max_steps
        self.pace = Pace(counts_each_step=device.type == "cpu")
        self.clock: Clock | None = None
        self._skipped_in_a_row = 0
        self._score: Score | None = None  # of the current weights, if they have been validated
        self._saved_step = self.state.step if self.state.step else None
        self._last_save = time.monotonic()
        self._work_seconds = 0.0  # in optimizer steps since the last log line
        self._work_tokens = 0
        self._sums: list[tuple[Tensor, ...]] = []  # (loss, gradient norm, terms) on the device
        self._term_names: tuple[str, ...] = ()  # names of the terms; empty for a loss of one term

    @property
    def last_step(self) -> int:
        return self.limit if self.clock is None else min(self.limit, self.clock.last_step)

    def run(self, events: Events, *, deadline: float = math.inf, stop_at_step: int | None = None) -> None:
        """Train until the last step, the deadline, early stopping or an interruption; save the state in each case.

        deadline: `time.monotonic()` at which no further step begins. stop_at_step: an earlier last step, which changes
        no schedule. With a clock the last step is the one that it decides.
        Raises InputError for data that can no longer be read, after saving the state.
        """
        self.events, self.limit = events, min(self.max_steps, stop_at_step or self.max_steps)
        keep_freed_memory()
        try:
            self._run(deadline)
        except InputError:
            self._leave()
            raise

    def _run(self, deadline: float) -> None:
        state, training, events, steps_here = self.state, self.recipe.training, self.events, 0
        if not state.validated:
            if not self._validate():
                return self._leave()
            self._save()
        while state.step < self.last_step and not state.finished:
            if self.parallel.agree(events.should_stop() or time.monotonic() >= deadline):
                return self._leave()
            began = time.monotonic()
            with self.pace.of_step():
                self.train_step()
            seconds = time.monotonic() - began
            steps_here += 1
            if steps_here == STEPS_BEFORE_FREEZE:
                # Full passes of the garbage collector over long-lived objects would pause training.
                gc.collect()
                gc.freeze()
            events.stepped(seconds)
            last = state.step >= self.last_step
            if state.step % training.log_every == 0 or last:
                with self.pace.of_step(counted=0):
                    self._log()
            if state.step % self.eval_every == 0 or last:
                state.validated = False
                if not self._validate():
                    return self._leave()
            if self._save_is_due() or last or state.finished:
                self._save()
            if self.clock is not None and state.step % self.clock.every == 0 and state.step < self.last_step:
                points = events.decide(state.step)
                if points is not None:
                    self.clock.points = points
                    self.schedule.follow(points)

    def _leave(self) -> None:
        if self._saved_step != self.state.step and self.state.step > 0:
            self._save()

    # One optimizer step.

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def train_step(self) -> None:
        """One optimizer step on the next global batch."""
        state = self.state
        began = time.perf_counter()
        micro_batches = self._next_batch()
        step = state.step + 1
        self.optimizer.set_lr_scale(self.schedule.scale(step))
        totals, tokens = self._global_counts(micro_batches)
        loss = torch.zeros((), device=self.device)
        terms: dict[str, Tensor] = {}
        self.models.train()
        about = TrainingStep(
            number=step,
            max_steps=self.max_steps,
            warmup_steps=self.recipe.schedule.warmup_steps,
            seed=random_key(self.recipe.seed, step),
        )
        for listener in self._step_listeners:
            listener.begin_step(about)
        for index, host_batch in enumerate(micro_batches):
            batch = host_batch.to(self.device, non_blocking=True)
            self._seed(step, index, batch)
            with self.parallel.accumulating(self._run_models, last=index == len(micro_batches) - 1):
                micro_loss, micro_terms = self._run_models(partial(self._loss, batch, totals))
                self.scaler.scaled(micro_loss).backward()
            loss += micro_loss.detach()
            for name, part in micro_terms.items():
                terms[name] = terms[name] + part if name in terms else part
        loss, *term_sums = self.parallel.sum(torch.stack([loss, *terms.values()])).unbind()
        norm = self._update(loss)
        self.optimizer.zero_grad()
        state.step = step
        self._score = None
        state.tokens += tokens
        self._work_tokens += tokens
        state.cursor = self.batches.cursor()
        self._sums.append((loss, norm, *term_sums))
        self._term_names = tuple(terms)
        self._work_seconds += time.perf_counter() - began

    def _next_batch(self) -> Sequence[Batch]:
        """This process's part of the next global batch.

        Raises InputError in all processes if the data of one is damaged; in the others it is an OtherProcessError.
        """
        problem = None
        try:
            micro_batches = self.batches.next()
        except InputError as error:
            problem = error
        if self.parallel.agree(problem is not None):
            raise problem or OtherProcessError("another process of this training cannot read its data")
        return micro_batches

    def _global_counts(self, micro_batches: Sequence[Batch]) -> tuple[dict[str, int], int]:
        """The predictions of each term in the global batch (at least 1), and its tokens."""
        totals: dict[str, int] = {}
        tokens = 0
        for batch in micro_batches:
            for name, count in self.objective.label_count(batch).items():
                totals[name] = totals.get(name, 0) + count * batch.is_counted
            tokens += batch.num_tokens * batch.is_counted
        if self.parallel.world_size > 1:
            tokens, *counts = self.parallel.sum(torch.tensor([tokens, *totals.values()])).tolist()
            totals = dict(zip(totals, counts, strict=True))
        return {name: max(1, count) for name, count in totals.items()}, tokens

    def _seed(self, step: int, index: int, batch: Batch) -> None:
        """Seed the draws of the forward pass of micro-batch `index`."""
        seed, rank = self.recipe.seed, self.parallel.rank
        # torch.manual_seed writes the stack of its caller three times, for devices that no program uses yet.
        on_cpu = self.device.type == "cpu"
        (torch.default_generator.manual_seed if on_cpu else torch.manual_seed)(random_key(seed, step, index, rank))
        if batch.share is not None:
            shared = SharedDraws(
                random_key(seed, step, index, 0),
                rows=batch.share.rows,
                num_rows=batch.share.num_rows,
                device=self.device,
            )
            self.objective.shared = shared
            for module in self._shared_draws:
                module.shared = shared

    def _loss(self, batch: Batch, totals: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """This process's part of the loss, of each term where there are several, and of the means that are logged."""
        result = self.objective.loss(self.forward, batch)
        loss = total_loss(result.terms, totals)
        terms = result.terms if len(result.terms) > 1 else {}
        parts = {f"{name}_loss": term.sum.detach().float() / totals[name] for name, term in terms.items()}
        logged = {name: metric for name, metric in result.metrics.items() if metric.is_logged}
        parts |= {name: metric.sum.float() / next(iter(totals.values())) for name, metric in logged.items()}
        if batch.is_counted:
            return loss, parts
        return loss * 0.0, dict.fromkeys(parts, torch.zeros_like(loss.detach()))

    def _update(self, loss: Tensor) -> Tensor:
        """Clip gradients and step; skip and count steps without a finite gradient. Returns the gradient norm."""
        self.scaler.unscale_(self.optimizer.gradients())
        norm = self.optimizer.clip(self.recipe.optimizer.clip_grad_norm)
        # Reading the norm would stall a GPU each step, so there a bad loss is found at the next log line. In fp16 the
        # scale must follow every overflow, so it is read.
        unread = self.device.type != "cpu" and not self.scaler.enabled
        # Loss and norm are sums over all processes, so they all decide alike.
        finite = unread or bool(torch.isfinite(norm) & torch.isfinite(loss))
        self.scaler.update(finite=finite)
        if finite:
            self._skipped_in_a_row = 0
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.state.step + 1)
            return norm
        self.state.skipped_steps += 1
        self._skipped_in_a_row += 1
        self.events.skipped(self.state.step + 1)
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW and self.scaler.scale <= 1.0:
            raise self._not_finite(f"at step {self.state.step + 1}, {self._skipped_in_a_row} steps in a row")
        return norm

    # Between steps.

    def _drain_sums(self) -> RunningSums:
        """Move the sums on the device into the saved sums; no other code reads from the device."""
        if self._sums:
            values = torch.stack([torch.stack(row) for row in self._sums]).tolist()
            for loss, norm, *terms in values:
                if math.isfinite(loss) and math.isfinite(norm):
                    named = dict(zip(self._term_names, terms, strict=True))
                    self.state.sums.add(loss=loss, grad_norm=norm, terms=named)
                elif self.device.type != "cpu" and not self.scaler.enabled:
                    raise self._not_finite(f"between steps {self.state.step - len(values) + 1} and {self.state.step}")
            self._sums.clear()
        return self.state.sums

    def _log(self) -> None:
        began = time.perf_counter()
        sums, state = self._drain_sums(), self.state  # on a GPU this waits for the work to be done
        seconds = self._work_seconds + time.perf_counter() - began
        state.seconds += seconds
        rate = self._work_tokens / seconds if seconds else 0.0
        record: dict[str, Any] = {
            "split": "train",
            "step": state.step,
            "loss": sums.loss / sums.steps if sums.steps else None,
            "lr": self.optimizer.learning_rate(),
            "grad_norm": sums.grad_norm / sums.steps if sums.steps else None,
            "tokens": state.tokens,
            "tokens_per_second": rate,
            "seconds": state.seconds,
        }
        for name, total in sums.terms.items():
            record[name] = total / sums.steps
        self.events.log(record)
        state.sums = RunningSums()
        self._work_seconds, self._work_tokens = 0.0, 0

    def _validate(self) -> bool:
        """Validate, update the best score, write a sample. False when interrupted: then the state is unchanged."""
        state, training = self.state, self.recipe.training
        return_free_memory()
        self._drain_sums()  # raises if the weights are no longer finite
        before, decodes = self.pace.seconds.get("validation", 0.0), set(self.objective.decoded_metrics)
        with self.pace.of("validation"), nullcontext() if self.ema is None else self.ema.swapped():
            try:
                found = self.events.validate(state.step)
            except NotFiniteError as error:
                raise self._not_finite(f"any more at step {state.step}: {error.message}") from error
            if found is None:
                return False
            values, sample = found
            self._score = score(values, training)
            best_loss = math.inf if state.best_loss is None else state.best_loss
            is_best = state.best_score is None or self._score < (state.best_score, best_loss)
            if is_best:
                (state.best_score, state.best_loss), state.best_step = self._score, state.step
            self.events.log({"split": "valid", "step": state.step, **values, "is_best": is_best})
            self.schedule.observe(values["loss"])
            state.bad_validations = 0 if is_best else state.bad_validations + 1
            early = training.early_stopping
            if early is not None and state.bad_validations >= early.patience:
                state.finished = True
            state.validated = True
            if sample:
                self.events.sample(state.step, sample)
        if training.valid_beam_size and decodes and decodes.isdisjoint(values):  # the next one may decode
            self.pace.seconds["validation"] = max(before, self.pace.seconds["validation"])
        clock = self.clock
        if clock is not None and self.parallel.agree(not clock.leaves_time(state.step, eval_every=self.eval_every)):
            self.eval_every = NEVER  # only the last one
        return True

    def _save_is_due(self) -> bool:
        minutes = self.recipe.training.save_every_minutes
        due = self.state.step % self.save_every == 0
        due = due or self.state.best_step == self.state.step
        if due or minutes is None:
            return due
        return self.parallel.agree(time.monotonic() - self._last_save >= 60 * minutes)

    def _save(self) -> None:
        self._drain_sums()
        self.state.schedule = self.schedule.state()
        self.state.scaler = self.scaler.state()
        with self.pace.of("checkpoint"):
            self.events.save(self._score)
        self._saved_step = self.state.step
        self._last_save = time.monotonic()

    def _not_finite(self, when: str) -> NotFiniteError:
        saved = "" if self._saved_step is None else f"; the checkpoint of step {self._saved_step} is intact"
        return NotFiniteError(
            f"the loss is not finite {when}",
            hint=f"lower the learning rate (--lr), or warm up longer (--set schedule.warmup_steps=N){saved}",
        )


DECODED = {name for objective in OBJECTIVES.values() for name in objective.decoded_metrics}
"""Metrics that a validation leaves out as long as nothing is decoded. The higher the better, and at least 0."""


Score = tuple[float, float]
"""(value of training.best_metric, loss) of a validation, signed so that lower is better: the loss decides on ties."""


def score(values: dict[str, Any], training: Training) -> Score:
    """The score by which the best checkpoint is chosen.

    Where nothing was decoded yet, it is the loss, which is worse than any decoded output.
    """
    if training.best_metric in DECODED - values.keys() and training.valid_beam_size:
        return float(values["loss"]), float(values["loss"])
    if training.best_metric not in values:
        raise InputError(
            f"training.best_metric is '{training.best_metric}', which validation of this model does not measure",
            hint=did_you_mean(
                training.best_metric,
                (name for name, value in values.items() if name in HIGHER_IS_BETTER or name == "loss"),
            ),
        )
    return lower_is_better(training.best_metric, float(values[training.best_metric])), float(values["loss"])


def constant_metric(validations: Sequence[dict[str, Any]], metric: str) -> str | None:
    """A note on a metric that is the same in all these validations, with one that differs; None: it differs."""
    first = validations[0].get(metric)
    if metric == "loss" or first is None or any(values.get(metric) != first for values in validations):
        return None
    varying = [name for name in validations[0] if len({values.get(name) for values in validations}) > 1]
    other = next((name for name in varying if name in HIGHER_IS_BETTER), "loss")
    return (
        f"training.best_metric: {metric} is {first:.4f} in {len(validations)} validations in a row, so the lowest loss "
        f"decides which checkpoint is the best (--best-metric {other} tells them apart)"
    )


def random_key(*parts: int) -> int:
    """A 63-bit seed from numbers by a hash: equal numbers give equal seeds, other numbers unrelated seeds."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
