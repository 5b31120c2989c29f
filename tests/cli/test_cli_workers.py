"""Several processes of one command: values, failures, signals and restarts, each reported once with the right code."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.faults.killing import ends_within, is_alive
from tests.quick import first_is_quick
from tformer.cli.process import StopFlag
from tformer.cli.report import console
from tformer.cli.workers import _failure_of, run_in_workers
from tformer.support import processes
from tformer.support.errors import InputError, Interrupted, NotFiniteError, OutOfMemoryError, StorageError, TformerError
from tformer.workers import launch
from tformer.workers import worker as workers
from tformer.workers.work import Job
from tformer.workers.worker import Failure, LostError, Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
LIMIT_SECONDS = 60
Work = Callable[[Worker], None]


@pytest.fixture(autouse=True)
def _all_workers_end() -> Iterator[None]:
    """No worker outlives its test, and a test that hangs ends."""
    with ends_within(LIMIT_SECONDS):
        yield


def run(work: Work, *, devices: str = "2", restart: Callable[[Path], Work] | None = None, restarts: int = 0) -> None:
    """Run `work` in workers; `restart` makes the work of those that start again."""
    with StopFlag() as stop:

        def part(begun: Path | None) -> Job:
            return Job(work if begun is None or restart is None else restart(begun), ["train"])

        run_in_workers(part, devices=devices, device="cpu", max_restarts=restarts, stop=stop)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def failing(message: str, code: int) -> Iterator[None]:
    """The workers end with one error of this message and exit code."""
    with pytest.raises(TformerError) as caught:
        yield
    assert (caught.value.message, caught.value.exit_code) == (message, code)


def put(folder: Path, worker: Worker, text: str) -> None:
    (folder / str(worker.rank)).write_text(text)


def written(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir())]


def when(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():
        time.sleep(0.005)


# --- values -----------------------------------------------------------------------------------------------------------


def test_workers_exchange_values_share_threads_and_form_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All that workers without a failure do, in one start of them."""
    monkeypatch.setattr(Worker, "take_own_gpu", lambda worker, device: put(tmp_path, worker, device))

    def fill(worker: Worker) -> int:
        time.sleep(0.1 if worker.leads else 0.0)
        return time.time_ns()

    def work(worker: Worker) -> None:
        device = (tmp_path / str(worker.rank)).read_text()
        values = [worker.share(lambda: {"loss": 0.1 + 0.2, "by": worker.rank}) for _ in range(2)]
        times = [turn(lambda: fill(worker)) for turn in (worker.in_turn, worker.after_leader)]
        ranks = torch.tensor([worker.rank + 1])
        with worker.joined(timeout_minutes=1):
            distributed.all_reduce(ranks)
        console.print(f"I am {worker.rank}")
        put(tmp_path, worker, json.dumps([device, values, torch.get_num_threads(), ranks.item(), times]))

    with StopFlag() as stop:
        run_in_workers(lambda _: Job(work, []), devices="3", device="cpu", stop=stop)
        assert {number: signal.getsignal(number) for number in stop.handlers()} == stop.handlers()
    found = [json.loads(text) for text in written(tmp_path)]
    shared, threads = [{"loss": 0.1 + 0.2, "by": 0}] * 2, max(1, torch.get_num_threads() // 3)
    assert [each[:-1] for each in found] == [["cpu", shared, threads, 6]] * 3
    assert capfd.readouterr().err == "I am 0\n"
    for first, *others in zip(*(each[-1] for each in found), strict=True):
        assert first < min(others)


def test_one_process_works_alone_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.launcher.api", None)  # its import would fail
    own = os.getpid()

    def work(worker: Worker) -> None:
        assert (worker.world_size, worker.leads, os.getpid()) == (1, True, own)
        put(
            tmp_path, worker, worker.share(lambda: "x") + worker.in_turn(lambda: "y") + worker.after_leader(lambda: "z")
        )

    run(work, devices="1")
    assert written(tmp_path) == ["xyz"]


# --- failures ---------------------------------------------------------------------------------------------------------


def after_joining(act: Work) -> Work:
    """Work that acts in the worker of rank 1, while the others wait for it in a sum."""

    def work(worker: Worker) -> None:
        with worker.joined(timeout_minutes=0.02):
            if worker.rank == 1:
                act(worker)
            distributed.all_reduce(torch.zeros(1))

    return work


def raising(error: Exception) -> Work:
    def act(worker: Worker) -> None:
        raise error

    return act


ERRORS = [
    (KeyError("x"), "internal error: KeyError: 'x'", 1),
    (InputError("a row is damaged"), "a row is damaged", 2),
    (StorageError("cannot write x"), "cannot write x", 3),
    (NotFiniteError("the loss is not finite"), "the loss is not finite", 4),
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: CUDA out of memory", 5),
]


@first_is_quick(
    ("error", "message", "code"), ERRORS, ids=lambda value: type(value).__name__ if isinstance(value, Exception) else ""
)
def test_an_error_of_one_worker_ends_all_with_its_rank_message_and_code(
    error: Exception, message: str, code: int
) -> None:
    """The traceback is kept for --debug."""
    with pytest.raises(TformerError) as caught:
        run(after_joining(raising(error)))
    assert (caught.value.message, caught.value.exit_code) == (f"rank 1: {message}", code)
    assert type(error).__name__ in str(caught.value.__cause__)


def test_the_failure_of_a_worker_has_the_message_and_the_code_of_its_error() -> None:
    for error, message, code in [
        *ERRORS,
        (LostError(workers.LOST), workers.LOST, 1),
        (RuntimeError("[/gloo/pair.cc] closed"), f"{workers.LOST}: [/gloo/pair.cc] closed", 1),
    ]:
        failure = _failure_of(error, Worker(rank=1, world_size=2), StopFlag())
        assert (failure.message, failure.code, failure.lost) == (message, code, message.startswith(workers.LOST))
        assert failure.named and type(error).__name__ in failure.trace
    assert not _failure_of(InputError("x"), Worker(world_size=2), StopFlag()).named  # of the leader before it joins


@pytest.mark.slow
def test_an_error_that_all_meet_is_reported_once_without_a_rank() -> None:
    """The quick twin is `test_the_failure_that_ended_a_group`."""

    def work(worker: Worker) -> None:
        with worker.joined(timeout_minutes=1):
            raise NotFiniteError("the loss is not finite at step 3")

    with failing("the loss is not finite at step 3", 4):
        run(work)


@pytest.mark.slow
def test_an_error_of_the_leader_before_the_group_forms_needs_no_rank() -> None:
    """The quick twin is `test_the_failure_of_a_worker_has_the_message_and_the_code_of_its_error`."""

    def work(worker: Worker) -> None:
        worker.in_turn(lambda: (_ for _ in ()).throw(InputError("text.txt does not exist")))

    with failing("text.txt does not exist", 2):
        run(work)


@pytest.mark.slow
def test_a_killed_worker_is_named_and_the_others_end() -> None:
    """The quick twin is `test_the_failure_that_ended_a_group`."""
    with failing("rank 1: this process was killed by signal 9 (SIGKILL)", 1):
        run(after_joining(lambda _: os.kill(os.getpid(), signal.SIGKILL)))


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_and_killed() -> None:
    """After the 30 seconds of torchrun's library; the quick twin is `test_the_failure_that_ended_a_group`."""
    with failing("rank 1: this process does not answer the others", 1):
        run(after_joining(lambda _: os.kill(os.getpid(), signal.SIGSTOP)))


LOST, WRONG = Failure(0, "lost", None, 1, lost=True), Failure(2, "a row is damaged", None, 2)
STOPPED = Failure(0, "interrupted: saved at step 3", None, 143, signal=signal.SIGTERM, named=False)
KILLED = Failure(1, "killed", None, 1)
SHARED = [Failure(rank, "the loss is not finite at step 3", None, 4, order=rank) for rank in range(3)]


@pytest.mark.parametrize(
    ("reported", "first", "message", "code"),
    [
        ([LOST, WRONG], (0, 1), "rank 2: a row is damaged", 2),
        ([STOPPED, WRONG], (0, 143), "rank 2: a row is damaged", 2),
        ([LOST], (1, -9), "rank 1: this process was killed by signal 9 (SIGKILL)", 1),
        ([STOPPED], (2, 7), "rank 2: this process ended with exit code 7", 7),
        ([LOST], (0, 1), "rank 1: this process does not answer the others", 1),
        ([STOPPED, replace(STOPPED, rank=1, message="interrupted")], (1, 143), "interrupted: saved at step 3", 143),
        (SHARED, (1, 4), "the loss is not finite at step 3", 4),
        (SHARED[1:], (1, 4), "rank 1: the loss is not finite at step 3", 4),
    ],
)
def test_the_failure_that_ended_a_group(
    reported: list[Failure], first: tuple[int, int], message: str, code: int, tmp_path: Path
) -> None:
    for each in reported:
        (tmp_path / f"failure-{each.rank}.json").write_text(json.dumps(asdict(each)))
    with failing(message, code):
        raise launch._failure(tmp_path, 3, *first).error()


@pytest.mark.parametrize(
    ("reported", "message", "code"),
    [
        ([], "interrupted: no answer from rank 0 and 1 and 2", 130),
        ([STOPPED, replace(LOST, rank=1)], "interrupted: saved at step 3: no answer from rank 1 and 2", 130),
        ([STOPPED, replace(STOPPED, rank=1), replace(STOPPED, rank=2)], "interrupted: saved at step 3", 130),
        ([replace(LOST, rank=1)], "interrupted: no answer from rank 0 and 1 and 2", 130),
        ([STOPPED, WRONG], "interrupted: saved at step 3: no answer from rank 1", 130),
        ([WRONG], "rank 2: a row is damaged", 2),
    ],
)
def test_the_failure_of_a_group_that_received_a_signal(
    reported: list[Failure], message: str, code: int, tmp_path: Path
) -> None:
    for each in reported:
        (tmp_path / f"failure-{each.rank}.json").write_text(json.dumps(asdict(each)))
    with failing(message, code):
        raise launch._interruption(tmp_path, 3, signal.SIGINT).error()


def test_other_facts_than_the_leaders_are_refused_by_name() -> None:
    store = distributed.HashStore()
    leader, other = (Worker(rank=rank, world_size=2, store=store) for rank in range(2))
    leader.require_equal({"--lr": "0.1", "--seed": "0"}, hint="start the same command")
    with failing("--seed: found 1 in the process of rank 1, 0 in that of rank 0", 2):
        other.require_equal({"--lr": "0.1", "--seed": "1"}, hint="start the same command")


# --- signals ----------------------------------------------------------------------------------------------------------


def until_stopped(worker: Worker, stop: Callable[[], bool]) -> None:
    """Steps as in training: all stop together once one of them has to."""
    flag = torch.zeros(1)
    with worker.joined(timeout_minutes=1):
        while not flag:
            flag += stop()
            distributed.all_reduce(flag)
            time.sleep(0.01)
        raise Interrupted("interrupted: saved at step 3", signal_number=signal.SIGINT)


@first_is_quick(
    ("to", "number"),
    [("launcher", signal.SIGTERM), ("worker", signal.SIGINT), ("launcher", signal.SIGHUP), ("worker", signal.SIGTERM)],
)
def test_a_signal_to_the_launcher_or_to_a_worker_stops_all_together(to: str, number: signal.Signals) -> None:
    with StopFlag() as stop, failing("interrupted: saved at step 3", 128 + number):

        def work(worker: Worker) -> None:
            stop.be_patient()
            if worker.rank == 1:
                os.kill(os.getppid() if to == "launcher" else os.getpid(), number)
            until_stopped(worker, stop.should_stop)

        run_in_workers(lambda _: Job(work, []), devices="2", device="cpu", stop=stop)


@pytest.mark.slow
def test_a_signal_to_the_launcher_and_its_workers_is_one_wish() -> None:
    """The quick twin is `test_a_signal_to_the_launcher_or_to_a_worker_stops_all_together`."""
    with StopFlag() as stop, failing("interrupted: saved at step 3", 128 + signal.SIGTERM):

        def saved_slowly() -> bool:
            if stop.should_stop():
                time.sleep(0.3)
            return stop.should_stop()

        def work(worker: Worker) -> None:
            stop.be_patient()
            leader = worker.share(os.getpid)
            if worker.rank == 1:
                for process in (os.getppid(), leader, os.getpid()):
                    os.kill(process, signal.SIGTERM)
            until_stopped(worker, saved_slowly)

        run_in_workers(lambda _: Job(work, []), devices="2", device="cpu", stop=stop)


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once() -> None:
    """The quick twin is `test_a_signal_to_the_launcher_or_to_a_worker_stops_all_together`."""
    with StopFlag() as stop, failing("interrupted at once", 130):

        def work(worker: Worker) -> None:
            stop.be_patient()
            for _ in range(2 * worker.rank):
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(workers.ECHO_SECONDS + 0.3)
            time.sleep(LIMIT_SECONDS)

        run_in_workers(lambda _: Job(work, []), devices="2", device="cpu", stop=stop)


def stuck(act: Work, *, rank: int, number: int = signal.SIGTERM) -> Work:
    """Steps of a training in which one worker gets stuck, after which the launcher gets a signal."""

    def work(worker: Worker) -> None:
        with worker.joined(timeout_minutes=1):
            distributed.all_reduce(torch.zeros(1))
            if worker.rank == (rank + 1) % worker.world_size:
                threading.Timer(0.3, os.kill, (os.getppid(), number)).start()
            if worker.rank == rank:
                act(worker)
            distributed.all_reduce(torch.zeros(1))

    return work


def stop_itself(worker: Worker) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(worker: Worker) -> None:
    while True:
        time.sleep(0.1)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")


def run_patiently(work: Work, *, devices: str = "2") -> None:
    with StopFlag() as stop:

        def patient(worker: Worker) -> None:
            stop.be_patient()
            work(worker)

        run_in_workers(lambda _: Job(patient, []), devices=devices, device="cpu", stop=stop)


@pytest.mark.parametrize(("act", "rank", "number"), [(stop_itself, 0, signal.SIGTERM), (stop_itself, 2, signal.SIGINT)])
@pytest.mark.slow
def test_a_worker_that_does_not_answer_a_signal_is_named_and_killed_soon(
    act: Work, rank: int, number: signal.Signals, short_grace: None
) -> None:
    """The quick twin is `test_the_failure_of_a_group_that_received_a_signal`."""
    with pytest.raises(Interrupted) as caught:
        run_patiently(stuck(act, rank=rank, number=number), devices="3")
    assert caught.value.message.startswith("interrupted: no answer from rank ") and str(rank) in caught.value.message
    assert caught.value.exit_code == 128 + number


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
@pytest.mark.slow
def test_workers_that_hang_are_killed_with_those_that_wait_for_them(
    rank: int, number: signal.Signals, short_grace: None
) -> None:
    """The quick twin is `test_the_failure_of_a_group_that_received_a_signal`."""
    with failing("interrupted: no answer from rank 0 and 1", 128 + number):
        run_patiently(stuck(hang, rank=rank, number=number))


@pytest.mark.slow
def test_the_error_of_killed_workers_says_where_resume_goes_on(tmp_path: Path, short_grace: None) -> None:
    """The quick twin is `test_a_failure_that_may_not_come_again_starts_the_workers_again`."""
    (tmp_path / "checkpoints").mkdir()

    def work(worker: Worker) -> None:
        worker.begins(tmp_path)
        stuck(hang, rank=1)(worker)

    with pytest.raises(Interrupted) as caught:
        run_patiently(work)
    expected = f"continue with: tformer train --resume --out {tmp_path}, from its beginning: there is no checkpoint"
    assert caught.value.hint == expected


@pytest.mark.slow
def test_what_the_leader_says_it_saved_is_kept_where_another_worker_is_killed(short_grace: None) -> None:
    """The quick twin is `test_the_failure_of_a_group_that_received_a_signal`."""

    def work(worker: Worker) -> None:
        if worker.leads:
            os.kill(os.getppid(), signal.SIGTERM)
            raise Interrupted("interrupted: saved at step 3", signal_number=signal.SIGTERM, hint="continue")
        hang(worker)

    with failing("interrupted: saved at step 3: no answer from rank 1", 143):
        run_patiently(work)


def sleeping_group(folder: Path) -> tuple[int, list[int]]:
    """(launcher, workers) of a group that sleeps."""
    launcher = os.fork()
    if launcher == 0:
        try:
            run(lambda worker: (put(folder, worker, str(os.getpid())), time.sleep(LIMIT_SECONDS)))
        finally:
            os._exit(0)
    when(lambda: len(written(folder)) == 2 and all(written(folder)))
    return launcher, [int(text) for text in written(folder)]


@pytest.mark.slow
def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """The quick twin is `test_nothing_that_stands_still_outlives_its_parent`."""
    launcher, workers = sleeping_group(tmp_path)
    assert all(map(is_alive, workers))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    when(lambda: not any(map(is_alive, workers)))


def test_the_words_of_a_command_reach_its_workers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.utils import macros
    from torch.distributed.launcher import api

    started: list[list[str]] = []
    substituted = lambda *words: started.append(macros.substitute([*words], "1"))  # noqa: E731
    monkeypatch.setattr(api, "elastic_launch", lambda config, start: substituted)
    words = ["train", "--set", "a=$$ ${local_rank} $HOME"]
    launch.launch(2, lambda _: Job(lambda worker: None, words), forks=False, signals={})
    assert started[0][-3:] == words


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.EADDRINUSE])
def test_only_errors_of_a_fork_say_that_no_process_starts(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.launcher import api

    def start(*words: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(api, "elastic_launch", lambda config, work: start)
    is_fork = number in (errno.EAGAIN, errno.ENOMEM)
    with pytest.raises(OutOfMemoryError if is_fork else OSError, match=os.strerror(number)) as caught:
        launch.launch(2, lambda _: Job(lambda worker: None, ["train"]), forks=False, signals={})
    assert is_fork == ("starts no further process" in str(caught.value))


@pytest.mark.slow
def test_a_network_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick twin is `test_an_error_of_one_worker_ends_all_with_its_rank_message_and_code`."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonet7")
    with pytest.raises(TformerError, match="nonet7"):
        run(after_joining(lambda worker: None))


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "begun", "error"),
    [
        ([KILLED, None], [None, "runs/mine"], None),
        ([KILLED, replace(KILLED, message="memory", code=5), None], [None, "runs/mine", "runs/mine"], None),
        ([KILLED] * 3, [None, "runs/mine", "runs/mine"], ("rank 1: killed", 1, None)),
        ([WRONG], [None], ("rank 2: a row is damaged", 2, None)),
        ([replace(KILLED, signal=signal.SIGTERM)], [None], ("rank 1: killed", 1, None)),
        ([STOPPED], [None], ("interrupted: saved at step 3", 143, "go on with runs/mine")),
    ],
)
def test_a_failure_that_may_not_come_again_starts_the_workers_again(
    failures: list[Failure | None],
    begun: list[str | None],
    error: tuple[str, int, str | None] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice at most, with the run that they began; a mistake and what follows a signal are final."""

    def attempt(count: int, job: Job, reports: Path, **_: object) -> Failure | None:
        (reports / workers.BEGUN).write_text("runs/mine")
        return failures[len(seen) - 1]

    def job(run: Path | None) -> Job:
        seen.append(None if run is None else str(run))
        return Job(lambda worker: None, [])

    seen: list[str | None] = []
    notes: list[str] = []
    monkeypatch.setattr(launch, "_attempt", attempt)
    found: tuple[str, int, str | None] | None = None
    try:
        continuing = "go on with {}".format
        launch.launch(2, job, forks=True, signals={}, max_restarts=2, note=notes.append, how_to_continue=continuing)
    except TformerError as raised:
        found = raised.message, raised.exit_code, raised.hint
    assert (found, seen, len(notes)) == (error, begun, len(begun) - 1)
    assert all(f"the processes start again, {number} of 2 times" in note for number, note in enumerate(notes, 1))


@pytest.mark.slow
def test_killed_workers_start_again_with_the_run_that_they_began(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The quick twin is `test_a_failure_that_may_not_come_again_starts_the_workers_again`."""

    def killed(worker: Worker) -> None:
        worker.begins(Path("runs/mine"))
        after_joining(lambda _: os.kill(os.getpid(), signal.SIGKILL))(worker)

    run(killed, restart=lambda begun: lambda worker: put(tmp_path, worker, str(begun)), restarts=1)
    assert written(tmp_path) == ["runs/mine"] * 2
    assert "rank 1: this process was killed by signal 9 (SIGKILL): the processes start again" in capfd.readouterr().err


@pytest.mark.slow
def test_what_fails_after_a_signal_does_not_start_again(tmp_path: Path) -> None:
    """The quick twin is `test_a_failure_that_may_not_come_again_starts_the_workers_again`."""

    def work(worker: Worker) -> None:
        put(tmp_path, worker, f"{len(written(tmp_path))}")
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.5)
        raise KeyError("x")

    with StopFlag() as stop, pytest.raises(TformerError, match=r"KeyError|interrupted"):  # while or before it watches
        run_in_workers(lambda _: Job(work, []), devices="2", device="cpu", max_restarts=2, stop=stop)
    assert set(written(tmp_path)) <= {"0", "1"}


