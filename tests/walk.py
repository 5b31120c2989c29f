"""Counts how many functions of tformer, in how many files, a command calls until the first result.

    python -m tests.walk train | generate | config [--list]

`train` is followed until the first loss, `generate` until the first token is chosen, `config` to its end. A function is
one `def` or lambda under `tformer/`, nested or not; what an import runs does not count. `--list` names them by file, in
the order in which the files are first called. Caches are filled by a first run, which does not count.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tformer.cli.app import main

HOUSE = str(Path(__file__).resolve().parent.parent / "tformer") + "/"


INNER = {"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}
"""Code objects that are a part of the function around them."""


class Reached(BaseException):
    """The function until which a command is followed was called."""


def walk(run: Callable[[], Any], until: tuple[str, str] | None = None) -> dict[CodeType, None]:
    """The functions that `run` calls, in order, until the function `until`: (file under tformer/, name)."""
    called: dict[CodeType, None] = {}
    imports = 0  # modules that are being imported

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal imports
        code = frame.f_code
        if code.co_name == "<module>":
            imports += {"call": 1, "return": -1}.get(event, 0)
        elif not imports and event == "call" and code.co_filename.startswith(HOUSE) and code.co_name not in INNER:
            called.setdefault(code)
            if (code.co_filename.removeprefix(HOUSE), code.co_name) == until:
                sys.setprofile(None)
                raise Reached

    sys.setprofile(note)
    try:
        with suppress(Reached, SystemExit):
            run()
    finally:
        sys.setprofile(None)
    return called


def files_of(called: dict[CodeType, None]) -> dict[str, list[str]]:
    """The names of the functions by file under tformer/."""
    found: dict[str, list[str]] = {}
    for code in called:
        found.setdefault(code.co_filename.removeprefix(HOUSE), []).append(f"{code.co_qualname}:{code.co_firstlineno}")
    return found


def train_words(folder: Path) -> list[str]:
    """The words of a training on a text, after a training of one step in another process has filled the caches."""
    text = folder / "t.txt"
    text.write_text("".join(f"{number} plus {number} is {2 * number}.\n" for number in range(2000)))
    words = ["train", "--arch", "gpt", "--preset", "tiny", "--data", str(text), "--out"]
    first = [sys.executable, "-c", "from tformer.cli.app import main; main()", *words, str(folder / "first")]
    subprocess.run([*first, "--max-steps", "1"], check=True, capture_output=True)
    return [*words, str(folder / "second")]


def walk_train(folder: Path) -> dict[CodeType, None]:
    """`tformer train` on a text, until the loss of the first batch."""
    words = train_words(folder)
    return walk(lambda: main(words), ("nn/losses.py", "linear_cross_entropy"))


def walk_generate(folder: Path) -> dict[CodeType, None]:
    """`tformer generate` with a prompt, until its first token is chosen."""
    train_words(folder)
    words = ["generate", str(folder / "first"), "--prompt", "1 plus"]
    return walk(lambda: main(words), ("decoding/sampling.py", "draw"))


def walk_config(folder: Path) -> dict[CodeType, None]:
    """`tformer config show` with a value set."""
    return walk(lambda: main(["config", "show", "--arch", "gpt", "--set", "model.decoder.positions.kind=rope"]))


WALKS = {"train": walk_train, "generate": walk_generate, "config": walk_config}

if __name__ == "__main__":
    name, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(WALKS[name](Path(folder)))
    if flags:
        for file, functions in files.items():
            print(f"{file} ({len(functions)}): {', '.join(functions)}")
    print(f"{sum(map(len, files.values()))} functions in {len(files)} files")
