"""Plots of fixed positional encodings: added to the embeddings, rotating queries and keys, or added to scores.

All numbers come from the modules of training (`tformer.nn.positions`): sinusoidal, patch2d and rope by their `formula`
in double precision, alibi and T5 by their slopes and buckets, Shaw by its `score`.
"""

from __future__ import annotations

import numpy as np
import torch

from tformer.nn.positions.biases import alibi_slopes, t5_bucket
from tformer.nn.positions.fixed import Patch2dOptions, Patch2dPositions, SinusoidalOptions, SinusoidalPositions
from tformer.nn.positions.rope import RopeOptions, RopePositions
from tformer.nn.positions.shaw import ShawOptions, ShawPositions
from tformer.viz.pe.settings import EncodingSettings, EncodingView
from tformer.viz.plots import Heat, Line, LinePlot, Numbers, Plot, Ramp, counted_heat, counted_line

# --- added to the embeddings -----------------------------------------------------------------------------------------

CLASSIC = (50, 500)  # tokens of the two usual pictures of this encoding


def sinusoidal_table(settings: EncodingSettings, rows: int) -> Numbers:
    """[rows, d_model] in double precision."""
    return _sinusoidal(settings).formula(torch.arange(rows)).numpy()


def fp32_error(settings: EncodingSettings, rows: int) -> float:
    """The largest difference between the double table and the fp32 one that training uses."""
    module = _sinusoidal(settings, rows)
    return float((module.formula(torch.arange(rows)) - module.table.double()).abs().max())


def _sinusoidal(settings: EncodingSettings, rows: int = 1) -> SinusoidalPositions:
    layout = settings.layout_used if settings.encoding == "sinusoidal" else "interleaved"
    options = SinusoidalOptions(layout=layout, base=settings.base)  # type: ignore[arg-type]
    return SinusoidalPositions(options, d_model=settings.d_model, max_seq_len=rows)


def sine_dimensions(settings: EncodingSettings) -> Numbers:
    """The columns of sines; the others are cosines."""
    half = settings.d_model // 2
    return np.arange(half, dtype=float) * (2 if settings.layout_used == "interleaved" else 1)


def distance_curve(table: Numbers) -> Numbers:
    """Product of row 0 with each row over the product with itself, [rows]: the first row of the Gram matrix."""
    return table @ table[0] / (table[0] @ table[0])


def trace_plots(table: Numbers, sines: Numbers | None) -> list[Plot]:
    """Values against the dimension index, a line per token: the sine dimensions alone, and with the cosines.

    With `sines` a token's line has two pieces, through its sines and through its cosines: a line that alternates
    between them at every dimension would fill the picture.
    """
    tokens, every = len(table), np.arange(table.shape[1], dtype=float)
    sets = {f"All {len(every)} dimensions, {tokens} tokens": every}
    if sines is not None:
        both = np.concatenate((sines, [np.nan], np.setdiff1d(every, sines)))
        sets = {f"Sine dimensions alone, {tokens} tokens": sines, f"With the cosines, {tokens} tokens": both}
    plots: list[Plot] = []
    for name, columns in sets.items():
        gap = np.isnan(columns)
        values = np.where(gap, np.nan, table[:, np.where(gap, 0, columns).astype(int)])
        lines = [Line(f"token {n}", columns, row) for n, row in enumerate(values)]
        plots.append(LinePlot("dimension", "value", lines, ramp=Ramp("viridis", 0, tokens - 1, "token"), title=name))
    return plots


def traces(view: EncodingView, settings: EncodingSettings) -> list[Plot]:
    counts = CLASSIC if settings.positions is None else (settings.positions,)
    sines = sine_dimensions(settings)
    return [plot for count in counts for plot in trace_plots(sinusoidal_table(settings, count), sines)]


def table_heat(table: Numbers, *, limit: float | None = 1.0) -> Heat:
    """A heat map of a table, red above 0 and blue below; limit: end of the scale, None for the largest value."""
    bound = float(np.abs(table).max()) or 1.0 if limit is None else limit
    return counted_heat(table, "position", "dimension", "RdBu_r", -bound, bound, "value", "")


def heatmap(view: EncodingView, settings: EncodingSettings) -> Plot:
    return table_heat(sinusoidal_table(settings, view.rows(settings)))


