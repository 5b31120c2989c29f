"""The launcher: a process that starts workers on this machine, watches them, and ends when they have ended.

On a CPU the workers are forked from the launcher, which has imported PyTorch but computed nothing: they start in a
tenth of a second. On GPUs, and on other systems than Linux, they are started as commands. The launcher keeps the store
of the group, so that a failure is known whichever worker ends first.

`torch.distributed.elastic` is not used here: it exits with 1 whatever a worker returned, forwards a signal only once,
kills after 30 seconds, and leaves orphans when it is killed itself. These workers end with the launcher.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed

from tformer.support.errors import InputError, Interrupted, OutOfMemoryError
from tformer.support.formatting import whole_number
from tformer.support.processes import end_with_parent, most_processes, python_command
from tformer.workers.work import Job
from tformer.workers.worker import ECHO_SECONDS, RANKS, SUPERVISED, Failure, c10d, worker_from_environment

HOST = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
WATCH_SECONDS = 0.02

END_SECONDS = 10.0
"""After the first failure the other workers get this time to end by themselves, before they are killed."""

HURRY_SECONDS = 2.0
"""After a second signal the workers get this time to end by themselves."""

STOP_SECONDS = 20.0
"""After a signal the workers get this time to end, plus the time that the leader announced (`Worker.expect`), before
they are killed."""

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
    signal_number: Callable[[], int | None],
    max_restarts: int = 0,
    note: Callable[[str], None] = lambda text: None,
    how_to_continue: Callable[[Path], str] = lambda run: "",
) -> None:
    """Run a job in `count` workers to its end, and raise the error that ended it, if any.

    Args:
        job: (run directory that earlier workers began, to go on with; None: begin) -> what the workers do.
        forks: fork the workers from this process, which must not have computed anything in several threads.
        signal_number: the signal that this process has received, if any; it is forwarded to the workers.
        max_restarts: how often the workers are started again after a failure that may not come again.
        note: shows one message to the user.
        how_to_continue: (run directory) -> hint, used when workers were killed without a report.
    """
    begun: Path | None = None
    for attempt in range(max_restarts + 1):
        group = _Group(count, job(begun), forks=forks)
        failure = group.watch(signal_number, note)
        if failure is None:
            return
        begun = group.run or begun
        if failure.code > 128 and failure.hint is None and begun is not None:
            failure = replace(failure, hint=how_to_continue(begun))
        if attempt == max_restarts or failure.code not in RESTARTED or signal_number() is not None:
            raise failure.error()
        note(f"{failure.error().message}: the processes start again, {attempt + 1} of {max_restarts} times")


class _Group:
    """The workers of one attempt, and the store through which they exchange values.

    Attributes:
        run: run directory that the workers have begun.
    """

    def __init__(self, count: int, job: Job, *, forks: bool) -> None:
        self.run: Path | None = None
        self._running: dict[int, int] = {}  # rank -> process
        self._codes: dict[int, int] = {}  # rank -> exit code; -N when signal N killed it
        self._killed: dict[int, bool] = {}  # ranks that this process killed; whether they were stopped
        with socket.create_server((HOST, 0)) as listener:  # a free port, taken before the workers get its number
            port = listener.getsockname()[1]
            threads = max(1, torch.get_num_threads() // count)
            try:
                for rank in range(count):
                    variables = {  # as torchrun sets them
                        **dict(zip(RANKS["torchrun"], map(str, (rank, count, rank, count, 0)), strict=True)),
                        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK),
                        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
                        "MASTER_ADDR": HOST,
                        "MASTER_PORT": str(port),
                        SUPERVISED: "1",
                        "OMP_NUM_THREADS": str(threads),
                    }
                    self._running[rank] = _fork(job, variables, listener) if forks else _spawn(job, variables)
            except OSError as error:
                self._end()
                raise OutOfMemoryError(
                    f"the system starts no further process: {error.strerror}",
                    hint="lower --devices, or raise the limits of memory and processes (ulimit -v, ulimit -u)",
                ) from error
            self._store: Any = c10d.TCPStore(
                HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

    def watch(self, signal_number: Callable[[], int | None], note: Callable[[str], None]) -> Failure | None:
        """Wait for the end of all workers, and return the failure that ended the group; None: all succeeded."""
        kill_at = forward_at = stop_at = math.inf
        forwarded: int | None = None

        def suspend(number: int, frame: FrameType | None) -> None:
            """Stop the workers with this process and continue them with it: Ctrl-Z reaches this process alone."""
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT)

        previous = signal.signal(signal.SIGTSTP, suspend)
        try:
            while self._running:
                for code in self._ended():
                    if code > 128:  # interrupted: the others end with it, or get the signal if they still prepare
                        forward_at = min(forward_at, time.monotonic() + END_SECONDS)
                    elif code:
                        kill_at = min(kill_at, time.monotonic() + END_SECONDS)
                now = time.monotonic()
                if now >= stop_at and now >= stop_at + self._expected():
                    kill_at = now
                if now >= kill_at and self._running:
                    self._killed |= {rank: _is_stopped(process) for rank, process in self._running.items()}
                    self._send(signal.SIGKILL)
                    kill_at = stop_at = math.inf
                number = signal.SIGINT if now >= forward_at else signal_number()
                if number is not None and forwarded is None:
                    forwarded, stop_at = number, now + STOP_SECONDS
                    note(
                        f"stopping: the processes get {STOP_SECONDS:.0f} s to answer; a second signal ends them at once"
                    )
                    self._send(number)
                time.sleep(WATCH_SECONDS)
            return self._failure(forwarded)
        except Interrupted:  # a second signal
            time.sleep(ECHO_SECONDS)
            self._send(signal.SIGTERM)
            deadline = time.monotonic() + HURRY_SECONDS
            while self._running and time.monotonic() < deadline:
                self._ended()
                time.sleep(WATCH_SECONDS)
            raise
        finally:
            signal.signal(signal.SIGTSTP, previous)
            self._end()
            if self._store.check(["run"]):
                self.run = Path(self._store.get("run").decode())
            self._store = None  # ends its threads before a later fork

    def _expected(self) -> float:
        """Seconds that the leader announced it may need before it answers."""
        return float(self._store.get("expected")) if self._store.check(["expected"]) else 0.0

    def _ended(self) -> list[int]:
        """The exit codes of the workers that have ended since the last call."""
        ended = []
        for rank, process in list(self._running.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self._running[rank]
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                ended.append(self._codes[rank])
        return ended

    def _send(self, number: int) -> None:
        for process in self._running.values():
            os.kill(process, number)  # the process exists, possibly as a zombie: only `_ended` waits for it

    def _end(self) -> None:
        """Kill the workers that still run, and wait for them."""
        self._send(signal.SIGKILL)
        for process in self._running.values():
            os.waitpid(process, 0)
        self._running.clear()

    def _failure(self, forwarded: int | None) -> Failure | None:
        """The failure that ended the group: reported by a worker, or the end of one that could not report.

        forwarded: the signal that the workers were sent, if any.
        """
        if not any(self._codes.values()):
            return None
        reports = [
            Failure(**json.loads(self._store.get(key)))
            for key in (f"failure/{rank}" for rank in self._codes)
            if self._store.check([key])
        ]
        reports.sort(key=lambda each: each.order)
        silent = {rank: code for rank, code in self._codes.items() if code and rank not in {r.rank for r in reports}}
        own = [each for each in reports if not each.lost]
        if forwarded and self._killed and silent.keys() <= self._killed.keys() and all(each.code > 128 for each in own):
            said = own[0] if own else Failure(0, "interrupted, not saved", None, 0)
            culprits = [rank for rank, stopped in sorted(self._killed.items()) if stopped] or sorted(self._killed)
            ranks, were = ("ranks", "were") if len(culprits) > 1 else ("rank", "was")
            named = " and ".join(map(str, culprits))
            message = f"{said.message}: {ranks} {named} did not answer and {were} killed"
            return replace(said, message=message, code=128 + forwarded, named=False)
        if own:
            first, code = own[0], own[0].code
            if code > 128:  # all were interrupted: the leader says what was saved
                first = min(own, key=lambda each: (each.code <= 128, each.rank))
                code = next((128 + each.signal for each in own if each.signal is not None), code)
            is_common = sum(each.message == first.message for each in own) == len(self._codes)
            return replace(first, code=code, named=first.named and not is_common)
        for rank, code in silent.items():
            if rank in self._killed:
                continue
            if code > 0:
                return Failure(rank, f"this process ended with exit code {code}", None, code)
            number = signal.Signals(-code)
            hint = "the system does this where memory runs out (dmesg names it)" if number == signal.SIGKILL else None
            return Failure(rank, f"this process was killed by signal {number} ({number.name})", hint, 1)
        for rank in sorted(silent):
            return Failure(rank, "this process does not answer the others", None, 1)
        return reports[0]


def _is_stopped(process: int) -> bool:
    """Whether a process is suspended (SIGSTOP); False where the system does not tell."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


# --- starting a worker ------------------------------------------------------------------------------------------------


def _spawn(job: Job, variables: dict[str, str]) -> int:
    """Start a worker as a command; returns the process. Ctrl-C on a terminal reaches the launcher alone."""
    command = python_command("tformer", *job.words)
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    return os.posix_spawn(command[0], command, {**os.environ, **variables}, file_actions=[nothing], setpgroup=0)


def _fork(job: Job, variables: dict[str, str], listener: socket.socket) -> int:
    """Start a worker as a copy of this process; returns the process."""
    launcher = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise the copy would write the same text again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns where a thread shows progress
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        end_with_parent(launcher)
        os.setpgid(0, 0)
        listener.close()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.environ.update(variables)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a copy has none of the threads that the library may have
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        worker = worker_from_environment()
        assert worker is not None
        code = job.run(worker) or 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
