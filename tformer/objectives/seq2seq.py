"""Sequence to sequence: batches and loss of an encoder-decoder by teacher forcing (arXiv 1706.03762, section 3.1).

    labels                      [forced_bos]  y_1 ... y_n  eos
    decoder_input_ids    start  [forced_bos]  y_1 ... y_n            the labels, shifted right by one

    loss = - sum_u log p(y_u | y_<u, x)

Both sides are padded on the right, each to its own width; padding has no label. Word dropout (`collate.py`) replaces
tokens of the source and of the decoder's input, never special ones and never a label.

Shapes: B pairs, T tokens of the source, U of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from tformer.data.batching.batch import Batch
from tformer.data.batching.padding import WIDTH_MULTIPLE, pad_layout
from tformer.data.shards.corpus import Example
from tformer.nn.heads import LmHeadOptions
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import (
    IMAGE_KEYS,
    LABEL_KEYS,
    PAIR_KEYS,
    CheckedOptions,
    Objective,
    ObjectiveContext,
    TokenObjective,
)
from tformer.objectives.collate import WordDropout, pad_examples, pad_id
from tformer.support.errors import InputError
from tformer.tokenizer.special import DecoderTokens

if TYPE_CHECKING:
    from tformer.data.shards.pair_tokens import PairExample


class DecoderObjective(TokenObjective):
    """Base class of objectives with a decoder's output as labels; subclasses make sources and targets."""

    head = LmHeadOptions()
    parts = ("encoder", "decoder")

    def __init__(self, options: Any, context: ObjectiveContext) -> None:
        super().__init__(options, context)
        assert context.target is not None
        self.target = context.target
        if options.word_dropout:
            source, target = context.special_ids, context.target_special_ids
            excluded = np.flatnonzero(context.special_V)
            excluded_target = excluded if target is None else np.array(target.all, dtype=np.int64)
            ends = (*self.target.prefix, self.target.eos)
            self.drop_source = WordDropout(options.word_dropout, source, excluded=excluded)
            self.drop_input = WordDropout(
                options.word_dropout, target or source, excluded=np.append(excluded_target, ends)
            )

    def batch(
        self,
        sources: Sequence[np.ndarray],
        shifted: Sequence[tuple[np.ndarray, np.ndarray]],
        *,
        rng: np.random.Generator,
        training: bool,
    ) -> Batch:
        """One batch of sources [t] with (decoder inputs, labels) [u]; a mask is None if no row is padded.

        `rng`: word dropout, in training only.
        Raises ValueError for a source of more than seq_len ids, or decoder inputs of more than target_seq_len.
        """
        inputs, labels = [row[0] for row in shifted], [row[1] for row in shifted]
        if training and self.options.word_dropout:
            sources, inputs = self.drop_source.rows(sources, rng), self.drop_input.rows(inputs, rng)
        context = self.context
        batch = pad_examples([Example(ids) for ids in sources], replace(context, padding="right"))
        layout = pad_layout(
            [len(ids) for ids in inputs], pad_to=context.pad_to, max_len=target_limit(context), multiple=WIDTH_MULTIPLE
        )
        mask = layout.mask()
        pad = pad_id(context.target_special_ids or context.special_ids)
        return replace(
            batch,
            decoder_input_ids=torch.from_numpy(layout.fill(inputs, pad)),
            decoder_attention_mask=None if mask is None else torch.from_numpy(mask),
            labels=torch.from_numpy(layout.fill(labels, IGNORED_LABEL)),
            num_tokens=-1,  # count again, with the decoder's
        )


class Seq2Seq(DecoderObjective):
    """The objective. Raises InputError for word dropout of a vocabulary that has no token to write instead."""

    data = "pairs"
    decoded_metrics = ("sequence_accuracy", "bleu", "chrf")
    metrics = ("loss", "accuracy", *decoded_metrics)
    predicts = "the target, token by token, and its end"
    unused_keys = (*IMAGE_KEYS, *LABEL_KEYS, "data.document_mask", "data.packing", "generator")

    @property
    def collates_at_random(self) -> bool:
        return bool(self.options.word_dropout)

    def originals(self, sample: PairExample) -> dict[str, np.ndarray]:
        """The source with its template, and the target with its end."""
        return {"source": sample.source, "target": sample.target}

    def collate(
        self, samples: Sequence[PairExample] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Pairs as a batch; `rng`: word dropout, in training only.

        Raises ValueError for a source of more than seq_len ids, or a target for which the decoder reads more than
        target_seq_len.
        """
        sources = [sample.source for sample in samples]
        shifted = [shift_right(sample.target, self.target) for sample in samples]
        return self.batch(sources, shifted, rng=rng, training=training)


@dataclass(frozen=True)
class Seq2SeqOptions(CheckedOptions):
    """The target, token by token, from the source and the target's earlier tokens (teacher forcing)."""

    kind: Literal["seq2seq"] = "seq2seq"
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary (arXiv 1512.00567)
    # uniform is torch's: eps over all K tokens; off_target is fairseq's: eps / (K - 1) on all but the target.
    smoothing_kind: Literal["uniform", "off_target"] = "uniform"
    word_dropout: float = 0.0  # training: a share of the source's and the decoder's input tokens becomes [UNK]
    z_loss: float = 0.0  # factor of the squared logarithm of the softmax's sum (PaLM: 1e-4, arXiv 2204.02311)
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = Seq2Seq


class RestoringObjective(DecoderObjective):
    """Base class of the objectives that corrupt a text and restore it: span corruption and denoising."""

    data = "masked_text"
    unused_keys = (*PAIR_KEYS, *LABEL_KEYS, *IMAGE_KEYS, "data.document_mask", "generator")

    def __init__(self, options: Any, context: ObjectiveContext) -> None:
        super().__init__(options, context)
        self.separators_V = context.special_V.copy()  # special tokens that are not part of a text
        if context.special_ids.unk is not None:
            self.separators_V[context.special_ids.unk] = False
        self.prefix, self.suffix = (np.array(ids, dtype=np.int64) for ids in context.frame)
        source_room = context.seq_len - len(self.prefix) - len(self.suffix)
        target_room = target_limit(context) - len(self.target.prefix)
        self.room = self._room(source_room, target_room)
        if self.room < 1:
            raise InputError(
                f"data.seq_len, data.target_seq_len: {context.seq_len} and {target_limit(context)} tokens leave no "
                f"room for text beside the special tokens"
            )

    def _room(self, source_room: int, target_room: int) -> int:
        """Maximum tokens of a text so that its source and its target fit these numbers of tokens."""
        raise NotImplementedError


def target_limit(context: ObjectiveContext) -> int:
    """The maximum number of tokens that the decoder reads."""
    return context.seq_len if context.target_seq_len is None else context.target_seq_len


def shift_right(target: np.ndarray, tokens: DecoderTokens) -> tuple[np.ndarray, np.ndarray]:
    """(decoder's input ids, labels) [U] of a target that ends with eos."""
    inputs = np.concatenate([tokens.prefix, target[:-1]]).astype(np.int64)
    return inputs, np.append(inputs[1:], target[-1])


def plain_text(sample: Example | np.ndarray, separators_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, breaks) [t] of a window without its separators; `breaks` is True where one came next.

    A separator of documents would end the target too early, so documents are joined without it, as in T5.
    """
    ids = np.asarray(sample.ids if isinstance(sample, Example) else sample, dtype=np.int64)
    separates = separators_V[ids]
    return ids[~separates], np.append(separates[1:], False)[~separates]
