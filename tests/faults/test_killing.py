"""The time limit of tests: it holds for commands in this process and for their children, and in C code."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.faults import killing
from tests.faults.killing import cpu_seconds_until_end, ends_within
from tformer.cli.process import StopFlag

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def sleeping() -> int:
    """A forked process that sleeps."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def test_the_limit_holds_after_a_command_that_uses_the_alarm_was_interrupted() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"no end within 0\.2 s"), ends_within(0.2):
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.should_stop()
        time.sleep(60)


def test_at_the_limit_children_are_killed() -> None:
    with pytest.raises(pytest.fail.Exception, match="no end"), ends_within(0.2):
        child = sleeping()
        time.sleep(60)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_child_that_outlives_the_block_fails_the_test() -> None:
    with pytest.raises(AssertionError), ends_within(60):
        child = sleeping()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_children_of_processes_that_ran_before_the_block_are_not_its_own() -> None:
    command = ["sh", "-c", "read line; sleep 60 & echo $!; read line; kill $!"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as before:
        assert before.stdin and before.stdout
        with ends_within(60):
            before.stdin.write("start\n")
            assert int(before.stdout.readline()) in killing.tree_of(os.getpid())
        before.stdin.write("end\n")


def test_a_block_in_c_code_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killing, "GRACE_SECONDS", 0.1)
    child = os.fork()
    if child == 0:
        with ends_within(0.1):
            ctypes.PyDLL(None).sleep(60)  # no other thread of Python runs meanwhile
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_the_time_that_a_killed_process_still_uses_is_that_of_its_processor() -> None:
    child = sleeping()
    os.kill(child, signal.SIGKILL)
    assert cpu_seconds_until_end([child]) < 0.1
    os.waitpid(child, 0)
