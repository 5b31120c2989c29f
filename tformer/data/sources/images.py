"""Labelled image sets as uint8 arrays of one size and number of channels.

A set is kept in memory if that takes at most 2 GB; otherwise every batch is decoded when it is needed.
"""

# Shapes: N images of a set, B of a batch, C channels, Y x X pixels.

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tformer.data.permutation import share_of
from tformer.data.sources.files import expanded
from tformer.data.sources.image_files import LAYOUT_HINT, MODES, Decoded, find_images, pillow_warnings
from tformer.data.sources.labelled import LabelIndex
from tformer.data.sources.remote import is_url
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.workers.work import QUIET, Work

MEMORY_BYTES = 2 << 30
THREADS = 4
CHUNK = 64  # images that a thread decodes before it reports
MAX_DIGITS = 255  # the longest name of a folder; in a zip one may have more digits than Python reads as a number
STATISTICS_SAMPLE = 4096  # images, evenly spread, from a set that is not in memory


@dataclass(frozen=True, slots=True)
class ImageExample:
    pixels: np.ndarray  # uint8 [C, Y, X]
    label: int | None = None


@dataclass
class ImageSet:
    """Labelled images, all of one size.

    Attributes:
        labels: int64 [N], indices into `label_names`; None without labels.
        places: the name of each image in messages.
        gather: numbers int64 [B] -> pixels uint8 [B, C, Y, X].
        seq_len: positions that the model makes of one image, set by the caller.
    """

    name: str
    fingerprint: str
    places: Sequence[str]
    labels: np.ndarray | None
    label_names: tuple[str, ...]
    gather: Callable[[np.ndarray], np.ndarray]
    in_memory: bool = True
    notes: tuple[str, ...] = ()
    seq_len: int = 1
    lengths: None = None  # all have the same
    rows: None = None  # of a table
    numbers: np.ndarray | None = None  # int [N], of the images in the whole set that these are a part of; None: all

    def __len__(self) -> int:
        return len(self.places)

    def pixels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """uint8 [B, C, Y, X]. Raises InputError for a damaged image of a set that is not in memory."""
        return self.gather(np.asarray(indices, dtype=np.int64))

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[ImageExample]:
        """The images with their labels; the same in every epoch."""
        pixels = self.pixels(indices)
        if self.labels is None:
            return [ImageExample(image) for image in pixels]
        labels = self.labels[np.asarray(indices, dtype=np.int64)].tolist()
        return [ImageExample(image, label) for image, label in zip(pixels, labels, strict=True)]

    def subset(self, indices: Sequence[int] | np.ndarray) -> ImageSet:
        """Some of the images, in this order; the pixels are shared, not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        digest = hashlib.sha256(self.fingerprint.encode() + chosen.tobytes())
        return dataclasses.replace(
            self,
            fingerprint=digest.hexdigest(),
            places=[self.places[index] for index in chosen],
            labels=None if self.labels is None else self.labels[chosen],
            gather=lambda numbers: self.gather(chosen[numbers]),
            numbers=chosen if self.numbers is None else self.numbers[chosen],
        )

    def share(self, *, fraction: float, seed: int) -> ImageSet:
        """Some of the images, fixed by the seed, with the share of each class."""
        return self.subset(share_of(len(self), fraction=fraction, seed=seed, labels=self.labels))


SURVEYED_IMAGES = 8
"""Number of evenly spread images that are opened to learn the size and colours of a set."""


def survey_images(path: str) -> tuple[int, int, int]:
    """(number of images, pixels of the shorter side, channels) of a set; the last two are the median of a few images.

    Raises InputError as `open_images`.
    """
    place = expanded(path)
    if is_url(path) or not place.exists():
        raise InputError(f"{path}: no such file or directory")
    found = find_images(place, needs_label=True)
    total = len(found.places)
    chosen = np.arange(min(total, SURVEYED_IMAGES)) * total // min(total, SURVEYED_IMAGES)
    with pillow_warnings():
        sizes = [found.native_size(int(number)) for number in chosen]
    side, channels = np.median(sizes, axis=0)
    return total, int(side), 1 if channels < 2 else 3


def open_images(
    path: str | Path,
    *,
    size: int,
    channels: int,
    label_names: Sequence[str] = (),
    needs_label: bool = True,
    work: Work = QUIET,
) -> ImageSet:
    """A folder or .zip with a folder per class, or an IDX file of images with its labels beside it.

    Args:
        size: side of the square that every image becomes.
        channels: 1 (grey) or 3 (red, green, blue).
        label_names: the classes in their order; empty: those found, numbers by value, other names by alphabet.
        needs_label: False: images in any folders, a single image, or an IDX file without labels are read too.

    Raises InputError: nothing there, no image, a damaged one, no classes or one only, an empty one, an unknown label;
    Interrupted if `work` is stopped.
    """
    if str(path) == STANDARD_INPUT:
        raise InputError("images cannot come from standard input", hint=LAYOUT_HINT)
    if is_url(str(path)):
        raise InputError(f"{path}: images are read from files and folders of this machine", hint="download them")
    place = expanded(path)
    if not place.exists():
        raise InputError(
            f"{path}: no such file or directory", hint=None if place.is_absolute() else f"looked in {Path.cwd()}"
        )
    if channels not in MODES:
        raise InputError(f"{path}: images have 1 channel (grey) or 3 (colour), found a model with {channels}")
    found = find_images(place, needs_label=needs_label)
    decode = functools.partial(found.decode, size=size, channels=channels)
    pixels: np.ndarray | None = None
    if found.images_NYX is not None and channels == 1 and found.images_NYX.shape[1:] == (size, size):
        pixels = found.images_NYX[:, None]  # they need no decoding
    labels, names = None, tuple(label_names)
    if found.classes is not None:
        names = names or class_order(set(found.classes))
        if len(names) < 2:
            raise InputError(f"{path}: one class only, '{names[0]}'", hint=LAYOUT_HINT)
        labels = LabelIndex(names).encode_all(found.classes, found.places)
    count, shape = len(found.places), (channels, size, size)
    images = ImageSet(
        str(path),
        found.fingerprint,
        found.places,
        labels,
        names,
        gather=lambda numbers: _decode_many(decode, numbers, shape)[0],
        in_memory=pixels is not None or count * channels * size * size <= MEMORY_BYTES,
    )
    if not images.in_memory:
        images.notes = (f"{path}: {count:,} images, decoded and resized to {size}x{size} when they are needed",)
        return images
    resized = recoloured = 0
    if pixels is None:
        pixels, resized, recoloured = _decode_many(decode, np.arange(count), shape, name=str(path), work=work)
    images.gather = pixels.__getitem__
    if resized:
        images.notes += (
            f"{path}: {resized:,} of {count:,} images were not {size}x{size}: "
            "resized by the shorter side, then the middle was cut out",
        )
    if recoloured:
        change = "grey images were given three equal channels" if channels == 3 else "colour images were made grey"
        images.notes += (f"{path}: {recoloured:,} of {count:,} {change}",)
    return images


def class_order(names: Sequence[str] | set[str]) -> tuple[str, ...]:
    """Sort the classes: by value if all names are numbers, else by alphabet."""
    if all(name.isdecimal() and len(name) <= MAX_DIGITS for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def channel_statistics(images: ImageSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of values in [0, 1]; 1 for a constant channel, as a divisor.

    Of a set that is not in memory a fixed sample is read.
    """
    count = len(images) if images.in_memory else min(len(images), STATISTICS_SAMPLE)
    chosen = np.linspace(0, len(images) - 1, count).round().astype(np.int64)
    sums: np.ndarray | int = 0
    squares: np.ndarray | int = 0
    values = 0  # per channel
    for start in range(0, count, 1024):
        pixels = images.pixels(chosen[start : start + 1024])
        sums = sums + pixels.sum(axis=(0, 2, 3), dtype=np.int64)  # exact, whatever the order
        squares = squares + (pixels.astype(np.uint16) ** 2).sum(axis=(0, 2, 3), dtype=np.int64)
        values += pixels[:, 0].size
    mean = np.asarray(sums) / values
    deviation = np.sqrt(np.maximum(0.0, np.asarray(squares) / values - mean**2))
    return (
        tuple(round(float(value), 6) for value in mean / 255),
        tuple(round(float(value), 6) or 1.0 for value in deviation / 255),
    )


