"""Resolution of a run, a checkpoint or no argument at all to one checkpoint folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

from tformer.checkpoint import catalog
from tformer.checkpoint.manifest import read_manifest, refuse_pickles
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import CHECKPOINTS, is_run, list_runs
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError, did_you_mean
from tformer.support.files import MANIFEST

MAX_NAMED = 5  # runs in a hint


def resolve_checkpoint(path: str | Path, which: str = "best", *, runs_dir: str | Path = "runs") -> Path:
    """The checkpoint folder of `path`: a checkpoint, a run, or a run's `checkpoints` folder or pointer file.

    Args:
        path: see above.
        which: `latest`, `best` or `step-N`; only for runs.
        runs_dir: where to look for names to suggest.

    Raises:
        InputError: nothing there, not a run, no checkpoint yet, no such step.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        return folder
    if is_run(folder):
        return _choose(folder / CHECKPOINTS, folder, which)
    if folder.name == CHECKPOINTS and folder.is_dir():
        return _choose(folder, folder.parent, which)
    if folder.is_file():
        return _from_file(folder)
    if not folder.exists():
        raise InputError(f"{folder} does not exist", hint=_suggest_run(folder, Path(runs_dir)))
    if not folder.is_dir():
        raise InputError(f"{folder} is a pipe, device or socket, expected a run or checkpoint folder")
    if (folder / "config.json").is_file():
        raise InputError(
            f"{folder} is a Hugging Face folder, expected a run or a checkpoint of tformer",
            hint=f"make one of it: tformer import {folder} --out DIR",
        )
    refuse_pickles(folder)
    raise InputError(
        f"{folder} is neither a run (no {CHECKPOINTS}/) nor a checkpoint (no {MANIFEST})",
        hint=_suggest_run(folder, Path(runs_dir)),
    )


def last_checkpoints(run: str | Path, count: int) -> list[Path]:
    """The last `count` checkpoints of a run (or of its `checkpoints` folder), in the order of their steps.

    A best checkpoint that was kept from earlier is left out.

    Raises:
        InputError: not a run, or fewer checkpoints than that.
    """
    folder = Path(run)
    if (folder / MANIFEST).is_file() or not (is_run(folder) or folder.name == CHECKPOINTS):
        found = resolve_checkpoint(folder, "latest")  # or its error
        raise InputError(f"--last {count} needs a run, {folder} is one checkpoint (step {read_manifest(found).step})")
    entries = catalog.scan(folder / CHECKPOINTS if is_run(folder) else folder)
    apart = _best_apart(entries)
    followed = [entry for entry in entries if entry is not apart]
    if len(followed) < count:
        steps = ", ".join(str(entry.step) for entry in followed[-8:])
        has = f"{len(followed)} checkpoint{'s' * (len(followed) != 1)}" + (f" (step {steps})" if followed else "")
        beside = "" if apart is None else f", and the best one apart from these (step {apart.step})"
        raise InputError(
            f"--last {count}: {folder} has {has}{beside}",
            hint=f"training.keep_last decides how many a run keeps: tformer train --set training.keep_last={count}",
        )
    return [entry.path for entry in followed[-count:]]


def _best_apart(entries: list[catalog.CheckpointEntry]) -> catalog.CheckpointEntry | None:
    """The best checkpoint, if checkpoints between it and the last saves have been removed; else None.

    It is then the oldest one. With saves every `training.save_every` steps, the next one is more steps away than that.
    Saves by the clock have no fixed interval: the run then has more than `training.keep_last` checkpoints, and the gap
    after the first one is the widest.
    """
    if len(entries) < 2 or entries[0].score is None or catalog.best(entries) is not entries[0]:
        return None
    first, *others = (entry.step for entry in entries)
    gap, widest = others[0] - first, max((b - a for a, b in itertools.pairwise(others)), default=0)
    training = read_checkpoint(entries[-1].path).recipe.training
    missed_saves = gap > (training.save_every or training.eval_every or gap)
    beyond_kept = len(entries) > training.keep_last and gap > (widest or training.save_every or gap)
    return entries[0] if missed_saves or beyond_kept else None


