"""Correlation of two lists of numbers, for regression: Pearson's (linear) and Spearman's (of ranks)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def pearson(xs: ArrayLike, ys: ArrayLike) -> float:
    """Covariance over the product of the standard deviations; 0 where one side is constant and it is undefined."""
    x, y = _pair(xs, ys)
    if (x == x[0]).all() or (y == y[0]).all():  # exact: the mean of equal numbers may round, leaving noise behind
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return float(np.clip(x @ y, -1.0, 1.0))


def spearman(xs: ArrayLike, ys: ArrayLike) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of their ranks."""
    x, y = _pair(xs, ys)
    return pearson(_ranks(x), _ranks(y))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return (last - (sizes - 1) / 2)[group]


def _pair(xs: ArrayLike, ys: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or x.size < 2:
        raise ValueError(f"expected two equally long lists of at least 2, found shapes {x.shape} and {y.shape}")
    return x, y
