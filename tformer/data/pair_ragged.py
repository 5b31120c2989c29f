"""Rows of different lengths in one flat array: ids, or the UTF-8 bytes of texts."""

# Shapes: N rows, M values of all of them together.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ragged:
    """Row n is `values[starts[n] : starts[n] + lengths[n]]`."""

    values: np.ndarray  # [M]
    starts: np.ndarray  # int64 [N]
    lengths: np.ndarray  # int64 [N]

    @classmethod
    def join(cls, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Ragged:
        """From (values, lengths) of consecutive rows; at least one part."""
        values, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return cls(values, np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order; values that no row has are left behind."""
        return cls.join([(part.values[part.places()], part.lengths) for part in parts])

    def places(self) -> np.ndarray:
        """int64 [M]: where the values of the rows stand, row after row."""
        before = np.cumsum(self.lengths) - self.lengths
        return np.repeat(self.starts - before, self.lengths) + np.arange(int(self.lengths.sum()))

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, index: int) -> np.ndarray:
        start = int(self.starts[index])
        return self.values[start : start + int(self.lengths[index])]

    def text(self, index: int) -> str:
        """The row as text, for bytes."""
        return self.row(index).tobytes().decode("utf-8")

    def subset(self, indices: np.ndarray) -> Ragged:
        """Some of the rows, in this order; their values are shared, not copied."""
        return Ragged(self.values, self.starts[indices], self.lengths[indices])


def texts_as_bytes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(values uint8 [M], lengths int64 [N]) for `Ragged.join`."""
    encoded = [text.encode("utf-8") for text in texts]
    lengths = np.array([len(text) for text in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths
