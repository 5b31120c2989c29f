"""What every objective is: a way to make batches, and a loss in named terms.

A term is a sum over predictions with their count and weight. The training loop adds counts over the whole global batch
(accumulation and processes) before the first backward and minimises

    loss = sum over terms of weight * sum / count,

so several objectives fit into one model, and cutting a batch into parts changes nothing.

Objectives see a model only as a callable that returns its `Output`, and special tokens only as `SpecialIds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tformer.data.batch import Batch
from tformer.data.windows import Example


@dataclass(frozen=True)
class Term:
    """One part of a loss: `sum` (a scalar with gradient) over `count` predictions, and its `weight` among the terms."""

    sum: Tensor
    count: Tensor | int
    weight: float = 1.0


@dataclass(frozen=True)
class LossResult:
    """The terms by name, and sums for reporting (scalars without gradient, which add up over batches)."""

    terms: dict[str, Term]
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """What the training loop and evaluation ask of an objective."""

    def collate(self, samples: Sequence[np.ndarray | Example] | np.ndarray, *, rng: np.random.Generator) -> Batch:
        """Samples -> one batch on the host; `rng` drives what is random about it, and nothing else does."""

    def label_count(self, batch: Batch) -> dict[str, int]:
        """How many predictions each term will have on this host batch, known before any forward."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """Run the model on the batch and form the terms."""


def total_loss(terms: Mapping[str, Term], counts: Mapping[str, int | Tensor] | None = None) -> Tensor:
    """The scalar to minimise. `counts`: those of the global batch; None: each term's own."""
    parts = [term.weight * term.sum / (term.count if counts is None else counts[name]) for name, term in terms.items()]
    loss = parts[0]
    for part in parts[1:]:
        loss = loss + part
    return loss
