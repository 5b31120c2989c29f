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

from tformer.inside.reading import Side
from tformer.support.errors import visible
from tformer.support.formatting import TOKEN_SIGNS, columns_of
from tformer.viz.attention.scene import CAUTION, MEASURES, Scene, heading, summarize
from tformer.viz.attention.weights import Attention, Kind
from tformer.viz.plots import colour_at
from tformer.viz.terminal import RESET, Colours, colour_code, shade

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
            found["divergence"] = _numbers(divergences.between_NN)
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


def _side(side: Side) -> dict[str, Any]:
    found: dict[str, Any] = {"side": side.name, "tokens": list(side.tokens), "special": list(side.special)}
    if side.written_from is not None:
        found["written_from"] = side.written_from
    return found


def _rows_of(matrix_TS: np.ndarray, seen_TS: np.ndarray) -> Sequence[Sequence[float | None]]:
    """Rows of numbers; None where `seen_TS` is False."""
    values = _numbers(matrix_TS)
    if seen_TS.all():
        return values
    return [
        [value if allowed else None for value, allowed in zip(row, row_seen, strict=True)]
        for row, row_seen in zip(values, seen_TS.tolist(), strict=True)
    ]


def _numbers(values: np.ndarray) -> list[list[float]]:
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

LABEL_WIDTH = 14
LINES = 48  # of a matrix; with more rows, they are drawn in blocks too
LINKED = 24  # number of tokens with listed links


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
    matrix_TS: np.ndarray, seen_TS: np.ndarray, attention: Attention, scale: str, width: int, colour: Colours
) -> list[str]:
    edge = " " * (LABEL_WIDTH + 2)
    rows, columns = _blocks(len(matrix_TS), LINES), _blocks(matrix_TS.shape[1], max(4, width - len(edge)))
    shares_TS = _shares(matrix_TS, scale)
    wide = 2 if 2 * len(columns) + len(edge) <= width else 1
    names = [_label(attention.keys, block[0]) for block in columns]
    lines = []
    # Names of columns, written vertically.
    for depth in range(min(8, max(map(len, names), default=0)) if all(len(block) == 1 for block in columns) else 0):
        letters = [name[depth] if depth < len(name) else " " for name in names]
        lines.append(edge + "".join(letter + " " * (wide - columns_of(letter)) for letter in letters))
    for row in rows:
        cells = []
        for block in columns:
            own = shares_TS[row[0] : row[-1] + 1, block[0] : block[-1] + 1]
            seen = seen_TS[row[0] : row[-1] + 1, block[0] : block[-1] + 1]
            cells.append(_cell(float(own[seen].max()) if seen.any() else None, wide, colour))
        lines.append(_padded(_label(attention.queries, row[0])) + "  " + "".join(cells))
    largest = float(matrix_TS[seen_TS].max()) if seen_TS.any() else 0.0
    ramp = "".join(_cell(step / 9, 1, colour) for step in range(10))
    most = float(np.abs(matrix_TS).max()) if scale in ("global", "sqrt") else 1.0
    top = "row's largest" if scale == "row" else f"{most:.3g}"
    top += ", of sizes without their signs" if float(matrix_TS.min(initial=0.0)) < 0 else ""
    hidden = "" if seen_TS.all() else f", {_cell(None, 1, colour)} cannot be seen"
    lines.append(f"{edge}0 {ramp} {top}{hidden}; largest {largest:.3f}")
    return lines


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


def _cell(share: float | None, wide: int, colour: Colours) -> str:
    """One cell of a matrix, `wide` columns; None: a cell that cannot be seen."""
    if share is None:
        return "·" * wide
    if colour == "none":
        return shade(share) * wide
    return f"\x1b[{colour_code(colour_at('viridis', share), colour, ground=True)}m{' ' * wide}{RESET}"


def _links(matrix_TS: np.ndarray, seen_TS: np.ndarray, attention: Attention, top_k: int, width: int) -> list[str]:
    """The keys with the largest weights of each query; negative weights by their absolute value."""
    lines = [""]
    for row in range(min(len(matrix_TS), LINKED)):
        keys = np.flatnonzero(seen_TS[row])
        best = keys[np.argsort(-np.abs(matrix_TS[row, keys]), kind="stable")][:top_k]
        found = "  ".join(f"{_label(attention.keys, key)} {matrix_TS[row, key]:.3f}" for key in best)
        lines.append(f"{_padded(_label(attention.queries, row))}  {found}"[: max(width, 40)])
    if len(matrix_TS) > LINKED:
        lines.append(f"... and {len(matrix_TS) - LINKED} more tokens (--format csv has all)")
    return lines


def _summary(attention: Attention) -> list[str]:
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


def _label(side: Side, place: int) -> str:
    return visible(side.tokens[place].translate(TOKEN_SIGNS))


def _padded(text: str) -> str:
    """The text in exactly LABEL_WIDTH columns; letters of East Asian scripts take two."""
    kept, used = "", 0
    for letter in text:
        size = columns_of(letter)
        if used + size > LABEL_WIDTH:
            kept, used = kept[:-1] + "…", LABEL_WIDTH
            break
        kept, used = kept + letter, used + size
    return " " * max(0, LABEL_WIDTH - used) + kept


def _blocks(count: int, room: int) -> list[list[int]]:
    """Positions in at most `room` blocks of equal size."""
    size = max(1, math.ceil(count / room))
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
