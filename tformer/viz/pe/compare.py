"""Decay with distance of several kinds, side by side: each curve scaled to 1 at its top.

Sinusoidal and rope by their mean cosine, alibi by exp(−slope · Δ) of its first, middle and last head; of a run also the
mean cosine similarity of a learned table's positions, and exp of T5's bias on keys before the query, a curve each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tformer.errors import InputError
from tformer.nn.positions.biases import alibi_slopes
from tformer.viz.pe.absolute import distance_curve, sinusoidal_table
from tformer.viz.pe.relative import bucket_of, rope_curve
from tformer.viz.pe.settings import ALL, VIEWS, Settings
from tformer.viz.pe.tables import Table
from tformer.viz.plots import Line, Lines, Numbers, Plot

Curves = dict[str, Numbers]


def _sinusoidal(settings: Settings, count: int) -> Curves:
    return {f"sinusoidal, d_model {settings.d_model}": distance_curve(sinusoidal_table(settings, count))}


def _rope(settings: Settings, count: int) -> Curves:
    return {f"rope, head width {settings.head_dim}": rope_curve(settings, count)}


def _alibi(settings: Settings, count: int) -> Curves:
    slopes = alibi_slopes(settings.heads)
    heads = dict.fromkeys((1, (settings.heads + 1) // 2, settings.heads))
    return {f"alibi, head {head}": np.exp(-slopes[head - 1] * np.arange(count)) for head in heads}


FIXED: dict[str, Callable[[Settings, int], Curves]] = {"sinusoidal": _sinusoidal, "rope": _rope, "alibi": _alibi}


def similarity_curve(similarity: Numbers, count: int) -> Numbers:
    """Mean of each diagonal: similarity [n, n] -> [min(n, count)]."""
    return np.array([np.diagonal(similarity, offset).mean() for offset in range(min(len(similarity), count))])


def table_curves(settings: Settings, table: Table, count: int) -> Curves:
    if table.encoding == "learned":
        return {"learned": similarity_curve(table.similarity(min(table.rows, 1024)), count)}
    assert table.bias is not None
    back = -np.arange(count, dtype=float)
    rows = bucket_of(settings, back, bidirectional=table.bidirectional).astype(int)
    factors = np.exp(table.bias[rows])
    return {f"t5_bias, head {head}": factors[:, head - 1] for head in range(1, factors.shape[1] + 1)}


def kinds_compared(settings: Settings, table: Table | None) -> Sequence[str]:
    """Those asked for, or all that there are. Raises InputError for one that cannot be compared."""
    learned = () if table is None or table.encoding not in ("learned", "t5_bias") else (table.encoding,)
    known = (*FIXED, *learned)
    if settings.compare in ((), ALL):
        return known
    for kind in settings.compare:
        if kind not in known:
            needs = kind in ("learned", "t5_bias")
            raise InputError(
                f"--compare {kind}: {'its curve is learned' if needs else 'it has no curve against distance'}",
                hint=f"name a run that has it: --run RUN (without: {', '.join(known)})" if needs else ", ".join(known),
            )
    return settings.compare


def curves(settings: Settings, table: Table | None = None) -> list[Plot]:
    view = VIEWS["compare"]["curves"]
    count = settings.positions or view.positions
    lines = []
    for kind in kinds_compared(settings, table):
        if kind in FIXED:
            found = FIXED[kind](settings, count)
        else:
            assert table is not None
            found = table_curves(settings, table, count)
        for label, curve in found.items():
            lines.append(Line(label, np.arange(len(curve), dtype=float), curve / curve.max()))
    return [Lines(view.title, view.caption, "distance Δ", "share of the top", lines)]
