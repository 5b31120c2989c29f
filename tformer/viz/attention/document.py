"""Attention as JSON and CSV: the numbers themselves, exact to nine decimals; forbidden cells are null, or empty."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from tformer.viz.attention.scene import CAUTION, Scene
from tformer.viz.attention.sides import Side
from tformer.viz.attention.summary import COLUMNS, summarise
from tformer.viz.attention.weights import Attention

View = Literal["head", "model", "rollout", "summary"]
Numbered = tuple[object, object, Sequence[Sequence[float | None]]]
"""Layer, head, matrix."""

DECIMALS = 9
BYTES_PER_WEIGHT = {"json": 5.0, "csv": 20.0}
"""At the very least, of each format."""


def as_json(scene: Scene, view: View) -> str:
    """One document: the model, the texts, and for each attention its tokens and what the view shows."""
    document: dict[str, Any] = {
        "model": scene.model,
        "command": scene.command,
        **scene.reading.texts,
        "notes": [*scene.notes, *scene.changes.notes(), CAUTION],
        "view": view,
        "attention": {},
    }
    for kind in scene.attentions:
        attention = scene.shown(kind)
        found: dict[str, Any] = {"queries": _side(attention.queries), "keys": _side(attention.keys)}
        if view == "summary":
            rows, divergences = summarise(attention)
            found["heads"] = [asdict(row) for row in rows]
            found["divergence"] = _numbers(divergences.between_NN)
            found["divergence_queries"] = divergences.rows
        elif view == "rollout":
            found["rollout"] = _rollout(scene, attention)
            found["notes"] = scene.rollout_notes(kind)
        else:
            found["layers"] = [
                {
                    "layer": layer.number,
                    "pattern": layer.pattern,
                    "heads": [
                        {"head": head, "weights": _matrix(matrix_TS, layer.visible_TS)}
                        for head, matrix_TS in zip(layer.heads, layer.weights_HTS, strict=True)
                    ],
                }
                for layer in attention.layers
            ]
        document["attention"][kind] = found
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def _side(side: Side) -> dict[str, Any]:
    found: dict[str, Any] = {"side": side.name, "tokens": list(side.tokens), "special": list(side.special)}
    if side.written_from is not None:
        found["written_from"] = side.written_from
    return found


def _matrix(matrix_TS: np.ndarray, seen_TS: np.ndarray | None) -> Sequence[Sequence[float | None]]:
    """Rows of numbers; None where `seen_TS` forbids."""
    values = _numbers(matrix_TS)
    if seen_TS is None or seen_TS.all():
        return values
    return [
        [value if allowed else None for value, allowed in zip(row, row_seen, strict=True)]
        for row, row_seen in zip(values, seen_TS.tolist(), strict=True)
    ]


def _rollout(scene: Scene, attention: Attention) -> Sequence[Sequence[float | None]]:
    """Sparse layers together reach beyond the pattern of each: causal order alone is a limit."""
    matrix_TS = scene.shown_rollout(attention.kind)
    return _matrix(matrix_TS, np.tril(np.ones(matrix_TS.shape, dtype=bool)) if attention.causal else None)


def _numbers(values: np.ndarray) -> list[list[float]]:
    return np.round(values.astype(np.float64), DECIMALS).tolist()


def as_csv(scene: Scene, view: View) -> str:
    """One row for each weight, or for each head of the summary."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if view == "summary":
        writer.writerow(("attention", *COLUMNS))
        for kind in scene.attentions:
            for head_row in summarise(scene.shown(kind))[0]:
                writer.writerow((kind, *(_plain(value) for value in asdict(head_row).values())))
        return stream.getvalue()
    writer.writerow(("attention", "layer", "head", "query", "query_token", "key", "key_token", "weight"))
    for kind in scene.attentions:
        attention = scene.shown(kind)
        if view == "rollout":
            matrices: Iterable[Numbered] = [("rollout", "", _rollout(scene, attention))]
        else:
            matrices = _matrices(attention)
        for layer, head, matrix in matrices:
            for query, row in enumerate(matrix):
                for key, weight in enumerate(row):
                    tokens = attention.queries.tokens[query], attention.keys.tokens[key]
                    writer.writerow((kind, layer, head, query, tokens[0], key, tokens[1], _plain(weight)))
    return stream.getvalue()


def _matrices(attention: Attention) -> Iterator[Numbered]:
    for layer in attention.layers:
        for head, matrix_TS in zip(layer.heads, layer.weights_HTS, strict=True):
            yield layer.number, head, _matrix(matrix_TS, layer.visible_TS)


def _plain(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else value
