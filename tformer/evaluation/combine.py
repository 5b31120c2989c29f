"""Figures over several texts from those of each: their sums are added, never their averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tformer.evaluation.lm import summarise


def combine_validation(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `evaluate_lm` would say of the texts as one, from what it said of each (at least one)."""
    if len(parts) == 1:
        return dict(parts[0])
    parts = [part for part in parts if part["tokens"]]
    return summarise(
        sum(part["loss"] * part["tokens"] for part in parts),
        sum(part["accuracy"] * part["tokens"] for part in parts),
        tokens=sum(part["tokens"] for part in parts),
        num_bytes=sum(part["bytes"] for part in parts),
        seconds=sum(part["tokens"] / part["tokens_per_second"] for part in parts),
    )
