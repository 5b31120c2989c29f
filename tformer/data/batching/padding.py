"""Padding of rows of different lengths to one width.

A `PadLayout` fixes where each row starts, so that ids, labels and document ids of an example are aligned.
"""

# Shapes: B examples, T tokens.

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
        """[B, T] bool, True on real tokens; None if nothing is padded."""
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
    """The places of rows of these lengths. `pad_to="max"` needs `max_len`; `side="random"` needs `rng`.

    The width is rounded up to a multiple of `multiple` where `max_len` allows, see `padded_lengths`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    longest = int(lengths.max(initial=0))
    assert max_len is None or longest <= max_len, f"a row has {longest} tokens, more than the maximum of {max_len}"
    width = longest
    if (lengths != longest).any():  # rows of equal length need no mask
        width = int(padded_lengths(lengths.max(), multiple=multiple))
    if max_len is not None:
        width = max_len if pad_to == "max" else min(width, max_len)
    spare = width - lengths
    if side == "right":
        starts = np.zeros_like(lengths)
    elif side == "left":
        starts = spare
    else:
        assert rng is not None, 'side="random" needs rng'
        starts = rng.integers(0, spare + 1)
    return PadLayout(starts=starts, lengths=lengths, width=width)


def padded_lengths(lengths: np.ndarray, *, multiple: int = WIDTH_MULTIPLE) -> np.ndarray:
    """Lengths rounded up, so that batches have few different widths.

    A new shape for each batch would cost memory that allocators do not get back, and time for compiling kernels.
    """
    return -(-lengths // multiple) * multiple
