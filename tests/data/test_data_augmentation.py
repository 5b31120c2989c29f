"""Augmentation of images: single operations, RandAugment against Pillow's, erasing, mixup and CutMix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from tformer.data.sources import augmentation as module
from tformer.data.sources.augmentation import (
    AUGMENTATIONS,
    OPERATIONS,
    augment,
    crop,
    flip,
    mix,
    random_crop,
    random_erasing,
    random_flip,
    random_operations,
    random_shift,
    rectangles,
    shift,
)

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


def test_crop_stretches_the_chosen_part() -> None:
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


# --- RandAugment


def applied(name: str, images: np.ndarray, strength: float) -> np.ndarray:
    return OPERATIONS[name](torch.from_numpy(images), torch.full((len(images),), strength)).numpy()


def smooth() -> np.ndarray:
    """Images with gradients: not of full contrast, and with few equal values."""
    y, x = np.mgrid[0:24, 0:20]
    planes = [40 + 5 * y + x, 30 + 7 * x, 200 - 3 * y - 2 * x]
    return np.stack([np.stack(planes), np.stack(planes[::-1]), noise(1, 3, 24, 20)[0]]).astype(np.uint8)


def factor(strength: float) -> float:
    return 1 + 0.9 * strength


PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, _: image,
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(factor(s)),
    "color": lambda image, s: ImageEnhance.Color(image).enhance(factor(s)),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(factor(s)),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(factor(s)),
    "posterize": lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "solarize": lambda image, s: ImageOps.solarize(image, 255 * (1 - abs(s))),
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}


@pytest.mark.parametrize("name", PILLOW)
@pytest.mark.parametrize("strength", [-1.0, -0.3, 0.3, 0.8])
def test_operations_on_colours_are_those_of_pillow(name: str, strength: float) -> None:
    images = smooth()
    for image, found in zip(images, applied(name, images, strength), strict=True):
        expected = np.asarray(PILLOW[name](Image.fromarray(image.transpose(1, 2, 0)), strength)).transpose(2, 0, 1)
        assert np.abs(expected.astype(int) - found.astype(int)).max() <= 1


def test_translations_are_shifts() -> None:
    images = noise(2, 3, 16, 16)
    strength = 4 / 16 * 331 / 150
    moved = applied("translate_x", images, strength)
    assert np.array_equal(moved, shift(images, np.zeros(2, int), np.full(2, -4)))
    assert np.array_equal(applied("translate_y", images, -strength), shift(images, np.full(2, 4), np.zeros(2, int)))


def test_a_rotation_turns_around_the_middle_and_back() -> None:
    images = np.zeros((1, 1, 33, 33), dtype=np.uint8)
    images[:, :, 14:19, 26:31] = 255
    turned = applied("rotate", images, 1.0)
    rows, columns = (np.argwhere(turned[0, 0] > 0).mean(axis=0) - 16).tolist()
    assert np.hypot(rows, columns) == pytest.approx(12, abs=0.5)
    assert abs(np.degrees(np.arctan2(rows, columns))) == pytest.approx(30, abs=3)
    back = applied("rotate", turned, -1.0)
    assert np.argwhere(back[0, 0] > 0).mean(axis=0) == pytest.approx([16, 28], abs=0.7)


@pytest.mark.parametrize(("name", "axis"), [("shear_x", 3), ("shear_y", 2)])
def test_a_shear_leaves_the_middle_and_moves_the_border(name: str, axis: int) -> None:
    images = np.zeros((1, 1, 21, 21), dtype=np.uint8)
    images[:, :, 10, :] = images[:, :, :, 10] = 255
    sheared = applied(name, images, 1.0)
    assert sheared[0, 0, 10, 10] == 255
    line = np.moveaxis(sheared, axis, -1)[0, 0]
    assert {int(line[0].argmax()), int(line[-1].argmax())} == {7, 13}  # 0.3 of the half side of 10


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_treats_each_image_alone(name: str, channels: int) -> None:
    images = noise(3, channels, 9, 12)
    images[1] = 7  # constant
    strength = torch.tensor([0.5, -0.5, 0.9])
    together = OPERATIONS[name](torch.from_numpy(images), strength)
    assert together.shape == images.shape and together.dtype == torch.uint8
    for row in range(3):
        alone = OPERATIONS[name](torch.from_numpy(images[row : row + 1]), strength[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)


def test_randaugment_draws_every_operation_with_both_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []

    def spy(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def operation(images: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
            seen.extend((name, round(float(each), 3)) for each in strength)
            return images

        return operation

    monkeypatch.setattr(module, "OPERATIONS", {name: spy(name) for name in OPERATIONS})
    random_operations(noise(600), np.random.default_rng(0))
    assert len(seen) == 600 * 2
    assert set(seen) == {(name, sign * 0.3) for name in OPERATIONS for sign in (-1, 1)}


# --- erasing and mixing


def test_erasing_changes_a_rectangle_of_a_quarter_of_the_images() -> None:
    images = np.zeros((800, 2, 16, 16), dtype=np.uint8)
    erased = random_erasing(images, np.random.default_rng(0))
    changed = (erased > 0).any(axis=1)
    share = changed.any(axis=(1, 2)).mean()
    assert 0.2 < share < 0.3
    for image in changed[changed.any(axis=(1, 2))]:
        rows, columns = np.flatnonzero(image.any(axis=1)), np.flatnonzero(image.any(axis=0))
        assert 0.005 <= (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1) / 256 <= 0.45
        assert image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.95


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.999), st.floats(0, 0.999))
def test_rectangles_lie_inside_and_have_the_sides_asked_for(
    height: float, width: float, down: float, right: float
) -> None:
    inside = rectangles(np.array([height]), np.array([width]), np.array([[down], [right]]), (10, 14))[0]
    assert inside.shape == (10, 14)
    rows, columns = round(height * 10), round(width * 14)
    assert inside.sum() == rows * columns
    if rows and columns:
        assert inside.any(axis=1).sum() == rows and inside.any(axis=0).sum() == columns


def mixed(count: int = 64, **options: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pixels, labels = torch.randn(count, 3, 12, 12), torch.arange(count) % 5
    given = {"mixup": 0.0, "cutmix": 0.0, "cutmix_share": 0.5} | options
    return pixels, labels, *mix(pixels, labels, num_classes=5, rng=np.random.default_rng(3), **given)


@pytest.mark.parametrize(
    "options", [{"mixup": 0.8}, {"cutmix": 1.0, "cutmix_share": 1.0}, {"mixup": 0.8, "cutmix": 1.0}]
)
def test_labels_of_mixtures_sum_to_one_and_are_shares_of_the_two_images(options: dict[str, float]) -> None:
    pixels, labels, mixture, shares = mixed(**options)
    assert mixture.shape == pixels.shape and shares.shape == (64, 5)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(64))
    own = shares.gather(1, labels.unsqueeze(1)).squeeze(1)
    other = shares.gather(1, labels.roll(1).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(own + other, torch.ones(64))
    assert 0.3 < own.mean() < 0.7


def test_mixup_is_a_convex_combination_with_the_shares_of_the_labels() -> None:
    pixels, labels, mixture, shares = mixed(mixup=0.8)
    own = shares.gather(1, labels.unsqueeze(1)).view(-1, 1, 1, 1)
    torch.testing.assert_close(mixture, own * pixels + (1 - own) * pixels.roll(1, 0))


def test_cutmix_takes_every_pixel_from_one_of_the_images_and_labels_follow_the_area() -> None:
    pixels, labels, mixture, shares = mixed(cutmix=1.0)
    from_own, from_other = (mixture == pixels).all(dim=1), (mixture == pixels.roll(1, 0)).all(dim=1)
    assert (from_own | from_other).all()
    torch.testing.assert_close(from_own.float().mean((1, 2)), shares.gather(1, labels.unsqueeze(1)).squeeze(1))


def test_the_switch_decides_between_mixup_and_cutmix() -> None:
    def cut(share: float) -> float:
        pixels, _, mixture, _ = mixed(400, mixup=1.0, cutmix=1.0, cutmix_share=share)
        whole = ((mixture == pixels) | (mixture == pixels.roll(1, 0))).flatten(1).all(dim=1)
        return whole.float().mean().item()

    assert cut(0.0) < 0.02 and cut(1.0) == 1.0 and 0.2 < cut(0.3) < 0.4


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_cutmix_alone_leaves_the_other_images_and_their_labels_as_they_are(share: float) -> None:
    pixels, labels, mixture, shares = mixed(400, cutmix=1.0, cutmix_share=share)
    same = (mixture == pixels).flatten(1).all(dim=1)
    assert abs(same.float().mean().item() - (1 - share)) < 0.1
    torch.testing.assert_close(shares[same], F.one_hot(labels, 5).float()[same])
