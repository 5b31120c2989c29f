"""Run directories: creation, the lock against a second writer, checkpoints, logs and resuming."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tformer.checkpoint import catalog, logs
from tformer.checkpoint.catalog import CheckpointEntry
from tformer.checkpoint.manifest import FILE_NAMES, file_names
from tformer.recipe import Recipe, recipe_from_yaml
from tformer.support import files
from tformer.support.errors import InputError, RunInUseError, StorageError
from tformer.support.files import read_bounded, read_object
from tformer.support.formatting import json_text

LOCK_NAME = ".lock"
MAX_RECIPE_BYTES = 1 << 20


class RunLock:
    """Advisory lock on `<run>/.lock`, held until `release`; the kernel releases it for a killed process.

    Raises:
        RunInUseError: another process holds it; the message names its PID.
        StorageError: the file cannot be made.
    """

    def __init__(self, run: Path) -> None:
        path = run / LOCK_NAME
        with files.storage_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            _lock(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise RunInUseError(
                f"{run} is in use by process {pid or '(unknown)'}",
                hint="wait until it has finished, stop it, or choose another folder with --out",
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise files.storage_error(path, error) from error
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the lock. The file stays: without it two processes could lock two different files of one name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(descriptor: int, patience: int = 20) -> None:
    """Take the lock, in several attempts within 0.2 seconds: `writer` of another process holds it for a moment."""
    for attempt in range(patience):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == patience - 1:
                raise
            time.sleep(0.01)


def writer(run: Path) -> str | None:
    """PID of the process that writes to the run at this moment, as text; None: no process does, or there are no locks.

    On a file system without locks nothing can be trained, but a run that was copied there is read.
    """
    try:
        descriptor = os.open(run / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {run / LOCK_NAME}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


CHECKPOINTS = "checkpoints"
PROBE_BYTES = 1 << 16
MAX_ENVIRONMENT_BYTES = 16 << 20


class RunDirectory:
    """A run directory, from `create` (for training: locked, leftovers removed) or `open` (for reading)."""

    def __init__(self, path: Path, *, lock: RunLock | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(
        cls,
        path: str | Path | None = None,
        *,
        arch: str,
        preset: str | None,
        resume: bool = False,
        runs_dir: str | Path = "runs",
    ) -> RunDirectory:
        """A locked run directory, new or, with `resume`, continued; leftovers of an interruption are removed.

        Without a path, a new one gets the next free `<runs_dir>/<arch>-<preset>-<n>`; `resume` takes the highest n.

        Raises:
            InputError: the folder is not empty and `resume` was not asked for, or the path is a file or a checkpoint.
            RunInUseError: another process trains in it.
            StorageError: the folder cannot be made or written.
        """
        if path is not None:
            folder = Path(path)
            with files.storage_errors(folder):
                files.make_folders(folder)
        else:
            folder = _default_folder(Path(runs_dir), f"{_plain(arch)}-{_plain(preset or 'custom')}", resume=resume)
        if resume and (folder / files.MANIFEST).is_file():
            raise InputError(
                f"{folder} is a checkpoint, not a run: it cannot be resumed",
                hint=f"start a new run from its weights: tformer train --init-from {folder}",
            )
        if not (folder / LOCK_NAME).exists() and not resume:
            require_empty(folder)  # before the lock creates a file
        lock = RunLock(folder)
        try:
            if not resume:
                require_empty(folder)
            run = cls(folder, lock=lock)
            with files.storage_errors(run.checkpoints_path):
                files.make_folders(run.checkpoints_path)
                files.fsync_dir(folder)
            if resume:
                run.sweep_temporaries()
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path, *, lock: bool = False) -> RunDirectory:
        """An existing run; with `lock`, for writing to it, after removing leftovers of an interruption.

        Raises:
            InputError: there is no such folder, or it is no run.
        """
        folder = Path(path)
        if not is_run(folder):
            raise InputError(f"{folder} is not a run directory: it has no {CHECKPOINTS}/")
        if not lock:
            return cls(folder)
        run = cls(folder, lock=RunLock(folder))
        run.sweep_temporaries()
        return run

    def close(self) -> None:
        """Release the lock; the directory can still be read."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def checkpoints_path(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.txt"

    def checkpoints(self) -> list[CheckpointEntry]:
        """Complete checkpoints in the order of their steps."""
        return catalog.scan(self.checkpoints_path)

    def latest(self) -> Path | None:
        entry = catalog.latest(self.checkpoints())
        return entry.path if entry else None

    def best(self) -> Path | None:
        """The checkpoint with the lowest score; the latest when none was validated."""
        entry = catalog.best(self.checkpoints())
        return entry.path if entry else None

    def check_writable(self, bytes_needed: int) -> None:
        """Check that the directory can be written and has the free space that training needs.

        Raises:
            StorageError: read-only, full, or fewer than `bytes_needed` bytes free; names both and the path.
        """
        probe = self.checkpoints_path / (files.TEMPORARY + "probe")
        try:
            with files.storage_errors(self.path, bytes_needed=bytes_needed):
                files.write_durably(probe, [bytes(PROBE_BYTES)])
        finally:
            if probe.exists():
                with files.storage_errors(probe):
                    files.unlink(probe)
        files.require_space(self.path, bytes_needed)

    def sweep_temporaries(self) -> None:
        """Remove leftovers of an interrupted process, and correct the pointers."""
        with files.storage_errors(self.path):
            for name in sorted(os.listdir(self.path)):
                if name.startswith(files.TEMPORARY):
                    files.remove_tree(self.path / name)
            catalog.tidy(self.checkpoints_path)

    def rewind(self, step: int, *, keep_last: int | None = None) -> None:
        """Go back to the state after `step`: remove later metrics, samples and checkpoints, which training remakes.

        keep_last: finish the pruning of an interrupted save; None: keep all checkpoints.
        """
        logs.cut_metrics(self.metrics_path, step)
        logs.cut_samples(self.samples_path, step)
        with files.storage_errors(self.checkpoints_path):
            for entry in reversed(self.checkpoints()):
                if entry.step > step:
                    files.remove_tree(entry.path)
            catalog.tidy(self.checkpoints_path, keep_last=keep_last)

    def append_metrics(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl; `values` holds its `step`. Non-finite numbers become null."""
        logs.append(self.metrics_path, json_text(values))

    def metrics(self) -> Iterator[dict[str, Any]]:
        return logs.read_metrics(self.metrics_path)

    def append_sample(self, step: int, text: str) -> None:
        logs.append(self.samples_path, logs.sample_text(step, text))

    def write_recipe(self, text: str) -> None:
        files.write_text(self.path / "recipe.yaml", text)

    def write_tokenizer(self, text: str, target: str | None = None) -> None:
        """Write the tokenizer of both sides, or with `target` one file per side."""
        names = file_names(separate=target is not None)
        files.write_text(self.path / names["tokenizer"], text)
        if target is not None:
            files.write_text(self.path / names["target_tokenizer"], target)

    def write_environment(self, content: Mapping[str, Any]) -> None:
        """Write environment.json; content: see `logs.describe_environment`."""
        files.write_text(self.path / "environment.json", json_text(content, indent=1))

    def recipe(self, *, name: str | None = None) -> Recipe:
        """The recipe of the run; `name`: of its file in messages. Raises InputError for a damaged file."""
        path = self.path / FILE_NAMES["recipe"]
        data = read_bounded(path, max_bytes=MAX_RECIPE_BYTES)
        shown = name or str(path)
        try:
            return recipe_from_yaml(data.decode("utf-8"), name=shown)
        except UnicodeDecodeError as error:
            raise InputError(f"{shown} is damaged: not UTF-8 at byte {error.start}") from None

    def environment(self) -> dict[str, Any] | None:
        """The content of environment.json, from the last start of this run; None before the first."""
        path = self.path / "environment.json"
        return read_object(path, max_bytes=MAX_ENVIRONMENT_BYTES) if path.exists() else None


def is_run(folder: Path) -> bool:
    return (folder / CHECKPOINTS).is_dir()


def list_runs(runs_dir: str | Path = "runs") -> list[Path]:
    """The run directories under a folder, by name."""
    folder = Path(runs_dir)
    return sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []


def _default_folder(runs_dir: Path, stem: str, *, resume: bool) -> Path:
    """Create the run directory with the next free number; mkdir decides between concurrent processes."""
    with files.storage_errors(runs_dir):
        files.make_folders(runs_dir)
        numbered = re.compile(re.escape(stem) + r"-(\d{1,9})")
        taken = [int(match[1]) for name in os.listdir(runs_dir) if (match := numbered.fullmatch(name))]
        number = max(taken, default=0)
        if resume and number:
            return runs_dir / f"{stem}-{number}"
        while True:
            number += 1
            try:
                files.mkdir(runs_dir / f"{stem}-{number}")
            except FileExistsError:
                continue
            files.fsync_dir(runs_dir)
            return runs_dir / f"{stem}-{number}"


def require_empty(folder: Path) -> None:
    """Raise InputError for a folder of a new run that holds anything but a lock."""
    try:
        found = sorted(name for name in os.listdir(folder) if name != LOCK_NAME)
    except OSError as error:
        raise StorageError(f"cannot use {folder}: {error.strerror}") from error
    if found:
        raise InputError(
            f"{folder} is not empty (it holds {found[0]})",
            hint="continue that run with --resume, or choose another folder with --out",
        )


def _plain(word: str) -> str:
    """The word with characters that are unsafe in a folder's name replaced."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-.") or "run"
