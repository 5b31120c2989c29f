"""Children and temporary folders of a process that may be killed: the children end with it, the folders are removed.

A process that is killed cannot end its children or delete its files. Therefore the children end themselves, so that
they keep no processor time, memory or lock, and the next process of the same user removes the folders.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the kernel sends this process a signal when the thread that started it ends. It is kept across `exec`,
and not inherited by children."""
POLL_SECONDS = 0.2

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
        threading.Thread(target=_wait_for_end, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
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


class ScratchFolder:
    """A temporary folder of the system, deleted by `cleanup`, at the end of a `with` block, or with this object.

    It is locked while this process lives: those of killed processes are recognised and removed by the next one.
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
        with contextlib.suppress(OSError):  # of another process, or on a file system without locks
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
    with contextlib.suppress(OSError):  # without locks, `_remove_abandoned` removes nothing
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
