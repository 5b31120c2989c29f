"""Files of a token cache: a checked header and one array each, written once, memory-mapped for reading."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tformer.errors import InputError, StorageError, cannot_write

MAGIC = b"TFTOKENS"
VERSION = 1
SHARD_BYTES = 128 << 20
VERIFY_BYTES = 64 << 20  # caches up to this size are read through when opened; larger ones only measured

_FIELDS = struct.Struct("<8sII32s32sIQQQQII")
HEADER_BYTES = 128


class DamagedShardError(Exception):
    """A cached file is not what was written: it will be rebuilt from the text."""


@dataclass(frozen=True)
class ShardHeader:
    item_bytes: int
    tokenizer: bytes  # sha256, 32 bytes
    text: bytes = bytes(32)
    number: int = 0
    count: int = 0
    tokens: int = 0
    num_bytes: int = 0
    shard_tokens: int = 0
    vocab_size: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        fields = (
            MAGIC,
            VERSION,
            self.item_bytes,
            self.tokenizer,
            self.text,
            self.number,
            self.count,
            self.tokens,
            self.num_bytes,
            self.shard_tokens,
            self.vocab_size,
            self.checksum,
        )
        data = _FIELDS.pack(*fields)
        return (data + struct.pack("<I", zlib.crc32(data))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> ShardHeader:
        size = _FIELDS.size
        if len(data) < HEADER_BYTES or struct.unpack("<I", data[size : size + 4])[0] != zlib.crc32(data[:size]):
            raise DamagedShardError("header")
        magic, version, *values = _FIELDS.unpack(data[:size])
        if magic != MAGIC or version != VERSION:
            raise DamagedShardError(f"magic {magic!r}, version {version}")
        return cls(*values)


def token_dtype(vocab_size: int, *, requested: str | None = None) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id; InputError when the requested one does not."""
    for name in (requested,) if requested else ("uint16", "uint32"):
        dtype = np.dtype(name)
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise InputError(
        f"a vocabulary of {vocab_size:,} tokens does not fit {dtype.name}, which ends at {np.iinfo(dtype).max + 1:,}",
        hint="train a tokenizer with a smaller --vocab-size",
    )


class ArrayWriter:
    """Appends to one file; the header is filled in, and everything forced to disk, by `finish`."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        self.count, self._checksum = 0, 0
        try:
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise storage_error(path, error) from error
        self._write(bytes(HEADER_BYTES))

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        self._checksum = zlib.crc32(data, self._checksum)
        self._write(data)
        self.count += len(values)

    def finish(self, *, tokenizer: bytes, **facts: Any) -> None:
        header = ShardHeader(
            item_bytes=self.dtype.itemsize, tokenizer=tokenizer, count=self.count, checksum=self._checksum, **facts
        )
        try:
            self._file.seek(0)
            self._write(header.pack())
            os.fsync(self._file.fileno())
        except OSError as error:
            raise storage_error(self.path, error) from error
        finally:
            self._file.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            needed = HEADER_BYTES + self.count * self.dtype.itemsize + len(data)
            raise storage_error(self.path, error, needed=needed) from error


def storage_error(path: Path, error: OSError, *, needed: int | None = None) -> StorageError:
    hint = "free some space, or set TFORMER_CACHE to a folder with more"
    return cannot_write(path, error, bytes_needed=needed, hint=hint)


def map_array(path: Path, dtype: np.dtype[Any], *, tokenizer: bytes) -> tuple[np.ndarray, ShardHeader]:
    """The file's array, memory-mapped read-only, and its header; DamagedShardError when anything does not fit."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header = ShardHeader.unpack(file.read(HEADER_BYTES))
    except OSError as error:
        raise DamagedShardError(f"{path.name}: {error}") from error
    if header.tokenizer != tokenizer or header.item_bytes != dtype.itemsize:
        raise DamagedShardError(f"{path.name}: written for another tokenizer")
    if header.count < 1 or size != HEADER_BYTES + header.count * dtype.itemsize:
        raise DamagedShardError(f"{path.name}: {size} bytes, expected {header.count} items")
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(header.count,)), header


def verify_array(array: np.ndarray, header: ShardHeader) -> None:
    if zlib.crc32(array.data) != header.checksum:
        raise DamagedShardError("checksum")
