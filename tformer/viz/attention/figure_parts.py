"""What attention's figures are made of: a matrix with its hatching, token names, a colour bar, sizes.

Forbidden cells are hatched: no colour of the scale stands for them.
"""

# Shapes: T queries, S keys.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tformer.errors import visible
from tformer.viz.attention.sides import Side
from tformer.viz.attention.weights import Attention, Layer
from tformer.viz.colours import colour_table

Scale = Literal["global", "row", "sqrt", "log"]

SMALL = 160  # cells of a small matrix's side: beyond, the largest of each block
LABELLED = 64  # up to so many tokens each has its name
NAME_LENGTH = 18
SMALLEST_LOG = 1e-4
GLYPHS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})


def paint_matrix(
    axes: Axes, matrix_TS: np.ndarray, seen_TS: np.ndarray, scale: Scale, norm: Normalize, colours: str,
    *, equal: bool = True,
) -> Any:  # fmt: skip
    signed = is_signed(norm)
    if scale == "row" and not signed:
        most = np.abs(matrix_TS).max(axis=1, keepdims=True)
        matrix_TS = matrix_TS / np.where(most > 0, most, 1)
    if scale == "log" and not signed:
        matrix_TS = np.maximum(matrix_TS, SMALLEST_LOG)
    if not seen_TS.all():
        axes.add_patch(
            Rectangle((0, 0), 1, 1, transform=axes.transAxes, facecolor="white", edgecolor="#b9bfc6", hatch="//////",
                      linewidth=0, zorder=0)
        )  # fmt: skip
    axes.spines[:].set_color("#b9bfc6")
    return axes.imshow(
        np.ma.masked_where(~seen_TS, matrix_TS),
        cmap=colour_map("RdBu_r" if signed else colours),
        norm=norm,
        aspect="equal" if equal else "auto",
        interpolation="nearest",
        zorder=1,
    )


def norm_of(scale: Scale, matrices: Sequence[np.ndarray]) -> Normalize:
    """One for all of them; around zero, whatever the scale, where weights are negative."""
    most = max(float(np.abs(matrix).max()) for matrix in matrices) or 1.0
    if any(float(matrix.min()) < 0 for matrix in matrices):
        return Normalize(-most, most)
    if scale == "log":
        return LogNorm(SMALLEST_LOG, 1)
    if scale == "row":
        return Normalize(0, 1)
    return PowerNorm(0.5, 0, most) if scale == "sqrt" else Normalize(0, most)


def is_signed(norm: Normalize) -> bool:
    return norm.vmin is not None and norm.vmin < 0


def colour_map(name: str) -> Colormap:
    table = np.frombuffer(colour_table(name), dtype=np.uint8).reshape(256, 3) / 255
    return ListedColormap(table, name=name).with_extremes(bad=(0, 0, 0, 0))


def add_bar(figure: Figure, image: Any, scale: Scale, axes: Sequence[Axes]) -> None:
    if image is None:
        return
    bar = figure.colorbar(image, ax=list(axes), shrink=0.7, pad=0.02, aspect=30)
    bar.ax.tick_params(labelsize=7)
    signed = is_signed(image.norm)
    bar.set_label("effective weight" if signed else "share of the largest" if scale == "row" else "weight", fontsize=8)


def size_of(attention: Attention, *, few: bool) -> tuple[float, float]:
    """Inches of one matrix: room for a name each where there are few tokens."""
    cell = 0.24 if few else 0.17
    width, height = (
        min(9.0 if few else 5.0, max(2.4, cell * len(side))) for side in (attention.keys, attention.queries)
    )
    return width + 1.3, height + 0.9


def name_tokens(axes: Axes, attention: Attention, width: float, height: float) -> None:
    for side, size, ticks in (
        (attention.keys, width, axes.set_xticks),
        (attention.queries, height, axes.set_yticks),
    ):
        room = (size - 1.1) / len(side) * 72  # points for a name
        font = min(8.0, max(3.5, room * 0.9))
        step = 1 if len(side) <= LABELLED else math.ceil(len(side) / LABELLED)
        places = list(range(0, len(side), step))
        names = [_short(side, place) for place in places]
        ticks(
            places,
            names,
            fontsize=font if step == 1 else 5,
            rotation=90 if side is attention.keys and ticks == axes.set_xticks else 0,
        )
    axes.tick_params(length=0)
    axes.set_xlabel(f"{attention.keys.name} token (is looked at)", fontsize=7, color="#555555")
    axes.set_ylabel(f"{attention.queries.name} token (looks)", fontsize=7, color="#555555")


def _short(side: Side, place: int) -> str:
    text = visible(side.tokens[place].translate(GLYPHS))
    return text if len(text) <= NAME_LENGTH else f"{text[: NAME_LENGTH - 1]}…"


def head_name(layer: Layer, head: int) -> str:
    return f"layer {layer.number}, " + ("mean of heads" if head < 0 else f"head {head}")


def blocks_of(matrix_TS: np.ndarray) -> np.ndarray:
    """At most SMALL a side: the largest of each block, by size, so that no thin line is lost."""
    for axis in (0, 1):
        size = matrix_TS.shape[axis]
        if size > SMALL:
            edges = np.linspace(0, size, SMALL + 1).astype(int)[:-1]
            high = np.maximum.reduceat(matrix_TS, edges, axis=axis)
            low = np.minimum.reduceat(matrix_TS, edges, axis=axis)
            matrix_TS = high if matrix_TS.dtype == bool else np.where(-low > high, low, high)
    return matrix_TS
