"""Children, memory and temporary folders of a process. It may be killed: its children end, its folders are removed.

A process that is killed cannot end its children or delete its files. Therefore the children end themselves, so that
they keep no processor time, memory or lock, and the next process of the same user removes the folders.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the kernel sends this process a signal when the thread that started it ends. It is kept across `exec`,
and not inherited by children."""
POLL_SECONDS = 0.2

MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of `ru_maxrss`."""
LOG_TAIL_BYTES = 64_000

MOST_PROCESSES = 64
"""The limit of processes that one command starts, or the number of processors where that is higher."""

OWN_PATH = "import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[2]))\n"
    "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Program of `bound_command`: it depends on no package, and a parent that has ended already is noticed."""


def process_lock() -> Any:
    """A lock (`threading.RLock`) of what one thread of a process does at a time; free in a child of `os.fork`."""
    lock: Any = threading.RLock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock


def available_cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_processes() -> int:
    """The processes that one command may start: a typing error does not eat the machine."""
    return max(MOST_PROCESSES, available_cores())


def end_with_parent(parent: int) -> None:
    """Kill this process when process `parent`, which started it, has ended in whatever way; at once if it has already.

    On Linux the kernel does it, to a suspended process too; elsewhere a thread looks for the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    else:

        def wait_for_end() -> None:
            while os.getppid() == parent:
                time.sleep(POLL_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait_for_end, name="parent", daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def own_python(program: str, *words: str) -> list[str]:
    """The command line of Python code that imports from this package, with WORDS as arguments.

    Python looks for modules in the current folder first (`-c`, `-m`): a file `json.py` in a folder of unknown origin
    would run there. This command never does.
    """
    return [sys.executable, "-P", "-c", OWN_PATH + program, str(Path(__file__).resolve().parents[2]), *words]


def python_command(module: str, *words: str) -> list[str]:
    """The command line of `python -m MODULE WORDS` as a child of this process that ends with it.

    The module is not looked for in the current folder, see `own_python`.
    """
    return own_python("from tformer.support.processes import main; main()", str(os.getpid()), module, *words)


def bound_command(command: Sequence[str]) -> list[str]:
    """The command line of any program as a child of this process that gets SIGTERM when this process ends.

    On other systems than Linux, and where Python runs inside another program, it is the command itself.
    """
    if sys.platform != "linux" or not sys.executable:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", BOUND, str(os.getpid()), str(int(signal.SIGTERM)), *command]


def main() -> None:
    """The child of `python_command`, with the arguments PARENT MODULE WORDS."""
    import runpy

    parent, module = int(sys.argv[1]), sys.argv[2]
    end_with_parent(parent)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Child:
    """A running child, the command of `python_command`, which writes its messages to a file.

    It has its own process group: Ctrl-C on a terminal reaches this process alone, which decides what the child gets.

    Attributes:
        process: its pipes and its exit code.
        peak_bytes: its largest resident set until the last `poll`, without a GPU's memory.
    """

    def __init__(self, command: Sequence[str], *, messages: IO[Any], **options: Any) -> None:
        """messages: the file that its stderr is added to, open for reading too; options: of `subprocess.Popen`."""
        self.process = subprocess.Popen(command, stderr=messages, process_group=0, **options)
        self.peak_bytes = 0
        self._messages = messages

    def poll(self) -> int | None:
        """The exit code, or -N when signal N killed it; None: it still runs."""
        if self.process.returncode is None:
            self.peak_bytes = max(self.peak_bytes, peak_resident_bytes(self.process.pid) or 0)
            ended, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if ended:
                self.process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it again
                # Linux counts the parent's memory at the fork as the child's: up to that, what was seen counts.
                reported, own = usage.ru_maxrss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                if reported > own or not self.peak_bytes:
                    self.peak_bytes = reported * MAXRSS_UNIT
        return self.process.returncode

    def last_error(self) -> str:
        """The last message that begins with `error:`, else the last line of the messages; empty without any."""
        descriptor = self._messages.fileno()
        tail = os.pread(descriptor, LOG_TAIL_BYTES, max(0, os.fstat(descriptor).st_size - LOG_TAIL_BYTES))
        lines = tail.decode("utf-8", "replace").strip().splitlines()
        errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
        return (errors or lines or [""])[-1]

    def end(self) -> None:
        """Kill it unless it has ended, and wait for its end; may be called again."""
        if self.poll() is None:
            self.process.kill()
            self.process.wait()


def peak_resident_bytes(pid: int | None = None) -> int | None:
    """Largest resident set of a process, by default this one, in bytes; None where the system does not report it."""
    return _memory_of_process("VmHWM", pid)


def resident_bytes() -> int | None:
    """Resident set of this process in bytes; None where the system does not report it."""
    return _memory_of_process("VmRSS", None)


def _memory_of_process(key: str, pid: int | None) -> int | None:
    with suppress(OSError):
        status = Path(f"/proc/{'self' if pid is None else pid}/status").read_text()
        found = re.search(rf"^{key}:\s+(\d+) kB$", status, re.MULTILINE)
        return None if found is None else int(found[1]) * 1024
    return None


class ScratchFolder:
    """A temporary folder of the system, deleted by `cleanup`, at the end of a `with` block, or with this object.

    It is locked while this process lives: those of killed processes are recognized and removed by the next one.
    """

    def __init__(self, purpose: str) -> None:
        prefix = f"tformer-{purpose}-{os.getuid()}-"
        _remove_abandoned(prefix)
        descriptor = None
        while descriptor is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            descriptor = _held(self.path)
        self.cleanup = weakref.finalize(self, _remove, self.path, descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # of another process, or on a file system without locks
            descriptor = _opened(folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _held(folder: Path) -> int | None:
    """A descriptor of a new folder, locked where the file system can; None when another process has removed it."""
    try:
        descriptor = _opened(folder)
    except FileNotFoundError:
        return None
    except OSError:
        folder.rmdir()
        raise
    with suppress(OSError):  # without locks, `_remove_abandoned` removes nothing
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    if folder.exists():
        return descriptor
    os.close(descriptor)
    return None


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
