"""Masked language modelling: hidden tokens are predicted from both sides (BERT, arXiv 1810.04805, section 3.1).

Of every sequence max(1, round(mask_share * n)) of its n tokens are chosen, never special tokens or padding. Of those

    80 %   become [MASK]
    10 %   become a random token
    10 %   stay unchanged

and exactly these have a label. The choice is new for every batch (dynamic masking, RoBERTa 1907.11692).
With `whole_words`, all tokens of a word are chosen or none: words are taken in random order while the middle of the
next one still lies within the budget, which chooses as many tokens on average as without.

Word dropout (`collate.py`) replaces other tokens, in training only; a mask token always has a label.

Shapes: B samples, T tokens, V vocabulary, W words of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.heads import MaskedLmHeadOptions
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.options import require
from tformer.objectives.base import (
    DECODER_TOKEN_KEYS,
    GENERATION_KEYS,
    IMAGE_KEYS,
    LABEL_KEYS,
    PAIR_KEYS,
    CheckedOptions,
    Objective,
    ObjectiveContext,
    TokenObjective,
    require_special_tokens,
)
from tformer.objectives.collate import NO_MASK, WordDropout, pad_samples

UNUSED_BY_ENCODERS = (*PAIR_KEYS, *LABEL_KEYS, *IMAGE_KEYS, *GENERATION_KEYS, *DECODER_TOKEN_KEYS)
"""Keys of the recipe that no objective of an encoder on running text reads."""


class MaskedLm(TokenObjective):
    """The objective. Raises InputError for a tokenizer without a mask token."""

    data = "masked_text"
    head = MaskedLmHeadOptions()
    parts = ("encoder",)
    without = ("decoder",)
    special_tokens = ("mask",)
    predicts = "the original of every chosen token; most of these are masked, some replaced or unchanged"
    unused_keys = (*UNUSED_BY_ENCODERS, "generator")

    def __init__(self, options: MaskedLmOptions, context: ObjectiveContext) -> None:
        super().__init__(options, context)
        require_special_tokens(options, context.special_ids)
        self.special_V = context.special_V
        excluded = np.flatnonzero(self.special_V)
        self.drop = WordDropout(options.word_dropout, context.special_ids, excluded=excluded, roles=NO_MASK)

    @staticmethod
    def predicted_share(head: str, options: MaskedLmOptions) -> float:
        """The share of tokens that are masked."""
        return options.mask_share if head == MaskedLm.head.kind else 1.0

    def collate(
        self, samples: Sequence[Example | np.ndarray] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Samples with their special tokens, at most seq_len ids each, padded and masked; `rng` drives all of it.

        Raises ValueError for a longer sample.
        """
        batch = pad_samples(samples, self.context, rng=rng)
        assert batch.input_ids is not None
        ids = batch.input_ids.numpy()
        maskable = ~self.special_V[ids]
        if batch.attention_mask is not None:
            maskable &= batch.attention_mask.numpy()
        corrupted, labels = corrupt(ids, maskable, rng, self.options, self.context)
        if training:
            corrupted = self.drop(corrupted, rng, also_excluded=labels != IGNORED_LABEL)
        return replace(batch, input_ids=torch.from_numpy(corrupted), labels=torch.from_numpy(labels))


@dataclass(frozen=True)
class MaskedLmOptions(CheckedOptions):
    """Masked language modelling (BERT, arXiv 1810.04805; dynamic as in RoBERTa, 1907.11692)."""

    kind: Literal["masked_lm"] = "masked_lm"
    mask_share: float = 0.15  # of the tokens
    mask_token_share: float = 0.8  # of those: become [MASK]
    random_share: float = 0.1  # of those: become a random token; the rest stays unchanged
    whole_words: bool = False  # all tokens of a word or none
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary (arXiv 1512.00567)
    word_dropout: float = 0.0  # training: a share of the other tokens becomes [UNK]
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = MaskedLm

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.mask_share < 1, f"mask_share must lie between 0 and 1, found {self.mask_share}")
        shares = self.mask_token_share + self.random_share
        require(
            min(self.mask_token_share, self.random_share) >= 0 and shares <= 1 + 1e-9,
            f"mask_token_share and random_share must be at least 0 and together at most 1, "
            f"found {self.mask_token_share} and {self.random_share}",
        )


def corrupt(
    ids_BT: np.ndarray,
    maskable_BT: np.ndarray,
    rng: np.random.Generator,
    options: MaskedLmOptions,
    context: ObjectiveContext,
) -> tuple[np.ndarray, np.ndarray]:
    """(input ids, labels) [B, T] after masking; `maskable_BT` is True where a token may be chosen."""
    starts_BT = np.ones_like(maskable_BT)
    if options.whole_words and context.word_starts is not None:
        starts_BT = context.word_starts[ids_BT]
    chosen_BT = choose(maskable_BT, starts_BT, options.mask_share, rng)
    originals = ids_BT[chosen_BT]
    draw, mask_id = rng.random(len(originals)), context.special_ids.mask
    assert mask_id is not None
    # Special tokens are no replacement: the model would recognize them.
    ordinary = np.flatnonzero(~context.special_V)
    replaced = np.where(
        draw < options.mask_token_share,
        mask_id,
        np.where(
            draw < options.mask_token_share + options.random_share,
            ordinary[rng.integers(0, len(ordinary), size=len(originals))],
            originals,
        ),
    )
    input_ids, labels = ids_BT.copy(), np.full_like(ids_BT, IGNORED_LABEL)
    input_ids[chosen_BT], labels[chosen_BT] = replaced, originals
    return input_ids, labels


def choose(maskable_BT: np.ndarray, starts_BT: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """bool [B, T]: the tokens to predict, `share` of each row's maskable ones, and at least one.

    `starts_BT` is True where a word begins; the token after one that may not be chosen begins a word too.
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
