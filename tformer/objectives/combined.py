"""Several objectives in one model: one batch, one forward pass, the terms of all (BERT's masked LM + next sentence).

The first makes the batches; each forms its own terms of the same `Output`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tformer.data.batch import Batch
from tformer.errors import InputError
from tformer.objectives.base import LossResult, Objective, SharedObjective
from tformer.objectives.next_sentence import NextSentence


class Combined:
    """Raises InputError for objectives that cannot share a forward pass, or that stand in the wrong order."""

    def __init__(self, objectives: Sequence[Objective]) -> None:
        kinds = [_kind(objective) for objective in objectives]
        for kind, objective in zip(kinds, objectives, strict=True):
            if not hasattr(objective, "terms"):
                raise InputError(f"objectives: {kind} runs two models and stands alone, found {', '.join(kinds)}")
            if kinds.count(kind) > 1:
                raise InputError(f"objectives: {kind} is listed twice")
        if isinstance(objectives[0], NextSentence):
            raise InputError(
                "objectives: next_sentence cannot be the first of several, because the first one makes the batches",
                hint=f"list it after {kinds[1]}",
            )
        self.objectives: list[SharedObjective] = list(objectives)  # type: ignore[arg-type]

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """The first objective's batch."""
        return self.objectives[0].collate(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """Every term's predictions in this host batch."""
        return _merged([objective.label_count(batch) for objective in self.objectives])

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One forward pass, and every term of it."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The terms and metrics of all objectives together."""
        results = [objective.terms(output, batch) for objective in self.objectives]
        return LossResult(
            terms=_merged([result.terms for result in results]),
            metrics=_merged([result.metrics for result in results]),
        )


def _kind(objective: Any) -> str:
    return objective.options.kind


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = {name: value for part in parts for name, value in part.items()}
    assert len(merged) == sum(len(part) for part in parts), "two objectives use one name"
    return merged
