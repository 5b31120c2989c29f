"""The table of position kinds: adding one is a file beside this one and a row in each of the two tables."""

from __future__ import annotations

from tformer.nn.positions.alibi import AlibiOptions
from tformer.nn.positions.learned import LearnedOptions
from tformer.nn.positions.none import NoPositionsOptions
from tformer.nn.positions.patch2d import Patch2dOptions
from tformer.nn.positions.rope import RopeOptions
from tformer.nn.positions.shaw import ShawOptions
from tformer.nn.positions.sinusoidal import SinusoidalOptions
from tformer.nn.positions.t5_bias import T5BiasOptions

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
