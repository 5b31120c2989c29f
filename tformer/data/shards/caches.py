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
    "tokens": re.compile(r"[0-9a-f]{32}"),
    "tokenizers": re.compile(r"tokenizers"),
    "translations": re.compile(r"translations-[0-9a-f]{32}\.jsonl"),
    "kernels": re.compile(r"kernels"),
}
"""What the cache holds, by the names of its entries: token files of a text, tokenizers trained on a run's data,
translations of a teacher, compiled C kernels. All of it is made anew when it is needed."""

ROWS = "rows"
KEPT = {ROWS: re.compile(ROWS)}
"""What lies there too and is never removed: rows that a program gave to `tformer.train`, which runs read again."""


@dataclass(frozen=True)
class CacheSize:
    """Number of entries of one kind, and their bytes."""

    entries: int
    bytes: int


def cache_sizes(home: Path) -> dict[str, CacheSize]:
    """The sizes of each kind of entry; empty where there is no cache."""
    kinds = {**KINDS, **KEPT}
    found = {kind: [(path, _bytes_of(path)) for path in _entries(home, names)] for kind, names in kinds.items()}
    return {kind: CacheSize(len(entries), sum(size for _, size in entries)) for kind, entries in found.items()}


def clean_caches(home: Path) -> tuple[dict[str, CacheSize], list[str]]:
    """Remove what `KINDS` names; (what was removed, names of what was left because another process writes it).

    Other files stay, and so do links. Processes that have opened an entry
    keep it: its files are mapped.
    """
    removed = dict.fromkeys(KINDS, CacheSize(0, 0))
    left: list[str] = []
    if not home.is_dir():
        return removed, left
    with locked(home):
        sweep(home)
        for kind, names in KINDS.items():
            for path in _entries(home, names):
                size = _bytes_of(path)
                if _remove(path):
                    removed[kind] = CacheSize(removed[kind].entries + 1, removed[kind].bytes + size)
                else:
                    left.append(path.name)
    return removed, left


def _entries(home: Path, names: re.Pattern[str]) -> list[Path]:
    if not home.is_dir():
        return []
    return sorted(path for path in home.iterdir() if names.fullmatch(path.name) and not path.is_symlink())


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
