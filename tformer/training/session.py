"""One training from its command to its summary. `tformer.training` tells how it begins."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tformer.checkpoint.logs import cut_samples, describe_environment
from tformer.checkpoint.run import RunDirectory
from tformer.data.shards.array_files import BackgroundCheck
from tformer.decoding.inference import state_of_kernels
from tformer.model import Transformer
from tformer.objectives.base import Objective
from tformer.recipe import recipe_to_yaml
from tformer.support.device import bound_products
from tformer.support.errors import InputError, Interrupted
from tformer.support.files import RUNS, in_blocks, require_room, write_file, write_text
from tformer.support.formatting import json_text
from tformer.support.processes import ScratchFolder
from tformer.training import assemble
from tformer.training.clock import MOST_VALIDATING, NEVER
from tformer.training.display import Console
from tformer.training.first_look import baselines_of, first_look
from tformer.training.loggers import Status, logger_names
from tformer.training.loop import Trainer
from tformer.training.options import TrainOptions
from tformer.training.parallel import parallel_of
from tformer.training.plan import plan
from tformer.training.prepare import check_target, describe, prepare
from tformer.training.reporter import RunReporter
from tformer.training.request import find_training, locked_run
from tformer.training.saving import Checkpoints
from tformer.training.state import TrainerState
from tformer.training.teacher import make_distillation
from tformer.training.together import prepare_together, require_same_command
from tformer.training.training import Training
from tformer.training.validations import plan_validations
from tformer.training.weights import load_sources
from tformer.workers.launch import number_of_workers
from tformer.workers.work import QUIET, Work
from tformer.workers.worker import Worker, is_lost

BAD_ROWS_FILE = "bad-rows.jsonl"
"""The rows of the data that `--bad-rows drop` left out, in the run directory."""

PREPARING, PREPARING_SECONDS = 0.9, 10.0
"""Part of the time of a training by time after which its data must be ready, and seconds that they have at least."""


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
    Raises InputError before anything of a new run is written, or after saving for data that can no longer be read;
    Interrupted after the checkpoint is saved.
    """
    bound_products()
    devices = number_of_workers(options.devices, options.device or "auto", planned=True) if options.dry_run else 1
    worker = worker or Worker()
    if worker.world_size > 1:
        require_same_command(options, worker)
    scratch = ScratchFolder("training") if options.dry_run else nullcontext()
    with locked_run(options) if worker.leads else nullcontext() as run, scratch as cache_dir:
        training = find_training(options, run, worker)
        for note in training.notes:
            console.print(note, markup=False)
        if worker.leads and not options.dry_run:
            check_target(training)
        work = replace(work, note=partial(console.print, markup=False), cache_dir=cache_dir, workers=options.workers)
        with _preparing(work, training.recipe.training.minutes, began) as own:
            alone = worker.world_size == 1
            training = prepare(training, own) if alone else prepare_together(training, own, worker)
        if training.recipe.training.minutes is not None and training.recipe.schedule.points is None:
            training = plan(training, began=began, work=work, worker=worker)
        training = plan_validations(training, work.note)
        work.raise_if_stopped("before training began; no run was started")
        if options.dry_run:
            if devices > 1 and training.recipe.training.parallel.kind != "ddp":
                work.note("memory: estimated with ddp; with fsdp a device holds a part of the weights")
            return describe(training, devices=devices)
        training_begins()
        with worker.joined(timeout_minutes=training.recipe.training.parallel.timeout_minutes):
            with work.progress("making the model"):
                trainer = make_trainer(training, worker, work.note)
                checkpoints = Checkpoints(training, trainer, worker)
                if training.resumed is not None:
                    checkpoints.restore(training.resumed)
                directory = open_run(training, trainer, worker, bytes_needed=2 * checkpoints.bytes_needed())
            with directory:
                reporter = RunReporter(
                    training,
                    trainer,
                    directory,
                    checkpoints,
                    console=console,
                    work=work,
                    began=began,
                    worker=worker,
                    log_to=logger_names(options.log_to),
                )
                return train(reporter, stop_at_step=options.stop_at_step)


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


def first_state(training: Training) -> TrainerState:
    """The state at the beginning, or of the checkpoint that is resumed.

    Raises InputError for another global batch than the resumed run has: its cursor counts global batches.
    """
    section, resumed = training.recipe.training, training.resumed
    batch = [size and size * section.grad_accum for size in (section.batch_size, section.batch_tokens)]
    if resumed is None:
        return TrainerState(data_fingerprint=training.data.fingerprint, global_batch=batch)
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
    if (stored.max_steps, stored.early_stopping) != (section.max_steps, section.early_stopping):
        state.finished = False  # the setting that ended the run has changed
    if stored.best_metric != section.best_metric:  # its values cannot be compared with those so far
        state.finished, state.best_score, state.bad_validations = False, None, 0
    if training.new_time:
        state.spent = 0.0
    return state


