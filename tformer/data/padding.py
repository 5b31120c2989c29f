"""Padding rows of different lengths into one array: right, left or at a random place; to the longest or to a maximum.

A `PadLayout` fixes where each row starts, so that ids, labels and document ids of the same example land alike.
Shapes: B rows, T the padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

WIDTH_MULTIPLE = 8  # of the widths of text batches

Side = Literal["right", "left", "random"]
PadTo = Literal["longest", "max"]


@dataclass(frozen=True)
class PadLayout:
    """Row b occupies columns `starts[b] : starts[b] + lengths[b]` of an array `width` wide."""

    starts: np.ndarray  # [B]
    lengths: np.ndarray  # [B]
    width: int

    def fill(self, rows: Sequence[np.ndarray], value: int) -> np.ndarray:
        """[B, T] int64 with each row in its place and `value` everywhere else."""
        padded = np.full((len(self.starts), self.width), value, dtype=np.int64)
        for index, row in enumerate(rows):
            start = self.starts[index]
            padded[index, start : start + len(row)] = row
        return padded

    def mask(self) -> np.ndarray | None:
        """[B, T] bool, True on real tokens; None when nothing is padded."""
        if (self.lengths == self.width).all():
            return None
        columns = np.arange(self.width)
        starts = self.starts[:, None]
        return (columns >= starts) & (columns < starts + self.lengths[:, None])


def pad_layout(
    lengths: Sequence[int] | np.ndarray,
    *,
    side: Side = "right",
    pad_to: PadTo = "longest",
    max_len: int | None = None,
    rng: np.random.Generator | None = None,
    multiple: int = 1,
) -> PadLayout:
    """Where rows of these lengths go. `pad_to="max"` needs `max_len`; `side="random"` needs `rng`.

    The width is rounded up to a multiple of `multiple` where `max_len` allows: see `padded_lengths`.

    Raises ValueError when a row is longer than `max_len`: cutting is the caller's decision.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    longest = int(lengths.max(initial=0))
    if max_len is not None and longest > max_len:
        raise ValueError(f"a row has {longest} tokens, more than the maximum of {max_len}")
    if pad_to == "max" and max_len is None:
        raise ValueError('pad_to="max" needs max_len')
    width = longest
    if (lengths != longest).any():  # nothing to pad stays so: then no mask is needed
        width = int(padded_lengths(lengths.max(), multiple=multiple))
    if max_len is not None:
        width = max_len if pad_to == "max" else min(width, max_len)
    spare = width - lengths
    if side == "right":
        starts = np.zeros_like(lengths)
    elif side == "left":
        starts = spare
    else:
        if rng is None:
            raise ValueError('side="random" needs rng')
        starts = rng.integers(0, spare + 1)
    return PadLayout(starts=starts, lengths=lengths, width=width)


def padded_lengths(lengths: np.ndarray, *, multiple: int = WIDTH_MULTIPLE) -> np.ndarray:
    """Lengths rounded up. Batches of texts have every width otherwise, and a new shape for each batch costs memory that
    allocators do not get back, and the time in which kernels for it are made.
    """
    return -(-lengths // multiple) * multiple
