"""Each head in numbers, and how alike heads are (as in arXiv 1906.04341, "What Does BERT Look At?").

    entropy     -sum_j a_j ln a_j / ln(visible keys): 0 looks at one token, 1 at all alike; rows that see two or more
    distance    sum_j a_j |i - j|, tokens
    previous    weight on the token before; of rows that have one. itself, first: on the token itself, on the first
    special     weight on special tokens
    max         the largest weight of a row
    divergence  Jensen-Shannon, in bits (0 equal, 1 disjoint), between the rows of two heads

All are means over rows. Where weights can be negative (Linformer), shares of their sizes are taken.
"""

# Shapes: H heads, T queries, S keys, N heads of all layers.

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch

from tformer.viz.attention.weights import Attention, Layer

DIVERGENCE_CELLS = 1.5e8  # at most so many logarithms; beyond, evenly spaced queries stand for all


@dataclass(frozen=True)
class HeadSummary:
    """One head; None where a number has no meaning: places of two sequences cannot be compared."""

    layer: int
    head: int
    entropy: float | None
    distance: float | None
    previous: float | None
    itself: float | None
    first: float
    special: float
    max: float
    nearest: str | None = None
    nearest_divergence: float | None = None


@dataclass(frozen=True)
class Divergences:
    """between_NN: in bits, in the order of the summaries; from `rows` of `of` queries."""

    between_NN: np.ndarray
    rows: int
    of: int


COLUMNS = ("layer", "head", "entropy", "distance", "previous", "itself", "first", "special", "max", "nearest",
           "nearest_divergence")  # fmt: skip


def summarise(attention: Attention) -> tuple[list[HeadSummary], Divergences]:
    """One row for each head that is shown, and how alike they are."""
    names = [f"{layer.number}.{head}" for layer in attention.layers for head in layer.heads]
    found = [row for layer in attention.layers for row in _of_layer(attention, layer)]
    divergences = divergence(attention)
    rows = []
    for place, row in enumerate(found):
        others = divergences.between_NN[place].copy()
        others[place] = math.inf
        if len(others) > 1:
            near = int(others.argmin())
            row = HeadSummary(**{**asdict(row), "nearest": names[near], "nearest_divergence": float(others[near])})
        rows.append(row)
    return rows, divergences


def _of_layer(attention: Attention, layer: Layer) -> list[HeadSummary]:
    weights_HTS = _shares(layer)
    seen_T = layer.visible_TS.sum(axis=1)
    several_T = seen_T > 1
    entropy_HT = torch.special.entr(torch.from_numpy(weights_HTS)).sum(-1).numpy()
    special_S = np.array(attention.keys.special, dtype=np.float32)
    own = attention.kind != "cross"
    distance = None
    if own:
        places = np.arange(weights_HTS.shape[1], dtype=np.float32)
        distance = (weights_HTS * np.abs(places[:, None] - places)).sum(-1).mean(-1)
    rows = []
    for place, head in enumerate(layer.heads):
        matrix_TS = weights_HTS[place]
        entropy = entropy_HT[place, several_T] / np.log(seen_T[several_T]) if several_T.any() else None
        rows.append(
            HeadSummary(
                layer=layer.number,
                head=head,
                entropy=None if entropy is None else float(entropy.mean()),
                distance=None if distance is None else float(distance[place]),
                previous=float(np.diagonal(matrix_TS, -1).mean()) if own and len(matrix_TS) > 1 else None,
                itself=float(np.diagonal(matrix_TS).mean()) if own else None,
                first=float(matrix_TS[:, 0].mean()),
                special=float((matrix_TS @ special_S).mean()),
                max=float(matrix_TS.max(axis=-1).mean()),
            )
        )
    return rows


def _shares(layer: Layer) -> np.ndarray:
    """The weights; signed ones as shares of their sizes."""
    if not layer.signed:
        return layer.weights_HTS
    sizes = np.abs(layer.weights_HTS)
    total = sizes.sum(axis=-1, keepdims=True)
    return sizes / np.where(total > 0, total, 1)


def divergence(attention: Attention) -> Divergences:
    """Jensen-Shannon between every two heads, the mean over queries: H((p + q) / 2) - (H(p) + H(q)) / 2."""
    queries, keys = len(attention.queries), len(attention.keys)
    count = sum(len(layer.heads) for layer in attention.layers)
    pairs = max(1, count * (count - 1) // 2)
    rows = int(min(queries, max(1, DIVERGENCE_CELLS // (pairs * keys))))
    picked = np.unique(np.linspace(0, queries - 1, rows).round().astype(int))
    heads = torch.cat([torch.from_numpy(_shares(layer)[:, picked]) for layer in attention.layers])
    entropy_NT = torch.special.entr(heads).sum(-1)
    between = torch.zeros(count, count)
    for one in range(count - 1):
        mixed = torch.special.entr((heads[one] + heads[one + 1 :]).mul_(0.5)).sum(-1)
        value = (mixed - 0.5 * (entropy_NT[one] + entropy_NT[one + 1 :])).mean(-1)
        between[one, one + 1 :] = value
    between = (between + between.T).clamp_(min=0.0) / math.log(2.0)
    return Divergences(between.numpy(), len(picked), queries)
