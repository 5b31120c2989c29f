"""What shall go: layers by name, number or share, heads by number or share, or both; and from which stacks."""

from __future__ import annotations

from dataclasses import dataclass

from tformer.errors import InputError
from tformer.model import Transformer

SIDES = ("encoder", "decoder")


@dataclass(frozen=True)
class Plan:
    """What a person asks for; None: nothing of that kind.

    Attributes:
        stack: `encoder`, `decoder` or `both`; None: the stacks that there are. Numbers apply to each.
        keep, rate: how many layers stay, or which share goes, by `strategy`.
        max_trials: the most subsets of layers that a search measures one by one.
        heads: below 1 the share of all heads to take out, else how many.
        heads_per_layer: `even` or `free`.
    """

    stack: str | None = None
    keep_layers: tuple[int, ...] | None = None
    drop_layers: tuple[int, ...] | None = None
    keep: int | None = None
    rate: float | None = None
    strategy: str = "every-other"
    max_trials: int = 100
    heads: float | None = None
    heads_per_layer: str = "even"

    @property
    def names_layers(self) -> bool:
        return self.keep_layers is not None or self.drop_layers is not None

    @property
    def cuts_layers(self) -> bool:
        return self.names_layers or self.keep is not None or self.rate is not None

    @property
    def searches(self) -> bool:
        return self.cuts_layers and not self.names_layers and self.strategy == "search"

    @property
    def needs_data(self) -> bool:
        """Whether what goes depends on data."""
        return self.heads is not None or self.searches


def stacks_of(model: Transformer, asked: str | None) -> tuple[str, ...]:
    """The stacks that are meant. Raises InputError for one that the model has not."""
    there = tuple(side for side in SIDES if getattr(model, side) is not None)
    wanted = there if asked is None else SIDES if asked == "both" else (asked,)
    missing = [side for side in wanted if side not in there]
    if missing:
        raise InputError(f"--stack {asked}: the model has no {missing[0]}, its layers are in the {there[0]}")
    return wanted
