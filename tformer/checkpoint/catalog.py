"""The checkpoints of a run: listing, the latest and the best, pointers, removal of old ones.

The folders decide, ordered by step, never by time. The pointer files `latest` and `best`, each with the name of a
folder, are for people and other programs; they are rewritten whenever they differ from the folders.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tformer.checkpoint.manifest import read_manifest
from tformer.support import files
from tformer.support.errors import InputError
from tformer.support.files import open_regular

LATEST, BEST = "latest", "best"
_STEP = re.compile(r"(?:\.old-)?step-(\d{1,15})")


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A complete checkpoint. `score` is its validation score (lower is better), or None if it was not validated.

    loss: of the same validation; infinite if the checkpoint does not say.
    """

    step: int
    path: Path
    score: float | None
    loss: float = math.inf


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def is_complete(checkpoint: Path) -> bool:
    """Whether the folder holds a checkpoint: the manifest is written last and removed first."""
    return (checkpoint / files.MANIFEST).is_file()


def scan(folder: Path) -> list[CheckpointEntry]:
    """The complete checkpoints (those with a manifest) in the order of their steps."""
    entries: dict[int, CheckpointEntry] = {}
    for name in _names(folder):  # `.old-step-…` sorts first and is replaced by `step-…`
        match = _STEP.fullmatch(name)
        path = folder / name
        if match and is_complete(path):
            step = int(match[1])
            entries[step] = CheckpointEntry(step, path, None)
            with suppress(InputError):  # reported when this checkpoint is read
                found = read_manifest(path)
                entries[step] = CheckpointEntry(step, path, found.score, math.inf if found.loss is None else found.loss)
    return [entries[step] for step in sorted(entries)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from error


def latest(entries: Sequence[CheckpointEntry]) -> CheckpointEntry | None:
    return entries[-1] if entries else None


def best(entries: Sequence[CheckpointEntry]) -> CheckpointEntry | None:
    """The checkpoint with the lowest score, without any score the latest.

    Ties go to the lower loss, then to the earlier step.
    """
    scored = [entry for entry in entries if entry.score is not None]
    return min(scored, key=lambda entry: (entry.score, entry.loss, entry.step)) if scored else latest(entries)


def tidy(folder: Path, *, keep_last: int | None = None) -> None:
    """Finish or undo interrupted work in a folder of checkpoints, prune it, and correct its pointers.

    Puts back a checkpoint that was being replaced, corrects the pointers, removes all but the last `keep_last` and the
    best (None: keeps all), and sweeps temporaries and half-removed checkpoints. Only for the holder of the run's lock.
    """
    for name in _names(folder):
        if name.startswith(files.OLD):
            files.settle_replaced(folder / name.removeprefix(files.OLD))
    entries = scan(folder)
    _point(folder / LATEST, latest(entries))
    _point(folder / BEST, best(entries))
    if keep_last is not None:
        assert keep_last >= 1, keep_last
        best_entry = best(entries)
        for entry in entries[:-keep_last]:
            if entry is not best_entry:
                files.remove_tree(entry.path)
    for name in _names(folder):
        path = folder / name
        is_half = path.is_dir() and not path.is_symlink() and not is_complete(path)
        if name.startswith(files.TEMPORARY) or (_STEP.fullmatch(name) and is_half):
            files.remove_tree(path)


def _point(pointer: Path, entry: CheckpointEntry | None) -> None:
    """Write a pointer if it is missing or wrong."""
    if entry is None:
        if os.path.lexists(pointer):
            files.unlink(pointer)
        return
    if read_pointer(pointer) != entry.path.name:
        if pointer.is_symlink():  # replace the link itself, not its target
            files.unlink(pointer)
        files.write_text(pointer, entry.path.name + "\n")


def read_pointer(pointer: Path) -> str | None:
    """The checkpoint's name in a pointer file, None when the file is missing or holds anything else."""
    try:
        with open_regular(pointer) as stream:
            name = stream.read(64).decode("ascii", "replace").strip()
    except InputError:
        return None
    return name if _STEP.fullmatch(name) else None
