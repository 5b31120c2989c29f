"""Base class of objectives: how samples become batches, and the loss as named terms.

A term is a sum over predictions with their count and weight. The training loop adds the counts over the whole global
batch (accumulation and processes) before the first backward pass and minimises

    loss = sum over terms of weight * sum / count,

so several objectives fit into one model (`Combined`), and cutting a batch into parts changes nothing.

Objectives see a model only as a callable that returns its `Output`, and special tokens only as `SpecialIds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tformer.data.batching.batch import (
    Batch,
    PadTo,
    Side,
)
from tformer.errors import InputError
from tformer.tokenizer.special import DecoderTokens, SpecialIds


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


@dataclass(frozen=True)
class ImageContext:
    """How images become numbers: (value in [0, 1] - mean) / std, per channel; and how training varies them."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...] = ()


@dataclass(frozen=True)
class ObjectiveContext:
    """What objectives may know of tokenizer, data and models. Whoever does not need a part leaves its default.

    Attributes:
        special_ids: ids of the special tokens.
        seq_len: the most tokens that an example may have, special ones included.
        padding, pad_to: the recipe's `data.padding` and `data.pad_to`.
        vocab_size: ids that the tokenizer knows, for random replacements.
        never_masked: bool [V], True for special tokens.
        word_starts: bool [V], True for tokens that begin a word; None: not known (every token is a word).
        label_counts: int [L], how often each class occurs in the training data.
        generator: ELECTRA's second model.
        images: None for text.
        target: what a decoder beside an encoder begins and ends with, None without one; `target_special_ids` and
            `target_seq_len` are its side's where that differs from the source's.
        frame: special ids before and after a source text.
        sentence_ends: bool [V], True for tokens that can end a sentence.
    """

    special_ids: SpecialIds
    seq_len: int
    padding: Side = "right"
    pad_to: PadTo = "longest"
    vocab_size: int = 0
    never_masked: np.ndarray | None = None
    word_starts: np.ndarray | None = None
    label_counts: np.ndarray | None = None
    generator: Callable[..., Any] | None = None
    images: ImageContext | None = None
    target: DecoderTokens | None = None
    target_special_ids: SpecialIds | None = None
    target_seq_len: int | None = None
    frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    sentence_ends: np.ndarray | None = None


class Objective(Protocol):
    """What the training loop and evaluation ask of an objective."""

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Samples -> one batch on the host; `rng` drives what is random about it, and nothing else does.

        `training=False` leaves out what only helps to learn (augmentation, word dropout); masking stays.
        """

    def label_count(self, batch: Batch) -> dict[str, int]:
        """How many predictions each term will have on this host batch, known before any forward."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """Run the model on the batch and form the terms."""


class SharedObjective(Objective, Protocol):
    """An objective whose loss needs one forward pass, which it can share with others."""

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The terms of a model's `Output` on the batch."""


def total_loss(terms: Mapping[str, Term], counts: Mapping[str, int | Tensor] | None = None) -> Tensor:
    """The scalar to minimise. `counts`: those of the global batch; None: each term's own."""
    parts = [term.weight * term.sum / (term.count if counts is None else counts[name]) for name, term in terms.items()]
    loss = parts[0]
    for part in parts[1:]:
        loss = loss + part
    return loss


class Combined:
    """Raises InputError for objectives that cannot share a forward pass, or that stand in the wrong order."""

    def __init__(self, objectives: Sequence[Objective]) -> None:
        kinds = [_kind(objective) for objective in objectives]
        for kind, objective in zip(kinds, objectives, strict=True):
            if not hasattr(objective, "terms"):
                raise InputError(f"objectives: {kind} runs two models and stands alone, found {', '.join(kinds)}")
            if kinds.count(kind) > 1:
                raise InputError(f"objectives: {kind} is listed twice")
        if kinds[0] == "next_sentence":
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
