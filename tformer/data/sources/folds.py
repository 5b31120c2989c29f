"""Folds of labelled examples for cross-validation: disjoint parts with the same share of every class.

Shapes: N examples, K folds, S strata.
"""

from __future__ import annotations

import numpy as np

from tformer.data.permutation import derive_key, permute_by_network
from tformer.support.errors import InputError

SCORE_BINS = 10
"""Ranges of scores, with equally many examples, that every fold has a share of."""


def fold_numbers(
    labels: np.ndarray, *, folds: int, name: str, groups: np.ndarray | None = None, unit: str = "groups"
) -> np.ndarray:
    """int [N]: the fold of each example, 0 ... K - 1, always the same for the same labels and groups.

    Numbers of examples of a class, and of all, differ by at most 1 between folds; for several labels per example those
    of each set of labels, for scores those of each of `SCORE_BINS` ranges. The examples of a group are all in one fold;
    the shares are then as equal as the groups allow: the largest ones first, each goes to the fold that has the least
    of its classes.

    groups: int [N], of which only equality has a meaning; `unit` names them in messages.

    Raises InputError for fewer examples or groups than folds.
    """
    total = len(labels) if groups is None else len(np.unique(groups))
    if total < folds:
        unit = "examples" if groups is None else unit
        raise InputError(f"{name}: found {total} {unit}, expected at least {folds}, one for each fold")
    stratum_N = _strata(labels)
    if groups is not None:
        return _grouped(stratum_N, groups, folds)
    drawn_N = permute_by_network(np.arange(len(labels)), size=len(labels), key=derive_key("folds", 0))
    fold_N = np.empty(len(labels), dtype=np.int64)
    fold_N[np.lexsort((drawn_N, stratum_N))] = np.arange(len(labels)) % folds
    return fold_N


def _strata(labels: np.ndarray) -> np.ndarray:
    """int [N]: the class, the set of labels or the range of scores of each example."""
    if np.issubdtype(labels.dtype, np.floating):
        ranks = np.argsort(np.argsort(labels, kind="stable"), kind="stable")
        return ranks * SCORE_BINS // len(labels)
    return np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)


def _grouped(stratum_N: np.ndarray, groups: np.ndarray, folds: int) -> np.ndarray:
    _, first_G, group_N = np.unique(groups, return_index=True, return_inverse=True)
    _, group_N, sizes_G = np.unique(first_G[group_N], return_inverse=True, return_counts=True)  # in order of appearance
    members = np.split(np.argsort(group_N, kind="stable"), sizes_G.cumsum()[:-1])
    drawn_G = permute_by_network(np.arange(len(sizes_G)), size=len(sizes_G), key=derive_key("folds", 1))
    total_S = np.bincount(stratum_N)
    filled_KS, fold_N = np.zeros((folds, len(total_S))), np.empty(len(group_N), dtype=np.int64)
    for group in np.lexsort((drawn_G, -sizes_G)):
        strata, counts = np.unique(stratum_N[members[group]], return_counts=True)
        full_K = filled_KS[:, strata] @ (counts / total_S[strata] ** 2)
        chosen = np.lexsort((filled_KS.sum(axis=1), full_K))[0]
        filled_KS[chosen, strata] += counts
        fold_N[members[group]] = chosen
    return fold_N
