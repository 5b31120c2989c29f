"""What tformer keeps in its cache folder, with sizes; and its removal."""

from __future__ import annotations

import fcntl
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tformer.data.shards.corpus import locked, sweep

KINDS = {
    "tokens": ("", re.compile(r"[0-9a-f]{32}")),
    "tokenizers": ("tokenizers", re.compile(r"[0-9a-f]{32}\.json")),
    "translations": ("", re.compile(r"translations-[0-9a-f]{32}\.jsonl")),
    "kernels": ("kernels", re.compile(r"[0-9a-f]{16}\.so")),
}
"""What the cache holds, as (folder, pattern of names): directories of token files of a text, tokenizers trained on a
run's data, translations of a teacher, compiled C kernels."""

TOKEN_FILES = re.compile(r"(documents|marks|tokens-\d{5,})\.bin")
"""Names of the files in a directory of tokens."""


@dataclass(frozen=True)
class CacheSize:
    """Number of entries of one kind, and their bytes."""

    entries: int
    bytes: int


def cache_sizes(home: Path) -> dict[str, CacheSize]:
    """The sizes of each kind of entry; empty where there is no cache."""
    found = {kind: [(path, _bytes_of(path)) for path in _entries(home, kind)] for kind in KINDS}
    return {kind: CacheSize(len(entries), sum(size for _, size in entries)) for kind, entries in found.items()}


def clean_caches(home: Path) -> tuple[dict[str, CacheSize], list[str]]:
    """Remove what `KINDS` names; (what was removed, names of what was left because another process writes it).

    Everything is made anew when it is needed. Other files and folders stay, and so do links: the cache may have been
    set to a folder that holds more. Processes that have opened an entry keep it: its files are mapped.
    """
    removed = dict.fromkeys(KINDS, CacheSize(0, 0))
    left: list[str] = []
    if not home.is_dir():
        return removed, left
    with locked(home):
        sweep(home)
        for kind, (folder, _) in KINDS.items():
            for path in _entries(home, kind):
                size = _bytes_of(path)
                if _remove(path):
                    removed[kind] = CacheSize(removed[kind].entries + 1, removed[kind].bytes + size)
                else:
                    left.append(path.name)
            if folder and removed[kind].entries:
                with suppress(OSError):  # it holds something else
                    (home / folder).rmdir()
    return removed, left


def _entries(home: Path, kind: str) -> list[Path]:
    name, pattern = KINDS[kind]
    folder = home / name
    if not folder.is_dir() or (name and folder.is_symlink()):
        return []
    named = (path for path in folder.iterdir() if pattern.fullmatch(path.name) and not path.is_symlink())
    return sorted(path for path in named if (_holds_tokens(path) if kind == "tokens" else path.is_file()))


def _holds_tokens(folder: Path) -> bool:
    """Whether this is a directory with files of tokens and nothing else."""
    return folder.is_dir() and all(TOKEN_FILES.fullmatch(file.name) for file in folder.iterdir())


def _remove(path: Path) -> bool:
    """Whether the entry could be removed: not while another process writes it."""
    if path.is_dir():
        shutil.rmtree(path)
        return True
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
    return True


def _bytes_of(path: Path) -> int:
    """The size of a file, or of the files of a folder; files that vanish meanwhile count nothing."""
    total = 0
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        with suppress(OSError):
            total += file.lstat().st_size if file.is_file() else 0
    return total
