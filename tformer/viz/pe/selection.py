"""From a run and the name of a view to plots; generic views of kinds that have no views."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tformer.nn.positions import POSITIONS, Positions, PositionSizes
from tformer.support.errors import InputError, did_you_mean, visible
from tformer.viz.pe.fixed import table_plot
from tformer.viz.pe.learned import Table
from tformer.viz.pe.settings import ENCODINGS, OPTIONS, Settings, View
from tformer.viz.pe.views import VIEWS
from tformer.viz.plots import Heat, Numbers, Plot, plots_to_json

# --- the positions of a run ------------------------------------------------------------------------------------------


def read_run(
    run: str | Path, settings: Settings, *, stack: str | None, layer: int, encoding: str | None
) -> tuple[Settings, Table | None]:
    """The settings of a run's model, and its learned table; None for a kind that follows from its settings.

    Args:
        settings: keeps the values that are not the model's own: positions, dims, compare.
        stack: encoder or decoder; None: the first with positions (of the kind `encoding`).
        layer: number of the layer, for a kind with tables per layer.
        encoding: the kind to show; None: any.

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
    sides = [
        side for side in stacks if stack in (None, side) and kinds[side] in ((encoding,) if encoding else ENCODINGS)
    ]
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
    return settings, _with_numbers(table, module, layer)


def _run_name(path: Path) -> str:
    return visible(path.parents[1].name if path.parent.name == "checkpoints" else path.parent.name)


def _with_options(settings: Settings, options: Any, *, d_model: int, heads: int, module: Any) -> Settings:
    """The settings with the sizes of a model."""
    if getattr(options, "scaling", None) is not None:
        raise InputError("rope with scaling cannot be shown: the views assume frequencies of base^(-2i/h)")
    if options.kind == "rope" and module.head_dim * heads != d_model:
        d_model = module.head_dim * heads
    names = ("base", "layout", "buckets", "max_distance", "clip")
    own = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if options.kind == "patch2d":
        own["grid"] = module.num_columns
    return replace(settings, encoding=options.kind, d_model=d_model, heads=heads, **own)


def _with_numbers(table: Table, module: Any, layer: int) -> Table | None:
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
    return None if table.encoding in VIEWS else replace(table, module=module)


# --- a kind without views --------------------------------------------------------------------------------------------


def views_of(kind: str) -> Mapping[str, View]:
    """The views of a kind, or of `compare`, by name."""
    return VIEWS[kind] if kind in VIEWS else _generic_views(kind)


def all_views() -> dict[str, Mapping[str, View]]:
    """The views of every kind in the table of position kinds, and of `compare`."""
    return {kind: views_of(kind) for kind in (*ENCODINGS, "compare")}


def _generic_views(kind: str) -> dict[str, View]:
    """A view for each hook that the kind overrides, at small sizes and with its default options, or of a run."""
    module = POSITIONS[kind]
    has_parameters = any(True for _ in _module(kind, Settings(d_model=8, heads=2), 4).parameters())
    titles = {
        "embed": "Added to the embeddings",
        "rotate": "A vector of ones, rotated",
        "bias": "Bias of the scores",
        "score": "Scores of a query of ones",
    }
    shown = [hook for hook in titles if getattr(module, f"has_{hook}")]
    return {
        hook: View(titles[hook], f"{module.about} Computed by the module that training uses.", _draw_hook(hook), 48,
                   needs_run=has_parameters)
        for hook in shown
    }  # fmt: skip


def _module(kind: str, settings: Settings, rows: int) -> Positions:
    """The kind's module with its default options."""
    sizes = PositionSizes(settings.d_model, settings.heads, settings.head_dim, settings.head_dim, rows, True,
                          (settings.grid, settings.grid, False))  # fmt: skip
    found: Positions = OPTIONS[kind]().build(sizes)
    return found


