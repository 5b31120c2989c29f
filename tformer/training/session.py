"""One training: preparation, run directory, loop and summary."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tformer.checkpoint import catalog
from tformer.checkpoint.logs import cut_samples, describe_environment
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.cost.flops import mean_lengths, training_flops_per_token
from tformer.data.shards.array_files import BackgroundCheck
from tformer.decoding.inference import state_of_kernels
from tformer.interop.adapters import open_base
from tformer.loading import load_body, load_generator, load_weights, why_new
from tformer.model import Transformer
from tformer.objectives.base import Objective
from tformer.recipe import Recipe, recipe_to_data, recipe_to_yaml
from tformer.support.device import bound_products
from tformer.support.errors import InputError, Interrupted
from tformer.support.files import RUNS, in_blocks, require_room, write_file, write_text
from tformer.support.formatting import in_words, json_text
from tformer.support.processes import ScratchFolder
from tformer.training import assemble
from tformer.training.adapters import BasePlaces, describe_adapters
from tformer.training.clock import MOST_VALIDATING, NEVER, Clock, Pace, Points, expected_seconds
from tformer.training.display import Console, TrainingDisplay, formats_of
from tformer.training.embeddings import write_embeddings
from tformer.training.first_look import baselines_of, first_look
from tformer.training.loggers import LoggedRun, Loggers, Status, logger_names
from tformer.training.loop import Components, Hooks, Score, Trainer, constant_metric
from tformer.training.options import TrainOptions
from tformer.training.parallel import parallel_of
from tformer.training.plan import plan
from tformer.training.prepare import Prepared, check_target, describe, measure_peak, prepare
from tformer.training.request import find_start, locked_run
from tformer.training.saving import Checkpoints
from tformer.training.state import LossScaler, TrainerState
from tformer.training.teacher import make_distillation
from tformer.training.together import prepare_together, require_same_command
from tformer.training.validations import plan_validations, share_text
from tformer.workers.launch import number_of_workers
from tformer.workers.work import QUIET, Work
from tformer.workers.worker import Worker, is_lost

BAD_ROWS_FILE = "bad-rows.jsonl"
"""The rows of the data that `--bad-rows drop` left out, in the run directory."""

PREPARING, PREPARING_SECONDS = 0.9, 10.0
"""Part of the time of a training by time after which its data must be ready, and seconds that they have at least."""

SHORT_TRAINING = 20.0
"""Seconds of a training that needs no forecast."""

VALIDATIONS_OF_A_CONSTANT = 3
"""Validations in a row with the same value of `training.best_metric`, after which a note names it."""

RATE_DIGITS = 6
"""Digits of learned LayerDrop rates in log lines; enough that they still average to the configured rate."""


def run_training(
    options: TrainOptions,
    *,
    console: Console,
    work: Work = QUIET,
    training_begins: Callable[[], None] = lambda: None,
    began: float,
    worker: Worker | None = None,
) -> dict[str, Any]:
    """Train, and return the summary that `--json` prints: run, checkpoint, step, and the last metrics.

    training_begins: called after preparation; from then on `work` is polled between steps only.
    began: `time.monotonic()` when the command started; `--max-minutes` counts from there.
    worker: this process as one of several; all of them call this function, and the leader returns the summary.
    Raises InputError before anything is written; Interrupted after the checkpoint is saved.
    """
    bound_products()
    devices = number_of_workers(options.devices, options.device or "auto", planned=True) if options.dry_run else 1
    worker = worker or Worker()
    require_same_command(options, worker)
    with locked_run(options) if worker.leads else nullcontext() as run, ScratchFolder("training") as scratch:
        start = find_start(options, run, worker)
        for note in start.notes:
            console.print(note, markup=False)
        if worker.leads and not options.dry_run:
            check_target(start)
        cache_dir = scratch if options.dry_run else None
        work = replace(work, note=partial(console.print, markup=False), cache_dir=cache_dir, workers=options.workers)
        with _preparing(work, start.recipe.training.minutes, began) as own:
            prepared = prepare(start, own) if worker.world_size == 1 else prepare_together(start, own, worker)
        if prepared.recipe.training.minutes is not None and prepared.recipe.schedule.points is None:
            prepared = plan(prepared, began=began, work=work, worker=worker)
        prepared = plan_validations(prepared, work.note)
        if work.should_stop():
            raise Interrupted("interrupted before training began; no run was started", signal_number=signal.SIGINT)
        if options.dry_run:
            return describe(prepared, devices=devices)
        training_begins()
        with worker.joined(timeout_minutes=prepared.recipe.training.parallel.timeout_minutes):
            with work.progress("making the model"):
                log_to = logger_names(options.log_to)
                session = Session(prepared, console=console, work=work, began=began, log_to=log_to, worker=worker)
            with session.run:
                return session.train(stop_at_step=options.stop_at_step)


@contextmanager
def _preparing(work: Work, minutes: float | None, began: float) -> Iterator[Work]:
    """The work of a preparation. Raises InputError where it takes nearly all of the time of a training by time."""
    over = max(time.monotonic() + PREPARING_SECONDS, began + PREPARING * 60 * (minutes or math.inf))
    try:
        yield replace(work, should_stop=lambda: work.should_stop() or time.monotonic() >= over)
    except Interrupted as error:
        if work.should_stop():
            raise
        raise InputError(
            f"--minutes {minutes:g}: tokenizing the data takes nearly all of the time",
            hint="give more minutes or less data; the same command again goes on where this one ended",
        ) from error


class Session:
    """The run directory and the parts of one training, and the callbacks of the loop.

    Made in steps, each of which needs those before it: the state, which decides where the data goes on; the models with
    random weights; what starts or resumes them; the objective, which forms the batches and is validated, and alone or
    with a teacher is trained; the optimizer and the other parts of the loop, into which a resumed checkpoint is
    restored; and last, after all input was checked, what is written: the run directory and the logs.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        console: Console,
        work: Work,
        began: float,
        log_to: Sequence[str] = (),
        worker: Worker,
    ) -> None:
        self.prepared, self.console, self.work, self.began, self.worker = prepared, console, work, began, worker
        self.should_stop = work.should_stop
        self.last_values: dict[str, Any] = {}  # of a validation
        self.validations: list[dict[str, Any]] = []  # the last few
        self.named_constant = False
        self.final_values: dict[str, Any] | None = None  # of the best checkpoint on all held-out data
        self.last_sample = ""
        self.pace = Pace(counts_each_step=prepared.device.type == "cpu")
        self.deadline = began + 60 * (prepared.max_minutes or math.inf)
        recipe, data, device, dtype = prepared.recipe, prepared.data, prepared.device, prepared.precision.dtype
        self.parallel = parallel_of(recipe.training.parallel, compute_dtype=dtype)
        self.state = self._first_state()
        rows = self.parallel.own_rows()  # with several processes, perhaps this one has only some of the weights
        self.models = assemble.make_models(recipe, device, dtype=dtype, rows=rows)
        assemble.require_separate_rows(self.models, self.parallel.world_size)
        self.shards = self.parallel.shard(self.models, rows, device)
        self.model: Transformer = self.models.main
        self._start_weights()
        self.objective = assemble.make_objective(recipe, data.context, self.models)
        self.batches = assemble.PlannedBatches(
            recipe,
            data,
            self.objective,
            cursor=self.state.cursor or None,
            device=device,
            rank=self.parallel.rank,
            world_size=self.parallel.world_size,
        )
        self.parts = self._assemble()
        self._spent_before = self.state.spent
        self.checkpoints = Checkpoints(prepared, self.parts, shards=self.shards, worker=worker)
        if prepared.start.resumed is not None:
            self.checkpoints.restore(prepared.start.resumed, self.state)
        self.run = self._open_run()
        logged = LoggedRun(
            path=self.run.path,
            first_step=self.state.step,
            recipe=recipe_to_data(recipe),
            recipe_yaml=recipe_to_yaml(recipe),
            environment=self.run.environment() or {},
        )
        self.loggers = Loggers(log_to, logged, self.work.note, enabled=worker.leads)

    def _first_state(self) -> TrainerState:
        """The state at the beginning, or of the checkpoint that is resumed.

        Raises InputError for another global batch than the resumed run has: its cursor counts global batches.
        """
        training, resumed = self.prepared.recipe.training, self.prepared.start.resumed
        batch = [size and size * training.grad_accum for size in (training.batch_size, training.batch_tokens)]
        if resumed is None:
            return TrainerState(data_fingerprint=self.prepared.data.fingerprint, global_batch=batch)
        name = resumed.path / "trainer.json"
        state = TrainerState.from_json(resumed.trainer, name=str(name))
        if state.step != resumed.step:
            raise InputError(f"{name} is damaged: step: expected {resumed.step} as in the manifest, found {state.step}")
        if state.global_batch != batch:
            own, given = _global_batch_text(state.global_batch), _global_batch_text(batch)
            raise InputError(
                f"a step of this run has {own}, this command sets {given}",
                hint="keep batch size times accumulation, or start a new run from these weights with --init-from",
            )
        stored = resumed.recipe.training
        if (stored.max_steps, stored.early_stopping) != (training.max_steps, training.early_stopping):
            state.finished = False  # the setting that ended the run has changed
        if stored.best_metric != training.best_metric:  # its values cannot be compared with those so far
            state.finished, state.best_score, state.bad_validations = False, None, 0
        if self.prepared.start.new_time:
            state.spent = 0.0
        return state

    def _assemble(self) -> Components:
        prepared, recipe, device = self.prepared, self.prepared.recipe, self.prepared.device
        compile_it = recipe.training.compile == "on"
        if compile_it:
            self.console.print("compiling the model: the first step takes a while", markup=False)
        # Padded batches have many shapes: the compiler gives up after a few graphs of one shape each.
        many_shapes = prepared.data.samples.lengths is not None
        return Components(
            model=self.models,
            forward=assemble.compiled(self.models.main, wanted=compile_it, dynamic=many_shapes),
            objective=self._trained_objective(),
            batches=self.batches,
            optimizer=assemble.make_optimizer(recipe, self.models, device, self.shards),
            schedule=assemble.make_schedule(recipe),
            scaler=LossScaler(enabled=prepared.precision.name == "fp16"),
            parallel=self.parallel,
            device=device,
            ema=assemble.make_ema(recipe, self.models, self.shards),
        )

    def _start_weights(self) -> None:
        """Weights to resume or fine-tune from, or token vectors; a new regression head's bias is the scores' mean."""
        start, data, model, own = self.prepared.start, self.prepared.data, self.model, self.prepared.recipe
        fresh_heads, base = True, None
        if own.lora is not None:
            base = BasePlaces(model, own, self.prepared.device)
        if start.resumed is not None:
            if base is not None:
                stored_base = open_base(own, beside=start.resumed.path)
                load_body(model, stored_base, keep_heads=base.kept_heads(start.resumed), place=base)
                base.finish()
            load_weights(model, start.resumed, shards=self.shards)
            if self.models.generator is not None:
                load_generator(self.models.generator, start.resumed, shards=self.shards)
            fresh_heads = False
        elif start.weights is not None:
            stored = start.weights.recipe
            reasons: dict[str, str | None] = {
                head.kind: why_new(head, own, stored, given=start.recipe.data.labels) for head in own.model.heads
            }
            keep = {kind for kind, reason in reasons.items() if reason is None}
            fresh = load_body(model, start.weights, keep_heads=keep, shards=self.shards, place=base)
            if base is not None:
                base.finish()
            new = list(dict.fromkeys(name.split(".")[1] for name in fresh))
            kept, fresh_heads = [head for head in model.heads if head not in new], bool(new)
            lines = [f"new head: {head} ({reasons.get(head) or 'another shape'})" for head in new]
            for line in [*lines, *([f"kept head: {', '.join(kept)}"] if kept else [])]:
                self.console.print(line, markup=False)
            if self.models.generator is not None and start.weights.has("generator"):
                load_generator(self.models.generator, start.weights, shards=self.shards)
        if own.lora is not None:
            self.console.print(describe_adapters(model, own.lora), markup=False)
        write_embeddings(self.prepared.vectors, model, shards=self.shards)
        if fresh_heads and data.label_mean is not None:
            head = data.recipe.objectives[0].objective.head.kind
            torch.nn.init.constant_(model.get_parameter(f"heads.{head}.project.bias"), data.label_mean)

    def _trained_objective(self) -> Objective:
        """The objective that is trained: with the soft targets of a teacher where there is one."""
        prepared, recipe = self.prepared, self.prepared.recipe
        teacher = prepared.start.teacher
        if teacher is None or recipe.teacher is None or recipe.teacher.kind != "soft":
            return self.objective
        return make_distillation(
            recipe,
            self.objective,
            self.model,
            teacher,
            device=prepared.device,
            dtype=prepared.precision.dtype,
            wrap=lambda model: assemble.compiled(model, wanted=recipe.training.compile == "on"),
        )

    def _open_run(self) -> RunDirectory:
        """The run directory; the leader creates or reopens it, after all other input was checked."""
        run = self._write_run() if self.worker.leads else None
        path = Path(self.worker.share(lambda: None if run is None else str(run.path)) or "")
        if not path.is_dir():
            raise InputError(
                f"{path}, which the process of rank 0 has made, is not visible to that of rank {self.worker.rank}",
                hint="all processes write to it: choose a folder on a file system that all machines share (--out)",
            )
        return run or RunDirectory(path)

    def _write_run(self) -> RunDirectory:
        """Create or reopen the run directory, and write the files that are known before the first step."""
        start, recipe = self.prepared.start, self.prepared.recipe
        needed = 2 * self.checkpoints.bytes_needed()  # a new checkpoint is written before an old one is deleted
        require_room(start.out if start.out is not None else RUNS, needed)
        run = start.run or RunDirectory.create(
            start.out, arch=recipe.arch, preset=recipe.preset, resume=start.may_exist, runs_dir=RUNS
        )
        try:
            latest, resumed = run.latest(), start.resumed
            if start.may_exist and (latest and latest.name) != (resumed and resumed.path.name):
                raise InputError(f"{run.path} has changed while this command started", hint="run it again")
            run.check_writable(needed)
            run.rewind(self.state.step, keep_last=self.prepared.recipe.training.keep_last)
            if not self.state.validated:  # this validation will be repeated; it may or may not have been written
                step = self.state.step
                kept = [each for each in run.metrics() if (each.get("step"), each.get("split")) != (step, "valid")]
                write_text(run.metrics_path, "".join(json_text(record) for record in kept))
                cut_samples(run.path / "samples.txt", step - 1)
            tokenizer, target = self.prepared.data.tokenizer, self.prepared.data.target_tokenizer
            if tokenizer is not None:
                run.write_tokenizer(tokenizer.to_json(), None if target is None else target.to_json())
            run.write_recipe(recipe_to_yaml(recipe))
            seconds = MOST_VALIDATING * 60 * (recipe.training.minutes or math.inf)
            environment = describe_environment(
                device=device_name(self.prepared.device, self.worker.world_size),
                data_fingerprint=self.state.data_fingerprint,
                kernels=state_of_kernels(self.model, self.prepared.device, seconds=seconds),
            )
            run.write_environment(environment)
            if self.prepared.data.bad_rows is not None:
                write_file(run.path / BAD_ROWS_FILE, in_blocks(self.prepared.data.bad_rows()))
        except BaseException:
            run.close()
            raise
        return run

    def train(self, *, stop_at_step: int | None = None) -> dict[str, Any]:
        """Run the loop to its end, or to `stop_at_step`; return the summary. Raises Interrupted after a checkpoint."""
        prepared, training = self.prepared, self.prepared.recipe.training
        timer = self._timer()
        late = math.inf if timer is None else timer.deadline
        display = TrainingDisplay(
            self.console,
            max_steps=training.max_steps if timer is None else timer.expected_steps,
            write=self._write,
            write_sample=self._write_sample,
            first_step=self.state.step,
            unit="tok" if prepared.data.tokenizer is not None else "img",
            processes=self.worker.world_size,
            progress=self.work.progress,
            seconds_left=lambda step: self._seconds_left(trainer, step),
            shown_metrics=formats_of(prepared.recipe)
            | {name: form for part in self.objective.members for name, form in part.shown_metrics.items()},
        )
        self.work = replace(
            self.work,
            progress=display.progress,
            should_stop=lambda: self.should_stop() or time.monotonic() >= late,
        )
        check = BackgroundCheck(prepared.data.files if self.worker.local_rank == 0 else ())
        trainer = Trainer(
            self.parts,
            Hooks(
                validate=partial(self._in_leader, self._measure),
                sample=self._sample,
                save=self._save,
                should_stop=self.should_stop,
                check_data=partial(self._check, check),
                log_metrics=self._log_metrics,
                forecast=lambda: self._forecast(trainer),
                decide=lambda step: self._decide(trainer, display, step),
            ),
            display,
            recipe=prepared.recipe,
            state=self.state,
            flops_per_token=self._flops_per_token(),
            peak_flops=measure_peak(prepared) * self.worker.world_size if self.worker.leads else 0.0,
            deadline=min(self.deadline, late),
            stop_at_step=stop_at_step,
            pace=self.pace,
            timer=timer,
        )
        first_step = self.state.step
        if prepared.start.weights is not None and first_step == 0:
            self._save(self.state, None)  # a run that is killed early resumes from these weights
        if timer is not None and self.worker.leads:  # their time is not known at the end
            baselines_of(prepared.data, self.run, self.objective)
        self.worker.begins(self.run.path)
        status: Status = "failed"
        try:
            with display, check:
                state = trainer.run()
                self.checkpoints.saver.finish()
                self.worker.share(lambda: None)  # the others leave when the leader has saved
                self._measure_best(state, display)
            status = "finished" if state.finished or state.step >= trainer.limit else "stopped"
        except InputError as error:  # data that can no longer be read
            if self.state.step:
                saved = f"saved at step {self.state.step}, {self._how_to_continue}"
                error.hint = "; ".join(filter(None, (saved, error.hint)))
            raise
        except Exception as error:
            if is_lost(error):
                self.checkpoints.saver.gave_up.set()  # no longer wait for the files of a process that has ended
            raise
        finally:
            self.checkpoints.saver.finish()
            self.batches.close()
            self.loggers.close(status)
        return self._conclude(state, first_step, trainer.last_step)

    # The clock.

    def _timer(self) -> Clock | None:
        """The clock of a training by time; None where the line of its rate is already in the recipe of a new run."""
        recipe, prepared = self.prepared.recipe, self.prepared
        minutes, points = recipe.training.minutes, recipe.schedule.points
        if minutes is None or (points is not None and prepared.start.resumed is None):
            return None
        return Clock(
            self.pace,
            end=self.began + 60 * minutes - self.state.spent,
            total=60 * minutes,
            fraction=recipe.schedule.decay_fraction,
            floor=recipe.schedule.min_ratio,
            planned_steps=prepared.planned_steps,
            most_steps=recipe.training.max_steps,
            points=points or (),
        )

    def _decide(self, trainer: Trainer, display: TrainingDisplay, step: int) -> Points | None:
        """The leader's new line of the rate, written into the recipe of the run and of its next checkpoints."""
        timer = trainer.timer
        assert timer is not None
        every = {"eval_every": trainer.eval_every, "save_every": trainer.save_every}
        shared = self.worker.share(lambda: timer.decide(step, **every))
        display.expect(timer.expected_steps)
        if shared is None:
            return None
        points = tuple((int(finished), float(factor)) for finished, factor in shared)
        recipe = self.prepared.recipe
        schedule = recipe.schedule.model_copy(update={"points": points})
        training = recipe.training.model_copy(update={"max_steps": points[-1][0]})
        self._change_recipe(recipe.model_copy(update={"schedule": schedule, "training": training}))
        display.expect(points[-1][0])
        return points

    def _change_recipe(self, recipe: Recipe) -> None:
        """Write the recipe into the run and its next checkpoints."""
        self.prepared = replace(self.prepared, recipe=recipe)
        self.checkpoints.recipe_yaml = recipe_to_yaml(recipe)
        if self.worker.leads:
            self.run.write_recipe(self.checkpoints.recipe_yaml)

    def _seconds_left(self, trainer: Trainer, step: int) -> float | None:
        if self.pace.step_seconds() is None:
            return None
        last = trainer.last_step if trainer.timer is None else trainer.timer.expected_steps
        return self.pace.to_come(step, last, eval_every=trainer.eval_every, save_every=trainer.save_every)

    def _forecast(self, trainer: Trainer) -> None:
        """Try out the validations and a sample, and say how long the training will take."""
        step, alone = self.state.step, self.worker.world_size == 1
        left = self._seconds_left(trainer, step)
        is_short = left is not None and left < SHORT_TRAINING and trainer.timer is None
        if left is None or not alone or (is_short and not self._ends_on_all_data):
            return
        self.models.eval()
        write = self.prepared.data.sample
        with self.work.progress("trying out a validation"):
            if self._ends_on_all_data:
                self.pace.seconds["end"] = expected_seconds(partial(self._validate, share=1.0))
            seconds = self._limit_validations(trainer, expected_seconds(self._validate))
            began = time.monotonic()
            if write is not None and self.prepared.recipe.training.sample_every != 0:
                write(self.model, self.work.should_stop)
        self.pace.seconds.setdefault("validation", seconds + time.monotonic() - began)
        left, spent = self._seconds_left(trainer, step), time.monotonic() - self.began
        if trainer.timer is None and left is not None and left >= SHORT_TRAINING:
            ends = time.strftime("%H:%M", time.localtime(time.time() + left))
            end = self.pace.seconds.get("end")
            of_end = "" if end is None else f", {in_words(end)} of them for all held-out data at the end"
            self.console.print(f"expected: {in_words(spent + left)} in all, until {ends}{of_end}", markup=False)

    def _limit_validations(self, trainer: Trainer, seconds: float) -> float:
        """Reduce the validations of a training by time to what they may take; the new seconds of one."""
        prepared, timer = self.prepared, trainer.timer
        if timer is None or prepared.start.resumed or prepared.data.recipe.training.valid_share is not None:
            return seconds
        part = timer.share_of_validations(self.state.step, seconds, eval_every=trainer.eval_every)
        if part < 1.0:
            share = float(f"{part * (prepared.recipe.training.valid_share or 1.0):.3g}")
            training = prepared.recipe.training.model_copy(update={"valid_share": share})
            self._change_recipe(prepared.recipe.model_copy(update={"training": training}))
            self.work.note(share_text(prepared, share))
        return part * seconds

    def _save(self, state: TrainerState, score: Score | None) -> None:
        if self.prepared.recipe.training.minutes is not None:
            state.spent = self._spent_before + time.monotonic() - self.began
        self.checkpoints.save(self.run, state, score)

    @property
    def _how_to_continue(self) -> str:
        return f"continue with: tformer train --resume --out {self.run.path}"

    def _conclude(self, state: TrainerState, first_step: int, last_step: int) -> dict[str, Any]:
        prepared, training = self.prepared, self.prepared.recipe.training
        if self.parallel.agree(self.should_stop()):
            saved = f"saved at step {state.step}" if state.step else "before the first step; nothing was lost"
            raise Interrupted(f"interrupted: {saved}", signal_number=signal.SIGINT, hint=self._how_to_continue)
        if state.step == first_step and first_step >= training.max_steps and self.final_values is None:
            self.console.print(f"the run is at step {state.step} of {training.max_steps}: nothing to do", markup=False)
        elif state.finished:
            self.console.print(f"stopped early: no better validation since step {state.best_step}", markup=False)
        elif state.step < training.max_steps or not state.validated:
            why = "out of time" if state.step < last_step or not state.validated else "stopped as asked"
            saved = "saved" if state.step else "before the first step; no checkpoint was saved"
            of = f" of {training.max_steps}" if training.max_steps < NEVER else ""
            self.console.print(f"{why} at step {state.step}{of}: {saved}", markup=False)
        if not self.worker.leads:
            return {}
        latest, best, device = self.run.latest(), self.run.best(), self.prepared.device
        say = partial(self.console.print, markup=False)
        baselines = first_look(prepared.recipe, prepared.data, self.run, state, self.objective, say=say)
        return {
            "run": str(self.run.path),
            "step": state.step,
            "tokens": state.tokens,
            "parameters": self.prepared.num_parameters,
            "flops_per_token": self._flops_per_token(),
            "peak_device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "checkpoint": None if latest is None else str(latest),
            "best_checkpoint": None if best is None else str(best),
            "valid": self.last_values,
            "final": self.final_values,
            "baseline": baselines,
            "sample": self.last_sample,
            "saving_seconds": round(self.checkpoints.seconds, 3),
            "seconds": round(time.monotonic() - self.began, 2),
        }

    def _flops_per_token(self) -> float:
        recipe, data = self.prepared.recipe, self.prepared.data
        source, target = mean_lengths(data.samples, data.tokens_per_sample)
        lengths = {"source_length": source, "target_length": target}
        return training_flops_per_token(recipe, self.model, self.models.generator, **lengths)

    # Callbacks of the loop. The leader validates and writes, so that the results equal those of one process.

    def _write(self, record: dict[str, Any]) -> None:
        if self.worker.leads:
            self.run.append_metrics(record)
            self.loggers.record(record)

    def _write_sample(self, step: int, text: str) -> None:
        if self.worker.leads:
            self.run.append_sample(step, text)
            self.loggers.sample(step, text)

    def _in_leader(self, function: Callable[[], Any]) -> Any:
        """The JSON value that `function`, which runs the models, returns in the leader, where alone it is called."""
        value = self.parallel.in_first(self.models, function)
        return self.worker.share(lambda: value)

    def _measure(self) -> dict[str, Any] | None:
        """The metrics of a validation; None when interrupted, or broken off at the deadline."""
        self.models.eval()
        polled: list[bool] = []

        def should_stop() -> bool:
            polled.append(self.work.should_stop())
            return polled[-1]

        values = self._validate(replace(self.work, should_stop=should_stop))
        if self.should_stop() or any(polled):
            return None
        self.last_values = values
        self.validations = [*self.validations[1 - VALIDATIONS_OF_A_CONSTANT :], values]
        if len(self.validations) == VALIDATIONS_OF_A_CONSTANT and not self.named_constant:
            note = constant_metric(self.validations, self.prepared.recipe.training.best_metric)
            if note is not None:
                self.console.print(note, markup=False)
                self.named_constant = True
        return values

    def _validate(self, work: Work, share: float | None = None) -> dict[str, Any]:
        """The metrics of the models on a share of the held-out data; None: the run's share."""
        share = share or self.prepared.recipe.training.valid_share or 1.0
        return self.prepared.data.validate(self.model, self.objective, work, share)

    @property
    def _ends_on_all_data(self) -> bool:
        """Whether validations read a share of the held-out data, and the best checkpoint is measured on all of it."""
        training = self.prepared.recipe.training
        return bool(training.final_validation) and (training.valid_share or 1.0) < 1.0 and training.minutes is None

    def _measure_best(self, state: TrainerState, display: TrainingDisplay) -> None:
        """At the end of the training: the record `final`. A run that is stopped here measures it when it is resumed."""
        if not self._ends_on_all_data or not (state.finished or state.step >= self.prepared.recipe.training.max_steps):
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
        load_weights(self.model, checkpoint, ema=checkpoint.has("ema"), shards=self.shards)
        if self.models.generator is not None:
            load_generator(self.models.generator, checkpoint, shards=self.shards)
        work = replace(self.work, should_stop=lambda: self.should_stop() or time.monotonic() >= self.deadline)

        def measure() -> dict[str, Any] | None:
            self.models.eval()
            values = self._validate(work, share=1.0)
            return None if work.should_stop() else values

        self.final_values = self._in_leader(measure)
        if self.final_values is not None:
            display.validated({"split": "final", "step": checkpoint.step, **self.final_values, "is_best": True})
        elif not self.should_stop():
            self.console.print(f"out of time for all held-out data; {self._how_to_continue}", markup=False)

    def _sample(self, step: int) -> str | None:
        """The sample of a step; "" if none is due; None: interrupted."""
        training, write = self.prepared.recipe.training, self.prepared.data.sample
        every = training.sample_every
        if write is None or every == 0 or (every is not None and step % every and step < training.max_steps):
            return ""

        def written() -> str | None:
            with self.work.progress("writing a sample"):
                text = write(self.model, self.work.should_stop)
                return text if text is not None or self.should_stop() else ""

        text: str | None = self._in_leader(written)
        self.last_sample = text or self.last_sample
        return text

    def _log_metrics(self) -> dict[str, Any]:
        """Learned LayerDrop rates for log lines; empty for a model without them."""
        stacks = {"encoder": self.model.encoder, "decoder": self.model.decoder}
        drops = {side: stack.layerdrop for side, stack in stacks.items() if stack is not None}
        learned = {side: drop for side, drop in drops.items() if drop is not None and drop.learned}
        if not learned:
            return {}
        rates = self.parallel.in_first(self.models, lambda: {side: drop.rates() for side, drop in learned.items()})
        rounded = {side: [round(rate, RATE_DIGITS) for rate in each] for side, each in (rates or {}).items()}
        return {"layerdrop_rates": rounded} if rounded else {}

    def _check(self, data: BackgroundCheck) -> None:
        """Raise the error of a thread that reads the data or writes a checkpoint."""
        data.raise_if_damaged()
        self.checkpoints.saver.raise_if_failed()


def _global_batch_text(sizes: list[int | None]) -> str:
    return ", ".join(f"{size} {unit}" for size, unit in zip(sizes, ("sequences", "tokens"), strict=True) if size)


def device_name(device: torch.device, processes: int = 1) -> str:
    """The name of the device in environment.json, of each of several processes."""
    together = f", {processes} processes" if processes > 1 else ""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device}){together}"
    return f"CPU, {torch.get_num_threads()} threads{together}"
