"""What a user can get wrong, and what the machine can refuse: one message, one hint, one exit code.

Every error a person is meant to read derives from `TformerError`; the command line prints its message and hint
and exits with its code. Anything else that escapes is a bug of ours, and is shown as one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path


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


def cannot_write(
    path: Path | str, error: OSError, *, bytes_needed: int | None = None, hint: str | None = None
) -> StorageError:
    """The refusal of a write by the operating system, with the path and, where it is known, what was needed."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    needs = "" if bytes_needed is None else f" ({bytes_needed:,} bytes needed)"
    return StorageError(f"cannot write {path}: {reason}{needs}", hint=hint)


# C0 but for tab and newline, DEL, C1; and the bidirectional controls that can reorder what is shown around them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The text with control characters spelled out (`\x1b`), so that what somebody else wrote cannot steer a terminal.

    Tab and newline stay, and so does every letter and space of any script.
    """
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)
