"""Image files in folders, zips and IDX: listing, classes, decoding, damaged files."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.data.fakes import refusal
from tests.data.image_makers import encoded, idx_bytes, noise_image, write_idx, write_tree, write_zip
from tformer.data.sources import image_files
from tformer.data.sources.image_files import (
    find_images,
    is_idx,
    labels_beside,
    read_idx_images,
    read_idx_labels,
    read_image,
)
from tformer.support.errors import InputError

PNG = encoded(noise_image(0))


def classes_of(path: Path) -> list[str]:
    found = find_images(path, needs_label=True)
    assert found.classes is not None
    return list(found.classes)


# -- layouts ---------------------------------------------------------------------------------------------------------

TREE = {"b/1.png": PNG, "b/0.JPG": PNG, "a/deeper/2.png": PNG, "a/deepest/3.jpeg": PNG}


@pytest.mark.parametrize("above", ["", "train/", "data/train/"])
@pytest.mark.parametrize("write", [write_tree, write_zip])
def test_class_is_the_folder_below_all_common_ones(tmp_path: Path, write: Callable, above: str) -> None:
    path = write(tmp_path / "set.zip", {above + name: data for name, data in TREE.items()})
    found = find_images(path, needs_label=True)
    assert found.classes == ("a", "a", "b", "b")
    assert found.places[-1] == f"{path}/{above}b/1.png"
    assert [found.read(number) for number in range(4)] == [PNG] * 4


@pytest.mark.parametrize("write", [write_tree, write_zip])
def test_hidden_files_are_left_out(tmp_path: Path, write: Callable) -> None:
    hidden = {"a/.DS_Store": b"x", "__MACOSX/a/._1.png": b"x", ".git/config": b"x", "a/Thumbs.db": b"x"}
    assert classes_of(write(tmp_path / "set.zip", {**TREE, **hidden})) == ["a", "a", "b", "b"]


NO_IMAGE = f"not an image (known endings: {', '.join(sorted(image_files.IMAGE_ENDINGS))})"
SPLITS = {"train/a/1.png": PNG, "train/b/1.png": PNG, "test/a/1.png": PNG}
IDX = {"train-images-idx3-ubyte.gz": b"x", "train-labels-idx1-ubyte.gz": b"x"}


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ({**TREE, "a/notes.txt": b"text"}, f"/a/notes.txt: {NO_IMAGE}", "move it out"),
        ({**TREE, "README.md": b"text"}, f"/README.md: {NO_IMAGE}", "move it out"),
        ({**TREE, "a/noending": b"text"}, f"/a/noending: {NO_IMAGE}", "move it out"),
        (IDX, f"/train-images-idx3-ubyte.gz: {NO_IMAGE}", "/train-images-idx3-ubyte.gz"),
        ({**TREE, "c/": b""}, "/c: no images of this class", ""),
        ({"1.png": PNG, "2.png": PNG}, "/1.png: lies in no class's folder", "one folder of images per class"),
        ({**TREE, "stray.png": PNG}, "/stray.png: lies in no class's folder", "one folder of images per class"),
        ({"a/": b"", "b/": b""}, ": no images in it", "one folder of images per class"),
        (SPLITS, ": holds parts of a data set (test, train), not classes", "/test"),
    ],
)
@pytest.mark.parametrize("write", [write_tree, write_zip])
def test_a_wrong_layout_is_named_in_folders_and_zips(
    tmp_path: Path, write: Callable, files: dict[str, bytes], message: str, hint: str
) -> None:
    path = write(tmp_path / "set.zip", files)
    error = refusal(lambda: classes_of(path))
    assert error.message == f"{path}{message}" and hint in str(error.hint)


def test_a_class_folder_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = write_tree(tmp_path / "set", TREE)
    odd = os.fsencode(path) + b"/d\xffg"
    try:
        os.mkdir(odd)
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    Path(os.fsdecode(odd), "1.png").write_bytes(PNG)
    message = refusal(lambda: classes_of(path)).message
    assert message == f"{path}: the folder b'd\\xffg' has a name that is not UTF-8"


def test_without_labels_any_layout_will_do(tmp_path: Path) -> None:
    flat = write_tree(tmp_path / "flat", {"2.png": PNG, "1.png": PNG})
    found = find_images(flat, needs_label=False)
    assert found.classes is None and found.places == (f"{flat}/1.png", f"{flat}/2.png")
    assert len(find_images(write_tree(tmp_path / "tree", TREE), needs_label=False).places) == 4
    single = find_images(flat / "1.png", needs_label=False)
    assert single.places == (f"{flat}/1.png",) and single.read(0) == PNG
    assert "a single file has no classes" in refusal(lambda: find_images(flat / "1.png", needs_label=True)).message


def test_links_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    elsewhere = write_tree(tmp_path / "elsewhere", {"1.png": PNG})
    path = write_tree(tmp_path / "set", {"a/1.png": PNG})
    (path / "b").symlink_to(elsewhere, target_is_directory=True)
    (path / "a" / "again").symlink_to(path, target_is_directory=True)
    assert classes_of(path) == ["a", "b"]
    (path / "a" / "2.png").symlink_to(path / "gone.png")
    assert f"{path}/a/2.png: cannot be read: no such file" in refusal(lambda: classes_of(path)).message


def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    path = write_tree(tmp_path / "set", TREE)
    os.mkfifo(path / "a" / "pipe.png")
    assert "expected an image, found a pipe" in refusal(lambda: classes_of(path)).message


@pytest.mark.parametrize("write", [write_tree, write_zip])
def test_fingerprint_follows_names_and_content(tmp_path: Path, write: Callable) -> None:
    def of(name: str, files: dict[str, bytes]) -> str:
        return find_images(write(tmp_path / name, files), needs_label=True).fingerprint

    first = of("1.zip", TREE)
    assert of("2.zip", TREE) == first
    assert of("3.zip", {**TREE, "a/4.png": PNG}) != first
    assert of("4.zip", {**TREE, "b/1.png": PNG + b"x"}) != first


# -- zips ------------------------------------------------------------------------------------------------------------


def test_not_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "set.zip"
    path.write_bytes(b"PK\x03\x04 and no more")
    assert refusal(lambda: classes_of(path)).message.startswith(f"{path}: damaged or not a zip: ")


def test_damage_inside_a_zip_names_the_image(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "set.zip", TREE)
    data = bytearray(path.read_bytes())
    data[data.index(PNG) + 40] ^= 1
    path.write_bytes(data)
    found = find_images(path, needs_label=True)
    assert f"{path}/b/1.png: damaged in the zip: Bad CRC-32" in refusal(lambda: found.read(3)).message


def test_a_zip_member_above_the_size_limit_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MAX_FILE_BYTES", 100_000)
    bomb = {"a/1.png": bytes(1_000_000), "b/1.png": PNG}
    packed = write_zip(tmp_path / "set.zip", bomb, compression=zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < 3000
    assert "a/1.png: too large for an image: 1,000,000 bytes" in refusal(lambda: classes_of(packed)).message
    plain = find_images(write_tree(tmp_path / "set", bomb), needs_label=True)
    assert "too large for an image" in refusal(lambda: plain.read(0)).message


def test_encrypted_and_endlessly_nested_zips_are_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "set.zip", TREE)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    assert "encrypted" in refusal(lambda: classes_of(path)).message
    deep = write_zip(tmp_path / "deep.zip", {"a/" * 100 + "1.png": PNG})
    assert "more than 64 deep" in refusal(lambda: classes_of(deep)).message


# -- one image -------------------------------------------------------------------------------------------------------


def test_lossless_pixels_are_read_as_they_are() -> None:
    colour, grey = noise_image(1), noise_image(2, channels=1)
    read = read_image(encoded(colour), size=8, channels=3)
    assert read.dtype == np.uint8 and read.flags.c_contiguous and read.flags.writeable
    assert np.array_equal(read, colour.transpose(2, 0, 1))
    assert np.array_equal(read_image(encoded(grey), size=8, channels=1), grey[None])


def test_grey_and_colour_become_each_other() -> None:
    colour, grey = noise_image(1), noise_image(2, channels=1)
    assert np.array_equal(read_image(encoded(grey), size=8, channels=3), np.stack([grey] * 3))
    weights = np.array([0.299, 0.587, 0.114])  # ITU-R 601
    assert np.abs(read_image(encoded(colour), size=8, channels=1)[0] - colour @ weights).max() <= 1


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = (np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).astype(np.uint16)
    assert np.array_equal(read_image(encoded(deep), size=8, channels=1)[0], deep >> 8)


def test_transparency_becomes_white() -> None:
    pixels = np.zeros((8, 8, 4), dtype=np.uint8)
    pixels[2:4, 2:4, 3] = 255  # black ink on nothing
    read = read_image(encoded(pixels), size=8, channels=1)[0]
    assert (read[2:4, 2:4] == 0).all() and read.sum() == 255 * 60


@pytest.mark.parametrize(("width", "height"), [(16, 8), (8, 16), (48, 24), (24, 72), (4, 6)])
def test_other_sizes_fit_the_shorter_side_and_keep_the_middle(width: int, height: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    scale = 8 / min(width, height)
    whole = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    left, top = (whole.width - 8) // 2, (whole.height - 8) // 2
    expected = np.asarray(whole)[top : top + 8, left : left + 8].transpose(2, 0, 1)
    assert np.abs(read_image(encoded(pixels), size=8, channels=3).astype(int) - expected).max() <= 1


def test_photographs_stand_upright() -> None:
    pixels = np.zeros((8, 8), dtype=np.uint8)
    pixels[0, :] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it turned by 90 degrees clockwise
    read = read_image(encoded(pixels, exif=exif), size=8, channels=1)[0]
    assert (read[:, -1] == 255).all() and read.sum() == 8 * 255


def test_large_jpeg_is_read_like_a_png_of_it() -> None:
    smooth = np.add.outer(np.arange(256), np.arange(256)).astype(np.float64) / 2
    pixels = np.repeat(smooth[..., None], 3, axis=2).astype(np.uint8)
    jpeg, png = (read_image(encoded(pixels, kind), size=8, channels=3).astype(int) for kind in ("JPEG", "PNG"))
    assert np.abs(jpeg - png).max() <= 3


@pytest.mark.parametrize("kind", ["BMP", "GIF", "PPM", "TIFF"])
def test_other_formats_are_read(kind: str) -> None:
    grey = noise_image(2, channels=1)
    assert np.array_equal(read_image(encoded(grey, kind), size=8, channels=1), grey[None])


def test_files_that_are_no_image_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    (tmp_path / "b.png").write_bytes(b"")
    for name, words in (("a.png", "not an image"), ("b.png", "is empty"), ("c.png", "cannot be read: no such file")):
        path = tmp_path / name
        message = refusal(lambda path=path: read_image(path, size=8, channels=3)).message
        assert message.startswith(f"{path}: {words}")
    assert refusal(lambda: read_image(b"x", size=8, channels=3)).message.startswith("image")


def test_truncated_image_is_named(tmp_path: Path) -> None:
    for kind in ("PNG", "JPEG"):
        path = tmp_path / f"x.{kind.lower()}"
        path.write_bytes(encoded(noise_image(0, size=64), kind)[:-600])
        assert f"{path}: damaged image: " in refusal(lambda path=path: read_image(path, size=8, channels=3)).message


@pytest.mark.parametrize("limit", [2000, 4000])  # 64 x 64 = 4096: more than twice the limit, and just more
def test_too_many_pixels_are_refused(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    data = encoded(noise_image(0, size=64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f"more than {limit:,} pixels" in refusal(lambda: read_image(data, size=8, channels=3)).message


def test_fractions_are_refused() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.ones((8, 8), dtype=np.float32)).save(buffer, "TIFF")
    assert "fractions" in refusal(lambda: read_image(buffer.getvalue(), size=8, channels=1)).message


@given(
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]),
    cut=st.integers(0, 400),
    places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6),
)
def test_any_damage_gives_pixels_or_one_line(kind: str, cut: int, places: list[tuple[float, int]]) -> None:
    data = bytearray(encoded(noise_image(0, size=12), kind))
    for share, value in places:
        data[min(int(share * len(data)), len(data) - 1)] = value
    try:
        pixels = read_image(bytes(data[: max(1, len(data) - cut)]), size=8, channels=3)
    except InputError as error:
        assert "\n" not in error.message
    else:
        assert pixels.shape == (3, 8, 8)


IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([7, 0, 9], dtype=np.uint8)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-images.idx3-ubyte"])
def test_idx_files_are_read_as_written(tmp_path: Path, name: str, ending: str) -> None:
    path = write_idx(tmp_path / f"{name}{ending}", IMAGES, LABELS)
    assert is_idx(path)
    assert np.array_equal(read_idx_images(path), IMAGES)
    assert np.array_equal(read_idx_labels(path, count=3), LABELS)


def test_labels_may_be_compressed_when_images_are_not(tmp_path: Path) -> None:
    images = write_idx(tmp_path / "train-images-idx3-ubyte", IMAGES)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx_bytes(LABELS)))
    assert labels_beside(images) == labels
    images.rename(tmp_path / "train-images-idx3-ubyte.gz")
    labels.rename(tmp_path / "train-labels-idx1-ubyte")
    assert labels_beside(tmp_path / "train-images-idx3-ubyte.gz").name == "train-labels-idx1-ubyte"


def test_labels_of_idx_images_are_named_where_they_are_missing_or_too_few(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "train-images-idx3-ubyte.gz", IMAGES)
    assert "train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz" in refusal(lambda: labels_beside(path)).message
    other = write_idx(tmp_path / "digits", IMAGES)
    assert "no file of labels beside it" in refusal(lambda: labels_beside(other)).message
    few = write_idx(tmp_path / "images", IMAGES, LABELS[:2])
    message = refusal(lambda: read_idx_labels(few, count=3)).message
    assert message == f"{tmp_path}/labels: 2 labels for the 3 images of {few}"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("labels", idx_bytes(LABELS), "expected IDX images (magic number 2051), found labels (2049)"),
        ("images", b"\0\0\x0d\x03" + idx_bytes(IMAGES)[4:], "found something else (3331)"),  # floats
        ("images.gz", gzip.compress(idx_bytes(IMAGES), mtime=0)[:-9], "damaged .gz data"),
        ("images", idx_bytes(np.zeros((0, 28, 28), dtype=np.uint8)), "no images in it"),
        ("images", idx_bytes(np.zeros((3, 0, 28), dtype=np.uint8)), "no images in it"),
    ],
)
def test_a_file_that_holds_no_idx_images_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = refusal(lambda: read_idx_images(path))
    assert error.message.startswith(str(path)) and words in error.message
    assert name != "labels" or "file of images" in str(error.hint)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:9]])
def test_wrong_number_of_bytes_is_damage(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "images"
    path.write_bytes(change(idx_bytes(IMAGES)))
    assert f"{path}: damaged: expected " in refusal(lambda: read_idx_images(path)).message


@given(data=st.binary(max_size=40), start=st.sampled_from([b"", b"\0\0\x08\x03", b"\0\0\x08\x03\0\0\0\x01"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, start: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-images"
    path.write_bytes(start + data)
    if not is_idx(path):
        return
    with contextlib.suppress(InputError):
        assert read_idx_images(path).size == len(start + data) - 16
