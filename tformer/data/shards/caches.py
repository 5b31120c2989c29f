"""What tformer keeps in its cache folder, with sizes; and its removal."""

from __future__ import annotations

import fcntl
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tformer.data.shards.corpus import locked, sweep
from tformer.support.errors import cannot_write

KINDS = {
    "tokens": ("", re.compile(r"[0-9a-f]{32}")),
    "tokenizers": ("tokenizers", re.compile(r"[0-9a-f]{32}\.json")),
    "translations": ("", re.compile(r"translations-[0-9a-f]{32}\.jsonl")),
    "fingerprints": ("fingerprints", re.compile(r"[0-9a-f]{32}\.txt")),
    "remote": ("remote", re.compile(r"[0-9a-f]{32}-\d{6}\.part")),
    "kernels": ("kernels", re.compile(r"[0-9a-f]{16}\.(so|json|failed|trying)")),
    "speed": ("speed", re.compile(r"[0-9a-f]{16}\.json")),
}
"""What the cache holds, as (folder, pattern of names): directories of token files of a text, tokenizers trained on a
run's data, translations of a teacher, fingerprints of many files, blocks of remote files, compiled C kernels, the
measured speed of a CPU. All of it is made again when it is needed."""

TOKEN_FILES = re.compile(r"(documents|marks|tokens-\d{5,})\.bin")
"""Names of the files in a directory of tokens."""

ROWS = "rows"
KEPT = {ROWS: (ROWS, re.compile(r"[0-9a-f]{16}\.jsonl"))}
"""What lies there too and is never removed: rows that a program gave to `tformer.train`, which runs read again."""


@dataclass(frozen=True)
class CacheSize:
    """Number of entries of one kind, and their bytes."""

    entries: int
    bytes: int


def cache_sizes(home: Path) -> dict[str, CacheSize]:
    """The sizes of each kind of entry; empty where there is no cache."""
    kinds = {**KINDS, **KEPT}
    found = {kind: [(path, _bytes_of(path)) for path in _entries(home, *names)] for kind, names in kinds.items()}
    return {kind: CacheSize(len(entries), sum(size for _, size in entries)) for kind, entries in found.items()}


def clean_caches(home: Path) -> tuple[dict[str, CacheSize], list[str]]:
    """Remove what `KINDS` names; (what was removed, names of what was left because another process writes it).

    Other files and folders stay, and so do links: the cache may have been set to a folder that holds more. Processes
    that have opened an entry keep it: its files are open. Raises StorageError where nothing can be written.
    """
    removed = dict.fromkeys(KINDS, CacheSize(0, 0))
    left: list[str] = []
    if not home.is_dir():
        return removed, left
    try:
        with locked(home):
            sweep(home, unfinished=True)
            for kind, (folder, names) in KINDS.items():
                for path in _entries(home, folder, names):
                    size = _bytes_of(path)
                    if _remove(path):
                        removed[kind] = CacheSize(removed[kind].entries + 1, removed[kind].bytes + size)
                    else:
                        left.append(path.name)
                place = home / folder
                if folder and place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
                    place.rmdir()
    except OSError as error:
        raise cannot_write(home, error) from error
    return removed, left


def _entries(home: Path, folder: str, names: re.Pattern[str]) -> list[Path]:
    place = home / folder
    if not place.is_dir() or (folder and place.is_symlink()):
        return []
    found = []
    for path in place.iterdir():
        if not names.fullmatch(path.name) or path.is_symlink():
            continue
        # Everything but a directory of tokens, which holds nothing else, is a file with a suffix.
        holds_tokens = path.is_dir() and all(TOKEN_FILES.fullmatch(file.name) for file in path.iterdir())
        if path.is_file() if path.suffix else holds_tokens:
            found.append(path)
    return sorted(found)


def _remove(path: Path) -> bool:
    """Remove an entry; False if another process writes it."""
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
