"""Mean and deviation over seeds, correlations (Pearson, Spearman) and percentile bootstrap intervals (Efron 1979).

A bootstrap draws N examples with replacement and computes the metric again, many times; the middle 95 % of the results
is its interval. The draws depend on a seed only, so a report is reproducible.

Shapes: N examples, S resamples, R runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        """Whether chance alone may explain the difference of the means; always, where neither has a deviation.

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


def pearson(xs: ArrayLike, ys: ArrayLike) -> float:
    """Covariance over the product of the standard deviations; 0 where one side is constant and it is undefined."""
    x, y = _pair(xs, ys)
    if (x == x[0]).all() or (y == y[0]).all():  # exact: rounding of the mean would leave noise
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return float(np.clip(x @ y, -1.0, 1.0))


def spearman(xs: ArrayLike, ys: ArrayLike) -> float:
    """Pearson's correlation of the ranks; equal values have the mean of their ranks."""
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


SAMPLES = 1000
LEVEL = 0.95
CHUNK_ELEMENTS = 2**20  # examples drawn at a time, which fit into the cache of a processor


def bootstrap_interval(
    statistic: Callable[..., np.ndarray],
    *arrays: ArrayLike,
    samples: int = SAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> tuple[float, float]:
    """(low, high) of a statistic of N examples.

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
    rng = np.random.default_rng(seed)
    values = np.empty(samples)
    rows = max(1, CHUNK_ELEMENTS // size)
    for start in range(0, samples, rows):
        index_SN = rng.integers(0, size, size=(min(rows, samples - start), size), dtype=np.int32)
        values[start : start + rows] = statistic(*(column[index_SN] for column in columns))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference(
    correct_a: ArrayLike,
    correct_b: ArrayLike,
    *,
    samples: int = 10 * SAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> tuple[float, float, float]:
    """(mean, low, high) of a's accuracy minus b's, both measured on the same N examples.

    `correct_a` [R, N] and `correct_b` [R', N]: which examples each run got right (or any metric that is averaged over
    examples). Runs of a side are averaged for each example, then examples are resampled: the interval holds for other
    examples from the same source and these runs. It excludes 0 where a and b differ significantly.

    Raises ValueError when the sides have different numbers of examples.
    """
    a_RN, b_RN = np.asarray(correct_a, dtype=np.float64), np.asarray(correct_b, dtype=np.float64)
    if a_RN.ndim != 2 or b_RN.ndim != 2 or a_RN.shape[1] != b_RN.shape[1] or 0 in a_RN.shape + b_RN.shape:
        raise ValueError(f"expected [runs, examples] of the same examples, found {a_RN.shape} and {b_RN.shape}")
    gain_N = a_RN.mean(axis=0) - b_RN.mean(axis=0)
    low, high = bootstrap_interval(mean_rows, gain_N, samples=samples, seed=seed, level=level)
    return float(gain_N.mean()), low, high


def mean_rows(values_SN: np.ndarray) -> np.ndarray:
    """[S]: the mean of each resample, the statistic of accuracies and errors."""
    return values_SN.mean(axis=1)


def f1_macro_rows(labels_SN: np.ndarray, predictions_SN: np.ndarray, *, num_classes: int) -> np.ndarray:
    """[S]: `f1_macro` of each resample."""
    hits_SK = _counts(np.where(labels_SN == predictions_SN, labels_SN, num_classes), num_classes + 1)[:, :-1]
    totals_SK = _counts(labels_SN, num_classes) + _counts(predictions_SN, num_classes)
    f1_SK = np.divide(2 * hits_SK, totals_SK, out=np.zeros(hits_SK.shape), where=totals_SK > 0)
    return f1_SK.sum(axis=1) / (totals_SK > 0).sum(axis=1)


def pearson_rows(xs_SN: np.ndarray, ys_SN: np.ndarray) -> np.ndarray:
    """[S]: `pearson` of each resample."""
    x_SN, y_SN = (side - side.mean(axis=1, keepdims=True) for side in (xs_SN, ys_SN))
    varied_S = (np.ptp(xs_SN, axis=1) > 0) & (np.ptp(ys_SN, axis=1) > 0)
    norms_S = np.sqrt(np.einsum("sn,sn->s", x_SN, x_SN) * np.einsum("sn,sn->s", y_SN, y_SN))
    return np.divide(np.einsum("sn,sn->s", x_SN, y_SN), norms_S, out=np.zeros(len(norms_S)), where=varied_S)


def spearman_rows(x_groups_SN: np.ndarray, y_groups_SN: np.ndarray) -> np.ndarray:
    """[S]: `spearman` of each resample; values are given as ranks 0, 1, ... among the distinct values."""
    return pearson_rows(_mean_ranks(x_groups_SN), _mean_ranks(y_groups_SN))


def _mean_ranks(groups_SN: np.ndarray) -> np.ndarray:
    """Ranks within each row without sorting; equal values have the mean of their ranks."""
    sizes_SG = _counts(groups_SN, int(groups_SN.max()) + 1)
    ranks_SG = np.cumsum(sizes_SG, axis=1) - (sizes_SG - 1) / 2
    return np.take_along_axis(ranks_SG, groups_SN.astype(np.int64), axis=1)


def _counts(values_SN: np.ndarray, size: int) -> np.ndarray:
    """[S, size]: number of occurrences of 0 ... size - 1 in each row."""
    rows = len(values_SN)
    offset_SN = values_SN + np.arange(rows)[:, None] * size
    return np.bincount(offset_SN.ravel(), minlength=rows * size).reshape(rows, size)
