"""Weights as bytes, for pages: round(255 sqrt(a)).

The root gives small weights their due: uniform attention over 512 tokens is 0.002 a cell, which a linear byte rounds to
0 and this one to 11. Its error is at most sqrt(a) / 255. Forbidden cells are known from a mask that stands apart, so a
byte of 0 is a weight of 0. Negative weights (Linformer) take 128 +- 127 sqrt(|a| / largest).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packed:
    """bytes in the order of the weights. `largest`: what the top byte stands for. `signed`: 128 is zero."""

    data: bytes
    largest: float = 1.0
    signed: bool = False


def pack(weights: np.ndarray, *, signed: bool = False) -> Packed:
    """Any shape, fp32; between 0 and 1 unless `signed`."""
    if signed:
        largest = float(np.abs(weights).max(initial=0.0)) or 1.0
        steps = np.sign(weights) * np.sqrt(np.abs(weights) / largest)
        return Packed(np.rint(128 + 127 * steps).astype(np.uint8).tobytes(), largest, signed=True)
    steps = np.sqrt(np.clip(weights, 0, 1, dtype=np.float32))
    steps *= 255
    return Packed(np.rint(steps, out=steps).astype(np.uint8).tobytes())


def unpack(packed: Packed, shape: tuple[int, ...]) -> np.ndarray:
    """What a page shows: fp32 of that shape."""
    steps = np.frombuffer(packed.data, dtype=np.uint8).astype(np.float32).reshape(shape)
    if packed.signed:
        steps = (steps - 128) / 127
        return np.sign(steps) * steps**2 * packed.largest
    return (steps / 255) ** 2


def pack_mask(visible_TS: np.ndarray) -> bytes:
    """One byte a cell, 1 where it can be seen."""
    return visible_TS.astype(np.uint8).tobytes()