@pytest.mark.slow
def test_restarts_are_counted_and_mistakes_are_not_repeated(tmp_path: Path) -> None:
    """The quick twin is `test_a_failure_that_may_not_come_again_starts_the_workers_again`."""

    def count(error: Exception) -> Work:
        def work(worker: Worker) -> None:
            if worker.leads:
                (tmp_path / str(time.time_ns())).write_text("")
                raise error

        return work

    with failing("internal error: KeyError: 'x'", 1):
        run(count(KeyError("x")), restarts=2)
    assert len(written(tmp_path)) == 3
    with failing("the recipe is wrong", 2):
        run(count(InputError("the recipe is wrong")), restarts=2)
    assert len(written(tmp_path)) == 4


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", ["0", "-1", "two", "1.5"])
def test_a_number_of_devices_that_is_none_is_refused(devices: str) -> None:
    with failing(f"--devices: found '{devices}', expected auto or a whole number above 0", 2):
        run(lambda worker: None, devices=devices)


def test_a_named_gpu_and_several_devices_exclude_each_other() -> None:
    with failing("--devices 2 and --device cuda:1 exclude each other", 2):
        launch.number_of_workers("2", "cuda:1")


def test_auto_is_every_gpu_or_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [launch.number_of_workers("auto", device) for device in ("auto", "cuda", "cpu")] == [4, 4, 1]
    with failing("--devices 5: this machine has 4 CUDA devices", 2):
        launch.number_of_workers("5", "auto")
    assert launch.number_of_workers("5", "cpu") == 5


