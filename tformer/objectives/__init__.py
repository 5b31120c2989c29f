"""The table of objectives."""

from __future__ import annotations

from typing import Any

from tformer.objectives.base import Objective
from tformer.objectives.causal_lm import CausalLm, CausalLmOptions
from tformer.tokenizer.special import SpecialIds

__all__ = ["OBJECTIVES", "CausalLmOptions", "ObjectiveOptions", "build_objective"]

ObjectiveOptions = CausalLmOptions  # becomes a union with the second kind

OBJECTIVES: dict[str, type[CausalLm]] = {"causal_lm": CausalLm}


def build_objective(options: ObjectiveOptions, special_ids: SpecialIds, **sizes: Any) -> Objective:
    """The objective of these options. `sizes`: seq_len, padding and pad_to, from the recipe's `data` section."""
    return OBJECTIVES[options.kind](options, special_ids, **sizes)
