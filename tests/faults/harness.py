"""Commands under injected faults: every failed call, every kill, every state that a crash can leave on the disk.

`Workshop` runs commands in a separate small folder (`work/`, `cache/`, `tmp/`), `Trial` compares what one command left
behind with what it found and with what it leaves undisturbed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.crash import SURVIVORS, Disk, Operation, Tree, read_trace

RECORD, FAIL, FULL, SHORT, KILL = range(5)  # of shim.c
HERE = Path(__file__).parent
LEFTOVER = re.compile(r"(^|/)\.(tmp|old)-|\.tmp$")
LOCK = re.compile(r"(^|/)\.?lock$")
PROCESS = re.compile(r"(?<=-)\d+(-[0-9a-f]{8})?(?=$|/)")
TIMED = ("trainer.json", "manifest.json", "metrics.jsonl", "environment.json")
FIGURE = re.compile(rb"[0-9a-f]{64}|-?\d+(\.\d+)?(e-?\d+)?")
STORAGE, MEMORY = 3, 5  # exit codes

ERRORS: dict[str, tuple[tuple[int, int], ...]] = {
    "open": ((FULL, errno.ENOSPC), (FAIL, errno.EIO), (FAIL, errno.EDQUOT), (FAIL, errno.EINTR)),
    "write": ((FULL, errno.ENOSPC), (FAIL, errno.EIO), (FAIL, errno.EDQUOT), (FAIL, errno.EINTR), (SHORT, 0)),
    "truncate": ((FAIL, errno.EIO), (FAIL, errno.EINTR)),
    "fsync": ((FAIL, errno.ENOSPC), (FAIL, errno.EIO), (FAIL, errno.EDQUOT), (FAIL, errno.EINTR)),
    "rename": ((FAIL, errno.ENOSPC), (FAIL, errno.EIO), (FAIL, errno.EDQUOT)),
    "mkdir": ((FULL, errno.ENOSPC), (FAIL, errno.EIO), (FAIL, errno.EDQUOT)),
    "unlink": ((FAIL, errno.EIO),),
    "rmdir": ((FAIL, errno.EIO),),
    "mmap": ((FAIL, errno.ENOMEM),),
}
"""What each call may return; `FULL`: everything that needs room fails from then on. EINTR only where POSIX has it."""


@dataclass(frozen=True)
class Fault:
    """What happens at the watched call number `call` (from 1)."""

    call: int
    mode: int = KILL
    error: int = 0

    def __str__(self) -> str:
        what = {KILL: "kill", SHORT: "short write"}.get(self.mode) or errno.errorcode[self.error]
        return f"{what}{' from here on' if self.mode == FULL else ''} at call {self.call}"


def faults_of(trace: list[Operation]) -> list[Fault]:
    """All faults of a command that makes these calls."""
    return [
        Fault(call, mode, error)
        for call, operation in enumerate(trace, start=1)
        for mode, error in (*(() if operation.failed else ERRORS[kind_of(operation)]), (KILL, 0))
    ]


def kind_of(operation: Operation) -> str:
    return "open" if operation.name == "empty" else operation.name


@dataclass(frozen=True)
class Scenario:
    """A command that writes.

    words: on a disk with `needs` (folders and files) of what `preparation` makes. again: the words that go on after an
    interruption (default: the same). targets: files and folders of which each is there wholly in its old or its new
    state. run: a run directory; its complete checkpoints verify. results: beginnings of
    the paths that the command determines; a cache may be filled or not. quick: examined by the quick tests, too.
    """

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...]
    targets: tuple[str, ...] = ()
    run: str | None = None
    again: tuple[str, ...] | None = None
    results: tuple[str, ...] = ("work/",)
    quick: bool = False


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Workshop:
    """A disk in `folder`, and the warm process that runs commands on it. Used as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.root, self.desk = folder / "disk", folder / "desk"
        self.desk.mkdir(parents=True)
        shim = self.desk / "shim.so"
        compiler = os.environ.get("CC", "cc").split()
        subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-o", str(shim), str(HERE / "shim.c")], check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TFORMER_")}
        surroundings = {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        surroundings |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "COLUMNS": "1000", "NO_COLOR": "1"}
        surroundings |= {"MPLCONFIGDIR": str(self.desk)}
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(shim)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=kept | surroundings,
        )

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()  # type: ignore[union-attr]
        self._server.wait(timeout=60)

    def restore(self, tree: Tree) -> None:
        """Make the disk hold exactly this."""
        shutil.rmtree(self.root, ignore_errors=True)
        for path in (self.root / name for name in ("work", "cache", "tmp")):
            path.mkdir(parents=True)
        for name, content in tree.items():
            if content is None:
                (self.root / name).mkdir(exist_ok=True)
            else:
                (self.root / name).write_bytes(content)

    def tree(self) -> Tree:
        """What the disk holds, without lock files."""
        found: Tree = {}
        for folder, folders, names in os.walk(self.root):
            place = "" if folder == str(self.root) else os.path.relpath(folder, self.root) + "/"
            found |= {place + name: None for name in folders}
            for name in names:
                if not LOCK.search(name):
                    found[place + name] = Path(folder, name).read_bytes()
        return dict(sorted(found.items()))

    def command(self, *words: str, fault: Fault | None = None, trace: Path | None = None) -> Outcome:
        """Run a command in `work/`, with a fault or recorded into `trace`."""
        out, err = self.desk / "out", self.desk / "err"
        fault = fault or Fault(0, RECORD)
        request = {
            "words": words,
            "cwd": str(self.root / "work"),
            "root": str(self.root),
            "out": str(out),
            "err": str(err),
            "trace": None if trace is None else str(trace),
            "call": fault.call,
            "mode": fault.mode,
            "error": fault.error,
            "environment": {"TFORMER_CACHE": str(self.root / "cache"), "TMPDIR": str(self.root / "tmp"),
                            "TFORMER_KERNELS": "off", "HOME": str(self.root / "work")},
        }  # fmt: skip
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = json.loads(self._server.stdout.readline())["code"]
        return Outcome(code, out.read_text(errors="replace"), err.read_text(errors="replace"))

    def undisturbed(self, *words: str) -> Outcome:
        """Run a command that must succeed."""
        outcome = self.command(*words)
        assert outcome.code == 0, f"{' '.join(words)}: exit {outcome.code}: {outcome.err}"
        return outcome

    def record(self, *words: str) -> list[Operation]:
        """The calls of an undisturbed command."""
        path = self.desk / "trace"
        path.unlink(missing_ok=True)
        outcome = self.command(*words, trace=path)
        assert outcome.code == 0, f"{' '.join(words)}: exit {outcome.code}: {outcome.err}"
        return read_trace(path, self.root)


