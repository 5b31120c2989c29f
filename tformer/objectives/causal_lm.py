"""Causal language modelling: every token is predicted from those before it (arXiv 1706.03762, sections 3.1 and 5.4).

    loss = - sum_t log p(x_(t+1) | x_(<=t))

A sample of n + 1 ids is n inputs and, shifted by one, n labels. Samples of one length are cut without a loop;
shorter ones are padded on the right, on the left or at random on both sides, and padding has no label.

Packed documents that must not see each other (`document_ids`) count their positions from 0 each. The last token of a
document still predicts the first of the next: with a separator between them, the model learns how documents begin.

Shapes: B samples, T inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.heads import LmHeadOptions
from tformer.objectives.base import (
    IMAGE_KEYS,
    LABEL_KEYS,
    PAIR_KEYS,
    SOURCE_KEYS,
    CheckedOptions,
    Objective,
    ObjectiveContext,
    TokenObjective,
)
from tformer.objectives.collate import WordDropout, pad_shifted, require_shifted_length


class CausalLm(TokenObjective):
    """The objective. Batches have `seq_len` inputs with `pad_to="max"`, and never more."""

    data = "text"
    head = LmHeadOptions()
    parts = ("decoder",)
    without = ("encoder",)
    predicts = "the next token at every position"
    unused_keys = (
        *PAIR_KEYS,
        *LABEL_KEYS,
        *IMAGE_KEYS,
        *SOURCE_KEYS,
        "tokenizer.special_ids.decoder_start",
        "tokenizer.special_ids.forced_bos",
        "generator",
    )

    def __init__(self, options: CausalLmOptions, context: ObjectiveContext) -> None:
        super().__init__(options, context)
        if options.word_dropout:
            special_V = context.special_V
            excluded, ordinary = np.flatnonzero(special_V), np.flatnonzero(~special_V)
            self.drop = WordDropout(options.word_dropout, context.special_ids, excluded=excluded, ordinary=ordinary)

    @property
    def collates_at_random(self) -> bool:
        return bool(self.options.word_dropout) or self.context.padding == "random"

    def collate(
        self, samples: Sequence[np.ndarray | Example] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Samples of up to seq_len + 1 ids, or one array [B, T + 1] of them, as a batch.

        `rng`: random padding, and word dropout. Raises ValueError for a sample with fewer than 2 or more than
        seq_len + 1 ids.
        """
        seq_len, pad_to = self.context.seq_len, self.context.pad_to
        if isinstance(samples, np.ndarray) and (pad_to == "longest" or samples.shape[1] == seq_len + 1):
            require_shifted_length(samples.shape[1], self.context)
            ids = torch.from_numpy(samples.astype(np.int64, copy=False))
            batch = Batch(input_ids=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())
        else:
            examples = [sample if isinstance(sample, Example) else Example(sample) for sample in samples]
            batch = pad_shifted(examples, list(map(self._labels_of, examples)), self.context, rng=rng)
        if training and self.options.word_dropout:
            assert batch.input_ids is not None
            batch = replace(batch, input_ids=torch.from_numpy(self.drop(batch.input_ids.numpy(), rng)))
        return batch

    def _labels_of(self, example: Example) -> np.ndarray:
        """The label of each id [t - 1]: the next id, or `IGNORED_LABEL`."""
        return example.ids[1:]


@dataclass(frozen=True)
class CausalLmOptions(CheckedOptions):
    """Causal language modelling."""

    kind: Literal["causal_lm"] = "causal_lm"
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary (arXiv 1512.00567)
    # uniform is torch's: eps over all K tokens; off_target is fairseq's: eps / (K - 1) on all but the target.
    smoothing_kind: Literal["uniform", "off_target"] = "uniform"
    word_dropout: float = 0.0  # training: a share of the input tokens becomes [UNK], or random where there is no [UNK]
    z_loss: float = 0.0  # factor of the squared logarithm of the softmax's sum (PaLM: 1e-4, arXiv 2204.02311)
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = CausalLm
