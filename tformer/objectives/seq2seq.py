"""Sequence to sequence: the target, token by token, from the source and what stands before (arXiv 1706.03762).

    loss = - sum_u log p(y_u | y_<u, x)

Shapes: B pairs, T tokens of the source, U of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tformer.data.batch import Batch
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.options import Seq2SeqOptions
from tformer.objectives.paired import DecoderLoss, shift_right

if TYPE_CHECKING:
    from tformer.data.pair_tokens import PairExample


class Seq2Seq(DecoderLoss):
    """The objective. Raises InputError for word dropout of a vocabulary that has no token to write instead."""

    def __init__(self, options: Seq2SeqOptions, context: ObjectiveContext) -> None:
        super().__init__(
            context,
            label_smoothing=options.label_smoothing,
            smoothing_kind=options.smoothing_kind,
            weight=options.weight,
            word_dropout=options.word_dropout,
        )

    def collate(
        self, samples: Sequence[PairExample] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Pairs as a batch; `rng`: word dropout, in training alone.

        Raises ValueError for a source of more than seq_len ids, or a target for which the decoder reads more than
        target_seq_len.
        """
        sources = [sample.source for sample in samples]
        shifted = [shift_right(sample.target, self.target) for sample in samples]
        return self.batch(sources, shifted, rng=rng, training=training)
