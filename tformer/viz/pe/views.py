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
from tformer.viz.pe.learned import Table
from tformer.viz.pe.settings import ALL, Settings, View
from tformer.viz.plots import Lines, Numbers, Plot, counted_line

# --- several kinds against the distance ----------------------------------------------------------------------------

Curves = dict[str, Numbers]


CURVES: dict[str, Callable[[Settings, int], Curves]] = {
    "sinusoidal": lambda s, n: {f"sinusoidal, d_model {s.d_model}": distance_curve(sinusoidal_table(s, n))},
    "rope": lambda s, n: {f"rope, head width {s.head_dim}": rope_curve(s, n)},
    "alibi": lambda s, n: {f"alibi, head {head}": alibi_bias(s, head, n)[0] for head in some_heads(s.heads)},
}
LEARNED_CURVES = ("learned", "t5_bias")  # from the table of a run


def similarity_curve(similarity: Numbers, count: int) -> Numbers:
    """Mean of each diagonal: similarity [n, n] -> [min(n, count)]."""
    return np.array([np.diagonal(similarity, offset).mean() for offset in range(min(len(similarity), count))])


def _table_curves(settings: Settings, table: Table, count: int) -> Curves:
    if table.encoding == "learned":
        return {"learned": similarity_curve(table.similarity(1024), count)}
    assert table.bias is not None
    back = -np.arange(count, dtype=float)
    rows = bucket_of(settings, back, bidirectional=table.bidirectional).astype(int)
    return {f"t5_bias, head {head}": table.bias[rows, head - 1] for head in range(1, table.bias.shape[1] + 1)}


def kinds_compared(settings: Settings, table: Table | None) -> Sequence[str]:
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


def curves(view: View, settings: Settings, table: Table | None = None) -> list[Plot]:
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
            plots.append(Lines("distance Δ", label, lines, title=label.capitalize()))
    return plots


# --- names, titles and captions --------------------------------------------------------------------------------------

SAME_CURVE = (
    "The mean of cos(Δ·ω) over all frequencies: the sinusoidal Gram matrix and RoPE's product of two all-ones "
    "vectors are this same function of the distance Δ, at equal width and base."
)

