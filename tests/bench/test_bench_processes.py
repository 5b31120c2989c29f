"""Measuring processes: answers, failures, time limits, stops, and the order of rounds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tformer.bench import processes
from tformer.bench.processes import RacedRow, race, run_isolated, summarize
from tformer.bench.speed import ContenderSpec, SpeedBench
from tformer.bench.worker import reason_of
from tformer.support.errors import Interrupted


def test_summary_of_durations() -> None:
    found = summarize([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (found["seconds"], found["minimum"], found["repeats"]) == (3.0, 1.0, 5)
    assert found["spread"] == pytest.approx((4.0 - 2.0) / 3.0)


def test_one_duration_has_no_spread() -> None:
    assert summarize([2.0])["spread"] == 0.0


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`child(script)`: what runs instead of Python; it notes its process id."""

    def become(script: str) -> Path:
        noted, program = tmp_path / "pid", tmp_path / "program"
        program.write_text(f"#!/bin/sh\necho $$ > {noted}\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return noted

    return become


def run_once(max_seconds: float = 30, *, should_stop: Any = lambda: False) -> dict[str, Any]:
    return run_isolated("module:function", {"kind": "full"}, max_seconds=max_seconds, should_stop=should_stop)


def noted_is_running(noted: Path) -> bool:
    try:
        os.kill(int(noted.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_the_line_on_stdout_is_the_answer(child: Any) -> None:
    child("read request; echo noise >&2; echo '{\"median\": 1.5}'")
    assert run_once() == {"median": 1.5}


def test_a_process_over_the_limit_is_ended(child: Any) -> None:
    noted = child("exec sleep 60")
    began = time.monotonic()
    assert run_once(max_seconds=0.5) == {"failed": "over 0.5 s"}
    assert time.monotonic() - began < 30 and not noted_is_running(noted)


def test_a_stop_ends_the_process_and_gives_nothing(child: Any) -> None:
    noted = child("exec sleep 60")
    with pytest.raises(Interrupted):
        run_once(should_stop=noted.exists)
    assert not noted_is_running(noted)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"kill -{signal.SIGKILL.value} $$", "out of memory: the system ended the process"),
        (f"kill -{signal.SIGALRM.value} $$", "over 30 s"),
        ("read request; echo first >&2; echo last >&2; exit 3", "the process ended with 3: last"),
        ("read request", "the process ended with 0: no message"),
    ],
)
def test_an_end_without_an_answer_is_told(child: Any, script: str, told: str) -> None:
    child(script)
    assert run_once() == {"failed": told}


