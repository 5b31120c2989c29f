"""Image files: folders with a folder per class, zip archives and IDX files; and decoding to arrays of bytes.

    [any/leading/folders/]CLASS/[any/folders/]image.png        below a folder, or inside a zip

A zip is read in place, with a limit on the size of each member. Hidden files are left out; any other file that is no
image is refused, because leaving it out would lose data silently.

An image of another size is scaled until its shorter side fits (bicubic) and cut to the square in its middle. Colour and
grey are converted to the wanted channels, transparency becomes white, photographs are turned upright by their EXIF tag.

IDX is the format of MNIST (yann.lecun.com/exdb/mnist): a magic number, the dimensions, then the values.

    0 0 TYPE NDIM | NDIM big-endian 32-bit sizes | values, the last dimension fastest

Images [N, Y, X] have the magic number 2051 (TYPE 8: unsigned byte, NDIM 3), labels [N] 2049. The labels lie beside the
images, under the same name with `labels` for `images` and `idx1` for `idx3`; both may be gzipped.
"""

# Shapes: N images, C channels, Y x X pixels.

from __future__ import annotations

import contextlib
import hashlib
import math
import os
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

from tformer.data.sources.files import FoundFile, expanded, open_input, read_bytes, unchanged, unreadable
from tformer.support.errors import InputError

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
SYSTEM_FILES = frozenset({"__macosx", "thumbs.db", "desktop.ini"})  # hidden without a leading dot
SPLITS = frozenset({"train", "training", "valid", "val", "validation", "dev", "test", "testing"})
LAYOUT_HINT = "give a folder (or .zip) with one folder of images per class, or an IDX file of images"

UNSIGNED_BYTE = 8
IDX_KINDS = {3: "images", 1: "labels"}  # by number of dimensions
GZIP = ".gz"

Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _File:
    parts: Parts  # of its path below the folder, or inside the zip
    stamp: str  # of its content, without reading it: size, and the checksum in a zip
    key: Any  # for reading it: a path, or a zip's entry
    found: FoundFile  # itself, or the zip


@dataclass(frozen=True)
class ImageFiles:
    """Encoded images in a fixed order, sorted by path; or the images of an IDX file.

    Attributes:
        places: the name of each image in messages.
        classes: the class of each, by its folder or its label; None without labels.
        read: number -> the file's bytes; may be called from several threads.
        images_NYX: of an IDX file, which has no encoded images to `read`; None for others.
    """

    places: tuple[str, ...]
    classes: tuple[str, ...] | None
    fingerprint: str
    read: Callable[[int], bytes] = lambda number: b""
    images_NYX: np.ndarray | None = None

    def decode(self, number: int, *, size: int, channels: int) -> Decoded:
        """One image; call it inside `pillow_warnings`."""
        if self.images_NYX is not None:
            return fit_image(Image.fromarray(self.images_NYX[number]), size=size, channels=channels)
        return decode_image(self.read(number), name=self.places[number], size=size, channels=channels)

    def native_size(self, number: int) -> tuple[int, int]:
        """(pixels of the shorter side, channels) of one image; call it inside `pillow_warnings`."""
        if self.images_NYX is not None:
            return min(self.images_NYX.shape[1:]), 1
        image = open_image(self.read(number), name=self.places[number])
        return min(image.size), 1 if image.mode in GREY_MODES else 3


def find_images(path: Path, *, needs_label: bool) -> ImageFiles:
    """The images of a path, listed without reading one. An IDX file is read, with the file of labels next to it.

    Raises InputError: nothing there, a file that is no image, no classes, a class without images, a damaged zip.
    """
    if path.is_file() and is_idx(path):
        return open_idx(path, needs_label=needs_label)
    read: Callable[[Any], bytes] = read_file

    def read_unchanged(number: int) -> bytes:
        with unchanged(files[number].found):
            return read(files[number].key)

    if path.is_dir():
        files, folders = _list_folder(path)
    elif path.suffix.lower() == ".zip":
        files, folders, read = _list_zip(path)
    elif needs_label:
        raise InputError(f"{path}: a single file has no classes", hint=LAYOUT_HINT)
    else:
        files = [_stat_file(path, ())]
        return ImageFiles((str(path),), None, _fingerprint(files), read_unchanged)
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
    return ImageFiles(places, classes, _fingerprint(files), read_unchanged)


