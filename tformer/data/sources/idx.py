"""IDX files (MNIST's format): images and their labels."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np

from tformer.data.sources.files import read_bytes
from tformer.errors import InputError

UNSIGNED_BYTE = 8
KINDS = {3: "images", 1: "labels"}  # by number of dimensions
GZIP = ".gz"


def is_idx(path: Path) -> bool:
    """Whether a file, gzipped or not, begins as IDX does. InputError when it cannot be read."""
    head = _head(path, 4)
    return len(head) == 4 and head[:2] == b"\0\0" and 0 < head[3] <= 4


def read_images(path: Path) -> np.ndarray:
    """uint8 [N, Y, X]. InputError: not images, none, damaged."""
    images = _read(path, ndim=3)
    if not images.size:
        raise InputError(f"{path}: no images in it: its sizes are {' x '.join(map(str, images.shape))}")
    return images


def read_labels(images_path: Path, *, count: int) -> np.ndarray:
    """uint8 [N]: the labels beside these images. InputError: no such file, damaged, not as many as images."""
    path = labels_beside(images_path)
    labels = _read(path, ndim=1)
    if len(labels) != count:
        raise InputError(f"{path}: {len(labels):,} labels for the {count:,} images of {images_path}")
    return labels


def labels_beside(images_path: Path) -> Path:
    """The labels of an images file, gzipped or not, whichever is there. InputError when neither is."""
    name = images_path.name.replace("images", "labels").replace("idx3", "idx1")
    plain = name.removesuffix(GZIP)
    names = [name] if name == images_path.name else list(dict.fromkeys((name, plain, plain + GZIP)))
    for candidate in names:
        path = images_path.with_name(candidate)
        if path != images_path and path.is_file():
            return path
    hint = "name them alike, as train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz are"
    raise InputError(f"{images_path}: no file of labels beside it, expected {plain} or {plain}{GZIP}", hint=hint)


def _read(path: Path, *, ndim: int) -> np.ndarray:
    header_bytes = 4 + 4 * ndim
    header = _head(path, header_bytes)
    magic = (UNSIGNED_BYTE << 8) + ndim
    found = int.from_bytes(header[:4], "big")
    if found != magic:
        other = KINDS.get(found - (UNSIGNED_BYTE << 8), "something else")
        raise InputError(
            f"{path}: expected IDX {KINDS[ndim]} (magic number {magic}), found {other} ({found})",
            hint="name the file of images: its labels are found beside it" if other == "labels" else None,
        )
    sizes = tuple(int(size) for size in np.frombuffer(header[4:].ljust(header_bytes - 4, b"\0"), dtype=">u4"))
    expected = header_bytes + math.prod(sizes)
    data = bytearray()
    for chunk in read_bytes(path):
        data += chunk
        if len(data) > expected:
            break  # the rest of what is no IDX file may be endless
    if len(data) != expected:
        more = "more" if len(data) > expected else f"{len(data):,}"
        wanted = " x ".join(map(str, sizes))
        raise InputError(f"{path}: damaged: expected {expected:,} bytes for {wanted} values, found {more}")
    return np.frombuffer(data, dtype=np.uint8, offset=header_bytes).reshape(sizes)


def _head(path: Path, count: int) -> bytes:
    with contextlib.closing(read_bytes(path)) as chunks:  # type: ignore[type-var]
        return next(chunks, b"")[:count]
