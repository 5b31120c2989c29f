"""Pictures and pages: positional encodings, attention, curves. matplotlib is imported here and nowhere else.

plots                 plots as values: heat maps, lines, colour maps; as JSON and CSV
figure, curves        the matplotlib back end; curves for sweep and bench reports
terminal              plots as terminal text
page, assets/         HTML pages: style, state in the URL, heat maps, lines, tables; no network
output                output format and file
pe/                   positional encodings (`viz-pe`)
attention/            attention weights (`viz-attention`)
plot/                 training curves (`plot`)
shapes                tensor shapes (`inspect --shapes`)

Importing the package imports neither torch nor matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer.viz.curves import Curve as Curve
    from tformer.viz.curves import draw_curves as draw_curves
    from tformer.viz.curves import picture_format as picture_format

__all__ = ["Curve", "draw_curves", "picture_format"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tformer.viz import curves

        return getattr(curves, name)
    raise AttributeError(f"module 'tformer.viz' has no attribute '{name}'")