def _classes(path: Path, files: Sequence[Parts], folders: set[Parts]) -> tuple[str, ...]:
    """The class of each file: the name of one of its folders."""
    root = _above_classes(files, folders)
    depth = len(root)
    for parts in files:
        if len(parts) == depth + 1:
            raise InputError(f"{os.path.join(path, *parts)}: lies in no class's folder", hint=LAYOUT_HINT)
    classes = tuple(parts[depth] for parts in files)
    for name in sorted(set(classes)):
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            above = os.path.join(path, *root)
            raise InputError(
                f"{above}: the folder {os.fsencode(name)!r} has a name that is not UTF-8", hint="rename it"
            ) from None
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


def _above_classes(files: Sequence[Parts], folders: set[Parts]) -> Parts:
    """The folder that holds the classes: below the top while there is a single folder that has folders in it."""
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
    raise unreadable(error.filename, error) from error


def _stat_file(path: Path, parts: Parts) -> _File:
    found = FoundFile(path)
    if found.facts is None:
        raise InputError(f"{path}: expected an image, found a pipe, device or socket")
    return _File(parts, str(found.facts.size), path, found)


def read_file(path: Path) -> bytes:
    """A file's bytes. Raises InputError if it cannot be read, or is larger than an image may be."""
    with open_input(path) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path}: too large for an image: more than {MAX_FILE_BYTES:,} bytes")
    return data


