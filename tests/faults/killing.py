"""Commands that are killed at random moments: forked children, their process trees, and what they wrote."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tformer.checkpoint.catalog import is_complete
from tformer.checkpoint.run import CHECKPOINTS, is_run
from tformer.support.processes import end_with_parent
from tformer.workflows.inspect.verify import verify

TICKS = os.sysconf("SC_CLK_TCK")
END_SECONDS = 2.0
"""Within this time after a kill no process of the killed command may be left."""
GRACE_SECONDS = 30.0
"""After the interruption at its limit, a block gets this time until its process ends."""
KEEP_LAST = 2

TEMPORARY = (".tmp-", ".old-")
UNEQUAL = {"environment.json", "manifest.json", "trainer.json", ".lock"}
UNEQUAL_KINDS = {".log", ".svg", ".png", ".so", ".md", ".csv", ".tex"}
"""Files with times, and hashes of such files."""
TIMES = {"seconds", "tokens_per_second", "peak_share", "peak_memory_bytes", "peak_device_bytes", "command", "text"}
"""Keys of JSON documents that depend on the time; `text`: the cells of a table of a sweep as they are shown."""


@dataclass(frozen=True)
class Case:
    """A command. `{work}` in its words is its folder.

    kills_worker: one of its processes is killed, and not the command, which then ends with 1.
    resume: words added when it runs again. done: a run after a complete one is refused, for its output stands.
    fresh_cache: the cache is emptied first and compared too. compared: False for a command that only measures times.
    """

    words: tuple[str, ...]
    resume: tuple[str, ...] = ()
    done: bool = False
    fresh_cache: bool = False
    compared: bool = True
    kills_worker: bool = False


def start_command(words: Sequence[str], out: Path, messages: Path) -> multiprocessing.process.BaseProcess:
    """`tformer WORDS` in a process that is forked from one with the imports: kills rarely meet an import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tformer.training.session", "tformer.tasks.evaluate"])
    process = context.Process(target=_run_command, args=(words, out, messages))
    process.start()
    return process