def to_pixels(images_BCYX: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 [B, C, Y, X] -> float32 of that shape: (value / 255 - mean) / std, with a mean and std for each channel."""
    scale = 1 / np.array(std, dtype=np.float64)
    offset = -np.array(mean, dtype=np.float64) * scale
    per_channel = (1, -1, 1, 1)
    values = torch.from_numpy(images_BCYX).float()
    values *= torch.from_numpy(scale / 255).float().view(per_channel)
    values += torch.from_numpy(offset).float().view(per_channel)
    return values


def _decode_many(
    decode: Callable[[int], Decoded],
    numbers: np.ndarray,
    shape: tuple[int, int, int],
    *,
    name: str = "",
    work: Work = QUIET,
) -> tuple[np.ndarray, int, int]:
    """(uint8 [B, C, Y, X], number resized, number recoloured). Of several damaged images the first is reported."""
    count = len(numbers)
    pixels = np.empty((count, *shape), dtype=np.uint8)

    def decode_chunk(start: int) -> tuple[int, int]:
        resized = recoloured = 0
        for place in range(start, min(start + CHUNK, count)):
            decoded = decode(int(numbers[place]))
            pixels[place] = decoded.pixels
            resized += decoded.resized
            recoloured += decoded.recoloured
        return resized, recoloured

    resized = recoloured = 0
    with pillow_warnings():
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
        try:
            for done, part in enumerate(pool.map(decode_chunk, range(0, count, CHUNK)), 1):
                work.raise_if_stopped(f"while reading {name}")
                resized, recoloured = resized + part[0], recoloured + part[1]
                work.report(min(done * CHUNK, count), count)
        finally:
            pool.shutdown(cancel_futures=True)
    return pixels, resized, recoloured
