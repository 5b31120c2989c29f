"""Metrics: pure functions from numbers (or strings) to numbers, one file a family. They import nothing of ours."""

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
from tformer.metrics.statistics import (
    bootstrap_interval,
    paired_difference,
    pearson,
    spearman,
)
from tformer.metrics.text import (
    CorpusScore,
    bits_per_byte,
    bleu,
    chrf,
    perplexity,
)

__all__ = [
    "ClassScores",
    "CorpusScore",
    "accuracy",
    "bits_per_byte",
    "bleu",
    "bootstrap_interval",
    "chrf",
    "confusion_matrix",
    "expected_calibration_error",
    "f1_binary",
    "f1_macro",
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
