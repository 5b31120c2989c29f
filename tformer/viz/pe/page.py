"""Positional encodings as an HTML page: every kind, its sizes under sliders, drawn by the page's script.

The browser computes fixed encodings in double precision and checks them against values of the training modules that the
page contains; tables that a run has learned are embedded.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tformer.nn.positions import POSITIONS
from tformer.nn.positions.biases import alibi_slopes
from tformer.support.errors import InputError
from tformer.viz.page import render_page
from tformer.viz.pe.fixed import bucket_of, fp32_error, patch_table, rope_turns, shaw_index, sinusoidal_table
from tformer.viz.pe.learned import RANDOM, LearnedEncoding
from tformer.viz.pe.selection import choose_view, document_of, heading, plots_of, views_of
from tformer.viz.pe.settings import ENCODINGS, LAYOUTS, EncodingSettings
from tformer.viz.pe.views import VIEWS, kinds_compared, similarity_curve
from tformer.viz.picture import ReportView
from tformer.viz.plots import Heat, Numbers, Plot

SAMPLES = 48  # reference values of each table
ROWS = 500

Case = dict[str, Any]  # name, arguments, values as [row, column, value]


def reference_cases(settings: EncodingSettings) -> list[Case]:
    """Reference values at the sizes of the settings, and at unusual ones."""
    cases = []
    for layout in LAYOUTS["sinusoidal"]:
        for d_model, base in ((settings.d_model, settings.base), (6, 100.0), (2, 10000.0)):
            at = replace(settings, encoding="sinusoidal", layout=layout, d_model=d_model, base=base)
            cases.append(_case("sinusoidal", [ROWS, d_model, base, layout], sinusoidal_table(at, ROWS)))
    for head_dim, base in ((64, settings.base), (2, 500000.0)):
        cosines, sines = rope_turns(replace(settings, d_model=head_dim, heads=1, base=base), ROWS)
        cases.append(_case("ropeCos", [ROWS, head_dim, base], cosines))
        cases.append(_case("ropeSin", [ROWS, head_dim, base], sines))
    for heads in {settings.heads, 8, 12}:
        cases.append(_case("alibiSlopes", [heads], np.array(alibi_slopes(heads))[:, None]))
    offsets = np.arange(-300, 301, dtype=float)
    for buckets, distance in {(settings.buckets, settings.max_distance), (32, 128), (64, 333), (10, 20)}:
        at = replace(settings, buckets=buckets, max_distance=distance)
        for both in (True, False):
            values = bucket_of(at, offsets, bidirectional=both)[:, None]
            cases.append(_case("t5Buckets", [300, buckets, distance, both], values, samples=len(offsets)))
    cases.append(_case("shawIndex", [40, settings.clip], shaw_index(settings, 40)))
    for width in {max(4, settings.d_model // 4 * 4), 8}:
        at = replace(settings, d_model=width)
        cases.append(_case("patch2d", [settings.grid, width, settings.base], patch_table(at)))
    return cases


def _case(name: str, arguments: list[Any], table: Numbers, *, samples: int = SAMPLES) -> Case:
    """Reference values at fixed places of a table: corners, and a stride without a common factor with the width."""
    rows, columns = table.shape
    count = rows * columns
    if count <= samples:
        places = np.arange(count)
    else:
        places = np.unique(
            np.concatenate(([0, columns - 1, count - columns, count - 1], np.arange(samples) * 7919 % count))
        )
    values = [[int(at // columns), int(at % columns), float(table.flat[at])] for at in places]
    return {"name": name, "arguments": arguments, "values": values}


SCRIPTS = ("pe_maths.js", "pe_views.js", "pe.js")
MAX_TABLE_BYTES = 16 << 20  # of an embedded table in fp32
ERROR_ROWS = 2048

BODY = """<section class="controls" id="controls" aria-label="What to show"></section>
<section aria-labelledby="view-title">
<h2 id="view-title"></h2>
<p class="caption" id="status"></p>
<div class="panels" id="panels"></div>
<p class="caption" id="caption"></p>
<details id="numbers"><summary>The numbers as a table</summary><div id="table"></div></details>
</section>
<p class="help" id="agreement" role="status"></p>"""

WORDS = ("title", "caption", "positions", "needs_run")  # of a view
COMPARE = "How the score of a pair of tokens depends on their distance, by position alone."


def view_of(settings: EncodingSettings, view: str | None, table: LearnedEncoding | None, *, command: str) -> ReportView:
    """A view in every form; its page has all views."""
    return ReportView(
        heading(settings, table),
        lambda: document_of(settings, view, table),
        lambda: plots_of(settings, view, table)[1],
        page=lambda **_: explorer(settings, view, table, command=command),
    )


def explorer(settings: EncodingSettings, view: str | None, table: LearnedEncoding | None, *, command: str) -> str:
    """The page as text, opened at a kind and a view (by default the kind's first).

    Raises:
        InputError: like `choose_view`, before anything is computed; the learned table is too large for a page.
    """
    view, _ = choose_view(settings, view, table)
    compared = kinds_compared(settings, table)
    learned, blobs = (None, {}) if table is None else _learned(settings, table)
    embedded = _embedded_plots(settings, table, blobs)
    sizes = {name: value for name, value in asdict(settings).items() if name not in ("compare", "positions", "dims")}
    data = {
        "kind": settings.subject,
        "view": view,
        "settings": {**sizes, "layout": settings.layout_used, "positions": settings.positions},
        "dims": settings.dims,
        "compare": compared,
        "views": {
            kind: {name: {word: getattr(found, word) for word in WORDS} for name, found in views_of(kind).items()}
            for kind in (*ENCODINGS, "compare")
        },
        "about": {**{kind: POSITIONS[kind].about for kind in ENCODINGS}, "compare": COMPARE},
        "layouts": LAYOUTS,
        "reference": reference_cases(settings),
        "fp32": {"error": fp32_error(settings, ERROR_ROWS), "rows": ERROR_ROWS},
        "learned": learned,
        "embedded": embedded,
    }
    subtitle = "How a Transformer encodes the position of a token" + (f": {table.note}" if table is not None else "")
    return render_page(
        title="Positional encodings",
        subtitle=subtitle,
        body=BODY,
        scripts=SCRIPTS,
        data=data,
        blobs=blobs,
        notes=(f"Command: {command}",),
    )


def _embedded_plots(
    settings: EncodingSettings, table: LearnedEncoding | None, blobs: dict[str, bytes]
) -> dict[str, Any]:
    """{kind: {view: heat maps}} of kinds that the page's script cannot compute; their values are added to `blobs`."""

    def embed(name: str, plot: Plot) -> dict[str, Any]:
        assert isinstance(plot, Heat)
        blob = f"{name}-{len(blobs)}"
        blobs[blob] = np.ascontiguousarray(plot.values, dtype="<f4").tobytes()
        low, high = plot.limits
        rows, columns = plot.values.shape
        return {"blob": blob, "title": plot.title, "rows": rows, "columns": columns, "rowTitle": plot.row_label,
                "colTitle": plot.column_label, "colours": plot.colours, "min": low, "max": high,
                "barLabel": plot.value_label}  # fmt: skip

    found: dict[str, Any] = {}
    for kind in ENCODINGS:
        if kind in VIEWS:
            continue
        own = table if table is not None and table.encoding == kind else None
        at = settings if settings.encoding == kind else EncodingSettings(encoding=kind)
        shown = [name for name, view in views_of(kind).items() if own is not None or not view.needs_run]
        found[kind] = {name: [embed(f"{kind}-{name}", plot) for plot in plots_of(at, name, own)[1]] for name in shown}
    return found


def _learned(settings: EncodingSettings, table: LearnedEncoding) -> tuple[dict[str, Any], dict[str, bytes]]:
    found: dict[str, Any] = {"kind": table.encoding, "name": table.name, "note": None if table.trained else RANDOM}
    blobs: dict[str, bytes] = {}

    def embed(name: str, numbers: Numbers) -> None:
        raw = np.ascontiguousarray(numbers, dtype="<f4").tobytes()
        if len(raw) > MAX_TABLE_BYTES:
            raise InputError(
                f"the learned table of {numbers.shape[0]:,} x {numbers.shape[1]:,} numbers takes {len(raw) >> 20} MiB, "
                f"a page holds {MAX_TABLE_BYTES >> 20}",
                hint="show fewer: --positions 1024",
            )
        blobs[name] = raw
        found[name] = list(numbers.shape)

    if table.weight is not None:
        weight = table.weight[: settings.positions] if settings.positions else table.weight
        embed("weight", weight)
        shown = LearnedEncoding(table.encoding, table.name, weight=weight)
        curve = similarity_curve(shown.similarity(min(len(weight), 1024)), 512)
        found["curves"] = {"learned": np.round(curve / curve.max(), 6).tolist()}
    if table.bias is not None:
        embed("bias", table.bias)
        found["bidirectional"] = table.bidirectional
    return found, blobs