def test_failures_inside_are_told_in_one_line() -> None:
    assert reason_of(MemoryError()) == "out of memory"
    assert (
        reason_of(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes")) == "out of memory"
    )
    assert reason_of(ValueError("window: 100 is odd\nand more")) == "window: 100 is odd"
    assert reason_of(RuntimeError("broken")) == "RuntimeError: broken"


def test_what_is_refused_comes_back_from_a_real_process() -> None:
    found = run_isolated("tformer.bench:nothing", {}, max_seconds=100, should_stop=lambda: False)
    assert found == {"failed": "AttributeError: module 'tformer.bench' has no attribute 'nothing'"}


PROCESS = """#!{python}
import json, os, signal, sys, time
from pathlib import Path

def read():
    line = sys.stdin.readline()
    return json.loads(line) if line else sys.exit()

def say(**answer):
    print(json.dumps(answer), flush=True)

log = Path({log!r})
request = read()
given = request["arguments"]
name, plan = given["name"], given.get("plan", {{}})
rounds = 0
while True:
    what = request.get("question", "prepare")
    with log.open("a") as file:
        file.write(f"{{name}} {{what}} {{os.getpid()}}\\n")
    rounds += what == "round"
    end = plan.get(what if what != "round" else f"round {{rounds}}")
    if end == "dies":
        print("what a pity", file=sys.stderr, flush=True)
        os._exit(3)
    elif end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "fails":
        say(failed="RuntimeError: broken")
    elif end == "full":
        full = log.with_name("full")
        if full.exists():
            say()
        else:
            full.touch()
            say(failed="out of memory")
    elif end == "sleeps":
        time.sleep(60)
    elif what == "prepare":
        say()
    elif what == "round":
        say(seconds=plan.get("seconds", 1.0), tokens=7)
    else:
        say(peak_rss_bytes=9)
    request = read()
"""


class Log:
    """What the processes did, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def words(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def of(self, what: str) -> str:
        return "".join(name for name, told, _ in self.words() if told == what)

    def nobody_is_left(self) -> bool:
        return not any(is_running(int(process)) for _, _, process in self.words())


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Processes that do no work, but as they are told: "round 2": "dies"."""
    program, found = tmp_path / "program", tmp_path / "log"
    program.write_text(PROCESS.format(python=sys.executable, log=str(found)))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return Log(found)


def run(*plans: dict[str, Any], repeats: int = 3, max_seconds: float = 100, **changes: Any) -> list[RacedRow]:
    contenders = [{"name": name, "plan": plan} for name, plan in zip("abc", plans, strict=False)]
    rules: dict[str, Any] = {"should_stop": lambda: False, **changes}
    return race("module:function", contenders, repeats=repeats, max_seconds=max_seconds, **rules)


def test_rounds_are_in_turn_once_all_are_prepared(log: Log) -> None:
    rows = run({}, {"seconds": 0.25}, {})
    assert [words[:2] for words in log.words()[:3]] == [["a", "prepare"], ["b", "prepare"], ["c", "prepare"]]
    assert log.of("round") == "abc" * 3 and log.of("peak") == "abc"
    assert rows[1] == {
        "seconds": 0.25, "minimum": 0.25, "spread": 0.0, "repeats": 3, "tokens": 7, "memory": {"peak_rss_bytes": 9},
    }  # fmt: skip
    assert len({process for _, _, process in log.words()}) == 3 and log.nobody_is_left()


def test_quick_rounds_go_on_until_each_has_had_enough(log: Log) -> None:
    rows = run({"seconds": 0.125}, {"seconds": 10.0})
    assert [row["repeats"] for row in rows] == [4, 4]


def test_one_turn_is_timed_whatever_the_limit_and_none_begins_after_it(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SHARE_FOR_ROUNDS", 0.0)
    run({}, {}, repeats=10**9)
    assert log.of("round") == "ab"


def test_no_turn_begins_that_somebody_has_no_time_for(log: Log) -> None:
    rows = run({"seconds": 1000.0}, {}, repeats=10**9)
    assert log.of("round") == "ab" and "failed" not in rows[0]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("dies", "the process ended with 3: what a pity"),
        ("killed", "out of memory: the system ended the process"),
        ("fails", "RuntimeError: broken"),
    ],
)
def test_one_that_ends_in_a_round_fails_alone(log: Log, end: str, told: str) -> None:
    rows = run({}, {"round 2": end}, {})
    assert rows[1] == {"failed": told}
    assert [row.get("repeats") for row in rows] == [3, None, 3]
    assert log.of("round").startswith("abc" + "abc" + "ac") and log.nobody_is_left()


def test_one_that_cannot_be_prepared_fails_alone(log: Log) -> None:
    rows = run({"prepare": "fails"}, {})
    assert rows[0] == {"failed": "RuntimeError: broken"} and log.of("round") == "bbb"


def test_where_all_fail_nothing_is_timed(log: Log) -> None:
    rows = run({"prepare": "fails"}, {"prepare": "dies"})
    assert ["failed" in row for row in rows] == [True, True] and log.of("round") == ""


def test_one_over_the_limit_fails_alone(log: Log) -> None:
    rows = run({"round 1": "sleeps"}, {}, max_seconds=3)
    assert rows[0] == {"failed": "over 3 s"} and "failed" not in rows[1]
    assert log.nobody_is_left()


