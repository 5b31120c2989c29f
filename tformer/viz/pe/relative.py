"""Plots of the encodings that act inside attention: rope turns, alibi and T5 add to scores, Shaw adds vectors.

All numbers come from the modules of training (`tformer.nn.positions`): rope by its `formula` in double precision and
its `rotate`, the others by their slopes, buckets and hooks.
"""

from __future__ import annotations

import numpy as np
import torch

from tformer.nn.positions.biases import alibi_slopes, t5_bucket
from tformer.nn.positions.rope import RopeOptions, RopePositions
from tformer.nn.positions.shaw import ShawOptions, ShawPositions
from tformer.viz.pe.settings import VIEWS, Settings
from tformer.viz.plots import Heat, Line, Lines, Numbers, Plot


def _rope(settings: Settings, rows: int) -> RopePositions:
    layout = settings.layout_used if settings.encoding == "rope" else "halves"
    options = RopeOptions(layout=layout, base=settings.base)  # type: ignore[arg-type]
    return RopePositions(options, head_dim=settings.head_dim, max_seq_len=rows)


def rope_turns(settings: Settings, rows: int) -> tuple[Numbers, Numbers]:
    """Cosine and sine of each pair's angle, [rows, head_dim / 2] each, in double precision."""
    cos, sin = _rope(settings, rows).formula(torch.arange(rows)).chunk(2, dim=-1)
    return cos.numpy(), sin.numpy()


def rope_angles(settings: Settings, rows: int) -> Numbers:
    """Angle of each pair at each position, in [0, 2π)."""
    cos, sin = rope_turns(settings, rows)
    return np.arctan2(sin, cos) % (2 * np.pi)


def rope_curve(settings: Settings, rows: int) -> Numbers:
    """Mean cosine over the pairs at each distance, [rows]."""
    return rope_turns(settings, rows)[0].mean(axis=1)


def angles(settings: Settings) -> list[Plot]:
    view = VIEWS["rope"]["angles"]
    values = rope_angles(settings, settings.positions or view.positions)
    rows, columns = range(len(values)), range(values.shape[1])
    heat = Heat(
        view.title, view.caption, values, rows, columns, "position", "pair", "twilight", 0.0, 2 * np.pi, "angle"
    )
    return [heat]


