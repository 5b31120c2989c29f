"""Commands on a terminal of 40 columns, and with NO_COLOR (https://no-color.org)."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.quick import first_is_quick

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLUMNS = 40


def on_terminal(*words: str, **environment: str) -> tuple[int, str]:
    """(exit code, output) of a command on a terminal of 40 columns."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    surroundings = {**plain, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    command = [sys.executable, "-m", "tformer", *words]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=surroundings)
    os.close(terminal)
    output = b""
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # the last process has closed the terminal
            break
        if not part:
            break
        output += part
    os.close(master)
    return process.wait(), output.decode()


@first_is_quick("words", [(), ("train", "--help"), ("config", "list", "--arch", "nonsense"), ("guide", "security")])
def test_no_color_turns_colours_off(words: tuple[str, ...]) -> None:
    coded, plain = (on_terminal(*words, **environment) for environment in ({}, {"NO_COLOR": "1"}))
    assert coded[0] == plain[0] and not COLOUR.search(plain[1])
    assert CONTROL.sub("", coded[1]) == CONTROL.sub("", plain[1])


@first_is_quick(
    "words",
    [
        ("config", "explain", "model.encoder.positions"),
        ("doctor", "--no-speed"),
        ("runs", "--help"),
        ("guide",),
        ("guide", "what", "is", "kept"),
    ],
)
def test_lines_fit_into_forty_columns_or_hold_one_long_word(words: tuple[str, ...]) -> None:
    code, output = on_terminal(*words)
    assert code == 0 and "Traceback" not in output and "…" not in output
    for line in CONTROL.sub("", output).replace("\r", "\n").splitlines():
        assert len(line) <= COLUMNS or len(line.split()[-1]) >= COLUMNS - 12, line