def make_trainer(training: Training, worker: Worker, note: Callable[[str], None]) -> Trainer:
    """The trainer with the weights that the training starts with, before the first step; nothing is written.

    The state decides where the data goes on. The optimizer's state of a resumed run is restored by `Checkpoints`.
    """
    recipe, data, device, dtype = training.recipe, training.data, training.device, training.precision.dtype
    parallel = parallel_of(recipe.training.parallel, compute_dtype=dtype)
    state = first_state(training)
    rows = parallel.own_rows()  # with several processes, perhaps this one has only some of the weights
    models = assemble.make_models(recipe, device, dtype=dtype, rows=rows)
    assemble.require_separate_rows(models, parallel.world_size)
    shards = parallel.shard(models, rows, device)
    load_sources(training, models, shards, note)
    objective = assemble.make_objective(recipe, data.context, models)
    batches = assemble.PlannedBatches(
        recipe,
        data,
        objective,
        cursor=state.cursor or None,
        device=device,
        rank=parallel.rank,
        world_size=parallel.world_size,
        check=BackgroundCheck(data.files if worker.local_rank == 0 else ()),
    )
    compile_it = recipe.training.compile == "on"
    if compile_it:
        note("compiling the model: the first step takes a while")
    # Padded batches have many shapes: the compiler gives up after a few graphs of one shape each.
    many_shapes = data.samples.lengths is not None
    return Trainer(
        recipe,
        models,
        objective,
        batches,
        device=device,
        state=state,
        taught=taught_objective(training, objective, models.main),
        forward=assemble.compiled(models.main, wanted=compile_it, dynamic=many_shapes),
        parallel=parallel,
        shards=shards,
    )


def taught_objective(training: Training, objective: Objective, student: Transformer) -> Objective | None:
    """The objective with the soft targets of a teacher; None without such a teacher."""
    recipe, teacher = training.recipe, training.teacher
    if teacher is None or recipe.teacher is None or recipe.teacher.kind != "soft":
        return None
    return make_distillation(
        recipe,
        objective,
        student,
        teacher,
        device=training.device,
        dtype=training.precision.dtype,
        wrap=lambda model: assemble.compiled(model, wanted=recipe.training.compile == "on"),
    )


def open_run(training: Training, trainer: Trainer, worker: Worker, *, bytes_needed: int) -> RunDirectory:
    """The run directory; the leader creates or reopens it, after all other input was checked.

    bytes_needed: on disk; a new checkpoint is written before an old one is deleted.
    """
    run = _write_run(training, trainer, worker, bytes_needed) if worker.leads else None
    path = Path(worker.share(lambda: None if run is None else str(run.path)) or "")
    if not path.is_dir():
        raise InputError(
            f"{path}, which the process of rank 0 has made, is not visible to that of rank {worker.rank}",
            hint="all processes write to it: choose a folder on a file system that all machines share (--out)",
        )
    return run or RunDirectory(path)


def _write_run(training: Training, trainer: Trainer, worker: Worker, bytes_needed: int) -> RunDirectory:
    """Create or reopen the run directory, and write the files that are known before the first step."""
    recipe, data, state = training.recipe, training.data, trainer.state
    require_room(training.out if training.out is not None else RUNS, bytes_needed)
    run = training.run or RunDirectory.create(
        training.out, arch=recipe.arch, preset=recipe.preset, resume=training.may_exist, runs_dir=RUNS
    )
    try:
        if training.may_exist:
            latest, resumed = run.latest(), training.resumed
            if (latest and latest.name) != (resumed and resumed.path.name):
                raise InputError(f"{run.path} has changed while this command started", hint="run it again")
        run.check_writable(bytes_needed)
        if training.may_exist:
            run.rewind(state.step, keep_last=recipe.training.keep_last)
        if not state.validated:  # this validation will be repeated; it may or may not have been written
            step = state.step
            kept = [each for each in run.metrics() if (each.get("step"), each.get("split")) != (step, "valid")]
            write_text(run.metrics_path, "".join(json_text(record) for record in kept))
            cut_samples(run.path / "samples.txt", step - 1)
        if data.tokenizer is not None:
            target = data.target_tokenizer
            run.write_tokenizer(data.tokenizer.to_json(), None if target is None else target.to_json())
        run.write_recipe(recipe_to_yaml(recipe))
        seconds = MOST_VALIDATING * 60 * (recipe.training.minutes or math.inf)
        environment = describe_environment(
            device=device_name(training.device, worker.world_size),
            data_fingerprint=state.data_fingerprint,
            kernels=state_of_kernels(trainer.models.main, training.device, seconds=seconds),
        )
        run.write_environment(environment)
        if data.bad_rows is not None:
            write_file(run.path / BAD_ROWS_FILE, in_blocks(data.bad_rows()))
    except BaseException:
        run.close()
        raise
    return run