def _list_zip(path: Path) -> tuple[list[_File], set[Parts], Callable[[zipfile.ZipInfo], bytes]]:
    found = _stat_file(path, ()).found  # opening a pipe would wait for its writer
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise InputError(f"{path}: damaged or not a zip: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
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
        folders.update(parts[:depth] for depth in range(1, len(parts) + is_folder))
        if not is_folder:
            if entry.flag_bits & 1:
                raise InputError(f"{path}/{name}: encrypted", hint="make the zip without a password")
            if (size := entry.file_size) > MAX_FILE_BYTES:
                raise InputError(f"{path}/{name}: too large for an image: {size:,} bytes, at most {MAX_FILE_BYTES:,}")
            files.append(_File(parts, f"{entry.file_size}:{entry.CRC}", entry, found))

    lock = threading.Lock()  # a ZipFile counts its readers without a lock

    def read(entry: zipfile.ZipInfo) -> bytes:
        try:
            with lock:
                return archive.read(entry)
        except Exception as error:  # the errors of the decompressors have no common base
            raise InputError(f"{path}/{entry.filename}: damaged in the zip: {error}") from error

    return files, folders, read


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_FILES


def _fingerprint(files: Sequence[_File]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.parts!r} {file.stamp}\n".encode())
    return digest.hexdigest()


class Decoded(NamedTuple):
    """An image [C, Y, X], and whether its size and colours had to be changed."""

    pixels: np.ndarray
    resized: bool
    recoloured: bool


def read_image(image: str | Path | bytes, *, size: int, channels: int) -> np.ndarray:
    """uint8 [C, size, size] of one file, or of its bytes."""
    name = "image"
    if not isinstance(image, bytes):
        name = str(image)
        if "\0" in name:
            raise InputError(f"{name}: a file's name cannot hold a NUL character")
        image = read_file(expanded(name))
    with pillow_warnings():
        return decode_image(image, name=name, size=size, channels=channels).pixels.copy()


@contextlib.contextmanager
def pillow_warnings() -> Iterator[None]:
    """Makes an error of Pillow's warning about images of more than MAX_IMAGE_PIXELS, and hides its other warnings.

    Warning filters belong to the process: enter this outside a pool of threads.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def open_image(data: bytes, *, name: str) -> Image.Image:
    """An image whose pixels are not decoded yet. Raises InputError: no image, too many pixels."""
    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InputError(
            f"{name}: {'not an image' if data else 'is empty'} (expected one of {', '.join(FORMATS)})"
        ) from None
    except Exception as error:
        raise _damaged(error, name) from None


def decode_image(data: bytes, *, name: str, size: int, channels: int) -> Decoded:
    """A file's bytes -> uint8 [C, size, size]; call it inside `pillow_warnings`.

    Raises InputError: no image, a damaged one, one with too many pixels.
    """
    image = open_image(data, name=name)
    try:
        full_size = image.size
        image.draft(None, (2 * size, 2 * size))  # JPEG skips detail that resizing would remove
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
        image.load()
    except Exception as error:
        raise _damaged(error, name) from error
    if image.mode == "F":
        raise InputError(f"{name}: pixels are fractions, expected whole numbers", hint="save it as PNG")
    fitted = fit_image(image if turn is None else image.transpose(turn), size=size, channels=channels)
    return fitted._replace(resized=full_size != (size, size))


def _damaged(error: Exception, name: str) -> InputError:
    """The error for an image that Pillow does not read; its errors for damaged data have no common base."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return InputError(f"{name}: more than {Image.MAX_IMAGE_PIXELS:,} pixels", hint="make it smaller")
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return InputError(f"{name}: damaged image: {reason}")


def fit_image(image: Image.Image, *, size: int, channels: int) -> Decoded:
    """The image at one size and number of channels. The pixels are a view of its memory."""
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


# -- IDX ---------------------------------------------------------------------------------------------------------------


def open_idx(path: Path, *, needs_label: bool) -> ImageFiles:
    """The images of an IDX file, with the labels beside it if they are needed."""
    with unchanged(FoundFile(path)):
        images_NYX = read_idx_images(path)
    digest = hashlib.sha256(images_NYX.data)
    classes: tuple[str, ...] | None = None
    if needs_label:
        labels = read_idx_labels(path, count=len(images_NYX))
        digest.update(labels.data)
        classes = tuple(map(str, labels.tolist()))
    places = tuple(f"{path}#{number}" for number in range(len(images_NYX)))
    return ImageFiles(places, classes, digest.hexdigest(), images_NYX=images_NYX)


def is_idx(path: Path) -> bool:
    """Whether a file, gzipped or not, begins as IDX does. Raises InputError if it cannot be read."""
    head = _first_bytes(path, 4)
    return len(head) == 4 and head[:2] == b"\0\0" and 0 < head[3] <= 4


def read_idx_images(path: Path) -> np.ndarray:
    """uint8 [N, Y, X]. Raises InputError: not images, none, damaged."""
    images = _read_idx(path, ndim=3)
    if not images.size:
        raise InputError(f"{path}: no images in it: its sizes are {' x '.join(map(str, images.shape))}")
    return images


def read_idx_labels(images_path: Path, *, count: int) -> np.ndarray:
    """uint8 [N]: the labels beside these images. Raises InputError: no such file, damaged, not as many as images."""
    path = labels_beside(images_path)
    labels = _read_idx(path, ndim=1)
    if len(labels) != count:
        raise InputError(f"{path}: {len(labels):,} labels for the {count:,} images of {images_path}")
    return labels


def labels_beside(images_path: Path) -> Path:
    """The file of labels, gzipped or not, beside a file of images. Raises InputError if there is none."""
    name = images_path.name.replace("images", "labels").replace("idx3", "idx1")
    plain = name.removesuffix(GZIP)
    names = [name] if name == images_path.name else list(dict.fromkeys((name, plain, plain + GZIP)))
    for candidate in names:
        path = images_path.with_name(candidate)
        if path != images_path and path.is_file():
            return path
    hint = "use matching names, as train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz"
    raise InputError(f"{images_path}: no file of labels beside it, expected {plain} or {plain}{GZIP}", hint=hint)


def _read_idx(path: Path, *, ndim: int) -> np.ndarray:
    header_bytes = 4 + 4 * ndim
    header = _first_bytes(path, header_bytes)
    magic = (UNSIGNED_BYTE << 8) + ndim
    found = int.from_bytes(header[:4], "big")
    if found != magic:
        other = IDX_KINDS.get(found - (UNSIGNED_BYTE << 8), "something else")
        raise InputError(
            f"{path}: expected IDX {IDX_KINDS[ndim]} (magic number {magic}), found {other} ({found})",
            hint="name the file of images: its labels are found beside it" if other == "labels" else None,
        )
    sizes = tuple(int(size) for size in np.frombuffer(header[4:].ljust(header_bytes - 4, b"\0"), dtype=">u4"))
    expected = header_bytes + math.prod(sizes)
    data = bytearray()
    for chunk in read_bytes(path):
        data += chunk
        if len(data) > expected:
            break  # a file that is not IDX may be endless
    if len(data) != expected:
        more = "more" if len(data) > expected else f"{len(data):,}"
        wanted = " x ".join(map(str, sizes))
        raise InputError(f"{path}: damaged: expected {expected:,} bytes for {wanted} values, found {more}")
    return np.frombuffer(data, dtype=np.uint8, offset=header_bytes).reshape(sizes)


def _first_bytes(path: Path, count: int) -> bytes:
    with contextlib.closing(read_bytes(path)) as chunks:  # type: ignore[type-var]
        return next(chunks, b"")[:count]
