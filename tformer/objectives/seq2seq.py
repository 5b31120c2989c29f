"""Sequence to sequence: the target, token by token, from the source and what stands before (arXiv 1706.03762).

    loss = - sum_u log p(y_u | y_<u, x)

Word dropout (arXiv 1512.05287, as in Transformers without Tears, 1910.05895) replaces single tokens of the source and
of what the decoder reads by the unknown token, never special ones and never a label.

Shapes: B pairs, T tokens of the source, U of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tformer.data.batch import Batch
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.examples import drop_words, replacement_id
from tformer.objectives.masked_lm import ids_of, never_masked
from tformer.objectives.options import Seq2SeqOptions
from tformer.objectives.paired import DecoderLoss, pad_pairs, shift_right

if TYPE_CHECKING:
    from tformer.data.pair_tokens import PairExample

WRITTEN_FOR_DROPPED = ("unk", "mask", "pad")  # the first that the vocabulary has


class Seq2Seq(DecoderLoss):
    """The objective. Raises InputError for word dropout of a vocabulary that has no token to write instead."""

    def __init__(self, options: Seq2SeqOptions, context: ObjectiveContext) -> None:
        super().__init__(
            context,
            label_smoothing=options.label_smoothing,
            smoothing_kind=options.smoothing_kind,
            weight=options.weight,
        )
        self.word_dropout = options.word_dropout
        if self.word_dropout:
            source, target = context.special_ids, context.target_special_ids
            kept = np.flatnonzero(never_masked(context))
            kept_of_target = kept if target is None else np.array(ids_of(target), dtype=np.int64)
            self.replacements = (
                replacement_id(source, WRITTEN_FOR_DROPPED),
                replacement_id(target or source, WRITTEN_FOR_DROPPED),
            )
            self.kept = (kept, np.append(kept_of_target, (*self.target.prefix, self.target.eos)))

    def collate(
        self, samples: Sequence[PairExample] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Pairs as a batch; `rng`: word dropout, in training alone.

        Raises ValueError for a source of more than seq_len ids, or a target for which the decoder reads more than
        target_seq_len.
        """
        sources = [sample.source for sample in samples]
        shifted = [shift_right(sample.target, self.target) for sample in samples]
        inputs, labels = [row[0] for row in shifted], [row[1] for row in shifted]
        if training and self.word_dropout:
            sources, inputs = self._drop(sources, 0, rng), self._drop(inputs, 1, rng)
        return pad_pairs(sources, inputs, labels, self.context)

    def _drop(self, rows: list[np.ndarray], side: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The rows of a side (0 source, 1 target) after word dropout."""
        ids = np.concatenate(rows)
        dropped = drop_words(ids, np.isin(ids, self.kept[side]), self.word_dropout, self.replacements[side], rng)
        return np.split(dropped, np.cumsum([len(row) for row in rows])[:-1])