def _draw_hook(hook: str) -> Callable[[View, Settings, Table | None], list[Plot]]:
    """A function that plots the result of one hook: positions × dimensions, or a matrix for each of some heads."""

    def draw(view: View, settings: Settings, table: Table | None = None) -> list[Plot]:
        rows = view.rows(settings)
        module = _module(settings.encoding, settings, rows) if table is None else table.module
        assert module is not None
        pos_1T = torch.arange(rows).unsqueeze(0)
        ones = torch.ones(1, settings.heads, rows, settings.head_dim)
        with torch.no_grad():
            if hook == "embed":
                values = module.embed(torch.zeros(1, rows, settings.d_model), pos_1T)[0]
                return [table_plot(values.double().numpy(), view.title, view.caption, limit=None)]
            if hook == "rotate":
                values = module.rotate(ones, ones, pos_1T, pos_1T)[0][0, 0]
                return [table_plot(values.double().numpy(), view.title, view.caption, limit=None)]
            scores = module.bias(pos_1T, pos_1T) if hook == "bias" else module.score(ones, pos_1T, pos_1T)
        matrices = scores[0].double().numpy()
        heads = dict.fromkeys((1, (len(matrices) + 1) // 2, len(matrices)))
        names = range(rows)
        return [
            Heat(
                f"{view.title}, head {head}",
                view.caption,
                matrices[head - 1],
                names,
                names,
                "query",
                "key",
                "viridis",
                value_label=hook,
            )
            for head in heads
        ]

    return draw


# --- from a name to plots --------------------------------------------------------------------------------------------


def view_of(encoding: str, name: str | None) -> str:
    """The name of a view of this kind, by default its first. InputError for an unknown view."""
    views = views_of(encoding)
    if name is None:
        return next(iter(views))
    if name not in views:
        raise InputError(f"--view {name}: {encoding} has no such view", hint=did_you_mean(name, views))
    return name


def subject(settings: Settings) -> str:
    """The key of the views: the kind, or `compare`."""
    return "compare" if settings.compare else settings.encoding


def plots_of(settings: Settings, view: str | None, table: Table | None) -> tuple[str, list[Plot]]:
    """The name of the view (by default the kind's first) and its plots.

    Raises:
        InputError: an unknown view, a view that needs a run, or dimensions out of range.
    """
    kind = subject(settings)
    name = view_of(kind, view)
    check_dims(settings)
    found = views_of(kind)[name]
    if not (found.needs_run or kind == "compare"):
        return name, found.draw(found, settings)
    if table is None and kind != "compare":
        raise needs_run(kind, name)
    return name, found.draw(found, settings, table)


def needs_run(kind: str, view: str) -> InputError:
    always = all(found.needs_run for found in views_of(kind).values())
    what = f"--encoding {kind}" if always else f"--view {view}"
    return InputError(f"{what} shows what a model has learned: name one", hint="--run RUN, a run or checkpoint")


def check_dims(settings: Settings) -> None:
    """Raise InputError for a dimension, pair or head that does not exist."""
    if settings.dims is None:
        return
    kind = subject(settings)
    counts = {
        "sinusoidal": ("dimension", 0, settings.d_model - 1),
        "rope": ("pair", 0, settings.head_dim // 2 - 1),
        "alibi": ("head", 1, settings.heads),
    }
    if kind not in counts:
        raise InputError(f"--dims: {kind} has no view of single dimensions", hint=f"for {', '.join(counts)}")
    word, low, high = counts[kind]
    for dim in settings.dims:
        if not low <= dim <= high:
            raise InputError(f"--dims {dim}: there is no such {word}, expected {low} to {high}")


# --- headings and numbers --------------------------------------------------------------------------------------------

SIZES: dict[str, Callable[[Settings], str]] = {
    "sinusoidal": lambda s: f"d_model {s.d_model}, base {s.base:g}, {s.layout_used}",
    "learned": lambda s: "",
    "rope": lambda s: f"head width {s.head_dim}, base {s.base:g}",
    "alibi": lambda s: f"{s.heads} heads",
    "t5_bias": lambda s: f"{s.buckets} buckets, maximum distance {s.max_distance}",
    "shaw": lambda s: f"k = {s.clip}",
    "patch2d": lambda s: f"{s.grid} × {s.grid} patches, d_model {s.d_model}, base {s.base:g}",
    "compare": lambda s: f"d_model {s.d_model}, {s.heads} heads, base {s.base:g}",
}
"""The sizes that matter for each kind of views."""


def heading(settings: Settings, table: Table | None) -> str:
    """The title of a picture: the kind, its sizes, and the run."""
    kind = subject(settings)
    sizes = SIZES[kind](settings) if kind in SIZES else f"d_model {settings.d_model}, {settings.heads} heads"
    parts = [f"{kind} positions" if kind != "compare" else "Positions compared", sizes]
    return " · ".join(part for part in (*parts, table.note if table is not None else "") if part)


def as_json(settings: Settings, view: str, table: Table | None, plots: Sequence[Plot]) -> str:
    """One document: the kind, the view, the settings, the run, and the numbers of each plot."""
    document = {
        "encoding": subject(settings),
        "view": view,
        "settings": asdict(settings),
        "run": None if table is None else {"name": table.name, "trained": table.trained},
        "plots": plots_to_json(plots),
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
