"""Metrics: pure functions of numbers (classification.py, statistics.py) or texts (text.py)."""

from __future__ import annotations

from typing import Literal, get_args

Metric = Literal[
    "loss", "accuracy", "f1_binary", "f1_macro", "f1_micro", "mcc", "pearson", "spearman", "bleu", "chrf",
    "sequence_accuracy", "recall_1", "mrr", "ndcg_10", "exact_match", "f1", "margin"
]  # fmt: skip
"""Metrics that may decide which checkpoint is the best."""

HIGHER_IS_BETTER = frozenset(get_args(Metric)) - {"loss"}
"""Metrics of a validation of which a higher value is better."""


def lower_is_better(metric: str, value: float) -> float:
    """The value of a validation's metric, signed so that a lower one is better."""
    return -value if metric in HIGHER_IS_BETTER else value
