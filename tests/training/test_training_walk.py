"""How far a reader follows `tformer train` from the command to the loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUNCTIONS, FILES = 700, 111
"""What `python -m tests.walk train` counts, and the few more that a slow start calls. A change that needs more has a
reason, or a shorter way."""


@pytest.mark.slow
def test_the_way_from_the_command_to_the_loss_does_not_grow() -> None:
    """Slow, without a twin: it counts what a reader reads, and a training by a command shows that it works."""
    command = [sys.executable, "-m", "tests.walk", "train"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    functions, _, _, files, _ = done.stdout.split()[-5:]
    assert int(functions) <= FUNCTIONS and int(files) <= FILES, done.stdout
