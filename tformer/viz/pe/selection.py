"""From a run and the name of a view to plots; generic views of kinds that have no views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tformer.nn.positions import POSITIONS, Positions, PositionSizes
from tformer.support.errors import InputError, did_you_mean, visible
from tformer.viz.pe.fixed import some_heads, table_heat
from tformer.viz.pe.learned import LearnedEncoding
from tformer.viz.pe.settings import ENCODINGS, LAYOUTS, OPTIONS, EncodingSettings, EncodingView
from tformer.viz.pe.views import VIEWS
from tformer.viz.plots import Numbers, Plot, counted_heat, plots_to_json

# --- the positions of a run ------------------------------------------------------------------------------------------


def read_run(
    run: str | Path, settings: EncodingSettings, *, stack: str | None, layer: int, encoding: str | None
) -> tuple[EncodingSettings, LearnedEncoding | None]:
    """The settings of a run's model, and its learned table; None for a kind that follows from its settings.

    Args:
        settings: keeps the values that are not the model's own: positions, dims, compare.
        stack: encoder or decoder; None: the first with positions (of the kind `encoding`).
        layer: number of the layer, where they differ.
        encoding: the kind to show; None: any.

    Raises:
        InputError: there is no such stack or layer, or its positions are of another kind.
    """
    from tformer.loading import load
    from tformer.recipe.model import layer_sections

    loaded = load(run)
    model = loaded.model
    stacks = {side: found for side in ("encoder", "decoder") if (found := getattr(model, side)) is not None}
    if stack is not None and stack not in stacks:
        raise InputError(f"--stack {stack}: {loaded.path} has {' and '.join(stacks)} only")
    layers = {side: layer_sections(getattr(loaded.recipe.model, side), path=f"model.{side}") for side in stacks}
    kinds = {side: found[min(layer, len(found) - 1)].positions.kind for side, found in layers.items()}
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
    module, options = stacks[side].positions_of(layer), layers[side][layer].positions
    changed = ("scaling", None), ("share", 1.0), ("rounded", False)
    for name, plain in changed:
        if getattr(options, name, plain) != plain:
            raise InputError(f"{options.kind} with {name} cannot be shown: the views assume the formula of the paper")
    d_model, heads = stacks[side].d_model, section.num_heads
    if options.kind == "rope" and module.head_dim * heads != d_model:
        d_model = module.head_dim * heads
    names = ("base", "layout", "buckets", "max_distance", "clip")
    own = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if options.kind not in LAYOUTS:
        own.pop("layout", None)
    if options.kind == "patch2d":
        own["grid"] = module.num_columns
    settings = replace(settings, encoding=options.kind, d_model=d_model, heads=heads, **own)
    path = loaded.path
    run_name = visible(path.parents[1].name if path.parent.name == "checkpoints" else path.parent.name)
    table = LearnedEncoding(options.kind, f"{path.name} of {run_name}, {side}", loaded.step > 0 or loaded.imported)
    return settings, _with_numbers(table, module)


def _with_numbers(table: LearnedEncoding, module: Any) -> LearnedEncoding | None:
    def numbers(parameter: Any) -> Numbers:
        found: Numbers = parameter.detach().double().cpu().numpy()
        return found

    if table.encoding in ("learned", "learned_t5_bias"):
        table = replace(table, weight=numbers(module.weight)[module.options.offset :])
        if table.encoding == "learned":
            return table
        module = module.relative
    if table.encoding in ("t5_bias", "learned_t5_bias"):
        return replace(table, bias=numbers(module.weight), bidirectional=module.bidirectional)
    return None if table.encoding in VIEWS else replace(table, module=module)


# --- a kind without views --------------------------------------------------------------------------------------------


HOOKS = {
    "embed": "Added to the embeddings",
    "rotate": "A vector of ones, rotated",
    "bias": "Bias of the scores",
    "score": "Scores of a query of ones",
}


def views_of(kind: str) -> Mapping[str, EncodingView]:
    """The views of a kind, or of `compare`, by name.

    A kind without views gets one for each hook that it overrides, at small sizes and with its default options, or of a
    run.
    """
    if kind in VIEWS:
        return VIEWS[kind]
    module = POSITIONS[kind]
    has_parameters = any(True for _ in _module(kind, EncodingSettings(d_model=8, heads=2), 4).parameters())
    caption = f"{module.about} Computed by the module that training uses."
    return {
        hook: EncodingView(title, caption, partial(_draw_hook, hook), 48, needs_run=has_parameters)
        for hook, title in HOOKS.items()
        if getattr(module, f"has_{hook}")
    }


def _module(kind: str, settings: EncodingSettings, rows: int) -> Positions:
    """The kind's module with its default options."""
    sizes = PositionSizes(settings.d_model, settings.heads, settings.head_dim, settings.head_dim, rows, True,
                          (settings.grid, settings.grid, False))  # fmt: skip
    found: Positions = OPTIONS[kind]().build(sizes)
    return found


