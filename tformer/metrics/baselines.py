"""Baselines: scores of guesses without a model, in the metrics of a model.

    unigram   p(t)     = (c(t) + S / V) / (N + S)
    bigram    p(t | s) = (c(s, t) + S(s) p(t)) / (c(s) + S(s))

with counts c of N training tokens, of which S of V ids occur and S(s) follow s. What has not been seen gets the share
that new ids had so far (Witten and Bell 1991, method C), so every vocabulary has finite losses.

    constant  the same scores for every example: the shares of the labels in the training data, or the mean score

Shapes: V ids, N and M pairs of neighbouring tokens [previous, next], E examples, L labels.
"""

from __future__ import annotations

import math

import numpy as np

from tformer.metrics.text import perplexity


def shares(counts_V: np.ndarray) -> np.ndarray:
    """Smoothed unigram probabilities [V] of counts; at least one count is above 0."""
    seen = np.count_nonzero(counts_V)
    return (counts_V + seen / len(counts_V)) / (counts_V.sum() + seen)


def unigram(counts_V: np.ndarray, found_V: np.ndarray) -> dict[str, float]:
    """Scores of a unigram guess: `counts_V` counts the training tokens, `found_V` the tokens to guess.

    Returns loss (nats per token), perplexity and accuracy.
    """
    total = found_V.sum()
    loss = float(found_V @ -np.log(shares(counts_V)) / total)
    return {"loss": loss, "perplexity": perplexity(loss), "accuracy": float(found_V[counts_V.argmax()] / total)}


def bigram(train_2N: np.ndarray, found_2M: np.ndarray, *, num_ids: int) -> dict[str, float]:
    """Scores of a bigram table: loss (nats per token) and perplexity of each next token of `found_2M`."""
    pairs, counts = np.unique(train_2N[0] * num_ids + train_2N[1], return_counts=True)
    before_V = np.bincount(train_2N[0], minlength=num_ids)
    followers_V = np.bincount(pairs // num_ids, minlength=num_ids)
    share_V = shares(np.bincount(train_2N[1], minlength=num_ids))
    found, times = np.unique(found_2M[0] * num_ids + found_2M[1], return_counts=True)
    first, second = np.divmod(found, num_ids)
    place = np.searchsorted(pairs, found).clip(max=len(pairs) - 1)
    together = np.where(pairs[place] == found, counts[place], 0)
    followers = np.maximum(1, followers_V[first])  # after an id that has not been seen, p(t) alone
    probability = (together + followers * share_V[second]) / (before_V[first] + followers)
    loss = float(times @ -np.log(probability) / times.sum())
    return {"loss": loss, "perplexity": perplexity(loss)}


def constant_scores(labels: np.ndarray, *, num_labels: int) -> list[float]:
    """The scores of a model that knows the labels of the training data and no example.

    labels: classes [E] (`num_labels` of them): log shares. Several labels, bool [E, L]: log odds, above 0 for a label
    of more than half of the examples. Scores [E] (`num_labels` 0): their mean.
    """
    if labels.ndim == 2:
        with_label_L = labels.sum(axis=0) + 0.5
        return [math.log(count / (len(labels) + 1 - count)) for count in with_label_L.tolist()]
    if num_labels:
        found: list[float] = np.log(shares(np.bincount(labels, minlength=num_labels))).tolist()
        return found
    return [float(labels.mean(dtype=np.float64))]
