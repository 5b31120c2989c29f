"""Children end with a parent that is killed; temporary folders of killed processes are removed by the next one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.killing import is_alive
from tformer.support import processes
from tformer.support.processes import ScratchFolder, bound_command, own_python, python_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for states in /proc")

SLEEPER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open("terminated", "w").close(), sys.exit()))
open("started", "w").write(f"{os.getpid()} {sys.argv[1:]}")
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
from tformer.support.processes import bound_command, own_python, python_command
elsewhere = "import sys; sys.platform = 'darwin'; from tformer.support.processes import main; main()"
child = subprocess.Popen({command})
time.sleep(60)
"""


def ended_within(process: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(process)


def content_of(file: Path) -> str:
    """The text of a file, once there is some."""
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return file.read_text()


@pytest.fixture
def start_parent(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """A function that starts a process with a child; it returns the process and the child's process id."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    parents: list[subprocess.Popen[bytes]] = []

    def start(command: str) -> tuple[subprocess.Popen[bytes], int]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        parents.append(
            subprocess.Popen([sys.executable, "-c", PARENT.format(command=command)], cwd=tmp_path, env=environment)
        )
        return parents[-1], int(content_of(tmp_path / "started").split()[0])

    yield start
    for parent in parents:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize(
    "command",
    [
        "python_command('sleeper', 'a', 'b c')",
        "own_python(elsewhere, str(os.getpid()), 'sleeper', 'a', 'b c')",
    ],
    ids=["linux", "elsewhere"],
)
def test_a_child_ends_within_two_seconds_when_its_parent_is_killed(
    start_parent: Callable[..., tuple[subprocess.Popen[bytes], int]], tmp_path: Path, command: str
) -> None:
    parent, child = start_parent(command)
    assert is_alive(child) and content_of(tmp_path / "started") == f"{child} ['a', 'b c']"
    parent.kill()
    assert ended_within(child, 2)
    assert not (tmp_path / "terminated").exists()


def test_a_suspended_child_ends_when_its_parent_is_killed(
    start_parent: Callable[..., tuple[subprocess.Popen[bytes], int]],
) -> None:
    parent, child = start_parent("python_command('sleeper')")
    os.kill(child, signal.SIGSTOP)
    parent.kill()
    assert ended_within(child, 2)


def test_any_program_is_asked_to_terminate_when_its_parent_is_killed(
    start_parent: Callable[..., tuple[subprocess.Popen[bytes], int]], tmp_path: Path
) -> None:
    parent, child = start_parent("bound_command([sys.executable, 'sleeper.py'])")
    parent.kill()
    assert ended_within(child, 2)
    assert (tmp_path / "terminated").exists()


def test_a_child_whose_parent_ended_before_it_began_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    another = str(os.getppid())
    for command in (python_command("sleeper"), bound_command([sys.executable, "sleeper.py"])):
        words = [another if word == str(os.getpid()) else word for word in command]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        assert subprocess.run(words, cwd=tmp_path, env=environment, timeout=60).returncode in (0, -signal.SIGKILL)
    assert not (tmp_path / "started").exists()


def test_a_bound_program_keeps_its_streams_and_exit_code() -> None:
    ended = subprocess.run(bound_command(["sh", "-c", "cat; exit 7"]), input=b"text", stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (7, b"text")


@pytest.mark.parametrize(
    "command",
    [python_command("tformer", "--version"), own_python("import json, shutil, tformer"), bound_command(["true"])],
    ids=["module", "code", "program"],
)
def test_no_child_runs_a_file_of_the_current_folder(tmp_path: Path, command: list[str]) -> None:
    for name in ("ctypes", "json", "os", "runpy", "shutil", "tformer"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n")
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=60).returncode == 0
    assert not (tmp_path / "ran").exists()


MAKER = """
import sys, time
from tformer.support.processes import ScratchFolder
folder = ScratchFolder("testing")
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
if sys.argv[1] == "sleep":
    time.sleep(60)
"""


def test_the_scratch_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tformer-testing-other").mkdir()
    processes = [
        subprocess.Popen([sys.executable, "-c", MAKER, "sleep"], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = [Path(process.stdout.readline().strip()) for process in processes if process.stdout is not None]
    try:
        processes[0].kill()
        processes[0].wait()
        assert all((folder / "file").exists() for folder in folders)
        with ScratchFolder("testing") as own:
            assert own.is_dir() and own.parent == tmp_path
            assert not folders[0].exists() and (folders[1] / "file").exists()
        assert {path.name for path in tmp_path.iterdir()} == {"tformer-testing-other", folders[1].name}
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_scratch_folder_is_deleted_when_its_process_ends(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", MAKER, "end"], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert not list(tmp_path.iterdir())


def test_a_scratch_folder_needs_no_locks_and_without_them_none_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes.fcntl, "flock", refuse)
    with ScratchFolder("testing") as first, ScratchFolder("testing") as second:
        assert first.is_dir() and second.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_scratch_folder_that_cannot_be_opened_is_an_error_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(prefix: str) -> str:
        assert not made, "a second folder"
        made.append(str(tmp_path / prefix))
        os.mkdir(made[0])
        return made[0]

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes.tempfile, "mkdtemp", make)
    with monkeypatch.context() as patch:
        patch.setattr(processes.os, "open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            ScratchFolder("testing")
    assert not list(tmp_path.iterdir())
