"""Where the runs are: under a folder, also inside folders of runs such as those of a sweep."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tformer.checkpoint.atomic import MANIFEST
from tformer.checkpoint.resolve import newest_checkpoint, resolve_checkpoint
from tformer.checkpoint.run import CHECKPOINTS
from tformer.errors import InputError

MAX_DEPTH = 6
"""So many folders deep a run is looked for."""

TRACES = ("metrics.jsonl", "environment.json")
"""A folder that holds these beside a recipe was a run, even if its checkpoints are gone."""


def find_runs(folders: Iterable[str | Path] = ("runs",)) -> list[Path]:
    """Every run at or under the folders, each once, by path.

    Links to folders are followed to runs, not through folders of runs, so that no circle is walked.

    Raises:
        InputError: a folder that is not there, or cannot be read.
    """
    found: dict[str, Path] = {}
    for name in folders:
        folder = Path(name)
        if not folder.is_dir():
            kind = "is a file, expected a folder of runs" if folder.exists() else "does not exist"
            raise InputError(f"{folder} {kind}", hint="list those under runs/ with: tformer runs list")
        try:
            os.listdir(folder)
        except OSError as error:
            raise InputError(f"cannot read {folder}: {error.strerror}") from error
        for run in _runs_in(folder, MAX_DEPTH):
            found.setdefault(os.path.realpath(run), run)
    return sorted(found.values())


def find_run(name: str | Path | None = None, *, runs_dir: str | Path = "runs") -> Path:
    """The run that a person means: its folder, its name under `runs_dir`, a place inside it; None: the newest.

    Raises:
        InputError: nothing there, or no run.
    """
    if name is None:
        return newest_checkpoint(runs_dir).parents[1]
    folder = Path(name)
    if looks_like_run(folder):
        return folder
    if not folder.exists() and looks_like_run(Path(runs_dir) / folder):
        return Path(runs_dir) / folder
    checkpoint = resolve_checkpoint(folder, runs_dir=runs_dir)  # or its complaint
    if checkpoint.parent.name == CHECKPOINTS:
        return checkpoint.parents[1]
    raise InputError(f"{folder} is a checkpoint on its own, expected a run (a folder with {CHECKPOINTS}/)")


def looks_like_run(folder: Path) -> bool:
    """Whether it is a run, or what is left of one."""
    if os.path.isdir(folder / CHECKPOINTS):
        return True
    return os.path.isfile(folder / "recipe.yaml") and any(os.path.isfile(folder / trace) for trace in TRACES)


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    if looks_like_run(folder):
        yield folder
        return
    if depth == 0 or os.path.isfile(folder / MANIFEST):
        return
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # a folder of somebody else among ours
        return
    for name in names:
        inner = folder / name
        if name.startswith(".") or not inner.is_dir():
            continue
        if looks_like_run(inner):
            yield inner
        elif not inner.is_symlink():
            yield from _runs_in(inner, depth - 1)