def train(reporter: RunReporter, *, stop_at_step: int | None = None) -> dict[str, Any]:
    """Run the trainer to its end, or to `stop_at_step`; the summary. Raises Interrupted after a checkpoint."""
    trainer, training, worker = reporter.trainer, reporter.training, reporter.worker
    state, saver = trainer.state, reporter.checkpoints.saver
    first_step = state.step
    if training.weights is not None and first_step == 0:
        reporter.save(None)  # a run that is killed early resumes from these weights
    if trainer.clock is not None and worker.leads:  # their time is not known at the end
        baselines_of(training.data, reporter.run, trainer.measured)
    worker.begins(reporter.run.path)
    status: Status = "failed"
    try:
        assert isinstance(trainer.batches, assemble.PlannedBatches)
        with reporter.display, trainer.batches:
            trainer.run(reporter, deadline=reporter.late, stop_at_step=stop_at_step)
            saver.finish()
            worker.share(lambda: None)  # the others leave when the leader has saved
            reporter.measure_best()
        status = "finished" if state.finished or state.step >= trainer.limit else "stopped"
    except InputError as error:  # data that can no longer be read
        if state.step:
            saved = f"saved at step {state.step}, {reporter.how_to_continue}"
            error.hint = "; ".join(filter(None, (saved, error.hint)))
        raise
    except Exception as error:
        if is_lost(error):
            saver.gave_up.set()  # no longer wait for the files of a process that has ended
        raise
    finally:
        saver.finish()
        reporter.loggers.close(status)
    return summary(reporter, first_step)


def summary(reporter: RunReporter, first_step: int) -> dict[str, Any]:
    """The JSON document of a training that has ended, in the leader, which also says why it ended.

    first_step: at which this command began. Raises Interrupted if the training was.
    """
    training, trainer, run, console = reporter.training, reporter.trainer, reporter.run, reporter.console
    state, section = trainer.state, training.recipe.training
    if trainer.parallel.agree(reporter.is_stopped()):
        saved = f"saved at step {state.step}" if state.step else "before the first step; nothing was lost"
        raise Interrupted(f"interrupted: {saved}", signal_number=signal.SIGINT, hint=reporter.how_to_continue)
    if state.step == first_step and first_step >= section.max_steps and reporter.final_values is None:
        console.print(f"the run is at step {state.step} of {section.max_steps}: nothing to do", markup=False)
    elif state.finished:
        console.print(f"stopped early: no better validation since step {state.best_step}", markup=False)
    elif state.step < section.max_steps or not state.validated:
        why = "out of time" if state.step < trainer.last_step or not state.validated else "stopped as asked"
        saved = "saved" if state.step else "before the first step; no checkpoint was saved"
        of = f" of {section.max_steps}" if section.max_steps < NEVER else ""
        console.print(f"{why} at step {state.step}{of}: {saved}", markup=False)
    if not reporter.worker.leads:
        return {}
    latest, best, device = run.latest(), run.best(), training.device
    say = partial(console.print, markup=False)
    baselines = first_look(training.recipe, training.data, run, state, trainer.measured, say=say)
    return {
        "run": str(run.path),
        "step": state.step,
        "tokens": state.tokens,
        "parameters": training.num_parameters,
        "flops_per_token": reporter.flops_per_token,
        "peak_device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "checkpoint": None if latest is None else str(latest),
        "best_checkpoint": None if best is None else str(best),
        "valid": reporter.last_values,
        "final": reporter.final_values,
        "baseline": baselines,
        "sample": reporter.last_sample,
        "saving_seconds": round(reporter.checkpoints.seconds, 3),
        "seconds": round(time.monotonic() - reporter.began, 2),
    }


def _global_batch_text(sizes: list[int | None]) -> str:
    return ", ".join(f"{size} {unit}" for size, unit in zip(sizes, ("sequences", "tokens"), strict=True) if size)


def device_name(device: torch.device, processes: int = 1) -> str:
    """The name of the device in environment.json, of each of several processes."""
    together = f", {processes} processes" if processes > 1 else ""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device}){together}"
    return f"CPU, {torch.get_num_threads()} threads{together}"