def waves(view: EncodingView, settings: EncodingSettings) -> Plot:
    table = sinusoidal_table(settings, view.rows(settings))
    sines = sine_dimensions(settings)
    # By default four sine dimensions whose wavelengths are visible in one picture: from 1/12 to 1/3 of the width.
    dims = settings.dims or tuple(dict.fromkeys(int(sines[len(sines) * n // 12]) for n in (1, 2, 3, 4)))
    return LinePlot("position", "value", [counted_line(f"dimension {dim}", table[:, dim]) for dim in dims])


def patch_table(settings: EncodingSettings) -> Numbers:
    """[grid * grid, d_model] in double precision, without a class token."""
    options = Patch2dOptions(base=settings.base)
    module = Patch2dPositions(options, d_model=settings.d_model, grid=(settings.grid, settings.grid, False))
    return module.formula(torch.arange(settings.grid**2)).numpy()


def patch_similarity(view: EncodingView, settings: EncodingSettings) -> Plot:
    """A grid × grid map per patch, at the patch's place, with an empty line between maps."""
    table, side = patch_table(settings), settings.grid
    step = side + 1
    tiled = np.full((side * step - 1, side * step - 1), np.nan)
    for patch, row in enumerate(table @ table.T / (settings.d_model / 2)):
        top, left = patch // side * step, patch % side * step
        tiled[top : top + side, left : left + side] = row.reshape(side, side)
    # A map's number stands at its middle.
    names = [str(at // step) if at % step == side // 2 else "" for at in range(side * step - 1)]
    return Heat(tiled, names, names, "row of patches", "column of patches", "viridis", None, 1.0, "cosine similarity")


# --- inside attention ------------------------------------------------------------------------------------------------


def rope_turns(settings: EncodingSettings, rows: int) -> tuple[Numbers, Numbers]:
    """Cosine and sine of each pair's angle, [rows, head_dim / 2] each, in double precision."""
    module = RopePositions(RopeOptions(base=settings.base), head_dim=settings.head_dim, max_seq_len=rows)
    cos, sin = module.formula(torch.arange(rows)).chunk(2, dim=-1)
    return cos.numpy(), sin.numpy()


def rope_curve(settings: EncodingSettings, rows: int) -> Numbers:
    """Mean cosine over the pairs at each distance, [rows]."""
    return rope_turns(settings, rows)[0].mean(axis=1)


def circles(view: EncodingView, settings: EncodingSettings) -> Plot:
    cos, sin = rope_turns(settings, view.rows(settings))
    count = settings.head_dim // 2
    pairs = settings.dims or tuple(dict.fromkeys((0, count // 8, count // 4, count // 2)))
    lines = []
    for ring, pair in enumerate(pairs):
        radius = 1 - ring / (len(pairs) + 1)
        lines.append(Line(f"pair {pair}", radius * cos[:, pair], radius * sin[:, pair]))
    return LinePlot("first coordinate", "second coordinate", lines, points=True, square=True)


def some_heads(count: int) -> dict[int, None]:
    """The first, the middle and the last of the heads, from 1."""
    return dict.fromkeys((1, (count + 1) // 2, count))


def alibi_bias(settings: EncodingSettings, head: int, rows: int) -> Numbers:
    """[rows, rows]: what head (from 1) adds to the score of each pair."""
    place = np.arange(rows, dtype=float)
    return -alibi_slopes(settings.heads)[head - 1] * np.abs(place[None, :] - place[:, None])


def bias(view: EncodingView, settings: EncodingSettings) -> list[Plot]:
    rows = view.rows(settings)
    return [
        counted_heat(
            alibi_bias(settings, head, rows), "query", "key", "viridis", None, 0.0, "bias", f"{view.title}, head {head}"
        )
        for head in settings.dims or some_heads(settings.heads)
    ]


def bucket_of(settings: EncodingSettings, offsets: Numbers, *, bidirectional: bool) -> Numbers:
    relative = torch.from_numpy(offsets.astype(np.int64))
    found = t5_bucket(
        relative, buckets=settings.buckets, max_distance=settings.max_distance, bidirectional=bidirectional
    )
    return found.double().numpy()


def buckets(view: EncodingView, settings: EncodingSettings) -> Plot:
    reach = view.rows(settings) - 1
    x = np.arange(-reach, reach + 1, dtype=float)
    lines = [
        Line(name, x, bucket_of(settings, x, bidirectional=both))
        for name, both in (("both directions", True), ("causal", False))
    ]
    return LinePlot("offset: key − query", "bucket", lines)


def shaw_index(settings: EncodingSettings, rows: int) -> Numbers:
    """[rows, rows]: the table's row for each pair, found with a table that holds its row numbers."""
    module = ShawPositions(ShawOptions(clip=settings.clip, values=False), head_dim=1, value_dim=1)
    pos = torch.arange(rows).unsqueeze(0)
    with torch.no_grad():
        module.keys.copy_(torch.arange(2 * settings.clip + 1).unsqueeze(1))
        return module.score(torch.ones(1, 1, rows, 1), pos, pos)[0, 0].double().numpy()


def index(view: EncodingView, settings: EncodingSettings) -> Plot:
    values = shaw_index(settings, view.rows(settings))
    return counted_heat(values, "query i", "key j", "viridis", 0.0, 2.0 * settings.clip, "row")
