"""Fewer rows and columns: special tokens hidden, tokens of one word merged.

hidden    special rows and columns go; what is left of a row grows to the row's sum, which is one
merged    a word is looked at as much as all its tokens are (sum over keys), and looks where they look on average
          (mean over queries): rows still sum to one
"""

# Shapes: T queries, S keys; t and s of what is left.

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tformer.viz.attention.sides import Side
from tformer.viz.attention.weights import Attention

Words = list[tuple[int, int, str]]


@dataclass(frozen=True)
class Changes:
    """What a person asked for."""

    hide_special: bool = False
    merge_subwords: bool = False

    def __bool__(self) -> bool:
        return self.hide_special or self.merge_subwords

    def notes(self) -> list[str]:
        said = []
        if self.hide_special:
            said.append("special tokens are hidden; each row is divided by what is left of it")
        if self.merge_subwords:
            said.append("tokens of one word are merged: sums over keys, means over queries")
        return said


def changed(attention: Attention, changes: Changes) -> Attention:
    """The attention with fewer rows and columns."""
    if not changes:
        return attention
    layers = tuple(
        replace(
            layer,
            weights_HTS=changed_matrix(
                layer.weights_HTS, attention.queries, attention.keys, changes, normalised=not layer.signed
            ),
            visible_TS=changed_mask(layer.visible_TS, attention.queries, attention.keys, changes),
        )
        for layer in attention.layers
    )
    return replace(
        attention,
        queries=changed_side(attention.queries, changes),
        keys=changed_side(attention.keys, changes),
        layers=layers,
    )


def changed_side(side: Side, changes: Changes) -> Side:
    words = _words(side, changes)
    firsts = [start for start, _, _ in words]
    from_ = side.written_from
    return Side(
        side.name,
        tuple(text for _, _, text in words),
        tuple(side.special[first] for first in firsts),
        tuple(changes.merge_subwords or side.starts[first] for first in firsts),
        tuple(side.text_of[first] for first in firsts) if side.text_of else (),
        None if from_ is None else sum(first < from_ for first in firsts),
    )


def changed_matrix(
    weights_xTS: np.ndarray, queries: Side, keys: Side, changes: Changes, *, normalised: bool = True
) -> np.ndarray:
    """fp32 [..., t, s]. `normalised`: after hiding, rows get back the sum that they had."""
    rows, columns = _words(queries, changes), _words(keys, changes)
    if changes.hide_special:
        hidden = np.array(keys.special, dtype=bool)
        total = weights_xTS.sum(axis=-1, keepdims=True, dtype=np.float64)
        weights_xTS = np.where(hidden, np.float32(0), weights_xTS)
        if normalised:
            left = weights_xTS.sum(axis=-1, keepdims=True, dtype=np.float64)
            weights_xTS = (weights_xTS * (total / np.where(left > 0, left, 1))).astype(np.float32)
    merged = weights_xTS @ _pooling(columns, len(keys), mean=False).T
    return (_pooling(rows, len(queries), mean=True) @ merged).astype(np.float32, copy=False)


def changed_mask(visible_TS: np.ndarray, queries: Side, keys: Side, changes: Changes) -> np.ndarray:
    """A merged cell can be seen if any of its own can."""
    rows, columns = _words(queries, changes), _words(keys, changes)
    seen = _pooling(rows, len(queries), mean=False) @ visible_TS.astype(np.float32)
    return (seen @ _pooling(columns, len(keys), mean=False).T) > 0


def _words(side: Side, changes: Changes) -> Words:
    if changes.merge_subwords:
        words = side.words()
    else:
        words = [(place, place + 1, token) for place, token in enumerate(side.tokens)]
    return [word for word in words if not (changes.hide_special and side.special[word[0]])]


def _pooling(words: Words, length: int, *, mean: bool) -> np.ndarray:
    """fp32 [t, T]: ones, or shares, of each word's tokens."""
    matrix = np.zeros((len(words), length), dtype=np.float32)
    for row, (start, stop, _) in enumerate(words):
        matrix[row, start:stop] = 1 / (stop - start) if mean else 1
    return matrix