def _run_command(words: Sequence[str], out: Path, messages: Path) -> None:
    end_with_parent(os.getppid())
    os.setpgid(0, 0)
    for number, path in ((1, out), (2, messages)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["tformer", *words]
    try:
        runpy.run_module("tformer", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


class Place:
    """The folders in which cases run.

    Attributes:
        seconds: processor time of each case when it is not disturbed; outputs: what it then writes.
        kills, runs: number of kills, and of runs that were killed and completed afterwards, by case.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache, self.temporary = root / "cache", root / "tmp"
        self.seconds: dict[str, float] = {}
        self.outputs: dict[str, dict[str, str]] = {}
        self.kills: dict[str, int] = {}
        self.runs: dict[str, int] = {}

    def once(self, words: tuple[str, ...]) -> None:
        """Run a command that must succeed."""
        code, _, log = self._run(Case(words), self.root, more=(), until=None)
        assert code == 0, log

    def undisturbed(self, name: str, case: Case) -> None:
        """Run the case to its end, and keep its time and outputs; a first run has filled caches and pages."""
        if name in self.seconds:
            return
        for _ in range(2):
            work = self._new_folder(name, case)
            code, seconds, log = self._run(case, work, more=(), until=None)
            assert code == 0, log
        self.seconds[name], self.outputs[name] = seconds, self._output(case, work)

    def survive(self, name: str, case: Case, draw: Random) -> int:
        """Kill the case once or several times, run it to its end, and compare; returns the number of kills."""
        self.undisturbed(name, case)
        work, kills = self._new_folder(name, case), 0
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            until = draw.uniform(0, self.seconds[name])
            code, _, log = self._run(case, work, more=case.resume if kills else (), until=until)
            if code != (1 if case.kills_worker else -signal.SIGKILL):
                assert code == 0 or (case.done and kills and code == 2), log
                break
            kills += 1
            check_runs(work, killed=True)
        if not kills:
            return 0
        was_whole = not self._differences(name, case, work)
        code, _, log = self._run(case, work, more=case.resume, until=None)
        assert code == 0 or (case.done and was_whole and code == 2), log
        differences = self._differences(name, case, work)
        assert not differences, f"other than undisturbed: {differences}"
        check_runs(work)
        left = [str(path) for path in self.root.rglob("*") if path.name.startswith(TEMPORARY)]
        assert not left + list(map(str, self.temporary.glob("tformer*"))), f"left: {left}"
        self.kills[name] = self.kills.get(name, 0) + kills
        self.runs[name] = self.runs.get(name, 0) + 1
        return kills

    def _new_folder(self, name: str, case: Case) -> Path:
        work = self.root / "work" / name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        if case.fresh_cache:
            shutil.rmtree(self.cache, ignore_errors=True)
        return work

    def _differences(self, name: str, case: Case, work: Path) -> list[str]:
        """Files that are missing, superfluous, or other than those of the undisturbed run."""
        found, expected = self._output(case, work), self.outputs[name]
        return [path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path)]

    def _output(self, case: Case, work: Path) -> dict[str, str]:
        found = digests(work) if case.compared else {}
        return {**found, **digests(self.cache)} if case.fresh_cache else found

    def _run(self, case: Case, work: Path, *, more: Sequence[str], until: float | None) -> tuple[int, float, str]:
        """(exit code, processor seconds, messages) of a run that is killed after `until` processor seconds."""
        words = [word.format(work=work) for word in (*case.words, *more)]
        child = start_command(words, self.root / "out", self.root / "log")
        assert child.pid is not None
        seconds, tree = 0.0, {child.pid}
        try:
            while child.exitcode is None:
                tree |= set(tree_of(child.pid))
                seconds = max(seconds, sum(map(cpu_seconds, tree)))
                if until is not None and seconds >= until and not case.kills_worker:
                    child.kill()
                    break
                if until is not None and seconds >= until and (workers := [*tree_of(child.pid)][1:]):
                    victim, until = workers[int(1000 * until) % len(workers)], None
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                time.sleep(0.005)
        finally:
            if child.exitcode is None:
                child.kill()
            child.join()
        deadline = time.monotonic() + END_SECONDS
        while any(map(is_alive, tree)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(is_alive, tree)), f"processes are left of {words}"
        assert child.exitcode is not None
        return child.exitcode, seconds, (self.root / "log").read_text(errors="replace")


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Fail the test when the block takes longer; none of the processes that it starts may outlive it.

    A thread watches the clock, because commands that run in this process use SIGALRM. At the limit it kills the child
    processes and interrupts the block with SIGUSR1. A block in C code that no signal interrupts ends this process.
    Children of processes that ran before the block do not count: a browser, for instance, starts some at any time.
    """

    def too_long(*_: Any) -> None:
        pytest.fail(f"no end within {seconds:g} s")

    def started() -> set[int]:
        return {process for process in list(tree_of(os.getpid(), without=before))[1:] if is_alive(process)}

    def interrupt() -> None:
        for process in started():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        signal.pthread_kill(main, signal.SIGUSR1)

    before, main = set(tree_of(os.getpid())), threading.get_ident()
    previous = signal.signal(signal.SIGUSR1, too_long)
    watcher = threading.Timer(seconds, interrupt)
    watcher.daemon = True
    watcher.start()
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        watcher.cancel()
        watcher.join()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGUSR1, previous)
    assert not started()


def cpu_seconds_until_end(processes: Sequence[int]) -> float:
    """Wait until all processes have ended; returns the most processor time that one of them still used.

    What a killed process does is measured so, and not on the clock of a busy machine.
    """
    before = {process: cpu_seconds(process) for process in processes}
    used = 0.0
    with ends_within(300):
        while running := [process for process in processes if is_alive(process)]:
            used = max(used, *(cpu_seconds(process) - before[process] for process in running))
            time.sleep(0.005)
    return used


def tree_of(process: int, without: Collection[int] = ()) -> Iterator[int]:
    """The ids of a process and all that it and its children have started and that still run.

    without: processes that are left out with all that they have started.
    """
    yield process
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended
        children = []
    for child in map(int, children):
        if child not in without:
            yield from tree_of(child, without)


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; [] once the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def cpu_seconds(process: int) -> float:
    """Processor time of a process."""
    return sum(map(int, _stat(process)[11:13])) / TICKS


def is_alive(process: int) -> bool:
    fields = _stat(process)
    return bool(fields) and fields[0] not in "ZX"


def check_runs(folder: Path, *, killed: bool = False) -> None:
    """Assert that all checkpoints of all runs in a folder verify, and that there are not too many.

    killed: a folder may have lost its manifest, which is removed before its other files; it is no checkpoint any more.
    """
    for run in [path for path in (folder, *sorted(folder.rglob("*"))) if path.is_dir() and is_run(path)]:
        verdicts = [verdict for verdict in verify(run) if not (killed and is_half_removed(verdict.path))]
        problems = [problem for verdict in verdicts for problem in verdict.problems]
        assert problems in ([], ["the run has no checkpoint yet"]), (run, problems)
        folders = [path for path in (run / "checkpoints").iterdir() if path.is_dir()]
        assert len(folders) <= KEEP_LAST + 2, (run, folders)


def is_half_removed(folder: Path) -> bool:
    return folder.parent.name == CHECKPOINTS and not is_complete(folder)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file whose content does not depend on the time, by its path; of JSON without its times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name in UNEQUAL or path.suffix in UNEQUAL_KINDS:
            continue
        data = path.read_bytes()
        if path.name == "metrics.jsonl":
            data = json.dumps([without_times(json.loads(line)) for line in data.splitlines()]).encode()
        elif path.suffix == ".json":
            with contextlib.suppress(ValueError):  # a kill left an unfinished file: its bytes are compared
                data = json.dumps(without_times(json.loads(data))).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(entry) for key, entry in value.items() if key not in TIMES}
    return [without_times(entry) for entry in value] if isinstance(value, list) else value
