"""Options of viz-pe: kind and sizes of an encoding, and the names, titles and captions of its views."""

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


@dataclass(frozen=True)
class View:
    """positions: how many tokens it shows when nobody says. needs_run: it shows what a model has learned."""

    title: str
    caption: str
    positions: int = 128
    needs_run: bool = False


SAME_CURVE = (
    "The mean of cos(Δ·ω) over all frequencies: the sinusoidal Gram matrix and RoPE's product of two all-ones "
    "vectors are this same function of the distance Δ, at equal width and base."
)

VIEWS: dict[str, dict[str, View]] = {
    "sinusoidal": {
        "traces": View(
            "Traces of the encoding, one per token",
            "Each line is one token's vector, read along the dimension index. Low dimensions differ from token to "
            "token; high ones hardly move: at the right all sines meet at 0, all cosines at 1.",
            50,
        ),
        "heatmap": View(
            "Position × dimension",
            "Each row is a token's vector. Columns at the left change with every token, those at the right take "
            "thousands of tokens for one period: fast and slow hands of one clock.",
        ),
        "waves": View(
            "Waves of single dimensions",
            "Each dimension is a sine or a cosine of the position; its wavelength grows geometrically with the index.",
        ),
        "gram": View(
            "Gram matrix: products of all pairs of tokens",
            "Every diagonal has one value (the matrix is Toeplitz): the product of two tokens' vectors depends on "
            "their distance alone, not on where they stand.",
        ),
        "distance": View(
            "Product of two encodings against their distance",
            SAME_CURVE + " It falls from 1 in ripples, and is even: it cannot tell before from after.",
            512,
        ),
        "wavelengths": View(
            "Wavelength of each pair",
            "From 2π tokens for the first pair towards 2π·base for the last; a straight line on this logarithmic axis.",
        ),
    },
    "learned": {
        "traces": View(
            "Traces of the table, one per token",
            "Each line is one position's learned vector, read along the dimension index.",
            50,
            True,
        ),
        "heatmap": View(
            "Position × dimension",
            "The learned table as it is. Structure along the rows means that training found position useful; a "
            "table of noise has not learned yet.",
            needs_run=True,
        ),
        "similarity": View(
            "Cosine similarity of all pairs of positions",
            "A bright band along the diagonal means that neighbours were given similar vectors.",
            needs_run=True,
        ),
        "norms": View(
            "Length of each position's vector",
            "Positions that training seldom saw keep the length of their initialisation; the first ones often "
            "stand out.",
            needs_run=True,
        ),
        "pca": View(
            "The path through the two main directions",
            "Positions along the first two principal components. A smooth curve means that order has become geometry.",
            needs_run=True,
        ),
        "beside": View(
            "Beside the sinusoidal encoding",
            "The learned table and sines of the same size, each on its own scale: few models rediscover sines exactly.",
            needs_run=True,
        ),
    },
    "rope": {
        "angles": View(
            "Angle of each pair, modulo 2π",
            "Pair i of a query or key at position m is turned by m·θᵢ. The colours are cyclic: the first pairs go "
            "round every few tokens, the last hardly leave 0.",
        ),
        "circles": View(
            "Pairs on their circles",
            "Each ring is one pair, its points the first positions: equal steps along the circle, large for the "
            "outer (first) pairs, small for the inner (last) ones.",
            12,
        ),
        "decay": View(
            "Mean cosine against distance",
            SAME_CURVE + " A query and a key that match lose weight, in ripples, as they move apart.",
            512,
        ),
        "rotation": View(
            "One vector, turned",
            "A head's vector of ones as it is turned for each position, by the very module that training uses: "
            "its length never changes, only the direction of its pairs.",
        ),
    },
    "alibi": {
        "slopes": View(
            "Slope of each head",
            "A geometric series: the first head sees only its neighbourhood, the last nearly everything.",
        ),
        "bias": View(
            "Bias added to the scores",
            "Minus the slope times the distance: nothing on the diagonal, ever more against far keys. A causal "
            "model uses the part below the diagonal.",
            32,
        ),
        "decay": View(
            "What the bias does to a weight",
            "exp(−slope·Δ), by which softmax multiplies the weight of a key at distance Δ: each head has its own "
            "horizon.",
            128,
        ),
    },
    "t5_bias": {
        "buckets": View(
            "Bucket of each offset",
            "Near keys have a bucket each, far ones share theirs in logarithmic steps, and beyond the maximum "
            "distance all fall into the last. Causal attention spends all buckets on the past.",
            160,
        ),
        "bias": View(
            "Learned bias, head × offset",
            "What each head adds to the score of a key at this offset: some heads look back, some next door, some far.",
            64,
            True,
        ),
    },
    "shaw": {
        "index": View(
            "Row of the table for each pair",
            "clip(j − i, −k, k) + k: every diagonal reads one row of the table, and beyond k tokens all distances "
            "read the same one.",
            48,
        ),
        "keys": View(
            "Learned vectors on the keys",
            "A row per clipped distance: what a query is compared with, beside the key itself.",
            needs_run=True,
        ),
        "values": View(
            "Learned vectors on the values",
            "A row per clipped distance: what is mixed in, beside the value itself.",
            needs_run=True,
        ),
    },
    "patch2d": {
        "similarity": View(
            "Similarity of each patch with all others",
            "One small map per patch, at its own place: how similar every patch's vector is to this one's. Row and "
            "column add up, so a patch stays closest to those of its own row and its own column.",
        ),
        "heatmap": View(
            "Patch × dimension",
            "Patches count row by row. The first half of the dimensions encodes the column and repeats with every "
            "row of patches; the second encodes the row.",
        ),
    },
    "compare": {
        "curves": View(
            "Decay with distance, side by side",
            "Each curve is scaled to 1 at its top: how much a pair of tokens keeps of its affinity as it moves "
            "apart, by position alone.",
        ),
    },
}


def view_of(encoding: str, name: str | None) -> str:
    """The name of a view of this kind, its first when None. Raises InputError for one that it does not have."""
    views = VIEWS[encoding]
    if name is None:
        return next(iter(views))
    if name not in views:
        raise InputError(f"--view {name}: {encoding} has no such view", hint=did_you_mean(name, views))
    return name
