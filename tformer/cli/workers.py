"""A command in one process or in several, which report their failures as one error."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.cli.process import StopFlag
from tformer.cli.report import console, spinner
from tformer.support.errors import InputError, Interrupted, TformerError
from tformer.support.files import STANDARD_INPUT, refuse_to_replace
from tformer.support.options import flag_words
from tformer.workers.work import Job

if TYPE_CHECKING:
    from tformer.workers.worker import Failure, Worker


def answer_in_workers(command: str, options: Any, answer: Callable[[Worker, StopFlag], None]) -> None:
    """Answer the inputs of a command, whose checked options these are, in one process or in several.

    Raises InputError for an output in the place of an input, and for `--devices` without a file of lines that the
    processes can divide.
    """
    refuse_to_replace(options.output, options.files)
    if options.devices is not None and options.input_path in (None, STANDARD_INPUT):
        raise InputError(
            "--devices needs --input FILE, whose lines the processes divide",
            hint="standard input can be read by one process only",
        )
    with StopFlag() as flag:
        job = Job(lambda worker: answer(worker, flag), [command, *flag_words(options)])
        run_in_workers(lambda _: job, devices=options.devices, device=options.device, stop=flag)


def refuse_standard_input(devices: str | None, *paths: str | None) -> None:
    """Raise InputError for `--devices` with standard input among the paths of the data."""
    if devices is not None and STANDARD_INPUT in paths:
        raise InputError(
            f"--devices {devices}: standard input can be read by one process only",
            hint="save the data to a file, which all can read",
        )


def run_in_workers(
    job: Callable[[Path | None], Job], *, devices: str | None, device: str, max_restarts: int = 0, stop: StopFlag
) -> None:
    """Do the work of a command in this process, or in as many as `--devices` asks for.

    A process that torchrun or srun started is one of several already.

    job: (run directory to go on with after a restart; None: begin) -> what each process does.
    """
    from tformer.workers.launch import launch, number_of_workers
    from tformer.workers.worker import Worker, worker_from_environment

    worker = worker_from_environment()
    if worker is not None:
        _run_as_one_of_several(worker, job(None), devices, device, stop)
        return
    count = number_of_workers(devices, device)
    if count == 1:
        job(None).run(Worker())
        return

    def reporting(begun: Path | None) -> Job:
        chosen = job(begun)

        def run(worker: Worker) -> int:
            failure = _run(worker, chosen, device, stop)
            if failure is not None:
                worker.report(failure)
            return 0 if failure is None else failure.code

        return Job(run, chosen.words)

    import torch

    spinner.end()  # from here on the process of rank 0 shows the progress
    launch(
        count,
        reporting,
        # Workers can be copies of this process on Linux, without GPUs, whose driver does not survive a fork.
        forks=sys.platform == "linux" and (device == "cpu" or torch.cuda.device_count() == 0),
        signals=stop.handlers(),
        max_restarts=max_restarts,
        note=lambda text: console.print(text, markup=False),
        how_to_continue=_how_to_continue,
    )


def _how_to_continue(run: Path) -> str:
    from tformer.checkpoint.run import RunDirectory

    latest = RunDirectory(run).latest()
    place = "its beginning: there is no checkpoint" if latest is None else str(latest)
    return f"continue with: tformer train --resume --out {run}, from {place}"


def _run_as_one_of_several(worker: Worker, job: Job, devices: str | None, device: str, stop: StopFlag) -> None:
    """Do the job of a process that was started as a command, and leave with its exit code."""
    if devices not in (None, "auto", str(worker.world_size)):
        raise InputError(
            f"--devices {devices}: torchrun or srun has started {worker.world_size} processes",
            hint="leave --devices out",
        )
    failure = _run(worker, job, device, stop)
    if failure is None:
        return
    if worker.report(failure):
        raise failure.error()
    sys.exit(failure.code)


def _run(worker: Worker, job: Job, device: str, stop: StopFlag) -> Failure | None:
    """Do a job and return its failure, if any."""
    from tformer.workers.worker import ECHO_SECONDS

    console.rich.quiet, stop.echo_seconds = not worker.leads, ECHO_SECONDS
    try:
        worker.take_own_gpu(device)
        job.run(worker)
    except (Exception, KeyboardInterrupt) as error:
        console.rich.quiet = False
        stop.echo_seconds = math.inf  # it ends: the launcher may send a signal before it has reported why
        return _failure_of(error, worker, stop)
    return None


def _failure_of(error: BaseException, worker: Worker, stop: StopFlag) -> Failure:
    from tformer.cli.app import as_tformer_error, internal_error
    from tformer.workers.worker import LOST, Failure, is_lost

    lost, interrupted = is_lost(error), isinstance(error, Interrupted | KeyboardInterrupt)
    known: TformerError
    if lost:
        reason = "" if isinstance(error, TformerError) else f": {str(error).partition(chr(10))[0]}"
        known = TformerError(LOST + reason)
    elif isinstance(error, KeyboardInterrupt):
        known = stop.interrupted("interrupted")
    else:
        assert isinstance(error, Exception)
        known = as_tformer_error(error) or internal_error(error)
    return Failure(
        worker.rank,
        known.message,
        known.hint,
        128 + stop.signal_number if interrupted and stop.signal_number is not None else known.exit_code,
        signal=stop.signal_number,
        lost=lost,
        named=not interrupted and (worker.has_joined or not worker.leads),
        trace="".join(traceback.format_exception(error)),
    )
