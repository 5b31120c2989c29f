"""Light augmentation: the same images again, a little different every time they are seen in training.

    shift   moved by up to an eighth of the side, zeros where nothing was
    flip    mirrored left to right, every other one
    crop    a part of 40 to 100 % of the area, stretched to the whole (Inception's crop, arXiv 1409.4842, but gentler)

What is drawn comes from the generator alone, so that a batch's key gives its augmentation.
"""

# Shapes: B images, C channels, Y x X pixels, uint8.

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

SHIFT_SHARE = 8  # the side over this is the furthest move
CROP_AREA = (0.4, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)  # width over height


def augment(pixels_BCYX: np.ndarray, kinds: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """New images of the same shape and dtype, each varied on its own; the kinds are applied in the order given."""
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
    count = len(pixels_BCYX)
    area = rng.uniform(*CROP_AREA, size=count)
    narrowest, widest = np.log(CROP_ASPECT)
    aspect = np.exp(rng.uniform(narrowest, widest, size=count))
    height = np.minimum(1.0, np.sqrt(area / aspect))
    width = np.minimum(1.0, np.sqrt(area * aspect))
    return crop(pixels_BCYX, rng.random(count) * (1 - height), rng.random(count) * (1 - width), height, width)


AUGMENTATIONS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "shift": random_shift,
    "flip": random_flip,
    "crop": random_crop,
}


def shift(pixels_BCYX: np.ndarray, down_B: np.ndarray, right_B: np.ndarray) -> np.ndarray:
    """Each image moved by whole pixels, zeros behind it; negative: up, left."""
    _, _, height, width = pixels_BCYX.shape
    moved = np.zeros_like(pixels_BCYX)
    # A copy of one rectangle per image: ten times faster than indexing every pixel.
    for image, target, down, right in zip(pixels_BCYX, moved, down_B.tolist(), right_B.tolist(), strict=True):
        target[:, max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = image[
            :, max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)
        ]
    return moved


def flip(pixels_BCYX: np.ndarray, chosen_B: np.ndarray) -> np.ndarray:
    """The chosen images mirrored left to right, the others as they are."""
    flipped = pixels_BCYX.copy()
    flipped[chosen_B] = pixels_BCYX[chosen_B][..., ::-1]
    return flipped


def crop(
    pixels_BCYX: np.ndarray, top_B: np.ndarray, left_B: np.ndarray, height_B: np.ndarray, width_B: np.ndarray
) -> np.ndarray:
    """A rectangle of each image, bilinearly stretched to the whole; edges and sizes are shares of the side."""
    to_input = np.zeros(
        (len(pixels_BCYX), 2, 3), dtype=np.float32
    )  # (x, y, 1) in [-1, 1] of the output -> of the input
    to_input[:, 0, 0], to_input[:, 0, 2] = width_B, 2 * left_B + width_B - 1
    to_input[:, 1, 1], to_input[:, 1, 2] = height_B, 2 * top_B + height_B - 1
    grid = F.affine_grid(torch.from_numpy(to_input), list(pixels_BCYX.shape), align_corners=False)
    images = torch.from_numpy(pixels_BCYX.astype(np.float32))
    stretched = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return stretched.round_().to(torch.uint8).numpy()
