"""A worker: one of the processes that run a command together, its exchange of values and the report of its failure.

Values go through the store of the group (`torch.distributed.Store`) as JSON, and nothing is unpickled. Waiting for one
has no time limit: the first worker may tokenize a corpus for hours while the others wait.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from tformer.support.errors import InputError, Interrupted, OtherProcessError, TformerError
from tformer.support.formatting import plural, whole_number

Result = TypeVar("Result")
Item = TypeVar("Item")

c10d: Any = distributed
"""torch.distributed; type checkers do not know all of its names."""

START_TIMEOUT = timedelta(minutes=5)
"""Time limit of the connection to the store: the workers of other machines start later."""

POLL_SECONDS = (0.001, 0.05)
"""First and longest pause between two looks for a value."""

AHEAD = 8
"""Maximum number of answers of a worker that others have not taken yet."""

FAILURE_SECONDS = 2.0
"""Time for which a worker that lost another one waits for the report of its failure, and the leader for all reports."""

ECHO_SECONDS = 1.0
"""A signal within this time after the first is a repetition: where a batch system or a terminal signals every process
of a group, each worker gets the signal directly, and again from the launcher or torchrun, which forward it."""

LOST = "another process of this group has ended or does not answer"

REPORTS = "TFORMER_REPORTS"
"""Environment variable of workers that `tformer.workers.launch` started: the folder for their failures, which it shows,
and for `BEGUN`, a file with the run directory that they began."""
BEGUN = "begun"

LAST_PORT = 65535

RANKS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID"),
}
"""Environment variables of a worker: rank, number of workers, rank and number of workers on this machine, machine."""


class LostError(TformerError):
    """Another worker of the group has failed or ended, so this one cannot go on."""


@dataclass(frozen=True)
class Failure:
    """Why a worker failed.

    Attributes:
        signal: that the worker has received, if any.
        lost: only another worker's end made this one fail.
        named: the message needs the rank: the worker failed in work that all share.
        trace: the traceback.
        order: place among the failures of the group, from 1.
    """

    rank: int
    message: str
    hint: str | None
    code: int
    signal: int | None = None
    lost: bool = False
    named: bool = True
    trace: str = ""
    order: int = 0

    def error(self) -> TformerError:
        """The error that a command ends with."""
        message = f"rank {self.rank}: {self.message}" if self.named else self.message
        error: TformerError
        if self.code > 128:
            error = Interrupted(message, signal_number=self.code - 128, hint=self.hint)
        else:
            error = TformerError(message, hint=self.hint)
            error.exit_code = self.code
        error.__cause__ = WorkerTraceback(self.trace) if self.trace else None
        return error


class WorkerTraceback(Exception):
    """The traceback of a worker, for --debug."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass
