"""Attention as text: JSON and CSV with nine decimals, and matrices in a terminal."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from tformer.inside.reading import TokenSequence
from tformer.support.errors import visible
from tformer.support.formatting import TOKEN_SIGNS, fitted
from tformer.viz.attention.scene import CAUTION, MEASURES, Scene, heading, summarize
from tformer.viz.attention.weights import AttentionMaps, Kind
from tformer.viz.plots import Heat
from tformer.viz.terminal import NOTHING, Colours, draw_heat

View = Literal["head", "model", "rollout", "summary"]

DECIMALS = 9
BYTES_PER_WEIGHT = {"json": 5.0, "csv": 20.0}
"""Lower bounds, by format."""


def as_json(scene: Scene, view: View) -> str:
    """One JSON document: the model, the texts, and for each attention its tokens and the numbers of the view."""
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
            rows, divergences = summarize(attention)
            found["heads"] = [asdict(row) for row in rows]
            found["divergence"] = rounded(divergences.between_NN)
            found["divergence_queries"] = divergences.rows
        elif view == "rollout":
            [matrix] = scene.matrices(attention, view)
            found["rollout"] = _rows_of(matrix.weights_TS, matrix.seen_TS)
            found["notes"] = scene.rollout_notes(kind)
        else:
            found["layers"] = [
                {
                    "layer": layer.number,
                    "pattern": layer.pattern,
                    "heads": [
                        {"head": head, "weights": _rows_of(matrix_TS, layer.visible_TS)}
                        for head, matrix_TS in zip(layer.heads, layer.weights_HTS, strict=True)
                    ],
                }
                for layer in attention.layers
            ]
        document["attention"][kind] = found
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def _side(side: TokenSequence) -> dict[str, Any]:
    found: dict[str, Any] = {"side": side.name, "tokens": list(side.tokens), "special": list(side.special)}
    if side.written_from is not None:
        found["written_from"] = side.written_from
    return found


def _rows_of(matrix_TS: np.ndarray, seen_TS: np.ndarray) -> Sequence[Sequence[float | None]]:
    """Rows of numbers; None where `seen_TS` is False."""
    values = rounded(matrix_TS)
    if seen_TS.all():
        return values
    return [
        [value if allowed else None for value, allowed in zip(row, row_seen, strict=True)]
        for row, row_seen in zip(values, seen_TS.tolist(), strict=True)
    ]


def rounded(values: np.ndarray) -> Any:
    """The numbers of an array for JSON: lists of fp64 with nine decimals."""
    return np.round(values.astype(np.float64), DECIMALS).tolist()


def as_csv(scene: Scene, view: View) -> str:
    """One row for each weight, or for each head of the summary."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if view == "summary":
        writer.writerow(("attention", *MEASURES))
        for kind in scene.attentions:
            for head_row in summarize(scene.shown(kind))[0]:
                writer.writerow((kind, *(_plain(value) for value in asdict(head_row).values())))
        return stream.getvalue()
    writer.writerow(("attention", "layer", "head", "query", "query_token", "key", "key_token", "weight"))
    for kind in scene.attentions:
        attention = scene.shown(kind)
        queries, keys = attention.queries.tokens, attention.keys.tokens
        for layer, head, _, matrix_TS, seen_TS in scene.matrices(attention, view):
            for query, row in enumerate(_rows_of(matrix_TS, seen_TS)):
                for key, weight in enumerate(row):
                    writer.writerow((kind, layer, head, query, queries[query], key, keys[key], _plain(weight)))
    return stream.getvalue()


