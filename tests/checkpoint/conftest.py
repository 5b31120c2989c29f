"""A tiny checkpoint, and a disk that fails or dies at the N-th call."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.attack import Subject, make_subjects
from tformer.checkpoint.manifest import TENSOR_FILES, content_sha256, index_role, part_name
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.save import CheckpointContents, save_checkpoint
from tformer.checkpoint.tensor_files import tensor_chunks
from tformer.support import files

TOKENIZER = '{"model": {"type": "char"}}'
PRIMITIVES = (
    "mkdir", "create", "open_append", "write", "truncate", "fsync", "fsync_dir", "rename", "unlink", "rmdir",
)  # fmt: skip


def weights_at(step: int) -> dict[str, torch.Tensor]:
    table = torch.full((3, 2), float(step))
    return {"embedding.weight": table, "heads.lm.weight": table, "norm.gain": torch.full((2,), step + 0.5)}


def save(run: RunDirectory, step: int, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "weights": weights_at(step),
        "tied": {"heads.lm.weight": "embedding.weight"},
        "recipe_yaml": f"# step {step}\nmodel: {{}}\n",
        "tokenizer_json": TOKENIZER,
        "trainer": {"step": step},
        "optimizer": {"exp_avg/norm.gain": torch.full((2,), float(step))},
        "keep_last": 2,
    }
    values |= changes
    options = {name: values.pop(name) for name in ("keep_last", "together") if name in values}
    return save_checkpoint(run, step, CheckpointContents(**values), **options)


def steps(run: RunDirectory) -> list[int]:
    return [entry.step for entry in run.checkpoints()]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", arch="gpt", preset="tiny") as made:
        yield made


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    """Trained runs and an exported folder, to be copied and damaged."""
    root = tmp_path_factory.mktemp("subjects")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFORMER_CACHE", str(root / "cache"))
        yield make_subjects(root)


class Killed(BaseException):
    """What SIGKILL is to the code under test: nothing it does afterwards reaches the disk."""


class Disk:
    """Counts the calls of every primitive, records them, and lets one of them fail or be the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self._stop_at: int | None = None
        self._mode = ""
        self._names: dict[int, str] = {}
        for name in PRIMITIVES:
            monkeypatch.setattr(files, name, self._wrap(name, getattr(files, name)))

    def arm(self, call: int, mode: str) -> None:
        """At call number `call` (from 1): `kill`, `kill_after`, `enospc`, `eio`, `full` (from then on), `none`."""
        self.calls, self._stop_at, self._mode = [], call, mode

    @property
    def hit(self) -> bool:
        return self._stop_at is not None and len(self.calls) >= self._stop_at

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            dead = self._mode.startswith("kill") and self.hit
            if dead:
                raise Killed
            self.calls.append((name, self._describe(args[0])))
            if self.hit:
                self._strike(name, original, args)
            result = original(*args)
            if name in ("create", "open_append"):
                self._names[result] = Path(args[0]).name
            return result

        return call

    def _strike(self, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> None:
        first = len(self.calls) == self._stop_at
        if self._mode == "kill":
            if name == "write":
                original(args[0], bytes(args[1])[: len(args[1]) // 2])  # half of it had reached the file
            raise Killed
        if self._mode == "kill_after":
            original(*args)
            raise Killed
        if self._mode == "full" and name in ("mkdir", "create", "write", "open_append"):
            if name == "write":
                original(args[0], bytes(args[1])[: len(args[1]) // 2])
            raise OSError(errno.ENOSPC, "injected")
        if first and self._mode in ("enospc", "eio"):
            raise OSError(errno.ENOSPC if self._mode == "enospc" else errno.EIO, "injected")

    def _describe(self, target: Any) -> str:
        return self._names.get(target, "?") if isinstance(target, int) else Path(target).name


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path under a folder with its bytes: what 'left as it was' compares."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as a forger would, with its hash computed anew."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content | {"sha256": content_sha256(content)}))


class Canary:
    """What a pickle makes of this is a folder, if somebody opens the pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def enlist(path: Path, files: dict[str, str]) -> None:
    """Add files with these roles to a manifest, or correct their records."""
    for name, role in files.items():
        data = (path / name).read_bytes()
        record = {"role": role, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        rewrite_manifest(path, lambda content, n=name, r=record: content["files"].update({n: r}))  # type: ignore[misc]


def split(path: Path, role: str, tensors: dict[str, torch.Tensor], index: Any = None) -> Path:
    """Put a file for each tensor, and an index, in the place of the one file of a role in a checkpoint.

    index: its weight_map; None: the true one.
    """
    whole = TENSOR_FILES[role]
    (path / whole).unlink()
    rewrite_manifest(path, lambda content: content["files"].pop(whole))
    names = {name: part_name(role, number, len(tensors)) for number, name in enumerate(tensors, 1)}
    for name, file in names.items():
        (path / file).write_bytes(b"".join(map(bytes, tensor_chunks({name: tensors[name]}))))
    document = {"metadata": {}, "weight_map": names if index is None else index}
    (path / f"{whole}.index.json").write_text(json.dumps(document))
    enlist(path, dict.fromkeys(names.values(), role) | {f"{whole}.index.json": index_role(role)})
    return path


@contextmanager
def umask(value: int) -> Iterator[None]:
    old = os.umask(value)
    try:
        yield
    finally:
        os.umask(old)
