"""Attention as a PNG or SVG figure; equal weights give equal bytes.

    head      every chosen head as a matrix with its tokens, side by side
    model     all heads, small: a row for each layer, with the tokens where they fit
    rollout   one matrix
    summary   measures of every head, layer by layer
    image     (image models) weights of the class token, or of the mean over patches, on the image

Forbidden cells are hatched: no colour of the scale stands for them.
"""

# Shapes: H heads, T queries, S keys.

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tformer.inside.reading import TokenSequence
from tformer.support.errors import InputError, visible
from tformer.support.formatting import TOKEN_SIGNS, fitted
from tformer.viz.attention.scene import CAUTION, MEASURES, Scene, heading, summarize
from tformer.viz.attention.weights import AttentionMaps, Kind, Layer
from tformer.viz.figure import colour_map, figure_bytes, style

Scale = Literal["global", "row", "sqrt", "log"]

SMALL = 160  # cells along a side of a small matrix; larger ones show the largest weight of each block
LABELLED = 64  # axes with at most this number of tokens name each
NAME_LENGTH = 18
SMALLEST_FONT, READABLE = 3.5, 5.0  # points of token names: of a matrix alone, and beside a grid
TOKEN_INCHES, LETTER_INCHES = 0.11, 0.06  # a side of a cell in a small grid, and a letter beside it
SMALLEST_LOG = 1e-4
COLOURS = colour_map("viridis")


def paint_matrix(
    axes: Axes, matrix_TS: np.ndarray, seen_TS: np.ndarray, scale: Scale, norm: Normalize, *, equal: bool = True
) -> Any:
    """Draw one matrix [T, S], hatched where `seen_TS` is False; returns the image for a colour bar."""
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
        cmap=colour_map("RdBu_r") if signed else COLOURS,
        norm=norm,
        aspect="equal" if equal else "auto",
        interpolation="nearest",
        zorder=1,
    )


def norm_of(scale: Scale, matrices: Sequence[np.ndarray]) -> Normalize:
    """One colour normalization for all matrices; symmetric around zero if any weight is negative."""
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


def add_bar(figure: Figure, image: Any, scale: Scale, axes: Sequence[Axes]) -> None:
    """A colour bar beside these axes; none without an image."""
    if image is None:
        return
    bar = figure.colorbar(image, ax=list(axes), shrink=0.7, pad=0.02, aspect=30)
    bar.ax.tick_params(labelsize=7)
    signed = is_signed(image.norm)
    bar.set_label("effective weight" if signed else "share of the largest" if scale == "row" else "weight", fontsize=8)


def name_tokens(axes: Axes, axis: Literal["x", "y"], names: Sequence[str], inches: float) -> None:
    """Token names along one axis, whose length is given in inches."""
    step = math.ceil(len(names) / LABELLED)
    getattr(axes, f"set_{axis}ticks")(
        range(0, len(names), step),
        names[::step],
        fontsize=min(8.0, max(SMALLEST_FONT, points_of_name(len(names), inches))) if step == 1 else 5,
        rotation=90 if axis == "x" else 0,
    )
    axes.tick_params(length=0)


def names_of(side: TokenSequence) -> list[str]:
    return [fitted(visible(token.translate(TOKEN_SIGNS)), NAME_LENGTH, "…") for token in side.tokens]


def points_of_name(count: int, inches: float) -> float:
    """Font size at which `count` names fill an axis of `inches`."""
    return 0.9 * 72 * inches / count


def blocks_of(matrix_TS: np.ndarray) -> np.ndarray:
    """At most SMALL cells a side: the value of each block that is largest in size, so that thin lines stay visible."""
    for axis in (0, 1):
        size = matrix_TS.shape[axis]
        if size > SMALL:
            edges = np.linspace(0, size, SMALL + 1).astype(int)[:-1]
            high = np.maximum.reduceat(matrix_TS, edges, axis=axis)
            low = np.minimum.reduceat(matrix_TS, edges, axis=axis)
            matrix_TS = high if matrix_TS.dtype == bool else np.where(-low > high, low, high)
    return matrix_TS


