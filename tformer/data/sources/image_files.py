"""Image files in folders and zip archives: listing, class names, decoding."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from tformer.data.sources.files import open_input
from tformer.errors import InputError

# Shapes: C channels, Y x X pixels.


IMAGE_ENDINGS = frozenset(
    (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
MODES = {1: "L", 3: "RGB"}  # Pillow's name of each number of channels
GREY_MODES = frozenset({"1", "L", "LA", "La"})
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
ORIENTATION = 0x0112  # EXIF's tag, and how to undo each of its values
UPRIGHT = dict(
    enumerate(
        (
            Image.Transpose.FLIP_LEFT_RIGHT,
            Image.Transpose.ROTATE_180,
            Image.Transpose.FLIP_TOP_BOTTOM,
            Image.Transpose.TRANSPOSE,
            Image.Transpose.ROTATE_270,
            Image.Transpose.TRANSVERSE,
            Image.Transpose.ROTATE_90,
        ),
        start=2,
    )
)
MAX_FILE_BYTES = 128 << 20  # of one encoded image
MAX_DEPTH = 64  # folders in folders
SYSTEM_FILES = frozenset({"__macosx", "thumbs.db", "desktop.ini"})  # what other systems hide without a leading dot
SPLITS = frozenset({"train", "training", "valid", "val", "validation", "dev", "test", "testing"})
LAYOUT_HINT = "give a folder (or .zip) with one folder of images per class, or an IDX file of images"

Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _File:
    parts: Parts  # of its path below the folder, or inside the zip
    stamp: str  # changes with its content, as far as can be known without reading it
    key: Any  # what reads it: a path, or a zip's entry


@dataclass(frozen=True)
class ImageFiles:
    """Encoded images in a fixed order, sorted by path.

    Attributes:
        places: how messages name each image.
        classes: the class folder of each; None when labels were not asked for.
        read: number -> the file's bytes; may be called from several threads.
    """

    places: tuple[str, ...]
    classes: tuple[str, ...] | None
    fingerprint: str
    read: Callable[[int], bytes]


def find_images(path: Path, *, needs_label: bool) -> ImageFiles:
    """Everything that is known without reading an image.

    InputError: nothing there, a file that is no image, no classes, a class without images, a damaged zip.
    """
    read: Callable[[Any], bytes] = read_file
    if path.is_dir():
        files, folders = _list_folder(path)
    elif path.suffix.lower() == ".zip":
        files, folders, read = _list_zip(path)
    elif needs_label:
        raise InputError(f"{path}: a single file has no classes", hint=LAYOUT_HINT)
    else:
        return ImageFiles((str(path),), None, _fingerprint([_stat_file(path, ())]), lambda number: read_file(path))
    files.sort(key=lambda file: file.parts)
    places = tuple(os.path.join(path, *file.parts) for file in files)
    for file, place in zip(files, places, strict=True):
        if os.path.splitext(file.parts[-1])[1].lower() not in IMAGE_ENDINGS:
            idx_hint = f"to read IDX, name the file of images itself: {place}" if "idx3" in file.parts[-1] else None
            raise InputError(
                f"{place}: not an image (known endings: {', '.join(sorted(IMAGE_ENDINGS))})",
                hint=idx_hint or "move it out of the folder of images",
            )
    if not files:
        raise InputError(f"{path}: no images in it", hint=LAYOUT_HINT)
    classes = _classes(path, [file.parts for file in files], folders) if needs_label else None
    return ImageFiles(places, classes, _fingerprint(files), lambda number: read(files[number].key))


def _classes(path: Path, files: Sequence[Parts], folders: set[Parts]) -> tuple[str, ...]:
    """The folder of each file that names its class."""
    root = _above_classes(files, folders)
    depth = len(root)
    for parts in files:
        if len(parts) == depth + 1:
            raise InputError(f"{os.path.join(path, *parts)}: lies in no class's folder", hint=LAYOUT_HINT)
    classes = tuple(parts[depth] for parts in files)
    for name in sorted(set(classes)):
        _require_utf8(name, above=os.path.join(path, *root))
    names = {folder[depth] for folder in folders if len(folder) > depth and folder[:depth] == root}
    if names and all(name.lower() in SPLITS for name in names):
        first = os.path.join(path, *root, min(names))
        raise InputError(
            f"{os.path.join(path, *root)}: holds parts of a data set ({', '.join(sorted(names))}), not classes",
            hint=f"name one of them, for example {first}",
        )
    empty = sorted(names.difference(classes))
    if empty:
        raise InputError(f"{os.path.join(path, *root, empty[0])}: no images of this class")
    return classes


def _require_utf8(name: str, *, above: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(
            f"{above}: the folder {os.fsencode(name)!r} has a name that is not UTF-8", hint="rename it"
        ) from None


def _above_classes(files: Sequence[Parts], folders: set[Parts]) -> Parts:
    """The folder that holds the classes: below the top as long as there is one folder only, with folders in it."""
    root: Parts = ()
    while True:
        depth = len(root)
        below = {folder for folder in folders if len(folder) > depth and folder[:depth] == root}
        inside = {folder[: depth + 1] for folder in below}
        has_files = any(len(parts) == depth + 1 and parts[:depth] == root for parts in files)
        if has_files or len(inside) != 1 or inside == below:
            return root
        root = inside.pop()


def _list_folder(folder: Path) -> tuple[list[_File], set[Parts]]:
    files: list[_File] = []
    folders: set[Parts] = set()
    seen: set[str] = set()  # links may lead in circles
    for place, names, file_names in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        parts = Path(place).relative_to(folder).parts
        real = os.path.realpath(place)
        if real in seen or len(parts) > MAX_DEPTH:
            names.clear()
            continue
        seen.add(real)
        if parts:
            folders.add(parts)
        names[:] = sorted(name for name in names if not _is_hidden(name))
        files += [_stat_file(Path(place, name), (*parts, name)) for name in file_names if not _is_hidden(name)]
    return files, folders


def _refuse_folder(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot be read: {(error.strerror or str(error)).lower()}") from error


def _stat_file(path: Path, parts: Parts) -> _File:
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: expected an image, found a pipe, device or socket")
    return _File(parts, str(status.st_size), path)


def read_file(path: Path) -> bytes:
    """A file's bytes; InputError when it cannot be read, or is larger than an image may be."""
    with open_input(path) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path}: too large for an image: more than {MAX_FILE_BYTES:,} bytes")
    return data


