"""Files of remote stores (`s3://`, `gs://`, `https://`, `hf://`), read by fsspec through a bounded cache on this disk.

A file is read in blocks. A block that was read stays in the cache until the cache is full, and then the least recently
used ones go. What identifies the content (size, and ETag, checksum or time of change, whichever the store has) is in
the name of a block and in the file's fingerprint, and is compared again when a file has been read (`files.unchanged`).

A connection that fails is tried again a few times; then the reading ends with one error. Only URLs that the user names
are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tformer.support import files
from tformer.support.errors import InputError, TformerError
from tformer.support.formatting import whole_number

SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub"}
"""The schemes of URLs, with the package that fsspec needs for each."""
SINGLE_FILES = ("http", "https")  # schemes without folders and patterns
VERSION_KEYS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id", "VersionId", "generation")
TIME_KEYS = ("Last-Modified", "LastModified", "mtime", "updated", "created")

BLOCK_BYTES = 8 << 20
CACHE_BYTES = 4 << 30
CACHE_BYTES_VARIABLE = "TFORMER_REMOTE_CACHE_BYTES"
FOLDER = "remote"  # of the cache
EDGE_BYTES = 1 << 20  # hashed at each end of a file for which the store has neither a version nor a time
NO_PARTS, DOWNLOAD = "the server does not send parts of this file", "download it, and give the file"
WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before each further try
REFUSED = (400, 401, 403, 405, 416)  # statuses of HTTP that are final: another try would give the same

Result = TypeVar("Result")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://.")


def is_url(path: str) -> bool:
    """Whether a path of the data section is a URL."""
    return _URL.match(path) is not None


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote store, with the version of its content when it was first opened."""

    url: str
    size: int
    version: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    def fingerprint(self) -> str:
        """sha256 of what identifies the content."""
        return hashlib.sha256(f"{self.url}\n{self.size}\n{self.version}".encode()).hexdigest()

    def open(self) -> io.BufferedReader:
        """The content, from its beginning."""
        return io.BufferedReader(_Reader(self), BLOCK_BYTES)

    def block(self, number: int) -> bytes:
        """The bytes of one block, from the cache or the store."""
        from tformer.support.device import default_cache_dir  # which imports torch

        path = default_cache_dir() / FOLDER / f"{self.fingerprint()[:32]}-{number:06d}.part"
        start = number * BLOCK_BYTES
        count = min(BLOCK_BYTES, self.size - start)
        with contextlib.suppress(OSError, InputError):  # not there
            kept = files.read_bounded(path, max_bytes=count + 4)
            data = kept[4:]
            if len(data) == count and zlib.crc32(data) == int.from_bytes(kept[:4], "little"):  # else damaged
                os.utime(path)
                return data
        data = _read_range(self.url, start, start + count)
        _keep(data, path)
        return data

    def require_unchanged(self) -> None:
        """Raise InputError if the content in the store has changed."""
        if describe(self.url) != self:
            raise InputError(f"{self.url}: changed while it was read", hint="run the command again")


