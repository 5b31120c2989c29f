"""Several labels per example, each decided alone: binary cross-entropy of every label.

    loss = -sum_(i, c) [ y_ic log sigmoid(s_ic) + (1 - y_ic) log(1 - sigmoid(s_ic)) ],   s = head(x), B L decisions

Shapes: B examples, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tformer.data.batch import Batch
from tformer.objectives.base import LossResult, ObjectiveContext, Term
from tformer.objectives.examples import ExampleCollator
from tformer.objectives.options import MultiLabelOptions

TERM = "classifier"
"""The name of the loss term, and of the head that it reads."""


class MultiLabel:
    """The objective."""

    def __init__(self, options: MultiLabelOptions, context: ObjectiveContext) -> None:
        self.options, self.context = options, context
        self.collator = ExampleCollator(context, torch.float32, word_dropout=options.word_dropout)

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Examples of texts, or of images, with labels float [B, L] of zeros and ones (None when they have none)."""
        return self.collator(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"classifier": decisions in this host batch, B L}."""
        assert batch.labels is not None
        return {TERM: batch.labels.numel()}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in nats per decision. Metrics: nll_sum, correct (decisions) and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        labels_BL = batch.labels
        assert labels_BL is not None
        scores_BL = output.head(TERM)
        loss_sum = F.binary_cross_entropy_with_logits(scores_BL, labels_BL, reduction="sum")
        correct = ((scores_BL > 0) == labels_BL.bool()).sum()
        count = labels_BL.numel()
        return LossResult(
            terms={TERM: Term(loss_sum, count, self.options.weight)},
            metrics={"nll_sum": loss_sum.detach(), "correct": correct, "count": correct.new_full((), count)},
        )
