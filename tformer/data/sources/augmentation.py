"""Random changes of training images: AUGMENTATIONS of single images (uint8), and mixtures of two (mixup, CutMix).

    shift         moved by up to an eighth of the side, with zeros at the border
    flip          half of the images mirrored left to right
    crop          a part of 40 to 100 % of the area, stretched to the whole (as in arXiv 1409.4842, but gentler)
    randaugment   two of the 14 OPERATIONS at magnitude 9 of 30 (RandAugment, arXiv 1909.13719, ranges of AutoAugment)
    erase         a quarter of the images get a rectangle of noise on 2 to 33 % of the area (arXiv 1708.04896)

All is drawn from the generator, so that the key of a batch determines its augmentation.
"""

# Shapes: B images of a batch, n of those that one operation changes, C channels, Y x X pixels, L classes.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SHIFT_SHARE = 8  # images move by at most the side divided by this
CROP_AREA = (0.4, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)  # width over height
ERASED_SHARE = 0.25  # of the images
ERASED_AREA = (0.02, 0.33)
ERASED_ASPECT = (0.3, 1 / 0.3)
NUM_OPERATIONS = 2  # of randaugment on each image
STRENGTH = 9 / 30  # its magnitude, as a share of the largest


def augment(pixels_BCYX: np.ndarray, kinds: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """New images of the same shape and dtype, each varied independently; the kinds are applied in the order given."""
    for kind in kinds:
        pixels_BCYX = AUGMENTATIONS[kind](pixels_BCYX, rng)
    return pixels_BCYX


def random_shift(pixels_BCYX: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    count, _, height, width = pixels_BCYX.shape
    down, right = (
        rng.integers(-furthest, furthest + 1, size=count)
        for furthest in (max(1, height // SHIFT_SHARE), max(1, width // SHIFT_SHARE))
    )
    return shift(pixels_BCYX, down, right)


def random_flip(pixels_BCYX: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return flip(pixels_BCYX, rng.random(len(pixels_BCYX)) < 0.5)


def random_crop(pixels_BCYX: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    height, width = _random_sides(len(pixels_BCYX), CROP_AREA, CROP_ASPECT, rng)
    count = len(pixels_BCYX)
    return crop(pixels_BCYX, rng.random(count) * (1 - height), rng.random(count) * (1 - width), height, width)


def random_operations(pixels_BCYX: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """RandAugment: every image goes through NUM_OPERATIONS operations, drawn with a sign for each."""
    images, count = torch.from_numpy(pixels_BCYX.copy()), len(pixels_BCYX)
    operations = tuple(OPERATIONS.values())
    for _ in range(NUM_OPERATIONS):
        chosen_B = rng.integers(len(operations), size=count)
        strength_B = torch.from_numpy(rng.choice([-STRENGTH, STRENGTH], size=count).astype(np.float32))
        for number, operation in enumerate(operations):
            rows = torch.from_numpy(np.flatnonzero(chosen_B == number))
            if len(rows):
                images[rows] = operation(images[rows], strength_B[rows])
    return images.numpy()


def random_erasing(pixels_BCYX: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    _, channels, rows, columns = pixels_BCYX.shape
    chosen = np.flatnonzero(rng.random(len(pixels_BCYX)) < ERASED_SHARE)
    height, width = _random_sides(len(chosen), ERASED_AREA, ERASED_ASPECT, rng)
    inside = rectangles(height, width, rng.random((2, len(chosen))), (rows, columns))
    noise = rng.integers(0, 256, (len(chosen), channels, rows, columns), dtype=np.uint8)
    erased = pixels_BCYX.copy()
    erased[chosen] = np.where(inside[:, None], noise, pixels_BCYX[chosen])
    return erased


AUGMENTATIONS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "shift": random_shift,
    "flip": random_flip,
    "crop": random_crop,
    "randaugment": random_operations,
    "erase": random_erasing,
}

if TYPE_CHECKING:
    AugmentationName = str
else:
    AugmentationName = Literal[tuple(AUGMENTATIONS)]


def shift(pixels_BCYX: np.ndarray, down_B: np.ndarray, right_B: np.ndarray) -> np.ndarray:
    """Each image moved by whole pixels, with zeros at the border; negative: up, left."""
    _, _, height, width = pixels_BCYX.shape
    moved = np.zeros_like(pixels_BCYX)
    # Copying one rectangle per image is ten times faster than indexing every pixel.
    for image, target, down, right in zip(pixels_BCYX, moved, down_B.tolist(), right_B.tolist(), strict=True):
        target[:, max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = image[
            :, max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)
        ]
    return moved


def flip(pixels_BCYX: np.ndarray, chosen_B: np.ndarray) -> np.ndarray:
    """The images, with the chosen ones mirrored left to right."""
    flipped = pixels_BCYX.copy()
    flipped[chosen_B] = pixels_BCYX[chosen_B][..., ::-1]
    return flipped


def crop(
    pixels_BCYX: np.ndarray, top_B: np.ndarray, left_B: np.ndarray, height_B: np.ndarray, width_B: np.ndarray
) -> np.ndarray:
    """A rectangle of each image, stretched to the whole (bilinear); edges and sizes are shares of the side."""
    # (x, y, 1) in [-1, 1] of the output -> (x, y) of the input
    to_input = np.zeros((len(pixels_BCYX), 2, 3), dtype=np.float32)
    to_input[:, 0, 0], to_input[:, 0, 2] = width_B, 2 * left_B + width_B - 1
    to_input[:, 1, 1], to_input[:, 1, 2] = height_B, 2 * top_B + height_B - 1
    grid = F.affine_grid(torch.from_numpy(to_input), list(pixels_BCYX.shape), align_corners=False)
    images = torch.from_numpy(pixels_BCYX.astype(np.float32))
    stretched = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return stretched.round_().to(torch.uint8).numpy()


def rectangles(height_B: np.ndarray, width_B: np.ndarray, place_2B: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """bool [B, Y, X], True inside a rectangle of each image; its sides and its place are shares of what is possible."""
    axes = []
    for share, place, pixels in zip((height_B, width_B), place_2B, size, strict=True):
        length = np.round(share * pixels)
        start = np.floor(place * (pixels - length + 1))
        at = np.arange(pixels)
        axes.append((at >= start[:, None]) & (at < (start + length)[:, None]))
    return axes[0][:, :, None] & axes[1][:, None, :]


def _random_sides(
    count: int, areas: tuple[float, float], aspects: tuple[float, float], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(height, width) of rectangles as shares of the sides, at most 1; `aspects` are drawn on a logarithmic scale."""
    area = rng.uniform(*areas, size=count)
    narrowest, widest = np.log(aspects)
    aspect = np.exp(rng.uniform(narrowest, widest, size=count))
    return np.minimum(1.0, np.sqrt(area / aspect)), np.minimum(1.0, np.sqrt(area * aspect))


# --- views of an image for averaged predictions

VIEW_PLACES = ((0, 0), (-1, -1), (1, 1), (-1, 1), (1, -1))  # down and right, in VIEW_SHARE of the side
VIEW_SHARE = 16


def view(pixels_BCYX: np.ndarray, number: int, *, mirrored: bool) -> np.ndarray:
    """View `number` of the images: 0 is unchanged, the others are moved along the diagonals.

    mirrored: each place has a mirrored view too.

    There are `most_views(mirrored)` views.
    """
    place, is_mirror = divmod(number, 2) if mirrored else (number, 0)
    if is_mirror:
        pixels_BCYX = pixels_BCYX[..., ::-1].copy()
    moves = [
        np.full(len(pixels_BCYX), steps * max(1, side // VIEW_SHARE))
        for steps, side in zip(VIEW_PLACES[place], pixels_BCYX.shape[2:], strict=True)
    ]
    return shift(pixels_BCYX, *moves) if place else pixels_BCYX


def most_views(mirrored: bool) -> int:
    """The number of different views."""
    return len(VIEW_PLACES) * (1 + mirrored)


# --- the operations of RandAugment: uint8 [n, C, Y, X] and signed strengths [n] in [-1, 1] -> uint8 [n, C, Y, X]

LUMA = (0.299, 0.587, 0.114)
SMOOTH = ((1.0, 1.0, 1.0), (1.0, 5.0, 1.0), (1.0, 1.0, 1.0))  # over 13


def _moved(matrix: Callable[[Tensor], list[Tensor]]) -> Callable[[Tensor, Tensor], Tensor]:
    """An affine map with zeros outside; `matrix`: strengths -> the numbers a b c d e f of x' = ax + by + c, y' = ..."""

    def operation(images: Tensor, strength_n: Tensor) -> Tensor:
        to_input = torch.stack(matrix(strength_n), dim=1).view(-1, 2, 3)
        grid = F.affine_grid(to_input, list(images.shape), align_corners=False)
        return F.grid_sample(images.float(), grid, mode="nearest", align_corners=False).to(torch.uint8)

    return operation


def _rotation(strength_n: Tensor) -> list[Tensor]:
    angle, zero = strength_n * math.radians(30.0), torch.zeros_like(strength_n)
    return [angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero]


def _affine(place: int, most: float) -> Callable[[Tensor], list[Tensor]]:
    """The identity with strength · most at one place of the six numbers."""

    def matrix(strength_n: Tensor) -> list[Tensor]:
        one, zero = torch.ones_like(strength_n), torch.zeros_like(strength_n)
        numbers = [one, zero, zero, zero, one, zero]
        numbers[place] = strength_n * most
        return numbers

    return matrix


def _blended(degenerate: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """degenerate + (1 + 0.9 strength) (image - degenerate), from the image's degenerate form in fp32."""

    def operation(images: Tensor, strength_n: Tensor) -> Tensor:
        values = images.float()
        return _bytes(torch.lerp(degenerate(values), values, 1.0 + 0.9 * strength_n.view(-1, 1, 1, 1)))

    return operation


def _bytes(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255).to(torch.uint8)


def _grey(values: Tensor) -> Tensor:
    """[n, 1, Y, X]: luma of colours, or the grey image itself."""
    if values.shape[1] == 1:
        return values
    return (values * torch.tensor(LUMA).view(1, 3, 1, 1)).sum(dim=1, keepdim=True).round_()


def _smooth(values: Tensor) -> Tensor:
    """Each pixel averaged with its neighbours; the border stays."""
    channels = values.shape[1]
    kernel = (torch.tensor(SMOOTH) / 13.0).expand(channels, 1, 3, 3)
    smoothed = values.clone()
    if min(values.shape[2:]) > 2:
        smoothed[:, :, 1:-1, 1:-1] = F.conv2d(values, kernel, groups=channels).round_()
    return smoothed


def posterize(images: Tensor, strength_n: Tensor) -> Tensor:
    """The upper bits of every value: 8 at no strength, 4 at full strength."""
    lost = (4 * strength_n.abs()).round_().to(torch.uint8).view(-1, 1, 1, 1)
    return (images >> lost) << lost


def solarize(images: Tensor, strength_n: Tensor) -> Tensor:
    """Values from 255 (1 - strength) up inverted."""
    return torch.where(images >= 255.0 * (1.0 - strength_n.abs()).view(-1, 1, 1, 1), 255 - images, images)


def autocontrast(images: Tensor, strength_n: Tensor) -> Tensor:
    """Every channel stretched to 0 ... 255."""
    values = images.float()
    least, most = values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)
    stretched = (values - least) * (255.0 / (most - least).clamp(min=1.0))
    return torch.where(most > least, _bytes(stretched), images)


def equalize(images: Tensor, strength_n: Tensor) -> Tensor:
    """Every channel with a histogram as flat as possible."""
    planes = images.flatten(0, 1).flatten(1).long()
    rows = torch.arange(len(planes)).unsqueeze(1)
    histogram = torch.bincount((planes + 256 * rows).flatten(), minlength=256 * len(planes)).view(-1, 256)
    last = histogram.gather(1, planes.amax(dim=1, keepdim=True))
    step = (planes.shape[1] - last) // 255
    table = ((histogram.cumsum(dim=1) - histogram + step // 2) // step.clamp(min=1)).clamp_(max=255)
    equal = table.gather(1, planes).to(torch.uint8).view_as(images)
    return torch.where(step.view(*images.shape[:2], 1, 1) > 0, equal, images)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda images, strength_n: images,
    "shear_x": _moved(_affine(1, 0.3)),
    "shear_y": _moved(_affine(3, 0.3)),
    "translate_x": _moved(_affine(2, 2 * 150 / 331)),  # of a side of length 2
    "translate_y": _moved(_affine(5, 2 * 150 / 331)),
    "rotate": _moved(_rotation),
    "brightness": _blended(torch.zeros_like),
    "color": _blended(lambda values: _grey(values).expand_as(values)),
    "contrast": _blended(lambda values: _grey(values).mean((1, 2, 3), keepdim=True).round_().expand_as(values)),
    "sharpness": _blended(_smooth),
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": autocontrast,
    "equalize": equalize,
}


# --- mixtures of two images


def mix(
    pixels_BCYX: Tensor,
    labels_B: Tensor,
    *,
    num_classes: int,
    mixup: float,
    cutmix: float,
    cutmix_share: float,
    rng: np.random.Generator,
) -> tuple[Tensor, Tensor]:
    """Mix each image with the one before it in the batch; returns pixels, and labels [B, L] with sum 1.

    Args:
        mixup: each pixel is λ of one and 1 - λ of the other, λ ~ Beta(mixup, mixup) (arXiv 1710.09412); 0: off.
        cutmix: a rectangle of area 1 - λ is the other image's, λ ~ Beta(cutmix, cutmix) (arXiv 1905.04899); 0: off.
        cutmix_share: probability that an image goes through CutMix; the others go through mixup where it is on.
    """
    count, (height, width) = len(pixels_BCYX), pixels_BCYX.shape[2:]
    cut_B = rng.random(count) < (cutmix_share if cutmix else 0.0)
    kept_B = rng.beta(mixup, mixup, count) if mixup else np.ones(count)
    if cutmix:
        kept_B = np.where(cut_B, rng.beta(cutmix, cutmix, count), kept_B)
    side_B = np.sqrt(1.0 - kept_B)
    inside = rectangles(side_B, side_B, rng.random((2, count)), (height, width))
    share = np.where(cut_B[:, None, None], ~inside, kept_B[:, None, None]).astype(np.float32)
    share_B1YX = torch.from_numpy(share).unsqueeze(1)
    own_B1 = share_B1YX.mean((1, 2, 3)).unsqueeze(1)
    labels_BL = F.one_hot(labels_B, num_classes).float()
    return (
        torch.lerp(pixels_BCYX.roll(1, 0), pixels_BCYX, share_B1YX),
        torch.lerp(labels_BL.roll(1, 0), labels_BL, own_B1),
    )