MAX_PANELS = 16
CLOSE: dict[str, Any] = {"w_pad": 0.01, "h_pad": 0.01, "wspace": 0.02, "hspace": 0.02}
DOTS_PER_INCH = 130
NOTE_LETTERS = 20  # per inch
SUMMARIZED = ("entropy", "distance", "previous", "itself", "first", "special", "max")


def draw(scene: Scene, kind: Kind, view: str, *, format_: str, scale: Scale) -> bytes:
    """The picture as bytes.

    Raises:
        InputError: too many heads for one picture, or nothing left to show.
    """
    attention = scene.shown(kind)
    if not attention.cells:
        raise InputError(
            "nothing to show: every token is a special token, and those are hidden", hint="omit --hide-special"
        )
    with style(axes__unicode_minus=False, font__size=11):
        if view == "summary":
            figure = _summary(attention)
        elif scene.reading.pixels is not None:
            figure = _image(scene, attention, view)
        elif view == "model":
            norm = norm_of(scale, [layer.weights_HTS for layer in attention.layers])

            def paint(axes: Axes, layer: Layer, matrix_TS: np.ndarray) -> Any:
                blocks, seen = blocks_of(matrix_TS), blocks_of(layer.visible_TS)
                return paint_matrix(axes, blocks, seen, scale, norm, equal=False)

            figure = _grid(attention, paint, scale)
        else:
            figure = _matrices(scene, attention, view, scale)
        figure.suptitle(visible(heading(scene, kind)), fontsize=12)
        note = ". ".join(scene.rollout_notes(kind)) if view == "rollout" else CAUTION
        lines = textwrap.wrap(note, round(NOTE_LETTERS * figure.get_figwidth()))
        figure.supxlabel("\n".join(lines), fontsize=6.5, color="#555555")
        return figure_bytes(figure, format_, dpi=DOTS_PER_INCH)


# --- views -----------------------------------------------------------------------------------------------------------


def _matrices(scene: Scene, attention: AttentionMaps, view: str, scale: Scale) -> Figure:
    """The matrix of each head, or the rollout, with its tokens."""
    panels = scene.matrices(attention, view)
    if len(panels) > MAX_PANELS:
        raise InputError(
            f"{len(panels)} heads with their tokens do not fit into one picture of at most {MAX_PANELS}",
            hint="choose some with --layers and --heads, or see all with --view model",
        )
    columns = min(len(panels), 4 if len(panels) > 4 else 2)
    rows = math.ceil(len(panels) / columns)
    # Inches of one panel; a single one has more room for the names of tokens.
    cell, most = (0.24, 9.0) if len(panels) == 1 else (0.17, 5.0)
    width = min(most, max(2.4, cell * len(attention.keys))) + 1.3
    height = min(most, max(2.4, cell * len(attention.queries))) + 1.1
    figure = Figure(figsize=(columns * width, rows * height + 0.6), layout="constrained")
    norm = norm_of(scale, [panel.weights_TS for panel in panels])
    image = None
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        image = paint_matrix(axes, panel.weights_TS, panel.seen_TS, scale, norm)
        name_tokens(axes, "x", names_of(attention.keys), width - 1.1)
        name_tokens(axes, "y", names_of(attention.queries), height - 1.1)
        axes.set_xlabel(f"{attention.keys.name} token (key)", fontsize=7, color="#555555")
        axes.set_ylabel(f"{attention.queries.name} token (query)", fontsize=7, color="#555555")
        axes.set_title("attention rollout" if view == "rollout" else panel.title, fontsize=9)
    add_bar(figure, image, scale, figure.axes)
    return figure


