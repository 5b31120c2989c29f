"""Image sets: opening, labels, statistics, subsets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.fakes import refusal
from tests.data.image_makers import encoded, noise_image, write_idx, write_tree, write_zip
from tformer.data.sources import images as module
from tformer.data.sources.images import (
    ImageSet,
    channel_statistics,
    class_order,
    open_images,
    to_pixels,
)
from tformer.support.errors import Interrupted
from tformer.workers.work import Work

REAL = os.environ.get("TFORMER_DATA")
real_data = pytest.mark.skipif(REAL is None, reason="TFORMER_DATA names no folder of real data")


def tree(*names: str, size: int = 8, channels: int = 3) -> dict[str, bytes]:
    return {name: encoded(noise_image(seed, size=size, channels=channels)) for seed, name in enumerate(names)}


TREE = tree("cat/1.png", "cat/2.png", "dog/1.png", "ant/1.png")


def open_rgb(path: Path, **options: object) -> ImageSet:
    return open_images(path, size=8, channels=3, **options)  # type: ignore[arg-type]


# -- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_tree, write_zip])
def test_labels_are_folders_in_order(tmp_path: Path, write: Callable) -> None:
    images = open_rgb(write(tmp_path / "set.zip", TREE))
    assert images.label_names == ("ant", "cat", "dog")
    assert images.labels is not None and images.labels.tolist() == [0, 1, 1, 2]
    assert len(images) == 4 and images.lengths is None and images.notes == ()
    for seed, example in zip((3, 0, 1, 2), images.examples(0, range(4)), strict=True):
        assert np.array_equal(example.pixels, noise_image(seed).transpose(2, 0, 1))
    assert [example.label for example in images.examples(5, [3, 0])] == [2, 0]


def test_a_folder_and_a_zip_of_it_are_the_same_images(tmp_path: Path) -> None:
    folder, archive = (open_rgb(write(tmp_path / write.__name__ / "x.zip", TREE)) for write in (write_tree, _zip))
    assert np.array_equal(folder.pixels(range(4)), archive.pixels(range(4)))
    assert np.array_equal(folder.labels, archive.labels)


def _zip(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir()
    return write_zip(path, files)


def test_numbers_are_ordered_by_value() -> None:
    assert class_order({"10", "9", "1"}) == ("1", "9", "10")
    assert class_order({"10", "9", "b"}) == ("10", "9", "b")


def test_a_name_of_thousands_of_digits_is_no_number(tmp_path: Path) -> None:
    long = "1" * 5000
    path = write_zip(tmp_path / "set.zip", tree("9/1.png", f"{long}/1.png"))
    assert open_rgb(path).label_names == (long, "9")
    assert class_order({"1", "01", "2"}) == ("01", "1", "2")


def test_images_cannot_come_from_standard_input() -> None:
    assert refusal(lambda: open_images("-", size=8, channels=3)).message == "images cannot come from standard input"


def test_given_names_decide_the_order_and_may_be_absent(tmp_path: Path) -> None:
    path = write_tree(tmp_path / "set", TREE)
    images = open_rgb(path, label_names=("dog", "cat", "bee", "ant"))
    assert images.label_names == ("dog", "cat", "bee", "ant")
    assert images.labels is not None and images.labels.tolist() == [3, 1, 1, 0]


def test_unknown_label_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = write_tree(tmp_path / "set", TREE)
    message = refusal(lambda: open_rgb(path, label_names=("ant", "cats", "dog"))).message
    assert message.startswith(
        f"{path}/cat/1.png: unknown label 'cat', not one of the training data; did you mean 'cats'?"
    )


@pytest.mark.parametrize("write", [write_tree, write_zip])
def test_one_class_only(tmp_path: Path, write: Callable) -> None:
    path = write(tmp_path / "set.zip", tree("cat/1.png", "cat/2.png"))
    assert refusal(lambda: open_rgb(path)).message == f"{path}: one class only, 'cat'"
    assert len(open_rgb(path, label_names=("cat", "dog"))) == 2  # a part of known classes


def test_no_labels_when_none_are_needed(tmp_path: Path) -> None:
    path = write_tree(tmp_path / "set", tree("b.png", "a.png"))
    images = open_rgb(path, needs_label=False, label_names=("x", "y"))
    assert images.labels is None and images.label_names == ("x", "y")
    assert [example.label for example in images.examples(0, [0, 1])] == [None, None]
    assert np.array_equal(images.pixels([0])[0], noise_image(1).transpose(2, 0, 1))
    assert len(open_rgb(path / "a.png", needs_label=False)) == 1


# -- IDX -------------------------------------------------------------------------------------------------------------

DIGITS = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
VALUES = np.array([3, 10, 1, 3, 1, 10, 3, 3, 1, 1, 10, 3], dtype=np.uint8)


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"])
def test_idx_finds_its_labels(tmp_path: Path, name: str) -> None:
    images = open_images(write_idx(tmp_path / name, DIGITS, VALUES), size=8, channels=1)
    assert images.label_names == ("1", "3", "10")
    assert images.labels is not None and [images.label_names[label] for label in images.labels] == list(
        map(str, VALUES)
    )
    assert np.array_equal(images.pixels([4, 2])[:, 0], DIGITS[[4, 2]])
    assert images.places[7].endswith("#7") and images.notes == ()


def test_idx_images_that_are_recoloured_and_resized_are_noted(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "images", DIGITS, VALUES)
    images = open_images(path, size=16, channels=3)
    assert images.pixels([0]).shape == (1, 3, 16, 16)
    assert f"{path}: 12 of 12 images were not 16x16: resized by the shorter side" in images.notes[0]
    assert images.notes[1] == f"{path}: 12 of 12 grey images were given three equal channels"


def test_idx_alone_when_no_labels_are_needed(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "images", DIGITS)
    assert open_images(path, size=8, channels=1, needs_label=False).labels is None
    assert "no file of labels" in refusal(lambda: open_images(path, size=8, channels=1)).message


# -- one size, notes, memory -----------------------------------------------------------------------------------------


def test_image_of_another_size_is_resized_as_stated(tmp_path: Path) -> None:
    path = write_tree(tmp_path / "set", {**TREE, **tree("dog/2.png", size=20), **tree("dog/3.png", channels=1)})
    images = open_rgb(path)
    assert images.pixels(range(6)).shape == (6, 3, 8, 8)
    assert images.notes == (
        f"{path}: 1 of 6 images were not 8x8: resized by the shorter side, then the middle was cut out",
        f"{path}: 1 of 6 grey images were given three equal channels",
    )


def test_images_above_the_memory_limit_are_decoded_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_zip(tmp_path / "set.zip", tree(*(f"{number % 3}/{number:03}.png" for number in range(150))))
    eager = open_rgb(path)
    monkeypatch.setattr(module, "MEMORY_BYTES", 1000)
    lazy = open_rgb(path)
    assert "when they are needed" in lazy.notes[0] and lazy.fingerprint == eager.fingerprint
    order = np.random.default_rng(0).permutation(150)
    assert np.array_equal(lazy.pixels(order), eager.pixels(order))
    assert channel_statistics(lazy) == channel_statistics(eager)
    half = lazy.subset(order[:75])
    assert np.array_equal(half.pixels([74, 0]), eager.pixels(order[[74, 0]]))


def test_the_first_damaged_image_is_named_and_no_thread_stays(tmp_path: Path) -> None:
    names = [f"{number % 2}/{number:03}.png" for number in range(300)]
    path = write_tree(tmp_path / "set", {**tree(*names), "0/150.png": b"x", "1/299.png": b"x", "1/001.png": b""})
    before = threading.active_count()
    assert refusal(lambda: open_rgb(path)).message.startswith(f"{path}/0/150.png: not an image")
    assert threading.active_count() == before


def test_progress_is_reported_and_reading_can_be_stopped(tmp_path: Path) -> None:
    path = write_tree(tmp_path / "set", tree(*(f"{number % 2}/{number:03}.png" for number in range(200))))
    seen: list[tuple[int, int | None]] = []
    open_rgb(path, work=Work(report=lambda done, total: seen.append((done, total))))
    assert seen == [(64, 200), (128, 200), (192, 200), (200, 200)]
    with pytest.raises(Interrupted) as caught:
        open_rgb(path, work=Work(should_stop=lambda: True))
    assert caught.value.exit_code == 130


def test_missing_path_and_odd_channels_are_refused(tmp_path: Path) -> None:
    assert refusal(lambda: open_rgb(tmp_path / "no")).message == f"{tmp_path}/no: no such file or directory"
    path = write_tree(tmp_path / "set", TREE)
    assert "found a model with 2" in refusal(lambda: open_images(path, size=8, channels=2)).message
    (tmp_path / "rows.csv").write_text("text,label\n")
    assert "rows.csv: a single file has no classes" in refusal(lambda: open_rgb(tmp_path / "rows.csv")).message


# -- subsets and numbers ---------------------------------------------------------------------------------------------


def test_subset_of_a_subset(tmp_path: Path) -> None:
    images = open_rgb(write_tree(tmp_path / "set", TREE))
    images.seq_len = 5
    part = images.subset([3, 1, 0]).subset(np.array([2, 0]))
    assert part.labels is not None and part.labels.tolist() == [0, 2] and part.label_names == images.label_names
    assert [Path(place).parent.name for place in part.places] == ["ant", "dog"]
    assert np.array_equal(part.pixels([0, 1]), images.pixels([0, 3]))
    assert len(part) == 2 and part.seq_len == 5
    assert len({images.fingerprint, part.fingerprint, images.subset([0, 3, 1]).fingerprint}) == 3


def test_fingerprint_of_idx_follows_content(tmp_path: Path) -> None:
    def of(name: str, images: np.ndarray, labels: np.ndarray) -> str:
        return open_images(write_idx(tmp_path / f"images{name}", images, labels), size=8, channels=1).fingerprint

    first = of("1", DIGITS, VALUES)
    assert of("2.gz", DIGITS, VALUES) == first
    assert of("3", DIGITS, VALUES[::-1]) != first
    assert of("4", DIGITS ^ 1, VALUES) != first


def test_statistics_are_those_of_all_pixels(tmp_path: Path) -> None:
    images = open_rgb(write_tree(tmp_path / "set", TREE))
    values = images.pixels(range(4)) / 255
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, values.mean(axis=(0, 2, 3)), atol=1e-6)
    np.testing.assert_allclose(std, values.std(axis=(0, 2, 3)), atol=1e-6)


def test_a_constant_channel_can_be_divided_by(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "images", np.full((2, 8, 8), 51, dtype=np.uint8), np.array([0, 1], dtype=np.uint8))
    assert channel_statistics(open_images(path, size=8, channels=1)) == ((0.2,), (1.0,))


@pytest.mark.parametrize("channels", [1, 3])
def test_to_pixels_is_standardizing(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, channels, 6, 6), dtype=np.uint8)
    mean, std = (0.5, 0.1, 0.9)[:channels], (0.2, 0.3, 1.0)[:channels]
    pixels = to_pixels(images, mean, std)
    assert pixels.dtype == torch.float32 and pixels.shape == images.shape
    expected = (images / 255 - np.reshape(mean, (1, -1, 1, 1))) / np.reshape(std, (1, -1, 1, 1))
    np.testing.assert_allclose(pixels.numpy(), expected, atol=1e-5)


@real_data
def test_mnist_has_the_well_known_statistics() -> None:
    images = open_images(f"{REAL}/mnist/train-images-idx3-ubyte.gz", size=28, channels=1)
    assert images.labels is not None and images.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    mean, std = channel_statistics(images)
    assert (round(mean[0], 4), round(std[0], 4)) == (0.1307, 0.3081)


@real_data
def test_cifar_as_jpeg_is_read_from_its_zip() -> None:
    images = open_images(f"{REAL}/cifar10_jpeg/valid_1500.zip", size=32, channels=3)
    assert images.labels is not None and np.bincount(images.labels).tolist() == [150] * 10
    assert images.label_names[:3] == ("airplane", "automobile", "bird") and images.notes == ()
