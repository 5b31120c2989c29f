"""JSON from files that may be hostile: bounded in bytes and depth, without duplicate keys."""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from tformer.errors import InputError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PICKLE_HINT = (
    "tformer never unpickles, for a pickle can run any code: convert the weights to safetensors where you trust them"
)


def open_regular(path: Path) -> BufferedReader:
    """Opens an existing ordinary file for reading; folders, pipes and devices are refused without blocking."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{path} is not an ordinary file")
        return open(path, "rb")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def read_bounded(path: Path, *, max_bytes: int) -> bytes:
    """The whole file, refused before it is read when it is larger than `max_bytes`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise InputError(f"{path} has {size:,} bytes, expected at most {max_bytes:,}")
        return stream.read(max_bytes)


def parse_object(data: bytes, *, name: str) -> dict[str, Any]:
    """A JSON object; anything else, duplicate keys, and nesting too deep for the parser are an `InputError`."""
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise InputError(f"{name} is damaged: JSON nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{name} is damaged: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{name} is damaged: expected a JSON object, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def looks_like_pickle(data: bytes) -> bool:
    """Whether a file's first bytes are those of a pickle or of PyTorch's zip of pickles."""
    return data[:4] == b"PK\x03\x04" or (len(data) >= 2 and data[0] == 0x80 and 2 <= data[1] <= 5)
