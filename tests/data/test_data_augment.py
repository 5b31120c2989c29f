"""Augmentation: what it moves, what it keeps, and that its generator alone decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data import augment as module
from tformer.data.augment import AUGMENTATIONS, augment, crop, flip, random_crop, random_flip, random_shift, shift

KINDS = tuple(AUGMENTATIONS)


def noise(count: int = 6, channels: int = 3, height: int = 16, width: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (count, channels, height, width), dtype=np.uint8)


@pytest.mark.parametrize("kinds", [(), ("shift",), ("flip",), ("crop",), KINDS])
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_and_dtype_stay_and_the_input_is_not_touched(kinds: tuple[str, ...], channels: int) -> None:
    images = noise(channels=channels)
    before = images.copy()
    varied = augment(images, kinds, np.random.default_rng(1))
    assert varied.shape == images.shape and varied.dtype == np.uint8
    assert np.array_equal(images, before)
    assert np.array_equal(varied, images) == (not kinds)


@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_alone_decides(kind: str) -> None:
    images = noise()
    first, again, other = (augment(images, (kind,), np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@given(down=st.integers(-5, 5), right=st.integers(-5, 5))
def test_shift_moves_the_content_and_fills_with_zeros(down: int, right: int) -> None:
    images = noise(2, 2, 5, 6)
    moved = shift(images, np.array([down, 0]), np.array([right, 0]))
    assert np.array_equal(moved[1], images[1])
    for row in range(5):
        for column in range(6):
            inside = 0 <= row - down < 5 and 0 <= column - right < 6
            expected = images[0, :, row - down, column - right] if inside else np.zeros(2)
            assert np.array_equal(moved[0, :, row, column], expected)


def test_shift_goes_up_to_an_eighth_both_ways() -> None:
    images = np.zeros((400, 1, 16, 16), dtype=np.uint8)
    images[:, :, 8, 8] = 1
    _, _, rows, columns = np.nonzero(random_shift(images, np.random.default_rng(0)))
    assert set(rows) == set(columns) == {6, 7, 8, 9, 10}


@given(seed=st.integers(0, 100))
def test_flip_twice_is_the_image_itself(seed: int) -> None:
    images = noise()
    chosen = np.random.default_rng(seed).random(len(images)) < 0.5
    flipped = flip(images, chosen)
    assert np.array_equal(flipped[chosen], images[chosen][:, :, :, ::-1])
    assert np.array_equal(flip(flipped, chosen), images)


def test_about_half_are_flipped() -> None:
    images = noise(400, 1, 2, 2)
    changed = (random_flip(images, np.random.default_rng(0)) != images).any(axis=(1, 2, 3)).mean()
    assert 0.4 < changed < 0.6


def test_cropping_the_whole_is_the_image_itself() -> None:
    images = noise()
    zero, one = np.zeros(len(images)), np.ones(len(images))
    assert np.array_equal(crop(images, zero, zero, one, one), images)


def test_crop_stretches_the_part_that_was_asked_for() -> None:
    images = np.zeros((1, 1, 8, 8), dtype=np.uint8)
    images[:, :, :4, 4:] = 200
    quarter = crop(images, np.array([0.0]), np.array([0.5]), np.array([0.5]), np.array([0.5]))
    assert (quarter[:, :, :7, 1:] == 200).all()  # the inner edges are mixed with what lies beyond
    assert (crop(images, np.array([0.5]), np.array([0.0]), np.array([0.4]), np.array([0.4])) == 0).all()


def test_a_crop_is_a_smooth_part_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    ramp = np.broadcast_to(np.arange(0, 240, 15, dtype=np.uint8), (300, 1, 16, 16))
    cropped = random_crop(ramp, np.random.default_rng(0)).astype(int)
    assert (np.diff(cropped, axis=3) >= 0).all() and (np.diff(cropped, axis=2) == 0).all()
    widths = (cropped[:, 0, 0, 14] - cropped[:, 0, 0, 1]) / 15 / 13
    assert 0.5 < widths.min() < 0.65 and 0.99 < widths.max() <= 1.01  # the square root of 40 %, times 4/3 either way
    monkeypatch.setattr(module, "CROP_AREA", (1.0, 1.0))
    monkeypatch.setattr(module, "CROP_ASPECT", (1.0, 1.0))
    assert np.array_equal(random_crop(ramp, np.random.default_rng(0)), ramp)