def _draw_hook(
    hook: str, view: EncodingView, settings: EncodingSettings, table: LearnedEncoding | None = None
) -> Plot | list[Plot]:
    """The result of one hook: positions × dimensions, or a matrix for each of some heads."""
    rows = view.rows(settings)
    module = _module(settings.encoding, settings, rows) if table is None else table.module
    assert module is not None
    pos_1T = torch.arange(rows).unsqueeze(0)
    ones = torch.ones(1, settings.heads, rows, settings.head_dim)
    with torch.no_grad():
        if hook == "embed":
            values = module.embed(torch.zeros(1, rows, settings.d_model), pos_1T)[0]
            return table_heat(values.double().numpy(), limit=None)
        if hook == "rotate":
            values = module.rotate(ones, ones, pos_1T, pos_1T)[0][0, 0]
            return table_heat(values.double().numpy(), limit=None)
        scores = module.bias(pos_1T, pos_1T) if hook == "bias" else module.score(ones, pos_1T, pos_1T)
    matrices = scores[0].double().numpy()
    return [
        counted_heat(
            matrices[head - 1], "query", "key", "viridis", value_label=hook, title=f"{view.title}, head {head}"
        )
        for head in some_heads(len(matrices))
    ]


# --- from a name to plots --------------------------------------------------------------------------------------------


def choose_view(
    settings: EncodingSettings, name: str | None, table: LearnedEncoding | None
) -> tuple[str, EncodingView]:
    """The view of this name, by default the kind's first.

    Raises:
        InputError: an unknown view, a view that needs a run, or dimensions out of range.
    """
    kind = settings.subject
    views = views_of(kind)
    if name is None:
        name = next(iter(views))
    elif name not in views:
        raise InputError(f"--view {name}: {kind} has no such view", hint=did_you_mean(name, views))
    if views[name].needs_run and table is None:
        always = all(view.needs_run for view in views.values())
        what = f"--encoding {kind}" if always else f"--view {name}"
        raise InputError(f"{what} shows what a model has learned: name one", hint="--run RUN, a run or checkpoint")
    _check_dims(settings)
    return name, views[name]


def plots_of(settings: EncodingSettings, name: str | None, table: LearnedEncoding | None) -> tuple[str, list[Plot]]:
    """The name of the view and its plots. Raises InputError like `choose_view`."""
    name, view = choose_view(settings, name, table)
    learned = (table,) if view.needs_run or settings.compare else ()
    found = view.draw(view, settings, *learned)
    plots = found if isinstance(found, list) else [found]
    return name, [replace(plot, title=plot.title or view.title, caption=view.caption) for plot in plots]


def _check_dims(settings: EncodingSettings) -> None:
    """Raise InputError for a dimension, pair or head that does not exist."""
    if settings.dims is None:
        return
    kind = settings.subject
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

SIZES: dict[str, Callable[[EncodingSettings], str]] = {
    "sinusoidal": lambda s: f"d_model {s.d_model}, base {s.base:g}, {s.layout_used}",
    "learned": lambda s: "",
    "rope": lambda s: f"head width {s.head_dim}, base {s.base:g}",
    "alibi": lambda s: f"{s.heads} heads",
    "t5_bias": lambda s: f"{s.buckets} buckets, maximum distance {s.max_distance}",
    "learned_t5_bias": lambda s: f"{s.buckets} buckets, maximum distance {s.max_distance}",
    "shaw": lambda s: f"k = {s.clip}",
    "patch2d": lambda s: f"{s.grid} × {s.grid} patches, d_model {s.d_model}, base {s.base:g}",
    "compare": lambda s: f"d_model {s.d_model}, {s.heads} heads, base {s.base:g}",
}
"""The sizes that matter for each kind of views."""


def heading(settings: EncodingSettings, table: LearnedEncoding | None) -> str:
    """The title of a picture: the kind, its sizes, and the run."""
    kind = settings.subject
    sizes = SIZES[kind](settings) if kind in SIZES else f"d_model {settings.d_model}, {settings.heads} heads"
    parts = [f"{kind} positions" if kind != "compare" else "Positions compared", sizes]
    return " · ".join(part for part in (*parts, table.note if table is not None else "") if part)


def document_of(settings: EncodingSettings, view: str | None, table: LearnedEncoding | None) -> dict[str, Any]:
    """The JSON of a view: the kind, the view, the settings, the run, and the numbers of each plot."""
    view, plots = plots_of(settings, view, table)
    return {
        "encoding": settings.subject,
        "view": view,
        "settings": asdict(settings),
        "run": None if table is None else {"name": table.name, "trained": table.trained},
        "plots": plots_to_json(plots),
    }