class Worker:
    """One of `world_size` processes; `Worker()` is a process that works alone.

    Attributes:
        rank: from 0; the worker of rank 0 leads: it writes files and shows messages.
        local_rank, local_size: among the workers on this machine.
        machine: number of this machine.
        store: None for a process that works alone.
        reports: folder of the launcher, which shows failures; None: one of the workers does.
        has_joined: whether the process group exists. Before, an error of the leader is shown without its rank.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    machine: int = 0
    store: Any = None
    reports: Path | None = None
    has_joined: bool = field(default=False, init=False)
    _shared: int = field(default=0, init=False)
    _turns: int = field(default=0, init=False)
    _divided: int = field(default=0, init=False)

    @property
    def leads(self) -> bool:
        """Whether this worker writes files and shows messages."""
        return self.rank == 0

    def share(self, make: Callable[[], Result]) -> Result:
        """The JSON value that `make` returns in the leader; the others do not call it.

        All workers must call `share` in the same order.
        """
        if self.store is None:
            return make()
        self._shared += 1
        key = f"shared/{self._shared}"
        if not self.leads:
            value: Result = self.take(key)
            return value
        value = make()
        self.give(key, value)
        return value

    def after_leader(self, make: Callable[[], Result]) -> Result:
        """Call `make` first in the leader, then in the others at once; returns its result."""
        if not self.leads:
            self.share(lambda: None)
            return make()
        value = make()
        self.share(lambda: None)
        return value

    def in_turn(self, make: Callable[[], Result]) -> Result:
        """Call `make` first in one worker of each machine, then in the others at once; returns its result.

        The first fills caches, from which the others read.
        """
        if self.store is None:
            return make()
        self._turns += 1
        key = f"turn/{self._turns}/{self.machine}"
        if self.local_rank != 0:
            self._wait_for(key)
            return make()
        value = make()
        self._put(key, "done")
        return value

    def send(self, index: int, answer: Any) -> None:
        """Give the leader the answer of item `index`, a JSON value; wait while it has many others to take."""
        self._wait_until(lambda: not self.store.check([f"answer/{index - AHEAD * self.world_size}"]))
        self.give(f"answer/{index}", answer)

    def receive(self, index: int, should_stop: Callable[[], bool]) -> Any:
        """The answer of item `index` by another worker; None once `should_stop` is true."""
        return self.take(f"answer/{index}", should_stop, delete=True)

    def give(self, name: str, value: Any) -> None:
        """Give all workers a JSON value under a name that no other value has. A thread may call it."""
        self._put(name, json.dumps(value))

    def take(self, name: str, should_stop: Callable[[], bool] = lambda: False, *, delete: bool = False) -> Any:
        """The value that a worker gives under a name; None once `should_stop` is true. A thread may call it.

        delete: remove the value from the store, where no other worker takes it.
        """
        self._wait_until(lambda: self.store.check([name]) or should_stop())
        if should_stop():
            return None
        value = json.loads(self._wait_for(name))
        if delete:
            with _connected():
                self.store.delete_key(name)
        return value

    def divide(
        self,
        items: Iterable[Item],
        answer: Callable[[Item], Result],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        to_json: Callable[[Result], Any] = lambda result: result,
        from_json: Callable[[Any], Result] = lambda value: value,
    ) -> Iterator[tuple[Item, Result]]:
        """(item, its answer) of all items in their order, in every worker; each worker answers some of them.

        All workers must have the same items, and take all that this yields.

        Args:
            answer: called with each item, or with those of this worker, in their order.
            should_stop: polled before every item; once it is True, no further answers are yielded.
            to_json, from_json: an answer as a JSON value, and back.
        """
        if self.store is None:
            for item in items:
                if should_stop():
                    return
                yield item, answer(item)
            return
        self._divided += 1
        waiting: deque[tuple[int, Item, Result | None]] = deque()  # the answer of another worker is None until taken

        def key(index: int) -> str:
            return f"divided/{self._divided}/{index}"

        def take() -> Iterator[tuple[Item, Result]]:
            index, item, result = waiting.popleft()
            if index % self.world_size != self.rank:
                value = self.take(key(index), should_stop)
                if should_stop():
                    return
                result = from_json(value)
            # A worker that has got this far has taken all answers but those of the last rounds.
            past = index - (AHEAD + 1) * self.world_size
            if past >= 0 and past % self.world_size == self.rank:
                with _connected():
                    self.store.delete_key(key(past))
            yield item, cast("Result", result)

        for index, item in enumerate(items):
            if should_stop():
                return
            result = None
            if index % self.world_size == self.rank:
                result = answer(item)
                self.give(key(index), to_json(result))
            waiting.append((index, item, result))
            if len(waiting) > AHEAD * self.world_size:
                yield from take()
        while waiting and not should_stop():
            yield from take()

    def total(self, number: int) -> int:
        """The sum of a number over all workers. Only the leader waits for all; the others get the sum so far."""
        if self.store is None:
            return number
        self._turns += 1
        with _connected():
            total = self.store.add(f"total/{self._turns}", number)
            given = self.store.add(f"given/{self._turns}", 1)
        if not self.leads or given == self.world_size:
            return int(total)
        self._wait_until(lambda: self.store.add(f"given/{self._turns}", 0) == self.world_size)
        return int(self.store.add(f"total/{self._turns}", 0))

    def require_equal(self, facts: Mapping[str, str], *, hint: str) -> None:
        """Raise InputError, which names the first difference, when this worker's facts differ from the leader's."""
        for name, text in self.share(lambda: dict(facts)).items():
            if facts.get(name) != text:
                raise InputError(
                    f"{name}: found {facts.get(name)} in the process of rank {self.rank}, {text} in that of rank 0",
                    hint=hint,
                )

    def take_own_gpu(self, device: str) -> None:
        """Make the GPU of this worker's number on its machine the current one, where the work is done on GPUs.

        device: the value of --device. Raises InputError for more workers than GPUs.
        """
        if self.world_size == 1 or device == "cpu" or not torch.cuda.is_available():
            return
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            raise InputError(
                f"{self.local_size} processes on this machine, but {plural(count, 'CUDA device')}",
                hint="start as many processes as there are devices, or choose --device cpu",
            )
        torch.cuda.set_device(self.local_rank)

    def begins(self, run: Path) -> None:
        """Tell the launcher the run directory, with which it may start the workers again."""
        if self.reports is not None and self.leads:
            (self.reports / BEGUN).write_text(str(run))

    @contextmanager
    def joined(self, *, timeout_minutes: float) -> Iterator[None]:
        """Context manager of the default process group: gloo for tensors on a CPU, NCCL for those on GPUs.

        timeout_minutes: a worker that waits longer for the others fails.
        """
        if self.store is None:
            yield
            return
        self.store.add("arrived", 1)
        self._wait_until(lambda: self.store.add("arrived", 0) == self.world_size)  # a signal interrupts this wait
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=c10d.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(minutes=timeout_minutes),
        )
        self.has_joined = True
        yield
        distributed.destroy_process_group()

    def report(self, failure: Failure) -> bool:
        """Report the failure of this worker to the group; returns whether this process has to show it.

        One worker shows the failure that ended the group: the first of those that do not follow from another's end.
        """
        try:
            failure = replace(failure, order=self.store.add("failures", 1))
            if self.reports is not None:
                (self.reports / f"failure-{self.rank}.json").write_text(json.dumps(asdict(failure)))
            deadline = time.monotonic() + FAILURE_SECONDS
            while failure.lost and time.monotonic() < deadline and not self.store.check(["cause"]):
                time.sleep(POLL_SECONDS[1])
            shows = bool(self.store.compare_set("cause", "", str(self.rank)).decode() == str(self.rank))
            if self.reports is not None:
                return False
            while self.leads and time.monotonic() < deadline and self.store.add("failures", 0) < self.world_size:
                time.sleep(POLL_SECONDS[1])  # the store may end with this process
            return shows
        except (LostError, c10d.DistError):  # the store has ended with the worker that kept it
            return self.reports is None

    def _put(self, key: str, text: str) -> None:
        with _connected():
            self.store.set(key, text)

    def _wait_for(self, key: str) -> str:
        """The text that another worker puts there. Raises LostError when a worker fails meanwhile."""
        self._wait_until(lambda: self.store.check([key]))
        with _connected():
            return str(self.store.get(key).decode())

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        pause, longest = POLL_SECONDS
        with _connected():
            while not condition():
                if self.store.check(["failures"]):
                    raise LostError(LOST)
                time.sleep(pause)
                pause = min(2 * pause, longest)


ALONE = Worker()
"""A process that works alone."""


@contextmanager
def _connected() -> Iterator[None]:
    """LostError in place of the error of a store whose process has ended."""
    try:
        yield
    except c10d.DistError as error:
        raise LostError(LOST) from error


def is_lost(error: BaseException) -> bool:
    """Whether an error only says that another worker does not answer or has ended."""
    if isinstance(error, LostError | OtherProcessError | c10d.DistError):
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


# --- workers that torchrun or srun started ----------------------------------------------------------------------------


def worker_from_environment() -> Worker | None:
    """The worker that this process is, by the variables of `torchrun` or of an `srun` step; None: it is not one.

    An `srun` step counts where MASTER_ADDR and MASTER_PORT are set: a shell on a cluster has the other variables too.
    Raises InputError for ranks without an address of the group, and for values that are not numbers.
    """
    has_meeting_point = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    for starter, names in RANKS.items():
        has_ranks = os.environ.get(names[0]) and os.environ.get(names[1])
        if not has_ranks or (starter == "srun" and not has_meeting_point):
            continue
        rank, world_size, local_rank, local_size, machine = (_number(name, starter) for name in names)
        if world_size <= 1:
            return None
        if rank >= world_size:
            raise InputError(f"{names[0]}={rank}: expected a rank below {names[1]}={world_size}")
        if has_meeting_point and not 0 < _number("MASTER_PORT", starter) <= LAST_PORT:
            raise InputError(f"MASTER_PORT={os.environ['MASTER_PORT']}: expected a port, from 1 to {LAST_PORT}")
        if not has_meeting_point:
            raise InputError(
                f"{names[0]} and {names[1]} are set, but not MASTER_ADDR and MASTER_PORT",
                hint="start the processes with torchrun, or unset these variables",
            )
        return Worker(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_size=max(1, local_size),
            machine=machine,
            store=_meet(rank, world_size),
            reports=Path(os.environ[REPORTS]) if REPORTS in os.environ else None,
        )
    return None


def _number(name: str, starter: str) -> int:
    text = os.environ.get(name) or "0"
    number = whole_number(text)
    if number is None:
        raise InputError(f"{name}={text}: expected a whole number, as {starter} sets it")
    return number


def _meet(rank: int, world_size: int) -> Any:
    """The store of the group, at MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", "torchrun")
    try:
        store, *_ = _in_a_thread(lambda: next(c10d.rendezvous("env://", rank, world_size, timeout=START_TIMEOUT)))
    except (c10d.DistError, ValueError) as error:
        raise TformerError(
            f"no connection to the other processes at {address}:{port}: {str(error).splitlines()[0]}",
            hint="MASTER_ADDR and MASTER_PORT name the machine of rank 0 and a free port of it",
        ) from error
    return store


def _in_a_thread(work: Callable[[], Result]) -> Result:
    """Call `work` in another thread, and return its result, so that this thread can handle signals during C++ calls."""
    done: Future[Result] = Future()

    def act() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    while not done.done():
        time.sleep(POLL_SECONDS[1])
    return done.result()
