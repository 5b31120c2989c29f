"""Child processes of a sweep: `tformer WORDS`, run to its end, forked from a warm process or started from scratch.

The warm process has imported PyTorch (also what its optimizers import later), training and evaluation, and forks a
child for every command line: that saves each child the seconds of the imports. It computes nothing itself, so a forked
child is a process like any other: it gives the same numbers, has its own exit code and signals, and its memory is
measured for it alone.

No child outlives the sweep: the warm process ends with the process that started it, and each child with the warm one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from tformer.support.device import peak_resident_bytes
from tformer.support.processes import end_with_parent, python_command

POLL_SECONDS = 0.05
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of `ru_maxrss`."""


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    code: its exit code; -N when signal N killed it. out: its standard output.
    peak_bytes: its largest resident set, without a GPU's memory. stopped: whether it was interrupted.
    """

    code: int
    out: str
    peak_bytes: int
    seconds: float
    stopped: bool


class Child(Protocol):
    """A running child."""

    pid: int

    def poll(self) -> tuple[int, int] | None:
        """(exit code, peak resident bytes); None: it still runs."""

    def end(self) -> None:
        """Kill it unless it has ended, and wait for its end."""


Start = Callable[[Sequence[str], IO[bytes], IO[bytes]], Child]
"""(words, file of its standard output, file of its messages) -> the running child."""


def run_child(words: Sequence[str], *, log: Path, should_stop: Callable[[], bool], start: Start) -> Ended:
    """Run `tformer WORDS` to its end; its stderr is appended to `log`.

    The child has its own process group, so that an interrupt reaches it once: from here, when `should_stop`
    returns True. It then gets all the time it needs to save. It never outlives this call.
    """
    began, stopped, observed = time.monotonic(), False, 0
    with tempfile.TemporaryFile() as out, log.open("ab") as messages:
        messages.write(os.fsencode(f"$ {subprocess.list2cmdline(['tformer', *words])}\n"))
        messages.flush()
        child = start(words, out, messages)
        try:
            while (ended := child.poll()) is None:
                observed = max(observed, peak_resident_bytes(child.pid) or 0)
                if should_stop() and not stopped:
                    stopped = True
                    os.kill(child.pid, signal.SIGINT)
                time.sleep(POLL_SECONDS)
        finally:
            child.end()
        out.seek(0)
        text = out.read().decode("utf-8", "replace")
    code, reported = ended
    return Ended(code, text, _peak(reported, observed), time.monotonic() - began, stopped)


def _peak(reported: int, observed: int) -> int:
    """The child's peak. Linux counts the parent's memory at the fork as the child's: up to that, `observed` counts."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT
    return observed if observed and reported <= own else reported


class Process:
    """A child that is started from scratch."""

    def __init__(self, words: Sequence[str], out: IO[bytes], messages: IO[bytes]) -> None:
        command = python_command("tformer", *words)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=messages, process_group=0
        )
        self.pid = self._process.pid

    def poll(self) -> tuple[int, int] | None:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if not pid:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it again
        return self._process.returncode, usage.ru_maxrss * MAXRSS_UNIT

    def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()


# --- the warm process -------------------------------------------------------------------------------------------------

MAX_MESSAGE_BYTES = 1 << 20
KILLED = (-int(signal.SIGKILL), 0)
"""The end of a child whose warm process was killed with it."""


@contextmanager
def warm_process() -> Iterator[Start]:
    """A function that starts children: forked from a warm process, which begins with the first of them.

    On other systems than Linux every child is started from scratch.
    """
    if sys.platform != "linux":  # elsewhere system libraries do not survive a fork
        yield Process
        return
    warm = _Warm()
    try:
        yield warm.start
    finally:
        warm.close()


class _Warm:
    """The connection to a warm process. Where it cannot be had, children are started from scratch."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(self, words: Sequence[str], out: IO[bytes], messages: IO[bytes]) -> Child:
        if self._process is None:
            number = self._far_end.fileno()
            self._process = subprocess.Popen(
                python_command("tformer.workflows.sweep.children", str(number)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[number],
                process_group=0,
            )
            self._far_end.close()
        try:
            files = [out.fileno(), messages.fileno()]
            socket.send_fds(self._connection, [json.dumps(list(words)).encode()], files)
            pid = self._connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            pid = b""
        return _Forked(int(pid), self._connection) if pid else Process(words, out, messages)

    def close(self) -> None:
        """End the warm process."""
        self._connection.close()
        self._far_end.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class _Forked:
    """A child of the warm process."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection = pid, connection
        self._ended: tuple[int, int] | None = None

    def poll(self) -> tuple[int, int] | None:
        with suppress(BlockingIOError):
            self._receive(socket.MSG_DONTWAIT)
        return self._ended

    def end(self) -> None:
        if self._ended is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._receive()

    def _receive(self, flags: int = 0) -> None:
        message = self._connection.recv(MAX_MESSAGE_BYTES, flags)
        code, peak = json.loads(message) if message else KILLED
        self._ended = code, peak


def serve(connection: socket.socket) -> None:
    """The warm process: fork a child for every list of words that arrives, until the connection ends."""
    warm = os.getpid()

    import tformer.tasks.evaluate
    import tformer.training.session  # noqa: F401

    ranges = resident_ranges()
    gc.freeze()  # no child collects, and thereby copies, what all of them share
    while True:
        message, files, *_ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
        if not message:
            return
        child = os.fork()
        if child == 0:
            end_with_parent(warm)
            connection.close()
            os.setpgid(0, 0)
            for number, file in enumerate(files, start=1):
                os.dup2(file, number)
                os.close(file)
            touch(ranges)
            sys.argv = ["tformer", *json.loads(message)]
            runpy.run_module("tformer", run_name="__main__", alter_sys=True)
            return
        for file in files:
            os.close(file)
        connection.send(str(child).encode())
        _, status, usage = os.wait4(child, 0)
        connection.send(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss * MAXRSS_UNIT]).encode())


MADV_POPULATE_READ = 22
PRESENT_BIT = 63
"""Bit of an entry of /proc/self/pagemap: the page is in memory."""


def resident_ranges() -> list[tuple[int, int]]:
    """(address, bytes) of the parts of mapped files that are in this process's memory; [] where the system hides them.

    A fork leaves them out of the child's resident set until it reads them, and a process that is started from scratch
    has read them while importing: with `touch` both are measured alike.
    """
    ranges: list[tuple[int, int]] = []
    with suppress(OSError), open("/proc/self/pagemap", "rb") as pages:
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            span, access, _, _, inode, *_ = line.split(maxsplit=5)
            if inode == "0" or "r" not in access:
                continue
            start, stop = (int(part, 16) for part in span.split("-"))
            pages.seek(start // mmap.PAGESIZE * 8)
            entries = np.frombuffer(pages.read((stop - start) // mmap.PAGESIZE * 8), dtype=np.uint64)
            present = np.concatenate([[0], entries >> np.uint64(PRESENT_BIT), [0]]).astype(np.int8)
            edges = np.flatnonzero(np.diff(present)).reshape(-1, 2) * mmap.PAGESIZE
            ranges += [(start + int(first), int(last - first)) for first, last in edges]
    return ranges


def touch(ranges: Sequence[tuple[int, int]]) -> None:
    """Take the pages into this process's resident set; without effect before Linux 5.14."""
    advise = ctypes.CDLL(None).madvise
    for start, length in ranges:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_POPULATE_READ)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
