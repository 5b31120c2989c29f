"""Kinds of position encodings. To add one: a file beside this one, and its options in `PositionOptions`."""

from __future__ import annotations

from typing import get_args

from tformer.nn.positions.base import LearnedOptions, NoPositionsOptions, Positions, PositionSizes
from tformer.nn.positions.biases import AlibiOptions, LearnedT5BiasOptions, T5BiasOptions
from tformer.nn.positions.fixed import Patch2dOptions, SinusoidalOptions
from tformer.nn.positions.rope import RopeOptions
from tformer.nn.positions.shaw import ShawOptions

PositionOptions = (
    NoPositionsOptions
    | SinusoidalOptions
    | LearnedOptions
    | RopeOptions
    | AlibiOptions
    | T5BiasOptions
    | LearnedT5BiasOptions
    | ShawOptions
    | Patch2dOptions
)
"""The table of kinds: the options of each, with its module class as `options.module`."""

POSITIONS: dict[str, type[Positions]] = {options.kind: options.module for options in get_args(PositionOptions)}

__all__ = ["POSITIONS", "PositionOptions", "PositionSizes", "Positions"]
