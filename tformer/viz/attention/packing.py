"""Weights as bytes, for pages: round(255 sqrt(a)).

The root gives small weights their due: uniform attention over 512 tokens is 0.002 a cell, which a linear byte rounds to
0 and this one to 11. Its error is about sqrt(a) / 255 at most. Where a page would grow too large, fewer steps pack
smaller. Forbidden cells are known from a mask that stands apart, so a byte of 0 is a weight of
0. Negative weights (Linformer) take 128 +- 127 sqrt(|a| / largest).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FINEST, COARSEST = 255, 48  # steps between no weight and all of it
BITS_OF_A_HALVING = 0.87  # that a weight packs smaller with half as many steps, measured on noisy attention
ZERO, SIGNED_STEPS = 128, 127


@dataclass(frozen=True)
class Packed:
    """bytes in the order of the weights. `largest`: what the top step stands for. `signed`: ZERO is no weight."""

    data: bytes
    steps: int = FINEST
    largest: float = 1.0
    signed: bool = False


def pack(weights: np.ndarray, *, signed: bool = False, steps: int = FINEST) -> Packed:
    """Any shape, fp32; between 0 and 1 unless `signed`."""
    if signed:
        largest = float(np.abs(weights).max(initial=0.0)) or 1.0
        roots = np.sign(weights) * np.sqrt(np.abs(weights) / largest)
        return Packed(np.rint(ZERO + SIGNED_STEPS * roots).astype(np.uint8).tobytes(), SIGNED_STEPS, largest, True)
    return Packed(np.rint(np.sqrt(np.clip(weights, 0, 1)) * np.float32(steps)).astype(np.uint8).tobytes(), steps)


def unpack(packed: Packed, shape: tuple[int, ...]) -> np.ndarray:
    """What a page shows: fp32 of that shape."""
    places = np.frombuffer(packed.data, dtype=np.uint8).astype(np.float32).reshape(shape)
    roots = (places - ZERO * packed.signed) / packed.steps
    return np.sign(roots) * roots**2 * packed.largest


def fewer_steps(steps: int, *, too_many_bytes: float, cells: int) -> int:
    """How many steps pack so many weights that much smaller, in base64 (6 bits a byte)."""
    halvings = too_many_bytes * 6 / cells / BITS_OF_A_HALVING
    return int(steps * 2.0**-halvings)


def pack_mask(visible_TS: np.ndarray) -> bytes:
    """One byte a cell, 1 where it can be seen."""
    return visible_TS.astype(np.uint8).tobytes()
