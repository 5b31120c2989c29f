"""Masked language modelling: hidden tokens are predicted from both sides (BERT, arXiv 1810.04805, section 3.1).

Of every sequence max(1, round(mask_share * n)) of its n tokens are chosen, special tokens and padding never. Of those

    80 %   become [MASK]
    10 %   become a random token
    10 %   stay as they are

and all of them, only them, have a label. The choice is new for every batch (dynamic masking, RoBERTa 1907.11692).
With `whole_words`, all tokens of a word are chosen or none: words are taken in random order while the middle of the
next one still lies within the budget, which chooses as many tokens on average as without.

Word dropout (`word_dropout.py`) replaces tokens among the others, in training alone; a mask always has a label.

Shapes: B samples, T tokens, V vocabulary, W words of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from tformer.data.batching.batch import Batch
from tformer.data.batching.windows import Example
from tformer.errors import InputError
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import LossResult, ObjectiveContext, Term
from tformer.objectives.collate import (
    NO_MASK,
    WordDropout,
    pad_samples,
)
from tformer.objectives.options import MaskedLmOptions
from tformer.tokenizer.special import SpecialIds

TERM = "masked_lm"
"""The name of the loss term, and of the head that it reads."""


class MaskedLm:
    """The objective. Raises InputError for a tokenizer without a mask token."""

    def __init__(self, options: MaskedLmOptions, context: ObjectiveContext) -> None:
        self.options, self.context = options, context
        require_mask_token(context)
        self.never_masked = never_masked(context)
        kept = np.flatnonzero(self.never_masked)
        self.drop = WordDropout(options.word_dropout, context.special_ids, kept=kept, roles=NO_MASK)

    def collate(
        self, samples: Sequence[Example | np.ndarray] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Samples with their special tokens, at most seq_len ids each, padded and corrupted; masking is all of `rng`.

        Raises ValueError for a longer sample.
        """
        batch = pad_samples(samples, self.context, rng=rng)
        assert batch.input_ids is not None
        ids = batch.input_ids.numpy()
        maskable = ~self.never_masked[ids]
        if batch.attention_mask is not None:
            maskable &= batch.attention_mask.numpy()
        corrupted, labels = corrupt(ids, maskable, rng, self.options, self.context)
        if training:
            corrupted = self.drop(corrupted, rng, also_kept=labels != IGNORED_LABEL)
        return replace(batch, input_ids=torch.from_numpy(corrupted), labels=torch.from_numpy(labels))

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"masked_lm": chosen tokens in this host batch}."""
        assert batch.labels is not None
        return {TERM: int((batch.labels != IGNORED_LABEL).sum())}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in nats. Metrics: nll_sum (never smoothed), correct and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        loss_sum, nll_sum, count, correct = output.loss_terms(
            TERM, batch.labels, num_labels=batch.num_labels, label_smoothing=self.options.label_smoothing
        )
        return LossResult(
            terms={TERM: Term(loss_sum, count, self.options.weight)},
            metrics={"nll_sum": nll_sum, "correct": correct, "count": count},
        )


def require_mask_token(context: ObjectiveContext) -> int:
    """The mask token's id; InputError when the tokenizer has none."""
    if context.special_ids.mask is None:
        raise InputError(
            "masked language modelling needs a tokenizer with a mask token ([MASK] or <mask>), this one has none",
            hint="train one with --template bert or roberta (tokenizer.train.template)",
        )
    return context.special_ids.mask


def never_masked(context: ObjectiveContext) -> np.ndarray:
    """bool [V]: the context's table, or one of the special ids alone."""
    if context.never_masked is not None:
        return context.never_masked
    table = np.zeros(context.vocab_size, dtype=bool)
    table[ids_of(context.special_ids)] = True
    return table


def ids_of(special_ids: SpecialIds) -> list[int]:
    """Every id that has a role; a token with two roles is listed twice."""
    roles = (getattr(special_ids, role.name) for role in fields(SpecialIds))
    return [i for role in roles for i in (role if isinstance(role, tuple) else (role,)) if i is not None]


def corrupt(
    ids_BT: np.ndarray,
    maskable_BT: np.ndarray,
    rng: np.random.Generator,
    options: MaskedLmOptions,
    context: ObjectiveContext,
) -> tuple[np.ndarray, np.ndarray]:
    """(input ids, labels) [B, T] of one corruption; `maskable_BT` is True where a token may be chosen."""
    starts_BT = np.ones_like(maskable_BT)
    if options.whole_words and context.word_starts is not None:
        starts_BT = context.word_starts[ids_BT]
    chosen_BT = choose(maskable_BT, starts_BT, options.mask_share, rng)
    originals = ids_BT[chosen_BT]
    fate = rng.random(len(originals))
    # Special tokens are no replacement: they would give themselves away.
    ordinary = np.flatnonzero(~never_masked(context))
    replaced = np.where(
        fate < options.mask_token_share,
        require_mask_token(context),
        np.where(
            fate < options.mask_token_share + options.random_share,
            ordinary[rng.integers(0, len(ordinary), size=len(originals))],
            originals,
        ),
    )
    input_ids, labels = ids_BT.copy(), np.full_like(ids_BT, IGNORED_LABEL)
    input_ids[chosen_BT], labels[chosen_BT] = replaced, originals
    return input_ids, labels


def choose(maskable_BT: np.ndarray, starts_BT: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """bool [B, T]: the tokens to predict, `share` of each row's maskable ones, and one at least.

    `starts_BT` is True where a word begins; whatever follows a token that may not be chosen begins one too.
    """
    budget_B = np.maximum(1, np.floor(share * maskable_BT.sum(axis=1) + 0.5))
    after_gap_BT = np.ones_like(maskable_BT)
    after_gap_BT[:, 1:] = ~maskable_BT[:, :-1]
    begins_BT = maskable_BT & (starts_BT | after_gap_BT)
    word_of_N = np.cumsum(begins_BT[maskable_BT]) - 1  # N: all maskable tokens, row by row
    row_W = np.nonzero(begins_BT)[0]
    size_W = np.bincount(word_of_N, minlength=len(row_W))
    order_W = np.lexsort((rng.random(len(row_W)), row_W))  # the words of each row in random order
    size_W, row_W = size_W[order_W], row_W[order_W]
    total_W = np.cumsum(size_W)
    first_W = np.searchsorted(row_W, row_W)  # of the row
    before_W = total_W - size_W - (total_W - size_W)[first_W]  # tokens of the words taken so far
    taken_W = (before_W + size_W / 2 <= budget_B[row_W]) | (before_W == 0)
    by_word = np.zeros(len(row_W), dtype=bool)
    by_word[order_W] = taken_W
    chosen_BT = np.zeros_like(maskable_BT)
    chosen_BT[maskable_BT] = by_word[word_of_N]
    return chosen_BT
