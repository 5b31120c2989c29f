"""The plan of a pruning, as the options of `tformer prune` give it: layers by name, number or share; heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from tformer.support.bounds import Positive, Share
from tformer.support.errors import InputError
from tformer.support.formatting import whole_number
from tformer.support.options import Panel, comma_list
from tformer.support.rules import Checked, exclude, needs, required

LAYERS, HEADS = Panel("Layers"), Panel("Heads")
OF_LAYERS = ("--keep-layers", "--drop-layers", "--keep", "--rate")

Strategy = Literal["every-other", "search", "learned"]
Stacks = Literal["encoder", "decoder", "both"]
HeadsPerLayer = Literal["even", "free"]


@dataclass(frozen=True, kw_only=True)
class PrunePlan(Checked):
    """Layers and heads to remove from the chosen stacks; numbers apply to each stack. None: not given."""

    RULES = (
        exclude(*OF_LAYERS),
        needs("--strategy", "--keep", "--rate"),
        needs("--max-trials", "--strategy search"),
        needs("--heads-per-layer", "--drop-heads"),
        required(*OF_LAYERS, "--drop-heads", hint="--rate 0.5 removes every other layer"),
    )

    keep_layers: Annotated[
        str | None, LAYERS("--keep-layers", metavar="0,2,4", help="Layers to keep, numbered from 0.")
    ] = None
    drop_layers: Annotated[str | None, LAYERS("--drop-layers", metavar="1,3", help="Layers to remove.")] = None
    keep: Annotated[
        Positive | None, LAYERS("--keep", metavar="N", help="Number of layers to keep, chosen by --strategy.")
    ] = None
    rate: Annotated[
        Share | None, LAYERS("--rate", metavar="P", help="Share of layers to remove, chosen by --strategy.")
    ] = None
    strategy: Annotated[
        Strategy | None,
        LAYERS(
            "--strategy",
            help="How layers are chosen. every-other: evenly spaced. search: the best score on the data. learned: the "
            "lowest learned LayerDrop rates.",
            default="every-other",
        ),
    ] = None
    stack: Annotated[
        Stacks | None,
        LAYERS(
            "--stack",
            help="Stacks to prune; layer numbers apply to each.",
            default="all stacks of the model",
            rare=True,
        ),
    ] = None
    max_trials: Annotated[
        Positive | None,
        LAYERS(
            "--max-trials",
            metavar="N",
            help="Maximum number of subsets that a search measures; if there are more, it removes one layer at a time "
            "(greedy).",
            default="100",
            rare=True,
        ),
    ] = None
    heads: Annotated[
        str | None,
        HEADS(
            "--drop-heads",
            metavar="RATE|N",
            help="Share (below 1) or number of attention heads to remove, the least important for the loss first; "
            "every layer keeps one.",
        ),
    ] = None
    heads_per_layer: Annotated[
        HeadsPerLayer | None,
        HEADS(
            "--heads-per-layer",
            help="even: remove the same number from every layer. free: remove the least important heads of all layers.",
            rare=True,
            default="even",
        ),
    ] = None

    def check(self) -> None:
        """Raise InputError for options that contradict each other or are out of range."""
        super().check()
        _ = self.kept_layers, self.dropped_layers, self.head_amount

    @cached_property
    def kept_layers(self) -> tuple[int, ...] | None:
        """The numbers in --keep-layers."""
        return _numbers("--keep-layers", self.keep_layers)

    @cached_property
    def dropped_layers(self) -> tuple[int, ...] | None:
        """The numbers in --drop-layers."""
        return _numbers("--drop-layers", self.drop_layers)

    @cached_property
    def head_amount(self) -> float | None:
        """Below 1 the share of all heads to remove, else their number."""
        if self.heads is None:
            return None
        try:
            amount = float(self.heads)
        except ValueError:
            amount = 0.0
        if not (0 < amount < 1 or (amount >= 1 and amount.is_integer())):
            raise InputError(
                f"--drop-heads: expected a share between 0 and 1, or a number of heads, found '{self.heads}'"
            )
        return amount

    @property
    def cuts_layers(self) -> bool:
        return any(way is not None for way in (self.keep_layers, self.drop_layers, self.keep, self.rate))

    @property
    def needs_data(self) -> bool:
        """Whether the choice of layers or heads depends on data."""
        return self.heads is not None or self.strategy == "search"


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    """`0,2,4` as numbers."""

    def read(word: str) -> int | None:
        number = whole_number(word.removeprefix("-"))
        return -number if number is not None and word.startswith("-") else number

    def refuse(word: str) -> InputError:
        return InputError(f"{flag}: expected numbers of layers such as 0,2,4, found '{word}' in '{text}'")

    return None if text is None else comma_list(text, read, refuse)
