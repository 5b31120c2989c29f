"""User-facing exceptions: message, hint, exit code.

The command line prints message and hint of a `TformerError` and exits with its code. Any other exception is reported
as an internal error.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class TformerError(Exception):
    """A failure while running (exit code 1): a message of one line and an optional hint."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(TformerError):
    """Bad usage, configuration or input: also a missing, damaged or mismatched file or checkpoint."""

    exit_code = 2


class Caution(str):
    """A note for the user that is also a warning in Python."""


class InputErrors(InputError):
    """Several input errors, one per line."""


class OtherProcessError(InputError):
    """Another process of the same training has raised an InputError: this one ends with it."""


class StorageError(TformerError):
    """The disk or file system refuses a write: read-only, full, out of inodes."""

    exit_code = 3


class NotFiniteError(TformerError):
    """A loss, weights or outputs that are NaN or infinite."""

    exit_code = 4


def require_finite(values: Any, what: str) -> None:
    """Raise NotFiniteError for NaN or infinity among a model's outputs: a tensor or an array; `what` names them."""
    least, most = (float(values.min()), float(values.max())) if math.prod(values.shape) else (0.0, 0.0)
    if not math.isfinite(most - least):
        raise NotFiniteError(
            f"the model's {what} are {'not numbers (NaN)' if math.isnan(most) else 'infinite'}",
            hint="its weights are damaged, training diverged, or --precision fp32 is needed",
        )


class OutOfMemoryError(TformerError):
    """The device has too little memory for this model and batch."""

    exit_code = 5


class RunInUseError(TformerError):
    """Another process is writing to the run directory."""

    exit_code = 6


class Interrupted(TformerError):
    """Interrupted by SIGINT or SIGTERM: exit code 128 + the signal number."""

    def __init__(self, message: str, *, signal_number: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signal_number


def require_package(name: str, *, extra: str, user: str) -> None:
    """Raise InputError if the module that `user` needs is not installed; extra: of tformer, which installs it."""
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise InputError(
            f"{user} needs the package {name}, which is not installed", hint=f"pip install 'tformer[{extra}]'"
        )


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint that names the nearest choice, and all of them when they are few."""
    known = sorted(choices)
    listing = ", ".join(known) if len(known) <= 24 else ", ".join(known[:24]) + ", ..."
    near = nearest(word, known)
    return f"known: {listing}" if near is None else f"did you mean '{near}'? (known: {listing})"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that is spelled most like a word; None: no one is."""
    return next(iter(difflib.get_close_matches(word, sorted(choices), n=1, cutoff=0.5)), None)


def cannot_write(
    path: Path | str, error: OSError, *, bytes_needed: int | None = None, hint: str | None = None
) -> StorageError:
    """The error of a failed write: path, reason and, where known, the number of bytes needed."""
    reason = os.strerror(error.errno) if error.errno else "only a part was written"  # as numpy has it
    needs = "" if bytes_needed is None else f" ({bytes_needed:,} bytes needed)"
    return StorageError(f"cannot write {path}: {reason}{needs}", hint=hint)


# C0 except tab and newline, DEL, C1, bidirectional controls, which can reorder the text around them, and lone
# surrogates, which stand for bytes of a file's name that are no UTF-8.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with control characters escaped (`\x1b`), so that foreign text cannot control a terminal.

    Tab and newline stay, and letters and spaces of all scripts.
    """
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)