def test_one_without_room_beside_the_others_is_measured_alone(log: Log) -> None:
    rows = run({}, {"prepare": "full"})
    assert log.of("round") == "aaa" + "bbb" and [row["repeats"] for row in rows] == [3, 3]
    assert "alone" not in rows[0] and rows[1]["alone"] is True


def test_one_without_room_though_it_is_alone_fails_once(log: Log) -> None:
    assert run({"prepare": "full"}) == [{"failed": "out of memory"}] and log.of("prepare") == "a"


@pytest.mark.parametrize("where", ["prepare", "round"])
def test_a_stop_ends_all_processes_soon(log: Log, where: str) -> None:
    began = time.monotonic()
    first = "prepare" if where == "prepare" else "round 1"
    with pytest.raises(Interrupted):
        run({}, {first: "sleeps"}, should_stop=lambda: "b" in log.of(where))
    assert time.monotonic() - began < 30 and log.nobody_is_left()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for states in /proc")
def test_who_has_not_its_turn_stands_still(log: Log) -> None:
    states: list[str] = []

    def look() -> bool:
        if "b" in log.of("round"):
            first = log.words()[0][2]
            states.append(Path(f"/proc/{first}/stat").read_text().rsplit(")", 1)[1].split()[0])
        return bool(states)

    with pytest.raises(Interrupted):
        run({}, {"round 1": "sleeps"}, should_stop=look)
    assert states == ["T"]


PARENT = """
import sys
from tformer.bench.processes import race
sys.executable = sys.argv[1]
contenders = [{"name": name, "plan": plan} for name, plan in (("a", {}), ("b", {"round 1": "sleeps"}))]
race("module:function", contenders, repeats=3, max_seconds=50, should_stop=lambda: False)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems were not tried")
def test_nothing_that_stands_still_outlives_its_parent(log: Log) -> None:
    python, program = Path("/proc/self/exe").resolve(), sys.executable
    parent = subprocess.Popen(
        [python, "-c", PARENT, program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    deadline = time.monotonic() + 200
    while "b" not in log.of("round") and time.monotonic() < deadline:
        time.sleep(0.05)
    stopped = int(log.words()[0][2])
    assert is_running(stopped)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while is_running(stopped) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(log.words()[-1][2]), signal.SIGKILL)  # it ends itself, but not so soon
    assert not is_running(stopped)


REAL = """#!{python}
import os, sys
from tformer.bench import speed, worker
from tformer.bench.workloads import Contender

settings = []
speed.keep_freed_memory = lambda: settings.append("kept")

class Fake(Contender):
    def prepare(self):
        os.environ["SEEN"] = os.environ.get("SEEN", "") + "x"
        print("a library's own words")
    def run(self):
        if self.precision == "gone":
            raise ValueError("gone")
        return 10 * len(os.environ["SEEN"]) + len(settings)

speed.Fake = Fake
worker.main()
"""


@pytest.mark.slow
def test_real_processes_keep_their_settings_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_speed_bench: Callable[..., SpeedBench]
) -> None:
    """Only the process of tformer keeps freed memory, and no process sees the environment that another one changes."""
    program = tmp_path / "program"
    program.write_text(REAL.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(sys, "executable", str(program))
    names = (("tformer", "bf16"), ("other", "fp32"), ("other", "gone"))
    entries = tuple(ContenderSpec(*each, "tformer.bench.speed:Fake") for each in names)
    given = {"bench": asdict(make_speed_bench(entries=entries)), "batch_size": 2}
    contenders = [{**given, "entry": entry} for entry in entries]
    rows = race(
        "tformer.bench.speed:start_contender", contenders, repeats=1, max_seconds=600, should_stop=lambda: False
    )
    assert [row.get("tokens") for row in rows] == [11, 10, None]
    assert rows[2] == {"failed": "gone"}
    assert all(row["memory"]["peak_rss_bytes"] > 2**20 for row in rows[:2])
