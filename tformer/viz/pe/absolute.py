"""Plots of the encodings that are added to the embeddings: sinusoidal, patch2d, and the learned tables of runs.

Fixed encodings come from the modules of training (`tformer.nn.positions`), by their `formula`, in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tformer.nn.positions.fixed import (
    Patch2dOptions,
    Patch2dPositions,
    SinusoidalOptions,
    SinusoidalPositions,
)
from tformer.viz.pe.settings import VIEWS, Settings
from tformer.viz.plots import Heat, Line, Lines, Numbers, Plot, Ramp

CLASSIC = (50, 500)  # tokens of the two pictures that everybody draws of this encoding


def sinusoidal_table(settings: Settings, rows: int) -> Numbers:
    """[rows, d_model] in double precision."""
    return _sinusoidal(settings).formula(torch.arange(rows)).numpy()


def fp32_error(settings: Settings, rows: int) -> float:
    """The largest difference between the double table and the fp32 one that training uses."""
    module = _sinusoidal(settings, rows)
    return float((module.formula(torch.arange(rows)) - module.table.double()).abs().max())


def _sinusoidal(settings: Settings, rows: int = 1) -> SinusoidalPositions:
    layout = settings.layout_used if settings.encoding == "sinusoidal" else "interleaved"
    options = SinusoidalOptions(layout=layout, base=settings.base)  # type: ignore[arg-type]
    return SinusoidalPositions(options, d_model=settings.d_model, max_seq_len=rows)


def sine_dimensions(settings: Settings) -> Numbers:
    """Which columns hold sines; the others hold cosines."""
    half = settings.d_model // 2
    return np.arange(half, dtype=float) * (2 if settings.layout_used == "interleaved" else 1)


def frequency_index(settings: Settings, dimension: int) -> int:
    half = settings.d_model // 2
    return dimension // 2 if settings.layout_used == "interleaved" else dimension % half


def wavelengths(settings: Settings) -> Numbers:
    """Tokens in one period of each pair, [d_model / 2]: read off the sine's angle at position 1."""
    pair = sinusoidal_table(settings, 2)[1]
    sines = sine_dimensions(settings).astype(int)
    cosines = sines + (1 if settings.layout_used == "interleaved" else settings.d_model // 2)
    return 2 * np.pi / np.arctan2(pair[sines], pair[cosines])


def distance_curve(table: Numbers) -> Numbers:
    """Product of row 0 with each row over the product with itself, [rows]: the first row of the Gram matrix."""
    return table @ table[0] / (table[0] @ table[0])


def trace_plots(table: Numbers, sines: Numbers | None, *, encoding: str) -> list[Plot]:
    """Values against the dimension index, a line per token: the sine dimensions alone, and with the cosines.

    With `sines` a token's line has two pieces, through its sines and through its cosines: one that jumped between
    them at every dimension would fill the picture.
    """
    view, tokens, every = VIEWS[encoding]["traces"], len(table), np.arange(table.shape[1], dtype=float)
    sets = {f"All {len(every)} dimensions, {tokens} tokens": every}
    if sines is not None:
        both = np.concatenate((sines, [np.nan], np.setdiff1d(every, sines)))
        sets = {f"Sine dimensions alone, {tokens} tokens": sines, f"With the cosines, {tokens} tokens": both}
    plots: list[Plot] = []
    for name, columns in sets.items():
        gap = np.isnan(columns)
        values = np.where(gap, np.nan, table[:, np.where(gap, 0, columns).astype(int)])
        lines = [Line(f"token {n}", columns, row) for n, row in enumerate(values)]
        ramp = Ramp("viridis", 0, tokens - 1, "token")
        plots.append(Lines(name, view.caption, "dimension", "value", lines, ramp=ramp))
    return plots


def traces(settings: Settings) -> list[Plot]:
    counts = CLASSIC if settings.positions is None else (settings.positions,)
    sines = sine_dimensions(settings)
    return [
        plot
        for count in counts
        for plot in trace_plots(sinusoidal_table(settings, count), sines, encoding="sinusoidal")
    ]


def table_plot(table: Numbers, title: str, caption: str, *, limit: float | None = 1.0, rows: str = "position") -> Heat:
    """Rows against dimensions, red above 0 and blue below; limit None: the table's own largest value."""
    bound = float(np.abs(table).max()) or 1.0 if limit is None else limit
    columns = range(table.shape[1])
    return Heat(title, caption, table, range(len(table)), columns, rows, "dimension", "RdBu_r", -bound, bound, "value")


def heatmap(settings: Settings) -> list[Plot]:
    view = VIEWS["sinusoidal"]["heatmap"]
    return [table_plot(sinusoidal_table(settings, settings.positions or view.positions), view.title, view.caption)]


def waves(settings: Settings) -> list[Plot]:
    view = VIEWS["sinusoidal"]["waves"]
    table = sinusoidal_table(settings, settings.positions or view.positions)
    dims = settings.dims or wave_dimensions(settings)
    x = np.arange(len(table), dtype=float)
    lines = [Line(f"dimension {dim}", x, table[:, dim]) for dim in dims]
    return [Lines(view.title, view.caption, "position", "value", lines)]


def wave_dimensions(settings: Settings) -> tuple[int, ...]:
    """Four sine dimensions whose wavelengths can all be seen at once: from 1/12 to 1/3 of the way."""
    sines = sine_dimensions(settings)
    return tuple(dict.fromkeys(int(sines[len(sines) * n // 12]) for n in (1, 2, 3, 4)))


def gram(settings: Settings) -> list[Plot]:
    view = VIEWS["sinusoidal"]["gram"]
    table = sinusoidal_table(settings, settings.positions or view.positions)
    return [similarity_plot(table @ table.T / (settings.d_model / 2), view.title, view.caption)]


def similarity_plot(matrix: Numbers, title: str, caption: str) -> Heat:
    names = range(len(matrix))
    return Heat(title, caption, matrix, names, names, "position", "position", "RdBu_r", -1, 1, "product / greatest")


def distance(settings: Settings) -> list[Plot]:
    view = VIEWS["sinusoidal"]["distance"]
    curve = distance_curve(sinusoidal_table(settings, settings.positions or view.positions))
    line = Line(f"d_model {settings.d_model}", np.arange(len(curve), dtype=float), curve)
    return [Lines(view.title, view.caption, "distance Δ", "mean cos(Δ·ω)", [line])]


def wavelength(settings: Settings) -> list[Plot]:
    view = VIEWS["sinusoidal"]["wavelengths"]
    y = wavelengths(settings)
    line = Line(settings.layout_used, np.arange(len(y), dtype=float), y)
    return [Lines(view.title, view.caption, "pair", "tokens in a period", [line], log_y=True)]


def patch_table(settings: Settings) -> Numbers:
    """[grid * grid, d_model] in double precision, without a class token."""
    options = Patch2dOptions(base=settings.base)
    module = Patch2dPositions(options, d_model=settings.d_model, grid=(settings.grid, settings.grid, False))
    return module.formula(torch.arange(settings.grid**2)).numpy()


def patch_similarity(settings: Settings) -> list[Plot]:
    view = VIEWS["patch2d"]["similarity"]
    table, side = patch_table(settings), settings.grid
    matrix = table @ table.T / (settings.d_model / 2)
    tiled = tile(matrix, side)
    names = grid_names(side)
    heat = Heat(
        view.title, view.caption, tiled, names, names, "row of patches", "column of patches", "viridis", None, 1.0,
        "cosine similarity",
    )  # fmt: skip
    return [heat]


def tile(matrix: Numbers, side: int) -> Numbers:
    """[side², side²] -> one side × side map per patch, at the patch's place, with an empty line between maps."""
    step = side + 1
    tiled = np.full((side * step - 1, side * step - 1), np.nan)
    for patch, row in enumerate(matrix):
        top, left = patch // side * step, patch % side * step
        tiled[top : top + side, left : left + side] = row.reshape(side, side)
    return tiled


def grid_names(side: int) -> Sequence[str]:
    """The number of each map at its middle; nothing elsewhere."""
    step = side + 1
    return [str(at // step) if at % step == side // 2 else "" for at in range(side * step - 1)]


def patch_heatmap(settings: Settings) -> list[Plot]:
    view = VIEWS["patch2d"]["heatmap"]
    return [table_plot(patch_table(settings), view.title, view.caption, rows="patch")]
