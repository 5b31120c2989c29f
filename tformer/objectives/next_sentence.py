"""Next-sentence prediction: does the second text follow the first? (BERT, arXiv 1810.04805, section 3.1.)

    loss = -log softmax(head(x_cls))[label],   0: it follows, 1: it was drawn at random

Stands beside masked_lm, which makes the batches, and shares its forward pass. Its metrics are prefixed
`next_sentence.`, because those without a prefix belong to the first objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.classification_heads import NextSentenceHeadOptions
from tformer.nn.heads import ModelOutput
from tformer.objectives.base import CheckedOptions, LossResult, Metric, Objective, Term, class_soft_loss
from tformer.objectives.collate import pad_samples
from tformer.objectives.masked_lm import UNUSED_BY_ENCODERS


class NextSentence(Objective):
    """The objective. Its samples are pairs of texts; `label` is 1 where the second text is a random one."""

    data = "sentences"
    head = NextSentenceHeadOptions()
    parts = ("encoder",)
    without = ("decoder",)
    companion_of = "masked_lm"
    predicts = "0: the second text follows the first, 1: it was drawn at random"
    shown_metrics: ClassVar[Mapping[str, str]] = {"next_sentence_accuracy": "next sentence {:.4f}"}
    unused_keys = (*UNUSED_BY_ENCODERS, "data.document_mask", "data.packing", "generator")

    def collate(
        self, samples: Sequence[Example | np.ndarray] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """The pairs padded and without masks. `rng`: for random padding."""
        return pad_samples(samples, self.context, rng=rng)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"next_sentence": pairs in this host batch}."""
        return {self.head.kind: len(_labels(batch))}

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """One term. Metric: next_sentence_accuracy."""
        name, labels_B = self.head.kind, _labels(batch)
        logits_B2 = output.head(name)
        loss_sum = F.cross_entropy(logits_B2, labels_B, reduction="sum")
        correct = (logits_B2.argmax(dim=-1) == labels_B).sum()
        return LossResult(
            terms={name: Term(loss_sum, len(labels_B), self.options.weight)},
            metrics={f"{name}_accuracy": Metric(correct, len(labels_B))},
        )

    def soft_loss(
        self, student: ModelOutput, teacher: ModelOutput, batch: Batch, *, temperature: float, order_L: Tensor | None
    ) -> Tensor:
        """Soft targets over the two outcomes."""
        return class_soft_loss(student, teacher, self.head.kind, temperature, order_L)


def _labels(batch: Batch) -> Tensor:
    if batch.next_sentence_label is None:
        raise ValueError("next_sentence needs samples that are pairs of sentences with a label, found none")
    return batch.next_sentence_label


@dataclass(frozen=True)
class NextSentenceOptions(CheckedOptions):
    """Does the second text follow the first? Stands beside masked_lm (BERT, arXiv 1810.04805, section 3.1)."""

    kind: Literal["next_sentence"] = "next_sentence"
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = NextSentence
