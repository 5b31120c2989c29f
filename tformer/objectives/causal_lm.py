"""Causal language modelling: every token is predicted from those before it (arXiv 1706.03762, sections 3.1 and 5.4).

A sample of n + 1 ids is n inputs and, one place further, n labels. Samples of one length are cut without a loop;
shorter ones are padded on the right, on the left or at random on both sides, and padding has no label.

Packed documents that must not see each other (`document_ids`) count their positions from 0 each. The last token of a
document still predicts the first of the next: with a separator between them, that is how a model learns to begin.

Shapes: B samples, T inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from tformer.data.batching.batch import Batch, PadTo, Side, pad_layout
from tformer.data.batching.windows import Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.options import require_positive, require_probability
from tformer.objectives.base import LossResult, Term
from tformer.objectives.collate import (
    WordDropout,
    document_tensors,
    documents_of,
)
from tformer.tokenizer.special import SpecialIds

TERM = "lm"
"""The name of the loss term, and of the head that it reads."""


@dataclass(frozen=True)
class CausalLmOptions:
    kind: Literal["causal_lm"] = "causal_lm"
    label_smoothing: float = 0.0
    # uniform is torch's: eps over all K tokens; off_target is fairseq's: eps / (K - 1) on all but the target.
    smoothing_kind: Literal["uniform", "off_target"] = "uniform"
    word_dropout: float = 0.0  # training: a share of the input tokens becomes [UNK], or random where there is no [UNK]
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(label_smoothing=self.label_smoothing, word_dropout=self.word_dropout)
        require_positive(weight=self.weight)


class CausalLm:
    """The objective. `seq_len` is the width of batches with `pad_to="max"`, and the most any sample may fill.

    never_masked: bool [V], True for special tokens; needed with word dropout alone.
    """

    def __init__(
        self,
        options: CausalLmOptions,
        special_ids: SpecialIds,
        *,
        seq_len: int,
        padding: Side = "right",
        pad_to: PadTo = "longest",
        never_masked: np.ndarray | None = None,
    ) -> None:
        self.options, self.seq_len, self.padding, self.pad_to = options, seq_len, padding, pad_to
        # Padding is masked and has no label, so without a token of its own any id will do.
        self.pad_id = 0 if special_ids.pad is None else special_ids.pad
        if options.word_dropout:
            assert never_masked is not None
            kept, ordinary = np.flatnonzero(never_masked), np.flatnonzero(~never_masked)
            self.drop = WordDropout(options.word_dropout, special_ids, kept=kept, ordinary=ordinary)

    def collate(
        self, samples: Sequence[np.ndarray | Example] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Samples of up to seq_len + 1 ids, or one array [B, T + 1] of them, as a batch.

        `rng`: random padding, and word dropout. Raises ValueError for a sample with fewer than 2 or more than
        seq_len + 1 ids.
        """
        batch = self._collate(samples, rng)
        if training and self.options.word_dropout:
            assert batch.input_ids is not None
            batch = replace(batch, input_ids=torch.from_numpy(self.drop(batch.input_ids.numpy(), rng)))
        return batch

    def _collate(self, samples: Sequence[np.ndarray | Example] | np.ndarray, rng: np.random.Generator) -> Batch:
        if isinstance(samples, np.ndarray) and (self.pad_to == "longest" or samples.shape[1] == self.seq_len + 1):
            self._check(samples.shape[1])
            ids = torch.from_numpy(samples.astype(np.int64, copy=False))
            return Batch(input_ids=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())
        examples = [sample if isinstance(sample, Example) else Example(sample) for sample in samples]
        for example in examples:
            self._check(len(example))
        layout = pad_layout(
            [len(example) - 1 for example in examples],
            side=self.padding,
            pad_to=self.pad_to,
            max_len=self.seq_len,
            rng=rng,
        )
        mask = layout.mask()
        documents, positions = document_tensors([documents_of(example)[:-1] for example in examples], layout)
        return Batch(
            input_ids=torch.from_numpy(layout.fill([example.ids[:-1] for example in examples], self.pad_id)),
            labels=torch.from_numpy(layout.fill([example.ids[1:] for example in examples], IGNORED_LABEL)),
            attention_mask=None if mask is None else torch.from_numpy(mask),
            document_ids=documents,
            position_ids=positions,
        )

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"lm": predictions in this host batch}."""
        assert batch.labels is not None
        return {TERM: int((batch.labels != IGNORED_LABEL).sum())}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in nats. Metrics: nll_sum (never smoothed), correct and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        loss_sum, nll_sum, count, correct = output.loss_terms(
            TERM,
            batch.labels,
            label_smoothing=self.options.label_smoothing,
            smoothing_kind=self.options.smoothing_kind,
        )
        return LossResult(
            terms={TERM: Term(loss_sum, count, self.options.weight)},
            metrics={"nll_sum": nll_sum, "correct": correct, "count": count},
        )

    def _check(self, num_ids: int) -> None:
        if not 2 <= num_ids <= self.seq_len + 1:
            raise ValueError(f"a sample must have 2 to {self.seq_len + 1} ids, found {num_ids}")
