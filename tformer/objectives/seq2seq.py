"""Sequence to sequence: batches and loss of an encoder-decoder by teacher forcing (arXiv 1706.03762, section 3.1).

    labels                      [forced_bos]  y_1 ... y_n  eos
    decoder_input_ids    start  [forced_bos]  y_1 ... y_n            the labels, shifted right by one

    loss = - sum_u log p(y_u | y_<u, x)

Both sides are padded on the right, each to a width of its own; padding has no label. Word dropout (`collate.py`)
replaces tokens of the source and of the decoder's input, never special ones and never a label.

Shapes: B pairs, T tokens of the source, U of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from tformer.data.batching.batch import WIDTH_MULTIPLE, Batch, pad_layout
from tformer.data.batching.windows import Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import LossResult, ObjectiveContext, Term
from tformer.objectives.collate import WordDropout
from tformer.objectives.labelled import collate_texts
from tformer.objectives.masked_lm import ids_of, never_masked
from tformer.objectives.options import Seq2SeqOptions
from tformer.tokenizer.special import DecoderTokens

if TYPE_CHECKING:
    from tformer.data.shards.pair_tokens import PairExample


TERM = "lm"
"""The name of the loss term, and of the head that it reads."""


class DecoderLoss:
    """The loss of the objectives whose labels are what a decoder says; batches are each one's own."""

    def __init__(
        self,
        context: ObjectiveContext,
        *,
        label_smoothing: float,
        smoothing_kind: Literal["uniform", "off_target"] = "uniform",
        weight: float,
        word_dropout: float = 0.0,
    ) -> None:
        assert context.target is not None
        self.context, self.target = context, context.target
        self.word_dropout = word_dropout
        if word_dropout:
            source, target = context.special_ids, context.target_special_ids
            kept = np.flatnonzero(never_masked(context))
            kept_of_target = kept if target is None else np.array(ids_of(target), dtype=np.int64)
            ends = (*self.target.prefix, self.target.eos)
            self.drop_source = WordDropout(word_dropout, source, kept=kept)
            self.drop_input = WordDropout(word_dropout, target or source, kept=np.append(kept_of_target, ends))
        self.smoothing = {"label_smoothing": label_smoothing, "smoothing_kind": smoothing_kind}
        self.weight = weight

    def batch(
        self,
        sources: Sequence[np.ndarray],
        shifted: Sequence[tuple[np.ndarray, np.ndarray]],
        *,
        rng: np.random.Generator,
        training: bool,
    ) -> Batch:
        """Sources, and (decoder's inputs, labels) of each, as one batch; `rng`: word dropout, in training alone.

        Raises ValueError for a source of more than seq_len ids, or decoder's inputs of more than target_seq_len.
        """
        inputs, labels = [row[0] for row in shifted], [row[1] for row in shifted]
        if training and self.word_dropout:
            sources, inputs = self.drop_source.rows(sources, rng), self.drop_input.rows(inputs, rng)
        return pad_pairs(sources, inputs, labels, self.context)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"lm": predictions in this host batch}."""
        assert batch.labels is not None
        return {TERM: int((batch.labels != IGNORED_LABEL).sum())}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in nats. Metrics: nll_sum (never smoothed), correct and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        loss_sum, nll_sum, count, correct = output.loss_terms(TERM, batch.labels, **self.smoothing)
        return LossResult(
            terms={TERM: Term(loss_sum, count, self.weight)},
            metrics={"nll_sum": nll_sum, "correct": correct, "count": count},
        )


def target_limit(context: ObjectiveContext) -> int:
    """The most tokens that the decoder may read."""
    return context.seq_len if context.target_seq_len is None else context.target_seq_len


def shift_right(target: np.ndarray, tokens: DecoderTokens) -> tuple[np.ndarray, np.ndarray]:
    """(decoder's input ids, labels) [U] of a target that ends with eos."""
    inputs = np.concatenate([tokens.prefix, target[:-1]]).astype(np.int64)
    return inputs, np.append(inputs[1:], target[-1])


def pad_pairs(
    sources: Sequence[np.ndarray], inputs: Sequence[np.ndarray], labels: Sequence[np.ndarray], context: ObjectiveContext
) -> Batch:
    """Sources [t], decoder inputs [u] and labels [u] as one batch; masks are None where nothing is padded.

    Raises ValueError for a source or a target that is longer than the context allows.
    """
    rows = [Example(ids) for ids in sources]
    batch = collate_texts(rows, replace(context, padding="right"), rng=np.random.default_rng(0))  # which draws nothing
    layout = pad_layout(
        [len(ids) for ids in inputs], pad_to=context.pad_to, max_len=target_limit(context), multiple=WIDTH_MULTIPLE
    )
    mask = layout.mask()
    pad = (context.target_special_ids or context.special_ids).pad
    return replace(
        batch,
        # Padding is masked and has no label, so without a token of its own any id will do.
        decoder_input_ids=torch.from_numpy(layout.fill(inputs, 0 if pad is None else pad)),
        decoder_attention_mask=None if mask is None else torch.from_numpy(mask),
        labels=torch.from_numpy(layout.fill(labels, IGNORED_LABEL)),
        num_tokens=-1,  # count again, with the decoder's
    )


def separators(context: ObjectiveContext) -> np.ndarray:
    """bool [V], True for special tokens that are no part of a text, as the unknown token is."""
    table = never_masked(context).copy()
    if context.special_ids.unk is not None:
        table[context.special_ids.unk] = False
    return table


def plain_text(sample: Example | np.ndarray, separators_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, breaks) [t] of a window without its separators; `breaks` is True where one came next.

    What ends a document would end the target in its middle, so documents are joined without it, as in T5.
    """
    ids = np.asarray(sample.ids if isinstance(sample, Example) else sample, dtype=np.int64)
    separates = separators_V[ids]
    return ids[~separates], np.append(separates[1:], False)[~separates]


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