@dataclass
class Trial:
    """One scenario: the disk before it, its calls, and what it leaves undisturbed."""

    shop: Workshop
    scenario: Scenario
    before: Tree
    trace: list[Operation] = field(init=False)
    after: Tree = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._judged: dict[str, str | None] = {}
        self.shop.restore(self.before)
        self.trace = self.shop.record(*self.scenario.words)
        self.after = self.shop.tree()
        self.shop.restore(self.before)
        self.shop.undisturbed(*self.scenario.words)
        again = self.shop.tree()
        assert list(again) == list(self.after), "the same command leaves other files"
        # These hold times and speeds, which two runs within one second may share.
        self.varying = {path for path in again if again[path] != self.after[path] or path.endswith(TIMED)}

    def with_fault(self, fault: Fault) -> str | None:
        """The problem that the command with this fault shows; None: it behaves as promised."""
        self.counts["kills" if fault.mode == KILL else "faults"] += 1
        self.shop.restore(self.before)
        outcome = self.shop.command(*self.scenario.words, fault=fault)
        operation = self.trace[fault.call - 1]
        problem = self._of_outcome(fault, operation, outcome)
        problem = problem or self._of_state(self.shop.tree(), is_there=True)
        words = outcome.err.strip().splitlines()[-3:]
        return problem and f"{fault} ({operation.name} {operation.path}): {problem} | exit {outcome.code} {words}"

    def after_crash(self, call: int, survivors: str, tree: Tree) -> str | None:
        """The problem of a disk that a crash after `call` calls leaves."""
        self.counts["crashes"] += 1
        problem = self._of_state(tree)
        operation = self.trace[call - 1]
        return problem and f"crash after call {call} ({operation.name} {operation.path}), kept: {survivors}: {problem}"

    def crashes(self, *, every: int = 1, first: int = 0) -> Iterator[tuple[int, str, Tree]]:
        """(number of calls made, what survives, the disk): the disk after each prefix of the calls, or some of them."""
        disk, number = Disk(self.before), 0
        for call, operation in enumerate(self.trace, start=1):
            disk.apply(operation)
            for kind in SURVIVORS:
                if number % every == first % every:
                    yield call, kind, disk.survivor(kind)
                number += 1

    def problems(self, *, every: int = 1, first: int = 0) -> list[str]:
        """What goes wrong under each fault, kill and crash, or under every N-th."""
        found = [self.with_fault(fault) for fault in faults_of(self.trace)[first % every :: every]]
        found += [self.after_crash(*crash) for crash in self.crashes(every=every, first=first)]
        return [problem for problem in found if problem is not None]

    def _of_outcome(self, fault: Fault, operation: Operation, outcome: Outcome) -> str | None:
        if fault.mode == KILL:
            return None if outcome.code == -9 else "it was not killed"
        absorbed = fault.mode == SHORT or fault.error == errno.EINTR
        spare = not operation.path.startswith("work/")  # caches and scratch files: the work goes on without
        tidying = kind_of(operation) in ("unlink", "rmdir") and bool(LEFTOVER.search(operation.path))
        if outcome.code == 0:
            if not (absorbed or spare or tidying):
                return "the failure was not reported"
            tree = self.shop.tree()
            found = {path: tree[path] for path in tree if not (tidying and LEFTOVER.search(path))}
            return None if self._same(found) else f"it succeeded with another result: {self._difference()}"
        if absorbed:
            return "it is no failure"
        if outcome.code != (MEMORY if operation.name == "mmap" else STORAGE):
            return "another exit code is documented"
        errors = [line for line in outcome.err.splitlines() if line.startswith("error:")]
        if len(errors) != 1 or "Traceback" in outcome.err:
            return "expected one line with the error"
        ours = [f"work/{path}" for path in (*self.scenario.targets, self.scenario.run or "")]
        named = [
            part for path in (operation.path, operation.other, *ours) for part in Path(path).parts if part != "work"
        ]
        parts = [PROCESS.sub("", LEFTOVER.sub("/", part)).strip("/-") for part in named]
        parts += [f"{self.shop.root}/"]  # of another file, which the full disk refused as well
        if outcome.code == STORAGE and not any(part and part in errors[0] for part in parts):
            return "the error names no path"
        if not tidying:
            left = [path for path in self.shop.tree() if LEFTOVER.search(path)]
            if left:
                return f"{left[0]} is left"
        return None

    def _of_state(self, tree: Tree, *, is_there: bool = False) -> str | None:
        """The problem of a disk: a mixture, a checkpoint that does not verify, another result in the end."""
        digest = hashlib.sha256()
        for path, content in tree.items():
            plain = FIGURE.sub(b"#", content) if content and path.endswith(TIMED) else content
            digest.update(repr((PROCESS.sub("#", path), plain)).encode())
        key = digest.hexdigest()
        if key not in self._judged:
            self.counts["states"] += 1
            if not is_there:
                self.shop.restore(tree)
            self._judged[key] = self._judgement(tree)
        return self._judged[key]

    def _judgement(self, tree: Tree) -> str | None:
        wholly_new = True
        for target in self.scenario.targets:
            now, old, new = (part_of(each, target) for each in (tree, self.before, self.after))
            if not self._equal(now, old) and not self._equal(now, new):
                return f"{target} is neither the old nor the new one"
            wholly_new &= self._equal(now, new)
        for checkpoint in self._checkpoints(tree):
            read = self.shop.command("inspect", checkpoint, "--verify")
            if read.code != 0:
                return f"inspect {checkpoint} --verify: exit {read.code} {read.err.strip()} {read.out.strip()[-300:]}"
        rerun = self.shop.command(*(self.scenario.again or self.scenario.words))
        if rerun.code == 2 and self.scenario.targets and wholly_new and "exists" in rerun.err:
            return None  # the whole result is there already, and is not replaced
        if rerun.code != 0:
            return f"the next run fails: exit {rerun.code} {rerun.err.strip()[-400:]}"
        return None if self._same(self.shop.tree()) else f"the next run ends elsewhere: {self._difference()}"

    def _checkpoints(self, tree: Tree) -> list[str]:
        """The complete checkpoints of the run: those with a manifest, which is written last and removed first."""
        places = [
            re.fullmatch(rf"work/({self.scenario.run}/checkpoints/step-\d+)/manifest.json", path) for path in tree
        ]
        return [place[1] for place in places if place]

    def _equal(self, now: Tree, other: Tree) -> bool:
        return list(now) == list(other) and all(now[path] == other[path] for path in now if path not in self.varying)

    def _same(self, tree: Tree) -> bool:
        return self._equal(self._results(tree), self._results(self.after))

    def _results(self, tree: Tree) -> Tree:
        return {path: tree[path] for path in tree if path.startswith(self.scenario.results)}

    def _difference(self) -> str:
        found, expected = self._results(self.shop.tree()), self._results(self.after)
        names = sorted(set(found) ^ set(expected))
        changed = [path for path in found if path in expected and path not in self.varying]
        return f"{names[:3]} {[path for path in changed if found[path] != expected[path]][:3]}"


def part_of(tree: Tree, target: str) -> Tree:
    """The file or folder `target` of `work/`."""
    place = f"work/{target}"
    return {path: content for path, content in tree.items() if path == place or path.startswith(f"{place}/")}
