"""What a run has learned about positions: tables and biases, and the plots that need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tformer.errors import InputError
from tformer.viz.pe.absolute import similarity_plot, sinusoidal_table, table_plot, trace_plots
from tformer.viz.pe.relative import bucket_of
from tformer.viz.pe.settings import VIEWS, Settings
from tformer.viz.plots import Heat, Line, Lines, Numbers, Plot, Ramp

RANDOM = "random initialisation: this model has not been trained"


@dataclass(frozen=True)
class Table:
    """Learned positions of one stack.

    Attributes:
        name: of the run, and the stack.
        trained: False: the numbers are random initialisation.
        weight: learned: [positions, d_model].
        bias: t5_bias: [buckets, heads]; bidirectional says how offsets fall into buckets.
        keys, values: shaw, of one layer: [2k + 1, width]; values None where the kind has none.
    """

    encoding: str
    name: str
    trained: bool = True
    weight: Numbers | None = None
    bias: Numbers | None = None
    bidirectional: bool = False
    keys: Numbers | None = None
    values: Numbers | None = None

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
        """Cosine of each pair of the first rows."""
        table = self.learned[:rows]
        unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
        return unit @ unit.T

    def path(self) -> Numbers:
        """Each position along the first two principal components, [positions, 2], signed so that the far end is +."""
        centred = self.learned - self.learned.mean(axis=0)
        left, scale, _ = np.linalg.svd(centred, full_matrices=False)
        found = left[:, :2] * scale[:2]
        found = np.pad(found, ((0, 0), (0, 2 - found.shape[1])))
        return found * np.where(found.max(axis=0) >= -found.min(axis=0), 1.0, -1.0)


def read_run(
    run: str | Path, settings: Settings, *, stack: str | None, layer: int, encoding: str | None
) -> tuple[Settings, Table | None]:
    """The settings that a run was made with, and what it has learned; no table for a kind without parameters.

    Args:
        settings: keeps what is not the model's own: positions, dims, compare.
        stack: encoder or decoder; None: the first that has positions (of the kind asked for).
        layer: whose tables, for a kind that has them per layer.
        encoding: the kind that was asked for; None: any.

    Raises:
        InputError: there is no such stack or layer, or its positions are of another kind.
    """
    from tformer.loading import load

    loaded = load(run)
    model = loaded.model
    stacks = {side: found for side in ("encoder", "decoder") if (found := getattr(model, side)) is not None}
    if stack is not None and stack not in stacks:
        raise InputError(f"--stack {stack}: {loaded.path} has {' and '.join(stacks)} only")
    kinds = {side: getattr(loaded.recipe.model, side).positions.kind for side in stacks}
    sides = [side for side in stacks if stack in (None, side) and kinds[side] in ((encoding,) if encoding else VIEWS)]
    if not sides:
        found = ", ".join(f"{kinds[side]} ({side})" for side in stacks if stack in (None, side))
        wanted = f"{encoding} positions" if encoding else "positions that can be shown"
        raise InputError(f"{loaded.path} has no {wanted}: found {found}")
    side = sides[0]
    section = getattr(loaded.recipe.model, side)
    if not 0 <= layer < section.num_layers:
        raise InputError(f"--layer {layer}: the {side} of {loaded.path} has layers 0 to {section.num_layers - 1}")
    module, options = stacks[side].positions_of(layer), section.positions
    settings = _with_options(settings, options, d_model=stacks[side].d_model, heads=section.num_heads, module=module)
    trained = loaded.step > 0 or loaded.imported
    table = Table(options.kind, f"{loaded.path.name} of {_run_name(loaded.path)}, {side}", trained)
    return settings, _learned(table, module, settings, layer)


def _run_name(path: Path) -> str:
    return path.parents[1].name if path.parent.name == "checkpoints" else path.parent.name


def _with_options(settings: Settings, options: Any, *, d_model: int, heads: int, module: Any) -> Settings:
    """The sizes of a model in place of those of the command line."""
    if getattr(options, "scaling", None) is not None:
        raise InputError("rope with scaling cannot be shown: the views assume frequencies of base^(-2i/h)")
    if options.kind == "rope" and module.head_dim * heads != d_model:
        d_model = module.head_dim * heads
    names = ("base", "layout", "buckets", "max_distance", "clip")
    own = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if options.kind == "patch2d":
        own["grid"] = module.num_columns
    return replace(settings, encoding=options.kind, d_model=d_model, heads=heads, **own)


def _learned(table: Table, module: Any, settings: Settings, layer: int) -> Table | None:
    def numbers(parameter: Any) -> Numbers | None:
        return None if parameter is None else parameter.detach().double().cpu().numpy()

    if table.encoding == "learned":
        weight = numbers(module.weight)
        assert weight is not None
        return replace(table, weight=weight[module.options.offset :])
    if table.encoding == "t5_bias":
        return replace(table, bias=numbers(module.weight), bidirectional=module.bidirectional)
    if table.encoding == "shaw":
        name = f"{table.name}, layer {layer}"
        return replace(table, name=name, keys=numbers(module.keys), values=numbers(module.values))
    return None


def _shown(settings: Settings, table: Table, view: str) -> Numbers:
    return table.learned[: settings.positions or VIEWS["learned"][view].positions]


def traces(settings: Settings, table: Table) -> list[Plot]:
    return trace_plots(_shown(settings, table, "traces"), None, encoding="learned")


def heatmap(settings: Settings, table: Table) -> list[Plot]:
    view = VIEWS["learned"]["heatmap"]
    return [table_plot(_shown(settings, table, "heatmap"), view.title, view.caption, limit=None)]


def similarity(settings: Settings, table: Table) -> list[Plot]:
    view = VIEWS["learned"]["similarity"]
    count = len(_shown(settings, table, "similarity"))
    return [replace(similarity_plot(table.similarity(count), view.title, view.caption), value_label="cosine")]


def norms(settings: Settings, table: Table) -> list[Plot]:
    view = VIEWS["learned"]["norms"]
    y = np.linalg.norm(table.learned[: settings.positions], axis=1)
    line = Line(table.name, np.arange(len(y), dtype=float), y)
    return [Lines(view.title, view.caption, "position", "length", [line])]


def pca(settings: Settings, table: Table) -> list[Plot]:
    view = VIEWS["learned"]["pca"]
    path = replace(table, weight=table.learned[: settings.positions]).path()
    parts = np.array_split(np.arange(len(path)), min(24, len(path)))
    # Pieces that overlap by a point, coloured by position.
    lines = [
        Line(f"positions {part[0]}–{part[-1]}", path[part[0] : part[-1] + 2, 0], path[part[0] : part[-1] + 2, 1])
        for part in parts
    ]
    ramp = Ramp("viridis", 0, len(path) - 1, "position")
    return [Lines(view.title, view.caption, "first component", "second component", lines, ramp=ramp, points=True)]


def beside(settings: Settings, table: Table) -> list[Plot]:
    view, shown = VIEWS["learned"]["beside"], _shown(settings, table, "beside")
    even = replace(settings, encoding="sinusoidal", layout=None, d_model=shown.shape[1] + shown.shape[1] % 2)
    sines = sinusoidal_table(even, len(shown))[:, : shown.shape[1]]
    return [
        table_plot(shown, "Learned", view.caption, limit=None),
        table_plot(sines, "Sinusoidal", view.caption),
    ]


def t5_bias(settings: Settings, table: Table) -> list[Plot]:
    view = VIEWS["t5_bias"]["bias"]
    reach = (settings.positions or view.positions) - 1
    offsets = np.arange(-reach, (reach if table.bidirectional else 0) + 1, dtype=float)
    assert table.bias is not None
    values = table.bias[bucket_of(settings, offsets, bidirectional=table.bidirectional).astype(int)].T
    bound = float(np.abs(values).max()) or 1.0
    heat = Heat(
        view.title, view.caption, values, range(1, len(values) + 1), [int(offset) for offset in offsets], "head",
        "offset: key − query", "RdBu_r", -bound, bound, "bias",
    )  # fmt: skip
    return [heat]


def _shaw(part: str) -> Callable[[Settings, Table], list[Plot]]:
    def plot(settings: Settings, table: Table) -> list[Plot]:
        values = getattr(table, part)
        if values is None:
            raise InputError(f"--view {part}: this model has none (positions: {{kind: shaw, values: false}})")
        view, clip = VIEWS["shaw"][part], len(values) // 2
        heat = table_plot(values, view.title, view.caption, limit=None)
        return [replace(heat, rows=range(-clip, clip + 1), row_label="clipped distance")]

    return plot


shaw_keys, shaw_values = _shaw("keys"), _shaw("values")
