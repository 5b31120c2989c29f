"""The path of a tensor as an HTML page: every step with its shape, what comes in, what goes out, and its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from tformer.viz.page import render_page

STYLE = "shapes.css"
SCRIPTS = ("shapes.js",)
WITHOUT = ("controls.js", "pictures.js", "heatmap.js", "lines.js")
BODY = """\
<p class="caption">Choose a tensor, or press ↓ and ↑ for the next and the previous one, → for where it goes, ← for
where it comes from.</p>
<div id="example"></div>
<div class="shapes">
<div id="path" role="group" aria-label="The tensors in the order of computation"></div>
<div id="detail" aria-live="polite"></div>
</div>
<h2>Letters</h2>
<div id="letters"></div>
"""


def render(
    traces: Mapping[str, Mapping[str, Any]],
    *,
    title: str,
    subtitle: str,
    names: Mapping[str, str],
    example: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page as text.

    Args:
        traces: documents of `inspect --shapes` (`Trace.to_json`), by the heading of the model; "": no heading.
        names: meaning of each letter of a shape.
        example: document of the batch's first example (`tasks.example`).
    """
    style = files("tformer.viz").joinpath("assets", STYLE).read_text(encoding="utf-8")
    data = {
        "models": [{"title": heading, **trace} for heading, trace in traces.items()],
        "names": dict(names),
        "example": example,
    }
    return render_page(
        title=title,
        subtitle=subtitle,
        body=f"<style>\n{style}</style>\n{BODY}",
        scripts=SCRIPTS,
        data=data,
        notes=notes,
        without=WITHOUT,
    )
