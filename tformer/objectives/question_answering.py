"""Extractive questions: the start and the end of the answer in a context (SQuAD; BERT, arXiv 1810.04805, 4.2 and 4.3).

    loss = -1/2 sum over windows of [log softmax(s)_start + log softmax(e)_end],   (s, e)_t = head(x)_t

over the tokens of the context and the first token, which stands for no answer in this window.

Shapes: B windows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.nn.classification_heads import SpanHeadOptions
from tformer.nn.heads import ModelOutput
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.options import require
from tformer.nn.soft_targets import soft_cross_entropy
from tformer.objectives.base import CheckedOptions, LossResult, Metric, Objective, Term
from tformer.objectives.labelled import LabelledObjective
from tformer.objectives.token_classification import TokenClassification

IMPOSSIBLE = -1e9  # score of a token at which no answer starts or ends


class QuestionAnswering(TokenClassification):
    """The answer as a part of the context; labels: 1 where it starts, plus 2 where it ends, ignored where it cannot."""

    data = "questions"
    head = SpanHeadOptions()
    metrics = ("loss", "accuracy", "exact_match", "f1")
    shown_metrics: ClassVar = {"exact_match": "exact match {:.2f}", "f1": "F1 {:.2f}"}
    predicts = "where the answer starts and where it ends"
    unused_keys = (*TokenClassification.unused_keys, "data.columns.text", "data.columns.label", "data.labels")
    label_count = LabelledObjective.label_count  # windows

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """One term. Metric: accuracy of both borders."""
        labels_BT = batch.labels
        assert labels_BT is not None
        scores_BT2 = self._scores(output, batch)
        bits_BT = labels_BT.clamp(min=0)
        borders_B2 = torch.stack([(bits_BT & bit).argmax(dim=1) for bit in (1, 2)], dim=1)
        loss = F.cross_entropy(scores_BT2, borders_B2, reduction="sum") / 2  # over T, of both borders
        count = torch.full((), len(labels_BT), device=labels_BT.device)
        correct = (scores_BT2.argmax(dim=1) == borders_B2).all(dim=1).sum()
        return LossResult(
            terms={self.head.kind: Term(loss, count, self.options.weight)},
            metrics={"accuracy": Metric(correct, count)},
        )

    def soft_loss(
        self, student: ModelOutput, teacher: ModelOutput, batch: Batch, *, temperature: float, order_L: Tensor | None
    ) -> Tensor:
        """Soft targets over the tokens at which an answer may start, and may end."""
        ours_B2T, theirs_B2T = (self._scores(output, batch).transpose(1, 2) for output in (student, teacher))
        return soft_cross_entropy(ours_B2T, theirs_B2T, temperature=temperature).sum() / 2

    def _scores(self, output: Any, batch: Batch) -> Tensor:
        """[B, T, 2]: the head's scores, very low where an answer cannot start or end."""
        assert batch.labels is not None
        scores_BT2: Tensor = output.head(self.head.kind)
        return scores_BT2.masked_fill((batch.labels == IGNORED_LABEL)[..., None], IMPOSSIBLE)


@dataclass(frozen=True)
class QuestionAnsweringOptions(CheckedOptions):
    """Answers that are a part of a context, as in SQuAD."""

    kind: Literal["question_answering"] = "question_answering"
    stride: int = 128  # tokens that two windows of a long context share
    max_question: int = 64  # maximum tokens of a question
    max_answer: int = 30  # maximum tokens of an answer
    unanswerable: bool | None = None  # whether a question may have no answer; null: whether one in the data has none
    word_dropout: float = 0.0  # this share of the tokens becomes [MASK] (or [UNK]) while training
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = QuestionAnswering

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("stride", 0), ("max_question", 1), ("max_answer", 1)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, found {getattr(self, name)}")
