"""Records of a run beside its checkpoints: environment.json, metrics.jsonl and samples.txt."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from tformer.kernels import library
from tformer.support import __version__, files
from tformer.support.errors import InputError
from tformer.support.files import open_regular

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "pydantic")


def describe_environment(
    *, device: str, data_fingerprint: str | None, command: Sequence[str] | None = None, kernels: str | None = None
) -> dict[str, Any]:
    """The content of environment.json: versions, device, C kernels, command line, git commit, fingerprint of the data.

    command: by default this process's. kernels: those used in samples; by default those that exist.
    """
    versions = {"tformer": __version__}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv if command is None else command),
        "device": device,
        "kernels": library.state() if kernels is None else kernels,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "git_commit": git_commit(Path(__file__).resolve().parents[2]),
        "data_fingerprint": data_fingerprint,
    }


def git_commit(checkout: Path) -> str | None:
    """The commit of a git checkout; None without a checkout or without git."""
    if not (checkout / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


MAX_SHOWN_BYTES = 256 << 20  # of the metrics that are listed and plotted: a million lines
MAX_LINE_BYTES = 16 << 20  # of metrics.jsonl; longer lines are ignored
MAX_SAMPLE_BYTES = 4096  # shown of the last sample
_SAMPLE_HEADER = re.compile(r"=== step (\d{1,15}) ===")


def append(path: Path, text: str) -> None:
    """Append text in one write; a write cut short by a full disk is undone. A new file's name is synced.

    Raises:
        StorageError: the disk is full or read-only.
    """
    data = text.encode("utf-8", "replace")
    with files.storage_errors(path, bytes_needed=len(data)):
        descriptor = files.open_append(path)
        try:
            size = os.fstat(descriptor).st_size
            try:
                files.write(descriptor, data)
            except OSError:
                files.truncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if size == 0:
            files.fsync_dir(path.parent)


def read_metrics(path: Path, *, max_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; incomplete and other lines are skipped.

    Raises InputError for a file of more than `max_bytes`.
    """
    if path.is_file():
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if max_bytes is not None and size > max_bytes:
                raise InputError(f"{path} has {size:,} bytes, expected at most {max_bytes:,}")
            for line in _lines(stream):
                if (record := _record(line)) is not None:
                    yield record


def cut_metrics(path: Path, step: int) -> None:
    """Keep the complete lines up to `step`; the file is replaced by rename, and only if it changes."""

    def kept(lines: Iterator[bytes]) -> Iterator[bytes]:
        for line in lines:
            if (record := _record(line)) is not None:
                found = record.get("step")
                is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
                if not (is_number and record["step"] > step):
                    yield line

    _cut(path, kept)


def _record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def sample_text(step: int, text: str) -> str:
    """A sample under a header with its step; a line of it that looks like a header is indented by one space."""
    lines = (f" {line}" if _SAMPLE_HEADER.match(line) else line for line in text.split("\n"))
    return f"=== step {step} ===\n" + "\n".join(lines) + "\n\n"


def last_sample(path: Path) -> str:
    """The last sample of the file without its header; the end of a sample above 4 kB; "" without a file."""
    if not path.is_file():
        return ""
    with open_regular(path) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - MAX_SAMPLE_BYTES))
        text = stream.read(MAX_SAMPLE_BYTES).decode("utf-8", "replace")
    headers = list(re.finditer(rf"^{_SAMPLE_HEADER.pattern}\n", text, re.MULTILINE))
    return text[headers[-1].end() if headers else 0 :].strip("\n")


def cut_samples(path: Path, step: int) -> None:
    """Keep the samples up to and including `step`; atomic, as `cut_metrics`."""

    def kept(lines: Iterator[bytes]) -> Iterator[bytes]:
        keep = True
        for line in lines:
            if match := _SAMPLE_HEADER.match(line[:64].decode("utf-8", "replace")):
                keep = int(match[1]) <= step
            if keep:
                yield line

    _cut(path, kept)


def _cut(path: Path, kept: Callable[[Iterator[bytes]], Iterator[bytes]]) -> None:
    if path.is_file():
        with open_regular(path) as stream:
            if sum(map(len, kept(_lines(stream)))) != os.path.getsize(path):  # lines are only ever left out
                stream.seek(0)
                files.write_file(path, files.in_blocks(kept(_lines(stream))))


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: stream.readline(MAX_LINE_BYTES), b"")