def test_more_processes_than_a_machine_bears_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "available_cores", lambda: 96)
    assert launch.number_of_workers("96", "cpu") == 96
    with failing("--devices 100000: at most 96 processes on the CPU of this machine", 2):
        launch.number_of_workers("100000", "cpu")


def test_ranks_without_a_meeting_point_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with failing("RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT", 2):
        run(lambda worker: None)


def test_each_worker_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every command: `generate`, `classify` and `evaluate` would all compute on the first."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    Worker(rank=3, world_size=4, local_rank=1, local_size=2).take_own_gpu("auto")
    Worker().take_own_gpu("auto")  # one process takes what PyTorch takes
    Worker(rank=1, world_size=2, local_rank=1, local_size=2).take_own_gpu("cpu")
    assert taken == [1]
    with pytest.raises(InputError, match="3 processes on this machine, but 2 CUDA devices"):
        Worker(rank=2, world_size=3, local_rank=2, local_size=3).take_own_gpu("cuda")


@pytest.mark.parametrize("port", ["65536", "0", "29500a"])
def test_a_port_that_is_none_is_refused_as_a_mistake(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"MASTER_PORT={port}: expected a "):
        workers.worker_from_environment()


def test_a_rank_that_the_group_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="RANK=2: expected a rank below WORLD_SIZE=2"):
        workers.worker_from_environment()


def test_one_process_needs_no_distributed_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.distributed, "is_available", lambda: False)
    assert launch.number_of_workers("1", "cpu") == 1
    with pytest.raises(InputError, match="built without"):
        launch.number_of_workers("2", "cpu")


def test_ctrl_c_ends_the_wait_for_the_other_processes(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    meeting_point = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    for name, value in meeting_point.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(workers, "START_TIMEOUT", timedelta(seconds=5))
    monkeypatch.setattr(StopFlag, "GRACE_SECONDS", 0.1)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with failing("interrupted", 130):
        run(lambda worker: None)


@pytest.mark.parametrize(
    "names",
    [
        {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"},
        {"RANK": "0"},
        {"RANK": "", "WORLD_SIZE": ""},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
    ],
)
def test_a_shell_of_a_cluster_and_a_group_of_one_are_one_process(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    ranks: list[int] = []
    run(lambda worker: ranks.append(worker.world_size), devices="1")
    assert ranks == [1]
