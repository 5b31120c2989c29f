"""Regression: one score per example, as it stands in the data, by squared error.

    loss = sum_i (head(x_i) - y_i)^2

Scores are neither shifted nor scaled: a head that starts at the mean of the training scores does as well, and what is
stored predicts the data's own numbers.

Shapes: B examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tformer.data.batch import Batch
from tformer.objectives.base import LossResult, ObjectiveContext, Term
from tformer.objectives.examples import ExampleCollator
from tformer.objectives.options import RegressionOptions

TERM = "regression"
"""The name of the loss term, and of the head that it reads."""


class Regression:
    """The objective."""

    def __init__(self, options: RegressionOptions, context: ObjectiveContext) -> None:
        self.options, self.context = options, context
        self.collator = ExampleCollator(
            context, torch.float32, word_dropout=options.word_dropout, swap_pairs=options.swap_pairs
        )

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Examples of texts, or of images, with labels float [B] (None when they have none)."""
        return self.collator(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"regression": examples in this host batch}."""
        assert batch.labels is not None
        return {TERM: len(batch.labels)}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in squared units. Metrics: squared_error_sum, absolute_error_sum and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        labels_B = batch.labels
        assert labels_B is not None
        error_B = output.head(TERM).squeeze(-1) - labels_B
        loss_sum = error_B.square().sum()
        return LossResult(
            terms={TERM: Term(loss_sum, len(labels_B), self.options.weight)},
            metrics={
                "squared_error_sum": loss_sum.detach(),
                "absolute_error_sum": error_B.detach().abs().sum(),
                "count": torch.full((), len(labels_B), device=labels_B.device),
            },
        )
