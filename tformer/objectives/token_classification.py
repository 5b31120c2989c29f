"""Token classification: a label for each word, as named entities and parts of speech (BERT, arXiv 1810.04805, 5.3).

    loss = -sum over labelled tokens of log softmax(head(x)_t)_(y_t)

The first piece of a word has the word's label, the others have none.

Shapes: B sentences, T tokens, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.nn.classification_heads import TokenClassifierHeadOptions
from tformer.nn.heads import HeadOptions, ModelOutput
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.soft_targets import soft_cross_entropy
from tformer.objectives.base import IMAGE_KEYS, CheckedOptions, DataKind, LossResult, Metric, Objective, Term, in_order
from tformer.objectives.labelled import LabelledObjective


class TokenClassification(LabelledObjective):
    """One label per word, at its first token."""

    data: ClassVar[DataKind] = "tagged"
    head: ClassVar[HeadOptions] = TokenClassifierHeadOptions()
    parts = ("encoder",)
    without = ("decoder",)
    metrics = ("loss", "accuracy", "f1_macro", "f1_micro")
    predicts = "the label of each word, at its first token"
    unused_keys = (
        *LabelledObjective.unused_keys,
        *IMAGE_KEYS,
        *("data.columns.text2", "data.columns.group", "data.label_separator", "data.truncation"),
        *("data.delimiter", "data.quotes", "data.bad_rows", "data.packing"),
    )

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """One batch of `Example` whose `label` [t] has one for each token; `labels` is [B, T], ignored elsewhere."""
        batch = self._texts(samples, rng=rng, training=training)
        if samples[0].label is None:
            return batch
        assert batch.input_ids is not None
        labels_BT = torch.full_like(batch.input_ids, IGNORED_LABEL)
        real_BT = torch.ones_like(labels_BT) if batch.attention_mask is None else batch.attention_mask
        labels_BT[real_BT.bool()] = torch.from_numpy(np.concatenate([sample.label for sample in samples]))
        return replace(batch, labels=labels_BT)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{term: labelled words of this host batch}."""
        assert batch.labels is not None
        return {self.head.kind: int((batch.labels != IGNORED_LABEL).sum())}

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """One term. Metric: accuracy of words."""
        scores_NL, labels_N = output.head(self.head.kind).flatten(0, 1), batch.labels
        assert labels_N is not None
        labels_N = labels_N.flatten()
        smoothing = self.options.label_smoothing
        loss_sum = F.cross_entropy(
            scores_NL, labels_N, ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=smoothing
        )
        count, correct = (labels_N != IGNORED_LABEL).sum(), (scores_NL.argmax(dim=-1) == labels_N).sum()
        return LossResult(
            terms={self.head.kind: Term(loss_sum, count, self.options.weight)},
            metrics={"accuracy": Metric(correct, count)},
        )

    def soft_loss(
        self, student: ModelOutput, teacher: ModelOutput, batch: Batch, *, temperature: float, order_L: Tensor | None
    ) -> Tensor:
        """Soft targets over the labels of each labelled word."""
        ours_NL, theirs_NL = (output.head(self.head.kind).flatten(0, 1) for output in (student, teacher))
        assert batch.labels is not None
        loss_N = soft_cross_entropy(ours_NL, in_order(theirs_NL, order_L), temperature=temperature)
        return (loss_N * (batch.labels.flatten() != IGNORED_LABEL)).sum()


@dataclass(frozen=True)
class TokenClassificationOptions(CheckedOptions):
    """One label per word: names, parts of speech."""

    kind: Literal["token_classification"] = "token_classification"
    label_smoothing: float = 0.0  # torch's: spread over all labels
    word_dropout: float = 0.0  # this share of the tokens becomes [MASK] (or [UNK]) while training
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = TokenClassification
