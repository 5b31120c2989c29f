"""Retrieval metrics from the ranks of the relevant documents of each query (Manning et al., 2008, chapter 8).

Shapes: Q queries, N documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CUTOFFS, GAIN_CUTOFF = (1, 5, 10), 10


def relevant_ranks(scores_QN: np.ndarray, relevant: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The ranks, from 1 and sorted, of each query's relevant documents. Ties count against them."""
    ranks = []
    for scores_N, own in zip(scores_QN, relevant, strict=True):
        others_n = np.sort(np.delete(scores_N, own))
        best = np.sort(scores_N[own])[::-1]
        ranks.append(len(others_n) - np.searchsorted(others_n, best, side="left") + 1 + np.arange(len(best)))
    return ranks


def retrieval_metrics(ranks: Sequence[np.ndarray]) -> dict[str, float]:
    """Means over the queries.

    - recall_K: share of the relevant documents among the first K;
    - mrr: 1 / rank of the first relevant document;
    - ndcg_10: sum of 1 / log2(1 + rank) over the relevant ones among the first 10, divided by its maximum.
    """
    found = {f"recall_{cutoff}": float(np.mean([(each <= cutoff).mean() for each in ranks])) for cutoff in CUTOFFS}
    gains = 1 / np.log2(np.arange(2, GAIN_CUTOFF + 2))
    shares = [gains[each[each <= GAIN_CUTOFF] - 1].sum() / gains[: len(each)].sum() for each in ranks]
    return {**found, "mrr": float(np.mean([1 / each[0] for each in ranks])), "ndcg_10": float(np.mean(shares))}
