"""Next-sentence prediction: does the second text follow the first? (BERT, arXiv 1810.04805, section 3.1.)

    loss = −log softmax(head(x_cls))[label],   0: it follows, 1: it was drawn at random

Stands beside masked_lm, which makes the batches, and shares its forward pass. Its figures are prefixed
`next_sentence.`, since those of the first objective are the run's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.objectives.base import LossResult, ObjectiveContext, Term
from tformer.objectives.collate import pad_samples
from tformer.objectives.options import NextSentenceOptions

TERM = "next_sentence"
"""The name of the loss term, and of the head that it reads."""


class NextSentence:
    """The objective. Its samples are pairs whose `label` says whether the second text is a random one."""

    def __init__(self, options: NextSentenceOptions, context: ObjectiveContext) -> None:
        self.options, self.context = options, context

    def collate(
        self, samples: Sequence[Example | np.ndarray] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """The pairs, padded, nothing hidden. `rng`: random padding."""
        return pad_samples(samples, self.context, rng=rng)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"next_sentence": pairs in this host batch}."""
        return {TERM: len(_labels(batch))}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in nats. Metrics: next_sentence.nll_sum, .correct and .count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        labels_B = _labels(batch)
        logits_B2 = output.head(TERM)
        loss_sum = F.cross_entropy(logits_B2, labels_B, reduction="sum")
        correct = (logits_B2.argmax(dim=-1) == labels_B).sum()
        count = labels_B.new_full((), len(labels_B))
        figures = {"nll_sum": loss_sum.detach(), "correct": correct, "count": count}
        return LossResult(
            terms={TERM: Term(loss_sum, len(labels_B), self.options.weight)},
            metrics={f"{TERM}.{name}": value for name, value in figures.items()},
        )


def _labels(batch: Batch) -> Tensor:
    if batch.next_sentence_label is None:
        raise ValueError("next_sentence needs samples that are pairs of sentences with a label, found none")
    return batch.next_sentence_label
