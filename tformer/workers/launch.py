"""The launcher of `--devices N`: starts workers on this machine by torchrun's library and waits for their end.

On a CPU the workers are forked from the launcher, which has imported PyTorch but computed nothing: they start in a
tenth of a second. On GPUs, and on other systems than Linux, they are started as commands. torchrun's library keeps the
store of the group, ends all workers after the first failure or a signal, and kills those that do not end.
"""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from tformer.support.errors import InputError, OutOfMemoryError
from tformer.support.formatting import whole_number
from tformer.support.processes import ScratchFolder, end_with_parent, most_processes, python_command
from tformer.workers.work import Job
from tformer.workers.worker import BEGUN, REPORTS, Failure, worker_from_environment

HOST = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
WATCH_SECONDS = 0.05

NO_FORK = (errno.EAGAIN, errno.ENOMEM)  # of fork(2), at a limit of processes or memory

STOP_SECONDS = 120
"""After a signal the workers get this time to finish a step and save (torch 2.11: 30 seconds)."""

RESTARTED = (1, 5)
"""Exit codes after which `--max-restarts` starts the workers again: a failure while running, memory that ran out. A
wrong recipe, wrong data, a full disk or a loss that is not finite would fail again."""


def number_of_workers(devices: str | None, device: str, *, planned: bool = False) -> int:
    """The number of workers that `--devices` asks for on this machine: N, or `auto`, one for each GPU.

    device: the value of --device: with `cpu`, or without a GPU, `auto` is one process, which has all threads.
    planned: for an estimate, which may be of more devices than this machine has.
    Raises InputError for another word, and for more than there are GPUs.
    """
    if devices is None:
        return 1
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    number = max(1, gpus) if devices == "auto" else whole_number(devices)
    if not number:
        raise InputError(f"--devices: found '{devices}', expected auto or a whole number above 0")
    if planned:
        return number
    if number > 1 and ":" in device:
        raise InputError(
            f"--devices {devices} and --device {device} exclude each other",
            hint="one GPU each: --device cuda; a choice of them: CUDA_VISIBLE_DEVICES=0,1",
        )
    if number > 1 and not distributed.is_available():
        raise InputError(f"--devices {devices}: this PyTorch was built without torch.distributed")
    if not gpus and number > most_processes():
        raise InputError(
            f"--devices {devices}: at most {most_processes()} processes on the CPU of this machine",
            hint="each needs memory, and they share the processors; several machines: torchrun",
        )
    if gpus and number > gpus:
        raise InputError(
            f"--devices {devices}: this machine has {gpus} CUDA device{'s' if gpus > 1 else ''}",
            hint="processes on the CPU: --device cpu",
        )
    return number


def launch(
    count: int,
    job: Callable[[Path | None], Job],
    *,
    forks: bool,
    signals: Mapping[signal.Signals, Callable[..., None]],
    max_restarts: int = 0,
    note: Callable[[str], None] = lambda text: None,
    how_to_continue: Callable[[Path], str] = lambda run: "",
) -> None:
    """Run a job in `count` workers to its end, and raise the error that ended it, if any.

    Args:
        job: (run directory that earlier workers began, to go on with; None: begin) -> what the workers do.
        forks: fork the workers from this process, which must not have computed anything in several threads.
        signals: that end the workers, with the handlers of a forked one.
        max_restarts: how often the workers are started again after a failure that may not come again.
        note: shows one message to the user.
        how_to_continue: (run directory) -> hint, used when workers were killed without a report.
    """
    begun: Path | None = None
    for attempt in range(max_restarts + 1):
        with ScratchFolder("launch") as reports:
            failure = _attempt(count, job(begun), reports, forks=forks, signals=signals)
            if (reports / BEGUN).exists():
                begun = Path((reports / BEGUN).read_text())
        if failure is None:
            return
        if failure.code > 128 and failure.hint is None and begun is not None:
            failure = replace(failure, hint=how_to_continue(begun))
        if attempt == max_restarts or failure.code not in RESTARTED or failure.signal is not None:
            raise failure.error()
        note(f"{failure.error().message}: the processes start again, {attempt + 1} of {max_restarts} times")


