"""What of a positional encoding is to be shown: its kind and sizes, checked before anything is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tformer.errors import InputError, did_you_mean

ENCODINGS = ("sinusoidal", "learned", "rope", "alibi", "t5_bias", "shaw", "patch2d")
NEEDS_RUN = ("learned",)  # kinds of which nothing can be shown without weights
LAYOUTS = {"sinusoidal": ("interleaved", "halves", "fairseq"), "rope": ("halves", "interleaved")}
ALL = ("all",)  # to compare whatever can be
MAX_D_MODEL, MAX_POSITIONS, MAX_HEADS = 8192, 4096, 256


@dataclass(frozen=True)
class Settings:
    """Sizes of an encoding.

    Attributes:
        positions: how many tokens; None: what suits each view.
        dims: the dimensions (rope: pairs; alibi: heads) to draw in views of single ones; None: some.
        layout: of sinusoidal's columns or rope's pairs; None: the kind's own.
        clip: Shaw's k. grid: patches a side.
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
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def layout_used(self) -> str:
        return self.layout or LAYOUTS.get(self.encoding, ("",))[0]


def check_settings(settings: Settings) -> None:
    """Raises InputError for what cannot be: each message names the option, what was found and what was expected."""
    check_encoding(settings.encoding)
    for name, value, low, high in (
        ("--d-model", settings.d_model, 2, MAX_D_MODEL),
        ("--positions", 2 if settings.positions is None else settings.positions, 2, MAX_POSITIONS),
        ("--heads", settings.heads, 1, MAX_HEADS),
        ("--clip", settings.clip, 1, MAX_POSITIONS),
        ("--grid", settings.grid, 2, 32),
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
    if {"rope", *ALL} & {settings.encoding, *settings.compare}:
        _check_rope(settings)
    _check_t5(settings)
    if settings.layout is not None:
        known = LAYOUTS.get(settings.encoding, ())
        if settings.layout not in known:
            expected = f"expected {' or '.join(known)}" if known else f"{settings.encoding} has no layouts"
            raise InputError(f"--layout {settings.layout}: {expected}")
    for kind in () if settings.compare == ALL else settings.compare:
        check_encoding(kind, option="--compare")


def check_encoding(kind: str, *, option: str = "--encoding") -> None:
    if kind not in ENCODINGS:
        found = kind or "(nothing)"
        raise InputError(f"{option} {found}: unknown", hint=did_you_mean(kind, ENCODINGS))


def _check_rope(settings: Settings) -> None:
    if settings.d_model % settings.heads or settings.head_dim % 2:
        raise InputError(
            f"rope turns pairs within a head: --d-model {settings.d_model} over --heads {settings.heads} is "
            f"{settings.d_model / settings.heads:g} a head, expected an even number"
        )


def _check_t5(settings: Settings) -> None:
    if settings.buckets < 4:
        raise InputError(f"--buckets {settings.buckets}: expected at least 4")
    if settings.max_distance <= settings.buckets // 2:
        raise InputError(
            f"--max-distance {settings.max_distance}: expected more than half the buckets ({settings.buckets // 2})"
        )


def _even(value: int, of: int = 2) -> str:
    below = value // of * of
    return f"try {max(below, of)} or {below + of}"