def _grid(
    attention: AttentionMaps, paint: Callable[[Axes, Layer, np.ndarray], Any], scale: Scale, *, named: bool = True
) -> Figure:
    """A grid of squares: a row for each layer, a column for each head. named: write tokens outside, if they fit."""
    columns = sorted({head for layer in attention.layers for head in layer.heads})
    shape = (len(attention.layers), len(columns))
    keys, queries = (names_of(side) if named else [] for side in (attention.keys, attention.queries))
    longest = max(len(keys), len(queries), 1)
    side = min(max(2.2, TOKEN_INCHES * longest), max(0.62, 9.0 / max(shape)))
    fits = named and points_of_name(longest, side) >= READABLE
    room = LETTER_INCHES * max(map(len, keys + queries)) if fits else 0.0
    figure = Figure(figsize=(shape[1] * side + 1.3 + room, shape[0] * side + 1.1 + room), layout="constrained")
    figure.get_layout_engine().set(**CLOSE)  # type: ignore[union-attr]
    image = None
    for row, layer in enumerate(attention.layers):
        for head, matrix_TS in zip(layer.heads, layer.weights_HTS, strict=True):
            axes = figure.add_subplot(*shape, row * shape[1] + columns.index(head) + 1)
            axes.set_xticks([])
            axes.set_yticks([])
            image = paint(axes, layer, matrix_TS)
            of_head = [each for each in attention.layers if head in each.heads]
            if layer is of_head[0]:
                axes.set_title("mean" if head < 0 else f"head {head}", fontsize=8)
            if head == min(layer.heads):
                axes.set_ylabel(f"layer {layer.number}" + "\nquery" * named, fontsize=8)
                if fits:
                    name_tokens(axes, "y", queries, side)
            if layer is of_head[-1] and named:
                axes.set_xlabel("key", fontsize=8)
                if fits:
                    name_tokens(axes, "x", keys, side)
    add_bar(figure, image, scale, figure.axes)
    return figure


def _summary(attention: AttentionMaps) -> Figure:
    rows, _ = summarize(attention)
    shown = [name for name in SUMMARIZED if getattr(rows[0], name) is not None]
    layers = [layer.number for layer in attention.layers]
    heads = sorted({row.head for row in rows})
    columns = min(4, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(columns * 2.9, lines * (1.1 + 0.22 * max(4, len(layers))) + 0.5), layout="constrained")
    for number, name in enumerate(shown):
        values = np.full((len(layers), len(heads)), np.nan)
        for row in rows:
            values[layers.index(row.layer), heads.index(row.head)] = getattr(row, name)
        axes = figure.add_subplot(lines, columns, number + 1)
        top = None if name == "distance" else 1.0
        image = axes.imshow(values, cmap=COLOURS, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        axes.set_title(MEASURES[name], fontsize=9)
        axes.set_xlabel("head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.set_xticks(range(len(heads)), [str(head) for head in heads], fontsize=7)
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
        figure.colorbar(image, ax=axes, shrink=0.85).ax.tick_params(labelsize=7)
    return figure


def _image(scene: Scene, attention: AttentionMaps, view: str) -> Figure:
    """Maps over the patches, drawn on the image; of all heads, or of the rollout."""
    pixels = scene.reading.pixels
    assert pixels is not None
    side = pixels.shape[0]

    def paint(axes: Axes, map_YX: np.ndarray) -> Any:
        axes.imshow(pixels, extent=(0, side, side, 0), interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        shares_YX = map_YX / (float(map_YX.max()) or 1.0)
        extent = (0, side, side, 0)
        return axes.imshow(shares_YX, cmap=COLOURS, alpha=0.6, extent=extent, interpolation="nearest", vmin=0, vmax=1)

    if view == "rollout":
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
        left.imshow(pixels, interpolation="nearest")
        left.set_axis_off()
        image = paint(right, over_patches(scene, attention, scene.shown_rollout(attention.kind)))
        add_bar(figure, image, "row", [right])
        return figure
    return _grid(
        attention,
        lambda axes, layer, matrix_TS: paint(axes, over_patches(scene, attention, matrix_TS)),
        "row",
        named=False,
    )


def over_patches(scene: Scene, attention: AttentionMaps, matrix_TS: np.ndarray) -> np.ndarray:
    """[rows, columns]: the class token's weights on the patches; without a class token the mean over all patches."""
    has_cls = any(attention.queries.special)
    row_S = matrix_TS[0] if has_cls else matrix_TS.mean(axis=0)
    rows, columns = scene.reading.grid
    return row_S[int(has_cls) :].reshape(rows, columns)
