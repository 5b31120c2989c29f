"""Pictures and pages: positional encodings, attention, curves. matplotlib is imported here and nowhere else.

page, assets/         the one shell of all pages: style, state in the URL, heat maps, lines, tables, no network
output                in what format and where to
colours, terminal     colour maps, and plots in characters
curves                curves for reports, as SVG, PNG or PDF
pe/, attention/       positional encodings; which token looks at which

Importing the package loads nothing heavy: a page needs no matplotlib.
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
