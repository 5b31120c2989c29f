"""A copy of the package with a new entry in one of its tables: one small file and one row.

The tests of this folder check the promise that a variant takes one file and one table row. They add a dummy variant to
a copy of the package and run the commands on it, so that a list of names hidden elsewhere makes them fail.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.killing import ends_within

ROOT = Path(__file__).parents[2]

PRELUDE = '''\
import contextlib, io, json, sys

import torch

torch.set_num_threads(1)


def command(*arguments):
    """(exit code, standard output) of a tformer command in this process."""
    from tformer.cli.app import main

    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
    return code, out.getvalue()


def succeed(*arguments):
    """Standard output of a command, which must succeed."""
    code, out = command(*arguments)
    assert code == 0, f"{' '.join(map(str, arguments))}: exit code {code}"
    return out


def report(value):
    """The value that `Overlay.run` returns."""
    print("REPORT " + json.dumps(value), file=sys.stderr)

'''


SEVERAL = """
import os, traceback

home = os.getcwd()


def outcome_of(folder, script):
    found = []
    os.chdir(os.path.join(home, folder))
    try:
        exec(script, {"command": command, "succeed": succeed, "json": json, "report": found.append})
        return {"found": found[-1]}
    except BaseException:
        return {"failed": traceback.format_exc()}


report({folder: outcome_of(folder, script) for folder, script in {scripts}.items()})
"""


@dataclass(frozen=True)
class Overlay:
    """root: the folder that holds the changed copy of `tformer`."""

    root: Path

    def run(self, script: str, *, cwd: Path) -> Any:
        """Run a Python script on the copy, with `command`, `succeed` and `report` at hand; the value it reported."""
        log = cwd / "log"
        _server()  # it outlives the block
        with ends_within(300):
            code = _ask({"root": str(self.root), "cwd": str(cwd), "log": str(log), "script": PRELUDE + script})
        text = log.read_text(errors="replace")
        assert code == 0, text[-8000:]
        reports = [line for line in text.splitlines() if line.startswith("REPORT ")]
        return json.loads(reports[-1].removeprefix("REPORT ")) if reports else None

    def run_each(self, scripts: Mapping[str, str], *, cwd: Path) -> dict[str, dict[str, Any]]:
        """Run scripts in one process, each in the folder of its name: {"found": its report} or {"failed": why}."""
        found: dict[str, dict[str, Any]] = self.run(SEVERAL.replace("{scripts}", repr(dict(scripts))), cwd=cwd)
        return found


def _ask(request: dict[str, str]) -> int:
    """The exit code of a script that a process with PyTorch, and without threads, runs in a forked child.

    The test process may have threads, whose locks a child of it would wait for without end.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        _server.cache_clear()
        raise AssertionError("the process that forks has ended")
    return int(answer)


@cache
def _server() -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.completeness.overlay"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Answer each request, a line of JSON, with the exit code of its script."""
    for name in ("torch", "numpy", "tokenizers", "safetensors.torch", "pydantic", "typer", "rich.console"):
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _execute(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)


def _execute(root: str, cwd: str, log: str, script: str) -> NoReturn:
    """The forked process."""
    code = 1
    try:
        with open(log, "wb") as file, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(cwd)
        sys.path.insert(0, root)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tformer"]:
            del sys.modules[name]
        lines: dict[str, Any] = {"mode": "w", "buffering": 1, "closefd": False}
        with open(1, **lines) as sys.stdout, open(2, **lines) as sys.stderr:
            try:
                exec(script, {"__name__": "__main__"})
                code = 0
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def overlay(tmp_path: Path, *, files: Mapping[str, str], rows: Mapping[str, Sequence[tuple[str, str]]]) -> Overlay:
    """A copy of the package in `tmp_path` with new files, and with lines replaced in existing ones.

    files: {path: text} of files that do not exist yet.
    rows: {path: (old text, new text) pairs}; each old text must occur exactly once.
    """
    root = tmp_path / "package"
    for name in ("tformer", "configs"):
        shutil.copytree(ROOT / name, root / name)  # with the compiled files, which stay valid
    for name, text in files.items():
        assert not (root / name).exists(), f"{name} exists already"
        (root / name).write_text(text, encoding="utf-8")
    for name, changes in rows.items():
        text = (root / name).read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {name}"
            text = text.replace(old, new)
        (root / name).write_text(text, encoding="utf-8")
    return Overlay(root)


if __name__ == "__main__":
    serve()
