"""Learned positional encodings of a run: tables and biases, and their plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tformer.nn.positions import Positions
from tformer.support.errors import InputError
from tformer.viz.pe.fixed import bucket_of, similarity_plot, sinusoidal_table, table_plot, trace_plots
from tformer.viz.pe.settings import Settings, View
from tformer.viz.plots import Heat, Line, Lines, Numbers, Plot, Ramp

RANDOM = "random initialisation: this model has not been trained"


@dataclass(frozen=True)
class Table:
    """Learned positions of one stack.

    Attributes:
        name: the checkpoint, its run and the stack.
        trained: False: the numbers are random initialisation.
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
    def rows(self) -> int:
        return len(self.learned)

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
        centred = self.learned - self.learned.mean(axis=0)
        left, scale, _ = np.linalg.svd(centred, full_matrices=False)
        found = left[:, :2] * scale[:2]
        found = np.pad(found, ((0, 0), (0, 2 - found.shape[1])))
        return found * np.where(found.max(axis=0) >= -found.min(axis=0), 1.0, -1.0)


def _shown(view: View, settings: Settings, table: Table) -> Numbers:
    return table.learned[: view.rows(settings)]


def traces(view: View, settings: Settings, table: Table) -> list[Plot]:
    return trace_plots(view, _shown(view, settings, table), None)


def heatmap(view: View, settings: Settings, table: Table) -> list[Plot]:
    return [table_plot(_shown(view, settings, table), view.title, view.caption, limit=None)]


def similarity(view: View, settings: Settings, table: Table) -> list[Plot]:
    count = len(_shown(view, settings, table))
    return [replace(similarity_plot(table.similarity(count), view.title, view.caption), value_label="cosine")]


def norms(view: View, settings: Settings, table: Table) -> list[Plot]:
    y = np.linalg.norm(table.learned[: settings.positions], axis=1)
    line = Line(table.name, np.arange(len(y), dtype=float), y)
    return [Lines(view.title, view.caption, "position", "length", [line])]


def pca(view: View, settings: Settings, table: Table) -> list[Plot]:
    path = replace(table, weight=table.learned[: settings.positions]).path()
    parts = np.array_split(np.arange(len(path)), min(24, len(path)))
    # Pieces overlap by a point; colours show the position.
    lines = [
        Line(f"positions {part[0]}–{part[-1]}", path[part[0] : part[-1] + 2, 0], path[part[0] : part[-1] + 2, 1])
        for part in parts
    ]
    ramp = Ramp("viridis", 0, len(path) - 1, "position")
    return [Lines(view.title, view.caption, "first component", "second component", lines, ramp=ramp, points=True)]


def beside(view: View, settings: Settings, table: Table) -> list[Plot]:
    shown = _shown(view, settings, table)
    even = replace(settings, encoding="sinusoidal", layout=None, d_model=shown.shape[1] + shown.shape[1] % 2)
    sines = sinusoidal_table(even, len(shown))[:, : shown.shape[1]]
    return [
        table_plot(shown, "Learned", view.caption, limit=None),
        table_plot(sines, "Sinusoidal", view.caption),
    ]


def t5_bias(view: View, settings: Settings, table: Table) -> list[Plot]:
    reach = (view.rows(settings)) - 1
    offsets = np.arange(-reach, (reach if table.bidirectional else 0) + 1, dtype=float)
    assert table.bias is not None
    values = table.bias[bucket_of(settings, offsets, bidirectional=table.bidirectional).astype(int)].T
    bound = float(np.abs(values).max()) or 1.0
    heat = Heat(
        view.title, view.caption, values, range(1, len(values) + 1), [int(offset) for offset in offsets], "head",
        "offset: key − query", "RdBu_r", -bound, bound, "bias",
    )  # fmt: skip
    return [heat]


def _shaw(part: str) -> Callable[[View, Settings, Table], list[Plot]]:
    def plot(view: View, settings: Settings, table: Table) -> list[Plot]:
        values = getattr(table, part)
        if values is None:
            raise InputError(f"--view {part}: this model has none (positions: {{kind: shaw, values: false}})")
        clip = len(values) // 2
        heat = table_plot(values, view.title, view.caption, limit=None)
        return [replace(heat, rows=range(-clip, clip + 1), row_label="clipped distance")]

    return plot


shaw_keys, shaw_values = _shaw("keys"), _shaw("values")