def _plain(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else value


# --- terminal --------------------------------------------------------------------------------------------------------

# Shapes: T queries, S keys.

LABEL_WIDTH, LINKED = 14, 24  # of a token beside its links; number of tokens with them


def as_text(scene: Scene, kind: Kind, view: str, *, scale: str, top_k: int, width: int, colour: Colours) -> str:
    """The view as lines of at most `width` columns (wide letters may exceed it)."""
    attention = scene.shown(kind)
    lines = [visible(heading(scene, kind)), ""]
    if view == "summary":
        lines += _summary(attention)
    else:
        for _, _, title, matrix_TS, seen_TS in scene.matrices(attention, view):
            lines += [title, *_matrix(matrix_TS, seen_TS, attention, scale, width, colour)]
            lines += [*_links(matrix_TS, seen_TS, attention, top_k, width), ""]
        lines += scene.rollout_notes(kind) if view == "rollout" else []
    return "\n".join([*lines, *(visible(note) for note in scene.changes.notes()), CAUTION]) + "\n"


def _matrix(
    matrix_TS: np.ndarray, seen_TS: np.ndarray, attention: AttentionMaps, scale: str, width: int, colour: Colours
) -> list[str]:
    """A heat map of sizes on the scale, empty where a key cannot be seen; and the largest weight."""
    rows, columns = ([_label(side, n) for n in range(len(side.tokens))] for side in (attention.queries, attention.keys))
    shares_TS = np.where(seen_TS, _shares(matrix_TS, scale), np.nan).astype(float)
    lines = draw_heat(Heat(shares_TS, rows, columns, "query", "key", "viridis", 0.0, 1.0), width=width, colour=colour)
    largest = float(matrix_TS[seen_TS].max()) if seen_TS.any() else 0.0
    top = "its row's largest" if scale == "row" else "1" if scale == "log" else f"{np.abs(matrix_TS).max():.3g}"
    signs = "; sizes without their signs" if float(matrix_TS.min(initial=0.0)) < 0 else ""
    hidden = "" if seen_TS.all() else f"; {NOTHING if colour == 'none' else 'empty'}: cannot be seen"
    return [*lines, f"1 on the scale: {top}; largest {largest:.3f}{signs}{hidden}"]


def _shares(matrix_TS: np.ndarray, scale: str) -> np.ndarray:
    """The place of each weight on the colour scale, 0 to 1."""
    sizes = np.abs(matrix_TS)
    if scale == "row":
        most = sizes.max(axis=1, keepdims=True)
        return sizes / np.where(most > 0, most, 1)
    if scale == "log":
        return np.clip(1 + np.log10(np.maximum(sizes, 1e-4)) / 4, 0, 1)
    shares = sizes / (float(sizes.max()) or 1.0)
    return np.sqrt(shares) if scale == "sqrt" else shares


def _links(matrix_TS: np.ndarray, seen_TS: np.ndarray, attention: AttentionMaps, top_k: int, width: int) -> list[str]:
    """The keys with the largest weights of each query; negative weights by their absolute value."""
    lines = [""]
    for row in range(min(len(matrix_TS), LINKED)):
        keys = np.flatnonzero(seen_TS[row])
        best = keys[np.argsort(-np.abs(matrix_TS[row, keys]), kind="stable")][:top_k]
        found = "  ".join(f"{_label(attention.keys, key)} {matrix_TS[row, key]:.3f}" for key in best)
        lines.append(f"{fitted(_label(attention.queries, row), LABEL_WIDTH):>{LABEL_WIDTH}}  {found}"[: max(width, 40)])
    if len(matrix_TS) > LINKED:
        lines.append(f"... and {len(matrix_TS) - LINKED} more tokens (--format csv has all)")
    return lines


def _summary(attention: AttentionMaps) -> list[str]:
    rows, divergences = summarize(attention)
    names = [name for name in MEASURES if any(getattr(row, name) is not None for row in rows)]
    columns = [{"nearest": "alike", "nearest_divergence": "its bits"}.get(name, name) for name in names]
    table = [columns, *([_number(getattr(row, name)) for name in names] for row in rows)]
    sizes = [max(len(line[place]) for line in table) for place in range(len(names))]
    lines = ["  ".join(f"{cell:>{size}}" for cell, size in zip(line, sizes, strict=True)) for line in table]
    if divergences.rows < divergences.of:
        lines.append(f"divergence: from {divergences.rows} of {divergences.of} tokens")
    return [*lines, ""]


def _number(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else "mean" if value == -1 else str(value)


def _label(side: TokenSequence, place: int) -> str:
    return visible(side.tokens[place].translate(TOKEN_SIGNS))
