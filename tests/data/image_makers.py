"""Tiny image files: folders, zips and IDX, each image of one colour or of noise."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image


def encoded(pixels_YXC: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of a file with these pixels, [Y, X] or [Y, X, C]."""
    buffer = io.BytesIO()
    Image.fromarray(pixels_YXC).save(buffer, kind, **options)
    return buffer.getvalue()


def noise_image(seed: int, *, size: int = 8, channels: int = 3) -> np.ndarray:
    shape = (size, size) if channels == 1 else (size, size, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    """Files by their path below the folder; a path that ends with / is an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_zip(path: Path, files: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def idx_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_idx(path: Path, images: np.ndarray, labels: np.ndarray | None = None) -> Path:
    """Images, and labels beside them under the matching name; gzipped when the name says so."""
    for place, values in ((path, images), (path.with_name(_labels_name(path.name)), labels)):
        if values is not None:
            data = idx_bytes(values)
            place.write_bytes(gzip.compress(data) if place.suffix == ".gz" else data)
    return path


def _labels_name(name: str) -> str:
    return name.replace("images", "labels").replace("idx3", "idx1")