def _attempt(
    count: int, job: Job, reports: Path, *, forks: bool, signals: Mapping[signal.Signals, Callable[..., None]]
) -> Failure | None:
    """Run a job in workers once; returns the failure that ended them. reports: empty folder for their failures."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = max(1, torch.get_num_threads() // count)
    before = {number: signal.getsignal(number) for number in signals}
    start, *words = python_command("tformer", *job.words)
    with _surroundings(
        {REPORTS: str(reports), "OMP_NUM_THREADS": str(threads)},
        {"GLOO_SOCKET_IFNAME": LOOPBACK, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(STOP_SECONDS)},
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr=HOST,
            max_restarts=0,
            monitor_interval=WATCH_SECONDS,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            signals_to_handle=",".join(number.name for number in signals),
        )
        try:
            if forks:
                elastic_launch(config, _work)(job, os.getpid(), threads, signals)
            else:
                elastic_launch(config, start)(*(word.replace("$", "$$") for word in words))  # it replaces ${local_rank}
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            return _failure(reports, count, rank, first.exitcode)
        except SignalException as error:
            return _interruption(reports, count, error.sigval)
        except OSError as error:
            if error.errno not in NO_FORK:
                raise
            raise OutOfMemoryError(
                f"the system starts no further process: {error.strerror}",
                hint="lower --devices, or raise the limits of memory and processes (ulimit -v, ulimit -u)",
            ) from error
        finally:
            for child in multiprocessing.active_children():
                child.kill()
            for number, handler in before.items():  # torchrun's library leaves its own
                signal.signal(number, handler)
    return None


@contextmanager
def _surroundings(variables: Mapping[str, str], defaults: Mapping[str, str]) -> Iterator[None]:
    """Context manager of the environment variables of the workers, in which torchrun's library logs nothing."""
    before = dict(os.environ)
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(logging.NullHandler())
    os.environ.update({**defaults, **before, **variables})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where a thread shows progress
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # otherwise a forked worker would write the same text again
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _work(job: Job, launcher: int, threads: int, signals: Mapping[signal.Signals, Callable[..., None]]) -> None:
    """The work of a forked process."""
    end_with_parent(launcher)
    for number, handler in signals.items():
        signal.signal(number, handler)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork has none of the threads that the library may have
    torch.set_num_threads(threads)
    worker = worker_from_environment()
    assert worker is not None
    code = job.run(worker)
    for number in signals:
        signal.signal(number, signal.SIG_DFL)  # from here on it only waits for the others
    if code:
        sys.exit(code)


# --- the failure of a group -------------------------------------------------------------------------------------------


def _reported(reports: Path) -> list[Failure]:
    """The failures that workers have reported, in their order."""
    found = [Failure(**json.loads(path.read_text())) for path in reports.glob("failure-*.json")]
    return sorted(found, key=lambda each: each.order)


def _failure(reports: Path, count: int, rank: int, code: int) -> Failure:
    """The failure that ended a group: reported by a worker, or the end of one that could not report.

    rank, code: of the worker that ended first, and its exit code; -N when signal N killed it.
    """
    reported = _reported(reports)
    own = [each for each in reported if not each.lost and each.code <= 128]
    if own:
        is_common = sum(each.message == own[0].message for each in own) == count
        return replace(own[0], named=own[0].named and not is_common)
    silent = sorted(set(range(count)) - {each.rank for each in reported})
    if rank in silent and code > 0:
        return Failure(rank, f"this process ended with exit code {code}", None, code)
    if rank in silent:
        number = signal.Signals(-code)
        hint = "the system does this where memory runs out (dmesg names it)" if number == signal.SIGKILL else None
        return Failure(rank, f"this process was killed by signal {number} ({number.name})", hint, 1)
    if interrupted := [each for each in reported if not each.lost]:  # all together: the leader says what was saved
        code = next((128 + each.signal for each in interrupted if each.signal is not None), interrupted[0].code)
        return replace(min(interrupted, key=lambda each: each.rank), code=code)
    if silent:
        return Failure(silent[0], "this process does not answer the others", None, 1)
    return reported[0]


def _interruption(reports: Path, count: int, number: signal.Signals) -> Failure:
    """The failure of a group that received a signal, with the leader's message."""
    reported = [each for each in _reported(reports) if not each.lost]
    unknown = Failure(0, "interrupted", None, 128 + number)
    first = min(reported, key=lambda each: (each.code <= 128, each.rank), default=unknown)
    if first.code <= 128:
        return replace(first, signal=number)
    message = first.message
    if silent := sorted(set(range(count)) - {each.rank for each in reported}):
        message += f": no answer from rank {' and '.join(map(str, silent))}"
    return replace(first, message=message, code=128 + number, named=False)