def newest_checkpoint(
    runs_dir: str | Path = "runs", which: str = "best", *, usable: Callable[[Path], bool] = lambda checkpoint: True
) -> Path:
    """A checkpoint of the most recently saved run under `runs_dir`, among runs with a `usable` one.

    Runs are ordered by the time of their last save, the checkpoints of a run by step.

    Raises:
        InputError: there is none.
    """
    runs = [(run, catalog.scan(run / CHECKPOINTS)) for run in list_runs(runs_dir)]
    saved = [
        (max((entry.path / MANIFEST).stat().st_mtime_ns for entry in entries), run.name, run)
        for run, entries in runs
        if entries
    ]
    for _, _, run in sorted(saved, reverse=True):
        checkpoint = _choose(run / CHECKPOINTS, run, which)
        if usable(checkpoint):
            return checkpoint
    if saved:
        raise InputError(
            f"no run under {runs_dir}/ suits this command ({len(saved)} have a checkpoint)",
            hint="tformer runs list shows what they are; name a run or a Hugging Face folder, or train one",
        )
    if runs:
        raise InputError(
            f"no run under {runs_dir}/ has a checkpoint yet ({', '.join(run.name for run, _ in runs[:3])})",
            hint="let it train until its first checkpoint: tformer train --resume --out RUN",
        )
    raise InputError(f"there is no run under {runs_dir}/", hint=_suggest_run(None, Path(runs_dir)))


def suits(folder: Path, is_usable: Callable[[Recipe], bool]) -> bool:
    """Whether a checkpoint's recipe is usable; True for a damaged one, so that loading it reports the damage."""
    try:
        recipe = read_checkpoint(folder).recipe
    except InputError:
        return True
    return is_usable(recipe)


def _choose(folder: Path, run: Path, which: str) -> Path:
    entries = catalog.scan(folder)
    if not entries:
        raise InputError(
            f"{run} has no checkpoint yet", hint=f"let it train until its first: tformer train --resume --out {run}"
        )
    choices = {"latest": catalog.latest, "best": catalog.best}
    if which in choices:
        entry = choices[which](entries)
        assert entry is not None
        return _damaged_best(folder) or entry.path if which == catalog.BEST else entry.path
    match = re.fullmatch(r"(?:step-)?0*(\d{1,15})", which)
    for entry in entries:
        if match and entry.step == int(match[1]):
            return entry.path
    names = ["latest", "best", *(catalog.step_name(entry.step) for entry in entries)]
    raise InputError(f"{run} has no checkpoint '{which}'", hint=did_you_mean(which, names))


def _damaged_best(folder: Path) -> Path | None:
    """The checkpoint that the pointer names, if its manifest is damaged: reading it reports that. Else None.

    Its score is unknown, so that another checkpoint would be taken for the best one.
    """
    name = catalog.read_pointer(folder / catalog.BEST)
    if name is None or not catalog.is_complete(folder / name):
        return None
    try:
        read_manifest(folder / name)
    except InputError:
        return folder / name if catalog.is_complete(folder / name) else None  # a training may have removed it
    return None


def _from_file(path: Path) -> Path:
    target = catalog.read_pointer(path) if path.name in (catalog.LATEST, catalog.BEST) else None
    if target is not None:
        return _choose(path.parent, path.parent.parent, path.name)
    refuse_pickles(path)
    holds_model = any((path.parent / name).is_file() for name in (MANIFEST, "config.json"))
    raise InputError(
        f"{path} is a file, expected a run or checkpoint folder",
        hint=f"name the folder it is in: {path.parent}" if holds_model else None,
    )


def is_imported(folder: Path) -> bool:
    """Whether a folder is an imported model: a checkpoint on its own, which commands take as a run."""
    try:
        return (folder / MANIFEST).is_file() and "imported" in read_checkpoint(folder, verify=False).trainer
    except InputError:
        return False


def _suggest_run(path: Path | None, runs_dir: Path) -> str:
    """A hint that names the runs and imported models there, the one named like `path`, or how to train one."""
    folders = sorted(runs_dir.iterdir()) if runs_dir.is_dir() else []
    names = [folder.name for folder in folders if is_run(folder) or is_imported(folder)]
    if not names:
        return "train a model first: tformer train --arch gpt"
    if path is None:
        return f"name one: {', '.join(str(runs_dir / name) for name in names[:MAX_NAMED])}"
    if path.name in names:
        return f"did you mean '{runs_dir / path.name}'?"
    return f"under {runs_dir}/: {did_you_mean(path.name, names)}"
