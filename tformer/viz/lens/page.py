"""The lens as an HTML page: the answers after every layer and the parts of every logit, as fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tformer.inside.lens import MEASURES, Lens, LensReport
from tformer.support.formatting import fitted
from tformer.viz.attention.scene import run_name
from tformer.viz.lens import text
from tformer.viz.page import MAX_BYTES, render_page, within
from tformer.viz.picture import ReportView

CAUTION = (
    "A lens reads inner states as if they were the last: what it shows early need not be what the model uses. Parts "
    "are direct effects on the logit; what a part changes through later layers counts for those."
)
BODY = """\
<div id="controls" class="controls" role="group" aria-label="What is shown"></div>
<section id="lens" aria-label="The answer after each layer"></section>
<section id="cell" aria-label="The cell at the cursor" aria-live="polite"></section>
<section id="parts" aria-label="Parts of the logit"></section>
<section id="tuning" aria-label="Training of the tuned lens"></section>
"""


def view_of(report: LensReport, view: str) -> ReportView:
    """The report; view: what pictures, table and text show of it, `layers` or `parts`."""
    return ReportView(
        text.heading(report, view),
        lambda: text.document_of(report),
        lambda: text.plots_of(report, view),
        lambda: text.table_of(report, view),
        lambda **_: text.as_text(report, view),
        lambda **_: render(report),
    )


def render(report: LensReport, *, max_bytes: float = MAX_BYTES) -> str:
    """The page as text. Raises InputError for one of more than `max_bytes`."""
    blobs: dict[str, bytes] = {}
    lenses = [("logit", report.logit_lens)]
    if report.lens is not report.logit_lens:
        lenses.insert(0, ("tuned", report.lens))
    ids = sorted(report.words)
    numbers = {token: number for number, token in enumerate(ids)}
    for name, lens in lenses:
        _pack(name, lens, numbers, blobs)
    data: dict[str, Any] = {
        "lenses": [name for name, _ in lenses],
        "rows": list(report.lens.rows),
        "tokens": list(report.tokens),
        "positions": list(report.positions),
        "words": [report.words[token] for token in ids],
        "targets": [numbers[token] for token in report.lens.targets.tolist()],
        "top": report.lens.top_ids.shape[2],
        "pools": report.pools,
        "against": report.against,
        "withoutParts": report.without_parts,
        "parts": None,
        "heldOut": None if report.tuned_kl is None else report.tuned_kl.astype(float).tolist(),
    }
    if report.parts is not None:
        data["parts"] = {
            "names": [part.name for part in report.parts.parts],
            "layers": [part.layer for part in report.parts.parts],
            "columns": [part.column for part in report.parts.parts],
            "logits": report.parts.logits.astype(float).tolist(),
        }
        blobs["parts"] = report.parts.values.astype("<f4").tobytes()
    model = report.model
    read = " → ".join(fitted(text, 160) for text in report.texts.values())
    page = render_page(
        title="Lens",
        subtitle=f"{run_name(Path(str(model['name'])))}: {read}",
        style="attention.css",
        body=BODY,
        scripts=("lens.js",),
        data=data,
        blobs=blobs,
        notes=[
            CAUTION,
            *report.notes,
            f"Model: {model['name']}, step {model['step']}, sha256 {str(model['sha256'])[:16]}.",
            *(f"{name.capitalize()}: {text}" for name, text in report.texts.items()),
            *([f"Command: {report.command}"] if report.command else []),
        ],
    )
    return within(page, max_bytes, "--positions, --top-k or --max-tokens make it smaller")


def _pack(name: str, lens: Lens, numbers: dict[int, int], blobs: dict[str, bytes]) -> None:
    """The arrays of a lens as bytes; ids as numbers of the page's words."""
    for measure in MEASURES:
        blobs[f"{name}-{measure}"] = getattr(lens, measure).astype("<f4").tobytes()
    places = np.vectorize(numbers.__getitem__, otypes=[np.int64])(lens.top_ids)
    blobs[f"{name}-top"] = places.astype("<i4").tobytes()
    blobs[f"{name}-shares"] = lens.top_probabilities.astype("<f4").tobytes()