def circles(settings: Settings) -> list[Plot]:
    view = VIEWS["rope"]["circles"]
    cos, sin = rope_turns(settings, settings.positions or view.positions)
    pairs = settings.dims or circle_pairs(settings.head_dim // 2)
    lines = []
    for ring, pair in enumerate(pairs):
        radius = 1 - ring / (len(pairs) + 1)
        lines.append(Line(f"pair {pair}", radius * cos[:, pair], radius * sin[:, pair]))
    plot = Lines(view.title, view.caption, "first coordinate", "second coordinate", lines, points=True, square=True)
    return [plot]


def circle_pairs(pairs: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((0, pairs // 8, pairs // 4, pairs // 2)))


def rope_decay(settings: Settings) -> list[Plot]:
    view = VIEWS["rope"]["decay"]
    y = rope_curve(settings, settings.positions or view.positions)
    line = Line(f"head of width {settings.head_dim}", np.arange(len(y), dtype=float), y)
    return [Lines(view.title, view.caption, "distance Δ", "mean cos(Δ·θ)", [line])]


def rotated(settings: Settings, rows: int) -> Numbers:
    """A vector of ones turned for each position, [rows, head_dim]; fp32, as in training."""
    pos = torch.arange(rows).unsqueeze(0)
    ones = torch.ones(1, 1, rows, settings.head_dim)
    turned, _ = _rope(settings, rows).rotate(ones, ones, pos, pos)
    return turned[0, 0].double().numpy()


def rotation(settings: Settings) -> list[Plot]:
    view = VIEWS["rope"]["rotation"]
    values = rotated(settings, settings.positions or view.positions)
    bound = 2**0.5
    rows, columns = range(len(values)), range(values.shape[1])
    heat = Heat(
        view.title, view.caption, values, rows, columns, "position", "coordinate", "RdBu_r", -bound, bound, "value"
    )
    return [heat]


def slopes(settings: Settings) -> list[Plot]:
    view = VIEWS["alibi"]["slopes"]
    y = np.array(alibi_slopes(settings.heads))
    line = Line(f"{settings.heads} heads", np.arange(1, len(y) + 1, dtype=float), y)
    return [Lines(view.title, view.caption, "head", "slope", [line], log_y=True, points=True)]


def chosen_heads(settings: Settings) -> tuple[int, ...]:
    """Heads to draw a matrix of, from 1: the first, one in the middle, the last."""
    return settings.dims or tuple(dict.fromkeys((1, (settings.heads + 1) // 2, settings.heads)))


def alibi_bias(settings: Settings, head: int, rows: int) -> Numbers:
    """[rows, rows]: what head (from 1) adds to the score of each pair."""
    place = np.arange(rows, dtype=float)
    return -alibi_slopes(settings.heads)[head - 1] * np.abs(place[None, :] - place[:, None])


def bias(settings: Settings) -> list[Plot]:
    view, heads = VIEWS["alibi"]["bias"], chosen_heads(settings)
    rows = settings.positions or view.positions
    matrices = {head: alibi_bias(settings, head, rows) for head in heads}
    names = range(rows)
    return [
        Heat(
            f"{view.title}, head {head}",
            view.caption,
            matrix,
            names,
            names,
            "query",
            "key",
            "viridis",
            None,
            0.0,
            "bias",
        )
        for head, matrix in matrices.items()
    ]


def alibi_decay(settings: Settings) -> list[Plot]:
    view = VIEWS["alibi"]["decay"]
    x = np.arange(settings.positions or view.positions, dtype=float)
    heads = settings.dims or range(1, settings.heads + 1)
    all_slopes = alibi_slopes(settings.heads)
    lines = [Line(f"head {head}", x, np.exp(-all_slopes[head - 1] * x)) for head in heads]
    return [Lines(view.title, view.caption, "distance Δ", "factor", lines)]


def bucket_of(settings: Settings, offsets: Numbers, *, bidirectional: bool) -> Numbers:
    relative = torch.from_numpy(offsets.astype(np.int64))
    found = t5_bucket(
        relative, buckets=settings.buckets, max_distance=settings.max_distance, bidirectional=bidirectional
    )
    return found.double().numpy()


def buckets(settings: Settings) -> list[Plot]:
    view = VIEWS["t5_bias"]["buckets"]
    reach = (settings.positions or view.positions) - 1
    x = np.arange(-reach, reach + 1, dtype=float)
    lines = [
        Line(name, x, bucket_of(settings, x, bidirectional=both))
        for name, both in (("both directions", True), ("causal", False))
    ]
    return [Lines(view.title, view.caption, "offset: key − query", "bucket", lines)]


def shaw_index(settings: Settings, rows: int) -> Numbers:
    """[rows, rows]: the table's row for each pair, found by a table that holds its own row numbers."""
    module = ShawPositions(ShawOptions(clip=settings.clip, values=False), head_dim=1, value_dim=1)
    pos = torch.arange(rows).unsqueeze(0)
    with torch.no_grad():
        module.keys.copy_(torch.arange(2 * settings.clip + 1).unsqueeze(1))
        return module.score(torch.ones(1, 1, rows, 1), pos, pos)[0, 0].double().numpy()


def index(settings: Settings) -> list[Plot]:
    view = VIEWS["shaw"]["index"]
    values = shaw_index(settings, settings.positions or view.positions)
    names = range(len(values))
    heat = Heat(
        view.title, view.caption, values, names, names, "query i", "key j", "viridis", 0.0, 2.0 * settings.clip, "row"
    )
    return [heat]