class _Reader(io.RawIOBase):
    """The content of a remote file at a position that can be moved."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._place = file, 0
        self._latest: tuple[int, bytes] = (-1, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        if self._place >= self._file.size:
            return 0
        number, offset = divmod(self._place, BLOCK_BYTES)
        if self._latest[0] != number:
            self._latest = (number, self._file.block(number))
        part = self._latest[1][offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)


# -- the store ---------------------------------------------------------------------------------------------------------


def describe(url: str) -> RemoteFile:
    """Describe the file at a URL. Raises InputError if there is none or the store cannot send parts of it."""
    system, path = _system(url)
    system.invalidate_cache()  # of listings
    return _described(url, _tried(url, lambda: system.info(path)))


def _described(url: str, info: dict[str, Any]) -> RemoteFile:
    if info.get("type") == "directory":
        raise InputError(f"{url}: expected a file, found a folder")
    if info.get("size") is None or info.get("partial") is False:
        raise InputError(f"{url}: {NO_PARTS}", hint=DOWNLOAD)
    size = int(info["size"])
    key = next((key for key in (*VERSION_KEYS, *TIME_KEYS) if info.get(key)), None)
    value = None if key is None else info[key]
    if isinstance(value, datetime):  # stores give a time in different forms for a listing and for a single file
        value = value.timestamp()
    version = None if key is None else f"{key} {value}"
    if version is None:
        edges = (0, min(size, EDGE_BYTES)), (max(0, size - EDGE_BYTES), size)
        version = " ".join(hashlib.sha256(_read_range(url, *edge)).hexdigest() for edge in edges)
    return RemoteFile(url, size, version)


def find(url: str, is_known: Callable[[RemoteFile], bool]) -> list[RemoteFile]:
    """One file, or the files of a pattern, or the files of a folder for which `is_known` is true, sorted by URL.

    Raises InputError where there is neither a file nor a folder.
    """
    system, path = _system(url)
    system.invalidate_cache()
    wanted: Callable[[RemoteFile], bool] | None
    if urlsplit(url).scheme in SINGLE_FILES:
        return [describe(url)]
    if "*" in path or "[" in path:
        found, wanted = _tried(url, lambda: system.glob(path, detail=True)), None
    elif _tried(url, lambda: system.isdir(path)):
        found, wanted = _tried(url, lambda: system.find(path, detail=True)), is_known
    else:
        return [describe(url)]
    known = [
        _described(system.unstrip_protocol(name), info)
        for name, info in found.items()
        if info.get("type") != "directory" and ("/." not in name or "/." in path)  # without hidden ones
    ]
    return sorted((file for file in known if wanted is None or wanted(file)), key=lambda file: file.url)


def _read_range(url: str, start: int, stop: int) -> bytes:
    """The bytes [start, stop). Raises InputError for a store that sends others."""
    if start == stop:
        return b""
    system, path = _system(url)

    def read() -> bytes:
        data: bytes = system.cat_file(path, start=start, end=stop)
        if len(data) > stop - start:
            raise InputError(f"{url}: {NO_PARTS}", hint=DOWNLOAD)
        if len(data) < stop - start:
            raise ConnectionError(f"{len(data):,} bytes came, expected {stop - start:,}")
        return data

    return _tried(url, read)


def _system(url: str) -> tuple[Any, str]:
    """(file system of fsspec, path in it). Raises InputError for an unknown scheme or a missing package."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise InputError(f"{url}: unknown kind of URL '{scheme}://'", hint=f"known: {known}")
    for package in ("fsspec", SCHEMES[scheme]):
        try:
            importlib.import_module(package)
        except ImportError:
            raise InputError(
                f"{url}: reading {scheme}:// needs the package {package}",
                hint="install it with: pip install 'tformer[remote]'",
            ) from None
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system, path


def _tried(url: str, action: Callable[[], Result]) -> Result:
    """The result of an action on the store, which is tried again while the connection fails."""
    for wait in (*WAITS, None):
        try:
            return action()
        except TformerError:
            raise  # an interruption too
        except Exception as error:  # stores have different errors, without a common base
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            status = getattr(cause, "status", None)  # of HTTP, whose file system calls every failure "not found"
            if isinstance(cause, FileNotFoundError) or status in (404, 410):
                raise InputError(f"{url}: no such file") from None
            is_final = isinstance(cause, PermissionError) or (status is not None and status in REFUSED)
            if is_final or wait is None:
                reason = " ".join(str(cause).split()) or type(cause).__name__
                hint = None if is_final else f"tried {1 + len(WAITS)} times"
                raise InputError(f"{url}: cannot be read: {reason}", hint=hint) from error
        time.sleep(wait)
    raise AssertionError("the last try returns or raises")


# -- the cache ---------------------------------------------------------------------------------------------------------


def _keep(data: bytes, path: Path) -> None:
    """Write a block into the cache: the crc32 of its bytes, and the bytes. Without a writable cache reading is slower.

    The least recently used blocks are removed until there is room.
    """
    given = os.environ.get(CACHE_BYTES_VARIABLE)
    limit = CACHE_BYTES if given is None else whole_number(given)
    if limit is None or limit < 0:
        raise InputError(f"{CACHE_BYTES_VARIABLE} must be a number of bytes, found '{given}'")
    if len(data) > limit:
        return
    with contextlib.suppress(OSError, TformerError):
        files.make_folders(path.parent)
        found = []
        for other in path.parent.iterdir():
            with contextlib.suppress(OSError):  # removed by another process
                status = other.stat()
                found.append((status.st_mtime_ns, status.st_size, other))
        size = sum(size for _, size, _ in found)
        for _, block_bytes, other in sorted(found):
            if size <= limit - len(data):
                break
            with contextlib.suppress(OSError):
                files.unlink(other)
            size -= block_bytes
        temporary = path.with_name(f"{files.TEMPORARY}{os.getpid()}")
        temporary.write_bytes(zlib.crc32(data).to_bytes(4, "little") + data)
        files.rename(temporary, path)
