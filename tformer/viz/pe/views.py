"""The views of each kind of positional encoding: names, titles, captions and functions; several kinds compared.

A kind without views in VIEWS gets generic ones from the hooks that its module overrides (`selection.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tformer.nn.positions import POSITIONS
from tformer.support.errors import InputError
from tformer.viz.pe import fixed, learned
from tformer.viz.pe.fixed import alibi_bias, bucket_of, distance_curve, rope_curve, sinusoidal_table, some_heads
from tformer.viz.pe.learned import LearnedEncoding
from tformer.viz.pe.settings import ALL, EncodingSettings, EncodingView
from tformer.viz.plots import LinePlot, Numbers, Plot, counted_line

# --- several kinds against the distance ----------------------------------------------------------------------------

Curves = dict[str, Numbers]


CURVES: dict[str, Callable[[EncodingSettings, int], Curves]] = {
    "sinusoidal": lambda s, n: {f"sinusoidal, d_model {s.d_model}": distance_curve(sinusoidal_table(s, n))},
    "rope": lambda s, n: {f"rope, head width {s.head_dim}": rope_curve(s, n)},
    "alibi": lambda s, n: {f"alibi, head {head}": alibi_bias(s, head, n)[0] for head in some_heads(s.heads)},
}
LEARNED_CURVES = ("learned", "t5_bias")  # from the table of a run


def similarity_curve(similarity: Numbers, count: int) -> Numbers:
    """Mean of each diagonal: similarity [n, n] -> [min(n, count)]."""
    return np.array([np.diagonal(similarity, offset).mean() for offset in range(min(len(similarity), count))])


def _table_curves(settings: EncodingSettings, table: LearnedEncoding, count: int) -> Curves:
    if table.encoding == "learned":
        return {"learned": similarity_curve(table.similarity(1024), count)}
    assert table.bias is not None
    back = -np.arange(count, dtype=float)
    rows = bucket_of(settings, back, bidirectional=table.bidirectional).astype(int)
    return {f"t5_bias, head {head}": table.bias[rows, head - 1] for head in range(1, table.bias.shape[1] + 1)}


def kinds_compared(settings: EncodingSettings, table: LearnedEncoding | None) -> Sequence[str]:
    """The kinds to compare, by default all with a curve. InputError for a kind without one."""
    learned = (table.encoding,) if table is not None and table.encoding in LEARNED_CURVES else ()
    known = (*CURVES, *learned)
    if settings.compare in ((), ALL):
        return known
    for kind in settings.compare:
        if kind not in known:
            needs = kind in LEARNED_CURVES
            raise InputError(
                f"--compare {kind}: {'its curve is learned' if needs else 'it has no curve against distance'}",
                hint=f"name a run that has it: --run RUN (without: {', '.join(known)})" if needs else ", ".join(known),
            )
    return settings.compare


def curves(view: EncodingView, settings: EncodingSettings, table: LearnedEncoding | None = None) -> list[Plot]:
    """Two plots: mean cosines of sinusoidal, rope and a run's learned table; what alibi and a run's T5 bias add.

    Of alibi the first, middle and last head; of T5 the bias on earlier keys.
    """
    count, kinds = view.rows(settings), kinds_compared(settings, table)
    plots: list[Plot] = []
    for has_bias, label in ((False, "mean cosine"), (True, "added to the score")):
        lines = []
        for kind in kinds:
            if POSITIONS[kind].has_bias is not has_bias:
                continue
            if kind in CURVES:
                found = CURVES[kind](settings, count)
            else:
                assert table is not None
                found = _table_curves(settings, table, count)
            lines += [counted_line(name, curve) for name, curve in found.items()]
        if lines:
            plots.append(LinePlot("distance Δ", label, lines, title=label.capitalize()))
    return plots


# --- names, titles and captions --------------------------------------------------------------------------------------

VIEWS: dict[str, dict[str, EncodingView]] = {
    "sinusoidal": {
        "traces": EncodingView(
            "Traces of the encoding, one per token",
            "Each line is one token's vector, read along the dimension index. Low dimensions differ from token to "
            "token, high ones hardly change: at the right all sines approach 0, all cosines 1.",
            fixed.traces,
            50,
        ),
        "heatmap": EncodingView(
            "Position × dimension",
            "Each row is a token's vector. Columns at the left change with every token; those at the right take "
            "thousands of tokens for one period.",
            fixed.heatmap,
        ),
        "waves": EncodingView(
            "Waves of single dimensions",
            "Each dimension is a sine or a cosine of the position; its wavelength grows geometrically with the index.",
            fixed.waves,
        ),
    },
    "learned": {
        "similarity": EncodingView(
            "Cosine similarity of all pairs of positions",
            "A bright band along the diagonal means that neighbouring positions have similar vectors.",
            learned.similarity,
            needs_run=True,
        ),
    },
    "rope": {
        "circles": EncodingView(
            "Pairs on their circles",
            "Each ring is one pair, its points the first positions: equal steps along the circle, large for the "
            "outer (first) pairs, small for the inner (last) ones.",
            fixed.circles,
            12,
        ),
    },
    "alibi": {
        "bias": EncodingView(
            "Bias added to the scores",
            "Minus the slope times the distance: nothing on the diagonal, ever more against far keys. A causal "
            "model uses the part below the diagonal.",
            fixed.bias,
            32,
        ),
    },
    "t5_bias": {
        "buckets": EncodingView(
            "Bucket of each offset",
            "Near keys have a bucket each, far ones share theirs in logarithmic steps, and beyond the maximum "
            "distance all fall into the last. Causal attention spends all buckets on the past.",
            fixed.buckets,
            160,
        ),
        "bias": EncodingView(
            "Learned bias, head × offset",
            "What each head adds to the score of a key at this offset: some heads favour earlier keys, some "
            "neighbours, some far keys.",
            learned.t5_bias,
            64,
            True,
        ),
    },
    "shaw": {
        "index": EncodingView(
            "Row of the table for each pair",
            "clip(j − i, −k, k) + k: every diagonal reads one row of the table, and beyond k tokens all distances "
            "read the same one.",
            fixed.index,
            48,
        ),
    },
    "patch2d": {
        "similarity": EncodingView(
            "Similarity of each patch with all others",
            "One small map per patch, at its own place: how similar every patch's vector is to this one's. Row and "
            "column add up, so a patch stays closest to those of its own row and its own column.",
            fixed.patch_similarity,
        ),
    },
    "compare": {
        "curves": EncodingView(
            "Kinds against the distance, side by side",
            "What position alone does to a score. Mean cosine: of two tokens' vectors (sinusoidal, learned), or of the "
            "angles between a query and a key (RoPE). Added to the score: a straight line for each head (ALiBi), or a "
            "learned value for each bucket (T5). At equal width and base the products of sinusoidal vectors and of "
            "vectors of ones turned by RoPE are the same function of the distance.",
            curves,
        ),
    },
}
VIEWS["learned_t5_bias"] = {**VIEWS["learned"], **VIEWS["t5_bias"]}
