"""Decision thresholds: the counts at each threshold of a yes-or-no decision, and the threshold that a rule chooses.

Shapes: N examples, M thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tformer.support.errors import InputError


@dataclass(frozen=True)
class Curve:
    """Decisions at each threshold, the lowest first: yes where the value is at least the threshold.

    Attributes:
        thresholds: [M] the different values, and infinity, where every decision is no.
        hits, found: int [M] decisions for yes that are right, and all decisions for yes.
        positives, total: examples whose label is yes, and all.
    """

    thresholds: np.ndarray
    hits: np.ndarray
    found: np.ndarray
    positives: int
    total: int

    @classmethod
    def of(cls, labels: ArrayLike, values: ArrayLike) -> Curve:
        """labels: bool [N]; values: [N], higher where yes is more probable."""
        true_N, value_N = np.asarray(labels, dtype=bool), np.asarray(values, dtype=np.float64)
        thresholds, place_N = np.unique(value_N, return_inverse=True)
        counts = (np.bincount(place_N[chosen], minlength=len(thresholds) + 1) for chosen in (true_N, slice(None)))
        hits, found = (count[::-1].cumsum()[::-1] for count in counts)
        return cls(np.append(thresholds, np.inf), hits, found, int(true_N.sum()), len(true_N))

    @property
    def precision(self) -> np.ndarray:
        """Precision at each threshold [M]; 1 where no example is found, as in scikit-learn's precision_recall_curve."""
        return np.divide(self.hits, self.found, out=np.ones(len(self.hits)), where=self.found > 0)

    @property
    def recall(self) -> np.ndarray:
        """Recall at each threshold [M]; 1 where no label is yes."""
        return self.hits / self.positives if self.positives else np.ones(len(self.hits))

    @property
    def average_precision(self) -> float:
        """Sum over the thresholds of the precision times the recall that they add; 0 where no label is yes."""
        return float(-np.diff(self.recall) @ self.precision[:-1])

    @property
    def f1(self) -> np.ndarray:
        return 2 * self.hits / np.maximum(1, self.found + self.positives)

    @property
    def accuracy(self) -> np.ndarray:
        return (self.total - self.positives - self.found + 2 * self.hits) / self.total

    @property
    def mcc(self) -> np.ndarray:
        """[M] Matthews' correlation; 0 where it is undefined."""
        of_labels = math.sqrt(self.positives * (self.total - self.positives))
        spread = np.sqrt(self.found * (self.total - self.found)) * of_labels
        covariance = self.hits * self.total - self.found * self.positives
        return np.divide(covariance, spread, out=np.zeros(len(self.hits)), where=spread > 0)

    def reach(self, meets: np.ndarray, goal: np.ndarray) -> np.ndarray:
        """The goal [M] where a threshold meets the condition, else 0; 0 everywhere if no label is yes."""
        return np.where(meets & (self.positives > 0), goal, 0.0)


RULES: dict[str, Callable[[Curve, float], tuple[np.ndarray, np.ndarray]]] = {
    "best-f1": lambda curve, _: (curve.f1, curve.precision),
    "best-accuracy": lambda curve, _: (curve.accuracy, curve.recall),
    "best-mcc": lambda curve, _: (curve.mcc, curve.precision),
    "precision": lambda curve, least: (curve.reach(curve.precision >= least, curve.recall), curve.precision),
    "recall": lambda curve, least: (curve.reach(curve.recall >= least, curve.precision), curve.recall),
}
"""What each rule makes as large as possible, and the second criterion among equal ones."""

EXPECTED = "a number from 0 to 1, best-f1, best-accuracy, best-mcc, precision=P or recall=R"


def parse_rule(text: str) -> tuple[str, float]:
    """Parse `precision=0.9`, `best-f1` or a number into (name or "", number). Raises InputError."""
    name, _, number = text.partition("=")
    if text in RULES and text.startswith("best-"):
        return text, 0.0
    try:
        value = float(number if name in RULES else text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1 or name.startswith("best-"):
        raise InputError(f"--threshold: found '{text}', expected {EXPECTED}")
    return (name if name in RULES else ""), value


def choose_threshold(labels: ArrayLike, values: ArrayLike, rule: str, least: float = 0.0) -> float | None:
    """The threshold of a rule: yes is decided above it. None: no threshold meets the rule.

    It lies between the lowest probability that is decided yes and the next one, so that rounding changes no decision.

    labels: bool [N]; values: [N] probabilities above 0. least: of the rules `precision` and `recall`.
    """
    curve = Curve.of(labels, values)
    first, second = RULES[rule](curve, least)
    best = int(np.lexsort((second, first))[-1])
    if first[best] <= 0:
        return None
    if np.isinf(curve.thresholds[best]):
        return 1.0
    high = float(curve.thresholds[best])
    low = float(curve.thresholds[best - 1]) if best else 0.0
    middle = (low + high) / 2
    return middle if middle < high else low
