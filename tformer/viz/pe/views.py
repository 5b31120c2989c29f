"""From a kind and the name of a view to its plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tformer.errors import InputError
from tformer.viz.pe import absolute, compare, relative, tables
from tformer.viz.pe.settings import (
    NEEDS_RUN,
    VIEWS,
    Settings,
    view_of,
)
from tformer.viz.pe.tables import Table
from tformer.viz.plots import Plot

FIXED: Mapping[tuple[str, str], Callable[[Settings], list[Plot]]] = {
    ("sinusoidal", "traces"): absolute.traces,
    ("sinusoidal", "heatmap"): absolute.heatmap,
    ("sinusoidal", "waves"): absolute.waves,
    ("sinusoidal", "gram"): absolute.gram,
    ("sinusoidal", "distance"): absolute.distance,
    ("sinusoidal", "wavelengths"): absolute.wavelength,
    ("rope", "angles"): relative.angles,
    ("rope", "circles"): relative.circles,
    ("rope", "decay"): relative.rope_decay,
    ("rope", "rotation"): relative.rotation,
    ("alibi", "slopes"): relative.slopes,
    ("alibi", "bias"): relative.bias,
    ("alibi", "decay"): relative.alibi_decay,
    ("t5_bias", "buckets"): relative.buckets,
    ("shaw", "index"): relative.index,
    ("patch2d", "similarity"): absolute.patch_similarity,
    ("patch2d", "heatmap"): absolute.patch_heatmap,
}
LEARNED: Mapping[tuple[str, str], Callable[[Settings, Table], list[Plot]]] = {
    ("learned", "traces"): tables.traces,
    ("learned", "heatmap"): tables.heatmap,
    ("learned", "similarity"): tables.similarity,
    ("learned", "norms"): tables.norms,
    ("learned", "pca"): tables.pca,
    ("learned", "beside"): tables.beside,
    ("t5_bias", "bias"): tables.t5_bias,
    ("shaw", "keys"): tables.shaw_keys,
    ("shaw", "values"): tables.shaw_values,
}


def subject(settings: Settings) -> str:
    """The key of the views: the kind, or `compare`."""
    return "compare" if settings.compare else settings.encoding


def plots_of(settings: Settings, view: str | None, table: Table | None) -> tuple[str, list[Plot]]:
    """The view's name (its first when None) and its plots.

    Raises:
        InputError: no such view, one that needs a run, or dimensions out of range.
    """
    kind = subject(settings)
    name = view_of(kind, view)
    check_dims(settings)
    if kind == "compare":
        return name, compare.curves(settings, table)
    if not VIEWS[kind][name].needs_run:
        return name, FIXED[kind, name](settings)
    if table is None:
        raise needs_run(kind, name)
    return name, LEARNED[kind, name](settings, table)


def needs_run(kind: str, view: str) -> InputError:
    what = f"--encoding {kind}" if kind in NEEDS_RUN else f"--view {view}"
    return InputError(f"{what} shows what a model has learned: name one", hint="--run RUN, a run or checkpoint")


def check_dims(settings: Settings) -> None:
    """Raises InputError for a dimension, pair or head that there is not."""
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
