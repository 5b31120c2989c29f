"""Classification: one class per text, pair of texts or image (BERT, arXiv 1810.04805, section 4; ViT, 2010.11929).

    loss = sum_i w_(y_i) * l_i,   l_i = -sum_c t_c log softmax(head(x_i))_c,   t_c = (1 - eps) [c = y_i] + eps / L

over N examples. Class weights are scaled so that their mean over the training examples is 1: the loss stays a mean
over examples, whatever is in a batch, and the learning rate means the same with and without them.

Shapes: B examples, L classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tformer.data.batch import Batch
from tformer.errors import InputError
from tformer.objectives.base import LossResult, ObjectiveContext, Term
from tformer.objectives.examples import ExampleCollator
from tformer.objectives.options import ClassificationOptions, ClassWeights

TERM = "classifier"
"""The name of the loss term, and of the head that it reads."""


class Classification:
    """The objective. Raises InputError for class weights that do not fit the classes."""

    def __init__(self, options: ClassificationOptions, context: ObjectiveContext) -> None:
        self.options, self.context = options, context
        self.collator = ExampleCollator(
            context, torch.long, word_dropout=options.word_dropout, swap_pairs=options.swap_pairs
        )
        weights = class_weights(options.class_weights, context.label_counts)
        self.weights_L = None if weights is None else torch.from_numpy(weights).float()

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Examples of texts, or of images, with labels long [B] (None when they have none)."""
        return self.collator(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"classifier": examples in this host batch}."""
        assert batch.labels is not None
        return {TERM: len(batch.labels)}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in nats. Metrics: nll_sum (neither smoothed nor weighted), correct and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        labels_B = batch.labels
        assert labels_B is not None
        scores_BL = output.head(TERM)
        loss_B = F.cross_entropy(scores_BL, labels_B, reduction="none", label_smoothing=self.options.label_smoothing)
        if self.weights_L is not None:
            self.weights_L = self.weights_L.to(labels_B.device)  # once: a copy at every step would wait for a GPU
            loss_B = loss_B * self.weights_L[labels_B]
        with torch.no_grad():
            nll_sum = F.cross_entropy(scores_BL, labels_B, reduction="sum")
            correct = (scores_BL.argmax(dim=-1) == labels_B).sum()
        return LossResult(
            terms={TERM: Term(loss_B.sum(), len(labels_B), self.options.weight)},
            metrics={"nll_sum": nll_sum, "correct": correct, "count": labels_B.new_full((), len(labels_B))},
        )


def class_weights(option: ClassWeights | tuple[float, ...], counts_L: np.ndarray | None) -> np.ndarray | None:
    """fp64 [L] with a mean of 1 over the training examples, or None for none.

    balanced is N / (L n_c) for the L classes that occur (scikit-learn's), 0 for one that does not. Raises InputError
    when there are not as many weights as classes, or when all examples weigh nothing.
    """
    if option == "none":
        return None
    if counts_L is None:
        raise InputError("objectives: class_weights need the labels of the training data")
    if isinstance(option, str):
        return np.divide(
            counts_L.sum() / max(1, np.count_nonzero(counts_L)),
            counts_L,
            out=np.zeros(len(counts_L)),
            where=counts_L > 0,
        )
    weights_L = np.array(option, dtype=np.float64)
    if len(weights_L) != len(counts_L):
        raise InputError(f"objectives: class_weights: expected {len(counts_L)}, one per class, found {len(weights_L)}")
    mean = (weights_L * counts_L).sum() / counts_L.sum()
    if not mean:
        raise InputError("objectives: class_weights: every class of the training data has weight 0")
    return weights_L / mean