VIEWS: dict[str, dict[str, View]] = {
    "sinusoidal": {
        "traces": View(
            "Traces of the encoding, one per token",
            "Each line is one token's vector, read along the dimension index. Low dimensions differ from token to "
            "token, high ones hardly change: at the right all sines approach 0, all cosines 1.",
            fixed.traces,
            50,
        ),
        "heatmap": View(
            "Position × dimension",
            "Each row is a token's vector. Columns at the left change with every token; those at the right take "
            "thousands of tokens for one period.",
            fixed.heatmap,
        ),
        "waves": View(
            "Waves of single dimensions",
            "Each dimension is a sine or a cosine of the position; its wavelength grows geometrically with the index.",
            fixed.waves,
        ),
        "gram": View(
            "Gram matrix: products of all pairs of tokens",
            "Every diagonal has one value (the matrix is Toeplitz): the product of two tokens' vectors depends on "
            "their distance alone, not on where they stand.",
            fixed.gram,
        ),
        "distance": View(
            "Product of two encodings against their distance",
            SAME_CURVE + " It falls from 1 in ripples and is even: earlier and later tokens give the same product.",
            fixed.distance,
            512,
        ),
        "wavelengths": View(
            "Wavelength of each pair",
            "From 2π tokens for the first pair towards 2π·base for the last; a straight line on this logarithmic axis.",
            fixed.wavelength,
        ),
    },
    "learned": {
        "traces": View(
            "Traces of the table, one per token",
            "Each line is one position's learned vector, read along the dimension index.",
            learned.traces,
            50,
            True,
        ),
        "heatmap": View(
            "Position × dimension",
            "The learned table as it is. Structure along the rows means that training found position useful; a "
            "table of noise has not learned yet.",
            learned.heatmap,
            needs_run=True,
        ),
        "similarity": View(
            "Cosine similarity of all pairs of positions",
            "A bright band along the diagonal means that neighbouring positions have similar vectors.",
            learned.similarity,
            needs_run=True,
        ),
        "norms": View(
            "Length of each position's vector",
            "Positions that training seldom saw keep the length of their initialization; the first ones often "
            "stand out.",
            learned.norms,
            needs_run=True,
        ),
        "pca": View(
            "The path through the two main directions",
            "Positions along the first two principal components. A smooth curve means that neighbouring positions "
            "have similar vectors.",
            learned.pca,
            needs_run=True,
        ),
        "beside": View(
            "Beside the sinusoidal encoding",
            "The learned table and sines of the same size, each on its own scale: few models rediscover sines exactly.",
            learned.beside,
            needs_run=True,
        ),
    },
    "rope": {
        "angles": View(
            "Angle of each pair, modulo 2π",
            "Pair i of a query or key at position m is turned by m·θᵢ. The colours are cyclic: the first pairs go "
            "round every few tokens, the last hardly leave 0.",
            fixed.angles,
        ),
        "circles": View(
            "Pairs on their circles",
            "Each ring is one pair, its points the first positions: equal steps along the circle, large for the "
            "outer (first) pairs, small for the inner (last) ones.",
            fixed.circles,
            12,
        ),
        "decay": View(
            "Mean cosine against distance",
            SAME_CURVE + " The score of a matching query and key falls, in ripples, with their distance.",
            fixed.rope_decay,
            512,
        ),
        "rotation": View(
            "One vector, turned",
            "A head's vector of ones as it is turned for each position, by the module that training uses: its "
            "length never changes, only the direction of its pairs.",
            fixed.rotation,
        ),
    },
    "alibi": {
        "slopes": View(
            "Slope of each head",
            "A geometric series: the first head sees only its neighbourhood, the last nearly everything.",
            fixed.slopes,
        ),
        "bias": View(
            "Bias added to the scores",
            "Minus the slope times the distance: nothing on the diagonal, ever more against far keys. A causal "
            "model uses the part below the diagonal.",
            fixed.bias,
            32,
        ),
        "decay": View(
            "What the bias does to a weight",
            "exp(−slope·Δ), by which softmax multiplies the weight of a key at distance Δ: each head has its own "
            "range.",
            fixed.alibi_decay,
            128,
        ),
    },
    "t5_bias": {
        "buckets": View(
            "Bucket of each offset",
            "Near keys have a bucket each, far ones share theirs in logarithmic steps, and beyond the maximum "
            "distance all fall into the last. Causal attention spends all buckets on the past.",
            fixed.buckets,
            160,
        ),
        "bias": View(
            "Learned bias, head × offset",
            "What each head adds to the score of a key at this offset: some heads favour earlier keys, some "
            "neighbours, some far keys.",
            learned.t5_bias,
            64,
            True,
        ),
    },
    "shaw": {
        "index": View(
            "Row of the table for each pair",
            "clip(j − i, −k, k) + k: every diagonal reads one row of the table, and beyond k tokens all distances "
            "read the same one.",
            fixed.index,
            48,
        ),
        "keys": View(
            "Learned vectors on the keys",
            "A row per clipped distance: what a query is compared with, beside the key itself.",
            learned.shaw("keys"),
            needs_run=True,
        ),
        "values": View(
            "Learned vectors on the values",
            "A row per clipped distance: what is mixed in, beside the value itself.",
            learned.shaw("values"),
            needs_run=True,
        ),
    },
    "patch2d": {
        "similarity": View(
            "Similarity of each patch with all others",
            "One small map per patch, at its own place: how similar every patch's vector is to this one's. Row and "
            "column add up, so a patch stays closest to those of its own row and its own column.",
            fixed.patch_similarity,
        ),
        "heatmap": View(
            "Patch × dimension",
            "Patches count row by row. The first half of the dimensions encodes the column and repeats with every "
            "row of patches; the second encodes the row.",
            fixed.patch_heatmap,
        ),
    },
    "compare": {
        "curves": View(
            "Kinds against the distance, side by side",
            "What position alone does to a score. Mean cosine: of two tokens' vectors (sinusoidal, learned), or of the "
            "angles between a query and a key (RoPE). Added to the score: a straight line for each head (ALiBi), or a "
            "learned value for each bucket (T5).",
            curves,
        ),
    },
}
VIEWS["learned_t5_bias"] = {**VIEWS["learned"], **VIEWS["t5_bias"]}
