"""Recall, MRR and nDCG against scikit-learn and by hand; ties count against the relevant documents."""

from __future__ import annotations

import numpy as np
import pytest

from tformer.metrics.retrieval import relevant_ranks, retrieval_metrics


def test_ranks_count_from_1_and_ties_against_the_relevant() -> None:
    scores = np.array([[0.9, 0.5, 0.7, 0.1], [0.5, 0.5, 0.5, 0.5]])
    ranks = relevant_ranks(scores, [np.array([2, 3]), np.array([1])])
    assert [each.tolist() for each in ranks] == [[2, 4], [4]]


def test_metrics_by_hand() -> None:
    found = retrieval_metrics([np.array([1]), np.array([2, 12]), np.array([30])])
    assert found["recall_1"] == pytest.approx(1 / 3)
    assert found["recall_5"] == found["recall_10"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 30) / 3)
    ideal = 1 + 1 / np.log2(3)
    assert found["ndcg_10"] == pytest.approx((1 + (1 / np.log2(3)) / ideal + 0) / 3)


def test_metrics_agree_with_scikit_learn() -> None:
    ranking = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(20, 50))
    relevant = [np.sort(rng.choice(50, size=rng.integers(1, 15), replace=False)) for _ in range(20)]
    truth = np.zeros((20, 50))
    for row, own in zip(truth, relevant, strict=True):
        row[own] = 1
    found = retrieval_metrics(relevant_ranks(scores, relevant))
    assert found["ndcg_10"] == pytest.approx(ranking.ndcg_score(truth, scores, k=10))
    first = [
        (np.argsort(-row)[:, None] == own).any(axis=1).argmax() + 1 for row, own in zip(scores, relevant, strict=True)
    ]
    assert found["mrr"] == pytest.approx(np.mean(1 / np.array(first)))
