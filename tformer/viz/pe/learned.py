"""Learned positional encodings of a run: tables and biases, and their plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tformer.metrics.statistics import principal_components
from tformer.nn.positions import Positions
from tformer.support.errors import InputError
from tformer.viz.pe.fixed import bucket_of, similarity_heat, sinusoidal_table, table_heat, trace_plots
from tformer.viz.pe.settings import Settings, View
from tformer.viz.plots import Heat, Line, Lines, Numbers, Plot, Ramp, counted_line

RANDOM = "random initialization: this model has not been trained"


@dataclass(frozen=True)
class Table:
    """Learned positions of one stack.

    Attributes:
        name: the checkpoint, its run and the stack.
        trained: False: the numbers are random initialization.
        weight: learned: [positions, d_model].
        bias: t5_bias: [buckets, heads]; bidirectional: later keys have separate buckets.
        keys, values: shaw, of one layer: [2k + 1, width]; values None where the kind has none.
        module: of a kind without views.
    """

    encoding: str
    name: str
    trained: bool = True
    weight: Numbers | None = None
    bias: Numbers | None = None
    bidirectional: bool = False
    keys: Numbers | None = None
    values: Numbers | None = None
    module: Positions | None = None

    @property
    def learned(self) -> Numbers:
        assert self.weight is not None
        return self.weight

    @property
    def note(self) -> str:
        return self.name if self.trained else f"{self.name}, {RANDOM}"

    def similarity(self, rows: int) -> Numbers:
        """Cosine similarity of each pair of the first rows."""
        table = self.learned[:rows]
        unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
        return unit @ unit.T

    def path(self) -> Numbers:
        """First two principal components of each position, [positions, 2]; the largest value of each is positive."""
        return principal_components(self.learned, 2)[0]


def traces(view: View, settings: Settings, table: Table) -> list[Plot]:
    return trace_plots(table.learned[: view.rows(settings)], None)


def heatmap(view: View, settings: Settings, table: Table) -> Plot:
    return table_heat(table.learned[: view.rows(settings)], limit=None)


def similarity(view: View, settings: Settings, table: Table) -> Plot:
    return similarity_heat(table.similarity(view.rows(settings)), "cosine")


def norms(view: View, settings: Settings, table: Table) -> Plot:
    y = np.linalg.norm(table.learned[: settings.positions], axis=1)
    return Lines("position", "length", [counted_line(table.name, y)])


def pca(view: View, settings: Settings, table: Table) -> Plot:
    path = replace(table, weight=table.learned[: settings.positions]).path()
    parts = np.array_split(np.arange(len(path)), min(24, len(path)))
    # Pieces overlap by a point; colours show the position.
    lines = [
        Line(f"positions {part[0]}–{part[-1]}", path[part[0] : part[-1] + 2, 0], path[part[0] : part[-1] + 2, 1])
        for part in parts
    ]
    ramp = Ramp("viridis", 0, len(path) - 1, "position")
    return Lines("first component", "second component", lines, ramp=ramp, points=True)


def beside(view: View, settings: Settings, table: Table) -> list[Plot]:
    shown = table.learned[: view.rows(settings)]
    even = replace(settings, encoding="sinusoidal", layout=None, d_model=shown.shape[1] + shown.shape[1] % 2)
    sines = sinusoidal_table(even, len(shown))[:, : shown.shape[1]]
    return [table_heat(shown, limit=None, title="Learned"), table_heat(sines, title="Sinusoidal")]


def t5_bias(view: View, settings: Settings, table: Table) -> Plot:
    reach = view.rows(settings) - 1
    offsets = range(-reach, (reach if table.bidirectional else 0) + 1)
    assert table.bias is not None
    values = table.bias[bucket_of(settings, np.array(offsets), bidirectional=table.bidirectional).astype(int)].T
    bound = float(np.abs(values).max()) or 1.0
    heads = range(1, len(values) + 1)
    return Heat(values, heads, offsets, "head", "offset: key − query", "RdBu_r", -bound, bound, "bias")


def shaw(part: Literal["keys", "values"]) -> Callable[[View, Settings, Table], Plot]:
    """The drawing function of the vectors on the keys or on the values."""

    def draw(view: View, settings: Settings, table: Table) -> Plot:
        vectors = getattr(table, part)
        if vectors is None:
            raise InputError(f"--view {part}: this model has none (positions: {{kind: shaw, values: false}})")
        clip = len(vectors) // 2
        heat = table_heat(vectors, limit=None, rows="clipped distance")
        return replace(heat, rows=range(-clip, clip + 1))

    return draw
