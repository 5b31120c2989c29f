"""Metrics: pure functions of numbers or texts."""

from __future__ import annotations

from tformer.metrics.classification import (
    ClassScores,
    accuracy,
    confusion_matrix,
    expected_calibration_error,
    f1_binary,
    f1_macro,
    mcc,
    micro_scores,
    multi_label_f1_macro,
    per_class,
    per_label,
    subset_accuracy,
)
from tformer.metrics.statistics import Stat, bootstrap_interval, paired_difference, pearson, spearman
from tformer.metrics.text import CorpusScore, bits_per_byte, bleu, chrf, perplexity

HIGHER_IS_BETTER = frozenset({"accuracy", "f1", "mcc", "pearson", "spearman", "bleu", "chrf", "sequence_accuracy"})
"""Metrics of a validation of which a higher value is better."""


def lower_is_better(metric: str, value: float) -> float:
    """The value of a validation's metric, signed so that a lower one is better."""
    return -value if metric in HIGHER_IS_BETTER else value


__all__ = [
    "HIGHER_IS_BETTER",
    "ClassScores",
    "CorpusScore",
    "Stat",
    "accuracy",
    "bits_per_byte",
    "bleu",
    "bootstrap_interval",
    "chrf",
    "confusion_matrix",
    "expected_calibration_error",
    "f1_binary",
    "f1_macro",
    "lower_is_better",
    "mcc",
    "micro_scores",
    "multi_label_f1_macro",
    "paired_difference",
    "pearson",
    "per_class",
    "per_label",
    "perplexity",
    "spearman",
    "subset_accuracy",
]
