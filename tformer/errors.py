"""What a user can get wrong, and what the machine can refuse: one message, one hint, one exit code.

Every error a person is meant to read derives from `TformerError`; the command line prints its message and hint
and exits with its code. Anything else that escapes is a bug of ours, and is shown as one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TformerError(Exception):
    """A failure while running (exit code 1), told in one line, with an optional hint on what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(TformerError):
    """Bad usage, configuration or input: also a missing, damaged or mismatched file or checkpoint."""

    exit_code = 2


class StorageError(TformerError):
    """The disk or file system refuses a write: read-only, full, out of inodes."""

    exit_code = 3


class NonFiniteLossError(TformerError):
    """Training cannot go on: the loss is not finite."""

    exit_code = 4


class OutOfMemoryError(TformerError):
    """The device has too little memory for this model and batch."""

    exit_code = 5


class RunInUseError(TformerError):
    """Another process is writing to the run directory."""

    exit_code = 6


class Interrupted(TformerError):
    """SIGINT or SIGTERM was honoured: 128 + the signal's number."""

    def __init__(self, message: str, *, signal_number: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signal_number


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint that names the nearest choice, and all of them when they are few."""
    known = sorted(choices)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    listing = ", ".join(known) if len(known) <= 24 else ", ".join(known[:24]) + ", ..."
    if near:
        return f"did you mean '{near[0]}'? (known: {listing})"
    return f"known: {listing}"
