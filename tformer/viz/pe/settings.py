"""Settings of viz-pe: kind and sizes of an encoding, checked before anything is computed; the type of a view."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from tformer.nn.positions import POSITIONS, PositionOptions
from tformer.support.errors import InputError, did_you_mean
from tformer.viz.plots import Plot

OPTIONS: dict[str, Any] = {options.kind: options for options in get_args(PositionOptions)}
ENCODINGS = tuple(kind for kind, module in POSITIONS.items() if module.has_embed or module.acts_in_attention)
LAYOUTS: dict[str, tuple[str, ...]] = {"sinusoidal": get_args(get_type_hints(OPTIONS["sinusoidal"])["layout"])}
"""The layouts that change a picture: in that of RoPE only the pairs stand elsewhere."""
ALL = ("all",)  # --compare all: every kind with a curve
MAX_D_MODEL, MAX_POSITIONS, MAX_HEADS = 8192, 4096, 256


@dataclass(frozen=True)
class EncodingSettings:
    """The kind and the sizes of an encoding.

    Attributes:
        positions: number of tokens; None: the default of each view.
        dims: dimensions (rope: pairs; alibi: heads) to draw in views of single ones; None: a few.
        layout: of sinusoidal's columns; None: the first.
        clip: Shaw's k. grid: patches along a side.
        compare: kinds in the view that overlays them.
    """

    encoding: str = "sinusoidal"
    d_model: int = 512
    positions: int | None = None
    base: float = 10000.0
    dims: tuple[int, ...] | None = None
    heads: int = 8
    layout: str | None = None
    buckets: int = 32
    max_distance: int = 128
    clip: int = 16
    grid: int = 8
    compare: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """The key of the views: the kind, or `compare`."""
        return "compare" if self.compare else self.encoding

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def layout_used(self) -> str:
        return self.layout or LAYOUTS.get(self.encoding, ("",))[0]


def check_settings(settings: EncodingSettings) -> None:
    """Raise InputError for impossible options: the message names the option, what was found and what was expected."""
    check_encoding(settings.encoding)
    for name, value, low, high in (
        ("--d-model", settings.d_model, 2, MAX_D_MODEL),
        ("--positions", 2 if settings.positions is None else settings.positions, 2, MAX_POSITIONS),
        ("--num-heads", settings.heads, 1, MAX_HEADS),
    ):
        if not low <= value <= high:
            raise InputError(f"{name} {value}: expected {low} to {high:,}")
    if not (math.isfinite(settings.base) and settings.base > 1):
        raise InputError(f"--base {settings.base:g}: expected a number above 1", hint="the paper's is 10000")
    if settings.d_model % 2:
        raise InputError(
            f"--d-model {settings.d_model} is odd: sines and cosines come in pairs", hint=_even(settings.d_model)
        )
    if settings.encoding == "patch2d" and settings.d_model % 4:
        raise InputError(
            f"--d-model {settings.d_model}: patch2d needs a multiple of 4", hint=_even(settings.d_model, 4)
        )
    uses_rope = bool({"rope", *ALL} & {settings.encoding, *settings.compare})
    if uses_rope and (settings.d_model % settings.heads or settings.head_dim % 2):
        raise InputError(
            f"rope turns pairs within a head: --d-model {settings.d_model} over --num-heads {settings.heads} is "
            f"{settings.d_model / settings.heads:g} a head, expected an even number"
        )
    if settings.layout is not None:
        known = LAYOUTS.get(settings.encoding, ())
        if settings.layout not in known:
            unused = f"pictures of {settings.encoding} do not depend on a layout"
            expected = f"expected {' or '.join(known)}" if known else unused
            raise InputError(f"--layout {settings.layout}: {expected}")
    for kind in () if settings.compare == ALL else settings.compare:
        check_encoding(kind, option="--compare")


def check_encoding(kind: str, *, option: str = "--encoding") -> None:
    if kind not in ENCODINGS:
        found = kind or "(nothing)"
        raise InputError(f"{option} {found}: unknown", hint=did_you_mean(kind, ENCODINGS))


def _even(value: int, of: int = 2) -> str:
    below = value // of * of
    return f"try {max(below, of)} or {below + of}"


@dataclass(frozen=True)
class EncodingView:
    """One way to show a kind of encoding.

    Attributes:
        draw: called with the view, the settings and, if `needs_run`, the learned table. Its plots need no caption and,
            unless there are several, no title: they take those of the view.
        positions: number of tokens shown by default.
        needs_run: it shows what a model has learned.
    """

    title: str
    caption: str
    draw: Callable[..., Plot | list[Plot]]
    positions: int = 128
    needs_run: bool = False

    def rows(self, settings: EncodingSettings) -> int:
        """Number of tokens to show."""
        return settings.positions or self.positions