def _list_zip(path: Path) -> tuple[list[_File], set[Parts], Callable[[zipfile.ZipInfo], bytes]]:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise InputError(f"{path}: damaged or not a zip: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    files: list[_File] = []
    folders: set[Parts] = set()
    for entry in archive.infolist():
        name = entry.filename.replace("\\", "/")  # some Windows programs write these
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if len(parts) > MAX_DEPTH:
            raise InputError(f"{path}: folders more than {MAX_DEPTH} deep")
        if not parts or any(_is_hidden(part) for part in parts):
            continue
        is_folder = name.endswith("/")
        folders.update(_folders_of(parts, including_last=is_folder))
        if not is_folder:
            _check_entry(entry, f"{path}/{name}")
            files.append(_File(parts, f"{entry.file_size}:{entry.CRC}", entry))

    one_reader = threading.Lock()  # a ZipFile counts its readers without one

    def read(entry: zipfile.ZipInfo) -> bytes:
        try:
            with one_reader:
                return archive.read(entry)
        except Exception as error:  # what the decompressors raise has no common base
            raise InputError(f"{path}/{entry.filename}: damaged in the zip: {error}") from error

    return files, folders, read


def _check_entry(entry: zipfile.ZipInfo, place: str) -> None:
    if entry.flag_bits & 1:
        raise InputError(f"{place}: encrypted", hint="make the zip without a password")
    if entry.file_size > MAX_FILE_BYTES:
        raise InputError(f"{place}: too large for an image: {entry.file_size:,} bytes, at most {MAX_FILE_BYTES:,}")


def _folders_of(parts: Parts, *, including_last: bool) -> Iterator[Parts]:
    return (parts[:depth] for depth in range(1, len(parts) + including_last))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_FILES


def _fingerprint(files: Sequence[_File]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.parts!r} {file.stamp}\n".encode())
    return digest.hexdigest()


class Decoded(NamedTuple):
    """An image [C, Y, X], and what had to be done to it."""

    pixels: np.ndarray
    resized: bool
    recoloured: bool


def read_image(image: str | Path | bytes, *, size: int, channels: int, name: str = "image") -> np.ndarray:
    """uint8 [C, size, size] of one file, or of its bytes, which messages then call `name`."""
    if not isinstance(image, bytes):
        name = str(image)
        if "\0" in name:
            raise InputError(f"{name}: a file's name cannot hold a NUL character")
        image = read_file(Path(os.path.expanduser(name)))  # a user that does not exist stays as written
    with pillow_warnings():
        return decode_image(image, name=name, size=size, channels=channels).pixels.copy()


@contextlib.contextmanager
def pillow_warnings() -> Iterator[None]:
    """Pillow refuses images of twice MAX_IMAGE_PIXELS and warns above it: here both are refused.

    Its other warnings are about metadata. Warnings belong to the process: enter this outside a pool of threads.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def decode_image(data: bytes, *, name: str, size: int, channels: int) -> Decoded:
    """A file's bytes -> uint8 [C, size, size]; call it inside `pillow_warnings`.

    InputError: no image, a damaged one, one with too many pixels.
    """
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=FORMATS)
        full_size = image.size
        image.draft(None, (2 * size, 2 * size))  # lets JPEG skip detail that the resizing would throw away
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
        image.load()
    except UnidentifiedImageError:
        raise InputError(
            f"{name}: {'not an image' if data else 'is empty'} (expected one of {', '.join(FORMATS)})"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"{name}: more than {Image.MAX_IMAGE_PIXELS:,} pixels", hint="make it smaller") from None
    except Exception as error:  # what Pillow raises for damaged data has no common base
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{name}: damaged image: {reason}") from error
    if image.mode == "F":
        raise InputError(f"{name}: pixels are fractions, expected whole numbers", hint="save it as PNG")
    fitted = fit_image(image if turn is None else image.transpose(turn), size=size, channels=channels)
    return fitted._replace(resized=full_size != (size, size))


def fit_image(image: Image.Image, *, size: int, channels: int) -> Decoded:
    """One size, one number of channels. The pixels are a view of the image's memory."""
    if image.mode.startswith("I"):  # 16 bits a pixel, which `convert` would clip instead of scaling
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    recoloured = (image.mode in GREY_MODES) != (channels == 1)
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image.convert("RGBA"))
        image = paper
    image = image.convert(MODES[channels])
    resized = image.size != (size, size)
    if resized:
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    pixels = np.asarray(image)
    return Decoded(pixels[None] if channels == 1 else pixels.transpose(2, 0, 1), resized, recoloured)
