"""The table of position kinds: adding one is a file beside this one, a row in the union and a row in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tformer.nn.positions.base import (
    LearnedOptions,
    LearnedPositions,
    NoPositions,
    NoPositionsOptions,
    Positions,
)
from tformer.nn.positions.biases import (
    AlibiOptions,
    AlibiPositions,
    T5BiasOptions,
    T5BiasPositions,
)
from tformer.nn.positions.rope import RopeOptions, RopePositions
from tformer.nn.positions.shaw import ShawOptions, ShawPositions
from tformer.nn.positions.sinusoidal import (
    Patch2dOptions,
    Patch2dPositions,
    SinusoidalOptions,
    SinusoidalPositions,
)

PositionOptions = (
    NoPositionsOptions
    | SinusoidalOptions
    | LearnedOptions
    | RopeOptions
    | AlibiOptions
    | T5BiasOptions
    | ShawOptions
    | Patch2dOptions
)


@dataclass(frozen=True)
class PositionSizes:
    """What the stack knows and a position kind may need. grid: (rows, columns, has a class token) of an image."""

    d_model: int
    num_heads: int
    head_dim: int
    value_dim: int
    max_seq_len: int
    bidirectional: bool
    grid: tuple[int, int, bool] | None


def _patch2d(options: Any, sizes: PositionSizes) -> Positions:
    if sizes.grid is None:
        raise ValueError("patch2d positions need an image model: its grid of patches is unknown")
    return Patch2dPositions(options, d_model=sizes.d_model, grid=sizes.grid)


POSITIONS: dict[str, Callable[[Any, PositionSizes], Positions]] = {
    "none": lambda options, sizes: NoPositions(),
    "sinusoidal": lambda options, sizes: SinusoidalPositions(
        options, d_model=sizes.d_model, max_seq_len=sizes.max_seq_len
    ),
    "learned": lambda options, sizes: LearnedPositions(options, d_model=sizes.d_model, max_seq_len=sizes.max_seq_len),
    "rope": lambda options, sizes: RopePositions(options, head_dim=sizes.head_dim, max_seq_len=sizes.max_seq_len),
    "alibi": lambda options, sizes: AlibiPositions(num_heads=sizes.num_heads),
    "t5_bias": lambda options, sizes: T5BiasPositions(
        options, num_heads=sizes.num_heads, bidirectional=sizes.bidirectional
    ),
    "shaw": lambda options, sizes: ShawPositions(options, head_dim=sizes.head_dim, value_dim=sizes.value_dim),
    "patch2d": _patch2d,
}


def build_positions(
    options: PositionOptions,
    *,
    d_model: int,
    num_heads: int,
    head_dim: int,
    value_dim: int,
    max_seq_len: int,
    bidirectional: bool,
    grid: tuple[int, int, bool] | None = None,
) -> Positions:
    """The module of a position kind. ValueError when a size does not suit it (odd d_model for sinusoids, ...)."""
    sizes = PositionSizes(d_model, num_heads, head_dim, value_dim, max_seq_len, bidirectional, grid)
    return POSITIONS[options.kind](options, sizes)


__all__ = ["POSITIONS", "PositionOptions", "PositionSizes", "Positions", "build_positions"]
