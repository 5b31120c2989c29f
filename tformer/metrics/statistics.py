"""Mean and deviation over seeds, correlations (Pearson, Spearman), principal components, bootstrap intervals.

A bootstrap (Efron 1979) draws N examples with replacement and computes the metric again, many times; the middle 95 % of
the results is its interval. The draws are the same every time, so a report is reproducible.

Shapes: N examples, S resamples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

TIE_STANDARD_ERRORS = 2.0
"""Two means tie when they differ by less than this number of standard errors of the difference (about 95 %)."""


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation (n - 1) over `count` seeds; None for one seed."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Stat | None:
        """None without values; a mean that is not finite has no deviation."""
        if not values:
            return None
        if len(values) == 1 or not all(map(math.isfinite, values)):
            return cls(sum(values) / len(values), None, len(values))
        return cls(statistics.fmean(values), statistics.stdev(values), len(values))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean by Student's t with n - 1 degrees of freedom; None without a deviation."""
        if self.deviation is None:
            return None
        reach = student_t(self.count - 1) * self.deviation / math.sqrt(self.count)
        return self.mean - reach, self.mean + reach

    def ties_with(self, other: Stat) -> bool:
        """Whether chance alone may explain the difference of the means; True if neither mean has a deviation.

        A mean of one seed has the deviation of the other.
        """
        known = self.deviation if self.deviation is not None else other.deviation
        if known is None:
            return True
        others = known if other.deviation is None else other.deviation
        error = math.sqrt(known**2 / self.count + others**2 / other.count)
        return abs(self.mean - other.mean) <= TIE_STANDARD_ERRORS * error


def student_t(degrees: int) -> float:
    """The t that 95 % of Student's distribution with these degrees of freedom lie within: P(-t < T < t) = 0.95."""
    x, step = np.linspace(0.0, 13.0, 130_001, retstep=True)  # 12.7 with 1 degree, 1.96 with infinitely many
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    return float(np.interp(LEVEL / 2, np.append(0.0, np.cumsum(density[1:] + density[:-1]) * step / 2), x))


def pearson(xs: ArrayLike, ys: ArrayLike) -> np.ndarray:
    """[...] of two arrays [..., N]: covariance over the product of the standard deviations; 0 where a side is constant.

    Raises ValueError for unequal shapes, and for fewer than two values.
    """
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if x.shape != y.shape or not x.ndim or x.shape[-1] < 2:
        raise ValueError(f"expected two equally long lists of at least 2, found shapes {x.shape} and {y.shape}")
    varied = (np.ptp(x, axis=-1) > 0) & (np.ptp(y, axis=-1) > 0)  # exact: rounding of the mean leaves noise
    x, y = (side - side.mean(axis=-1, keepdims=True) for side in (x, y))

    def dot(a: np.ndarray, b: np.ndarray) -> Any:
        return np.einsum("...n,...n->...", a, b)

    spread = np.sqrt(dot(x, x)) * np.sqrt(dot(y, y))
    return np.divide(dot(x, y), spread, out=np.zeros(spread.shape), where=varied).clip(-1.0, 1.0)


def distinct_places(values: ArrayLike) -> np.ndarray:
    """int [N]: the number of each value among the distinct ones, from 0, the smallest first."""
    return np.unique(values, return_inverse=True)[1]


def spearman(x_places: ArrayLike, y_places: ArrayLike) -> np.ndarray:
    """[...] of two arrays [..., N]: Pearson's correlation of the ranks of values that are given as `distinct_places`.

    Equal values have the mean of their ranks. Resamples need not be sorted again.
    """
    return pearson(_mean_ranks(x_places), _mean_ranks(y_places))


def _mean_ranks(places: ArrayLike) -> np.ndarray:
    places_SN = np.atleast_2d(np.asarray(places, dtype=np.int64))
    sizes_SG = _counts(places_SN, int(places_SN.max()) + 1)
    ranks_SG = np.cumsum(sizes_SG, axis=1) - (sizes_SG - 1) / 2
    return np.take_along_axis(ranks_SG, places_SN, axis=1).reshape(np.shape(places))


SAMPLES = 1000
LEVEL = 0.95
CHUNK_ELEMENTS = 2**20  # examples drawn at a time, which fit into the cache of a processor


def bootstrap_interval(
    statistic: Callable[..., np.ndarray], *arrays: ArrayLike, samples: int = SAMPLES
) -> tuple[float, float]:
    """(low, high) of a statistic of N examples, the middle 95 % of its resamples.

    Args:
        statistic: arrays [S, N, ...], each row one resample, the same for all arrays -> [S] numbers.
        arrays: each [N, ...].

    Raises ValueError for arrays of unequal lengths, or of none.
    """
    columns = [np.asarray(array) for array in arrays]
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"expected equal, non-empty lists, found shapes {[column.shape for column in columns]}")
    size = lengths.pop()
    rng = np.random.default_rng(0)
    values = np.empty(samples)
    rows = max(1, CHUNK_ELEMENTS // size)
    for start in range(0, samples, rows):
        index_SN = rng.integers(0, size, size=(min(rows, samples - start), size), dtype=np.int32)
        values[start : start + rows] = statistic(*(column[index_SN] for column in columns))
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_rows(values_SN: np.ndarray) -> np.ndarray:
    """[S]: the mean of each resample, the statistic of accuracies and errors."""
    return values_SN.mean(axis=1)


def f1_macro_rows(labels_SN: np.ndarray, predictions_SN: np.ndarray, *, num_classes: int) -> np.ndarray:
    """[S]: `f1_macro` of each resample."""
    hits_SK = _counts(np.where(labels_SN == predictions_SN, labels_SN, num_classes), num_classes + 1)[:, :-1]
    totals_SK = _counts(labels_SN, num_classes) + _counts(predictions_SN, num_classes)
    f1_SK = np.divide(2 * hits_SK, totals_SK, out=np.zeros(hits_SK.shape), where=totals_SK > 0)
    return f1_SK.sum(axis=1) / (totals_SK > 0).sum(axis=1)


def _counts(values_SN: np.ndarray, size: int) -> np.ndarray:
    """[S, size]: number of occurrences of 0 ... size - 1 in each row."""
    rows = len(values_SN)
    offset_SN = values_SN + np.arange(rows)[:, None] * size
    return np.bincount(offset_SN.ravel(), minlength=rows * size).reshape(rows, size)


def principal_components(vectors_ND: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(coordinates fp64 [N, count], the share of the variance of each component [count]), zeros beyond the rank.

    The singular value decomposition of the centred rows (Pearson 1901): X - mean = U S Vᵀ, coordinates U S, shares
    S² / Σ S². The sign of a component makes its largest coordinate positive.
    """
    centred_ND = vectors_ND - vectors_ND.mean(axis=0, dtype=np.float64)
    # R of X = QR has the same S and V, and as many rows as columns.
    _, scale, axes = np.linalg.svd(np.linalg.qr(centred_ND, mode="r"), full_matrices=False)
    found = centred_ND @ axes[:count].T
    found *= np.where(found.max(axis=0) >= -found.min(axis=0), 1.0, -1.0)
    shares = scale[:count] ** 2 / (np.square(scale).sum() or 1.0)
    missing = (0, count - len(shares))
    return np.pad(found, ((0, 0), missing)), np.pad(shares, missing)
