"""IDX files: what is written is read, labels are found beside images, and damage is named."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.image_makers import idx_bytes, write_idx
from tformer.data.idx import is_idx, labels_beside, read_images, read_labels
from tformer.errors import InputError

IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([7, 0, 9], dtype=np.uint8)


def refusal(action: Callable[[], object]) -> InputError:
    with pytest.raises(InputError) as caught:
        action()
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-images.idx3-ubyte"])
def test_what_is_written_is_read(tmp_path: Path, name: str, ending: str) -> None:
    path = write_idx(tmp_path / f"{name}{ending}", IMAGES, LABELS)
    assert is_idx(path)
    assert np.array_equal(read_images(path), IMAGES)
    assert np.array_equal(read_labels(path, count=3), LABELS)


def test_labels_may_be_compressed_when_images_are_not(tmp_path: Path) -> None:
    images = write_idx(tmp_path / "train-images-idx3-ubyte", IMAGES)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx_bytes(LABELS)))
    assert labels_beside(images) == labels
    images.rename(tmp_path / "train-images-idx3-ubyte.gz")
    labels.rename(tmp_path / "train-labels-idx1-ubyte")
    assert labels_beside(tmp_path / "train-images-idx3-ubyte.gz").name == "train-labels-idx1-ubyte"


def test_missing_labels_name_what_was_looked_for(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "train-images-idx3-ubyte.gz", IMAGES)
    assert "train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz" in refusal(lambda: labels_beside(path)).message
    other = write_idx(tmp_path / "digits", IMAGES)
    assert "no file of labels beside it" in refusal(lambda: labels_beside(other)).message


def test_as_many_labels_as_images(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "images", IMAGES, LABELS[:2])
    message = refusal(lambda: read_labels(path, count=3)).message
    assert message == f"{tmp_path}/labels: 2 labels for the 3 images of {path}"


def test_the_file_of_labels_is_no_file_of_images(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "images", IMAGES, LABELS)
    error = refusal(lambda: read_images(labels_beside(path)))
    assert "expected IDX images (magic number 2051), found labels (2049)" in error.message
    assert error.hint is not None and "file of images" in error.hint


def test_other_values_than_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(b"\0\0\x0d\x03" + idx_bytes(IMAGES)[4:])  # floats
    assert "found something else (3331)" in refusal(lambda: read_images(path)).message


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:9]])
def test_wrong_number_of_bytes_is_damage(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "images"
    path.write_bytes(change(idx_bytes(IMAGES)))
    assert f"{path}: damaged: expected " in refusal(lambda: read_images(path)).message


def test_damaged_compression_is_named(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(IMAGES))[:-9])
    assert "damaged .gz data" in refusal(lambda: read_images(path)).message


@pytest.mark.parametrize("shape", [(0, 28, 28), (3, 0, 28)])
def test_no_images_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = write_idx(tmp_path / "images", np.zeros(shape, dtype=np.uint8))
    assert "no images in it" in refusal(lambda: read_images(path)).message


@given(data=st.binary(max_size=40), start=st.sampled_from([b"", b"\0\0\x08\x03", b"\0\0\x08\x03\0\0\0\x01"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, start: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-images"
    path.write_bytes(start + data)
    if not is_idx(path):
        return
    with contextlib.suppress(InputError):
        assert read_images(path).size == len(start + data) - 16
