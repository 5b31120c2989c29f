"""Objectives of labelled examples (texts, pairs of texts, images): classification, multi-label classification,
regression.

Shapes: B examples, T tokens, L labels, C channels, Y x X pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import (
    WIDTH_MULTIPLE,
    Batch,
    PadLayout,
    pad_layout,
)
from tformer.data.shards.corpus import Example
from tformer.errors import InputError
from tformer.objectives.base import ImageContext, LossResult, ObjectiveContext, Term
from tformer.objectives.collate import (
    MASK_FIRST,
    WordDropout,
)
from tformer.objectives.masked_lm import never_masked
from tformer.objectives.options import ClassificationOptions, ClassWeights, MultiLabelOptions, RegressionOptions
from tformer.tokenizer.special import SpecialIds

if TYPE_CHECKING:
    from tformer.data.sources.images import ImageExample


SWAPPED_SHARE = 0.5
NO_TYPES = np.zeros(0, dtype=np.int64)


class ExampleCollator:
    """Makes the batches of the objectives that have one label per example.

    `label_dtype`: of the batch's labels, torch.long for a class, torch.float32 for a score or for several labels.
    Raises InputError for what the examples cannot have: word dropout of images, or of a tokenizer that has neither a
    mask, an unknown nor a padding token.
    """

    def __init__(
        self,
        context: ObjectiveContext,
        label_dtype: torch.dtype,
        *,
        word_dropout: float = 0.0,
        swap_pairs: bool = False,
    ) -> None:
        self.context, self.label_dtype = context, label_dtype
        self.word_dropout, self.swap_pairs = word_dropout, swap_pairs
        if context.images is not None and (word_dropout or swap_pairs):
            raise InputError("objectives: word_dropout and swap_pairs are for texts, this model reads images")
        if word_dropout:
            kept = np.flatnonzero(never_masked(context))
            self.drop = WordDropout(word_dropout, context.special_ids, kept=kept, roles=MASK_FIRST)

    def __call__(
        self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """One batch of `Example` or `ImageExample`; `labels` is None when the first sample has none.

        `rng`: random padding, and what training varies. Raises ValueError for a text of more than `seq_len` ids.
        """
        if self.context.images is not None:
            batch = collate_images(samples, self.context.images, rng=rng, training=training)
        else:
            batch = self._texts(samples, rng=rng, training=training)
        return replace(batch, labels=self._labels(samples))

    def _texts(self, examples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool) -> Batch:
        if training and self.swap_pairs:
            chosen = rng.random(len(examples)) < SWAPPED_SHARE
            special_ids = self.context.special_ids
            examples = [
                swap_pair(example, special_ids) if swap else example
                for example, swap in zip(examples, chosen.tolist(), strict=True)
            ]
        batch = collate_texts(examples, self.context, rng=rng)
        if training and self.word_dropout:
            assert batch.input_ids is not None
            batch = replace(batch, input_ids=torch.from_numpy(self.drop(batch.input_ids.numpy(), rng)))
        return batch if self.context.target is None else read_again(batch, self.context.target.start)

    def _labels(self, samples: Sequence[Any] | np.ndarray) -> Tensor | None:
        if samples[0].label is None:
            return None
        return torch.from_numpy(np.array([sample.label for sample in samples])).to(self.label_dtype)


def collate_texts(
    examples: Sequence[Example] | np.ndarray, context: ObjectiveContext, *, rng: np.random.Generator
) -> Batch:
    """Ids, mask (None when nothing is padded) and, when any example has them, token types; no labels."""
    lengths = np.array([len(example) for example in examples], dtype=np.int64)
    layout = pad_layout(
        lengths,
        side=context.padding,
        pad_to=context.pad_to,
        max_len=context.seq_len,
        rng=rng,
        multiple=WIDTH_MULTIPLE,
    )
    if layout.width == 0:  # empty texts and a template without special tokens: a column of padding stands for them
        layout = PadLayout(layout.starts, lengths, 1)
    mask = layout.mask()
    types = [example.token_type_ids for example in examples]
    typed = any(row is not None for row in types)
    # Padding is masked, so without a token of its own any id will do.
    pad_id = 0 if context.special_ids.pad is None else context.special_ids.pad
    return Batch(
        input_ids=torch.from_numpy(layout.fill([example.ids for example in examples], pad_id)),
        attention_mask=None if mask is None else torch.from_numpy(mask),
        token_type_ids=torch.from_numpy(layout.fill([NO_TYPES if row is None else row for row in types], 0))
        if typed
        else None,
    )


def read_again(batch: Batch, start: int) -> Batch:
    """The decoder reads the encoder's text, shifted right behind `start`, and sees all of it at its last token (BART).

    On whichever side the padding stands, the first real token gives its place to `start`.
    """
    assert batch.input_ids is not None
    ids, mask = batch.input_ids.roll(1, dims=1), batch.attention_mask
    first_B = torch.zeros(len(ids), dtype=torch.long) if mask is None else mask.long().argmax(dim=1)
    ids[torch.arange(len(ids)), first_B] = start
    return replace(batch, decoder_input_ids=ids, decoder_attention_mask=mask, num_tokens=-1)


def collate_images(
    examples: Sequence[ImageExample] | np.ndarray, images: ImageContext, *, rng: np.random.Generator, training: bool
) -> Batch:
    """Normalised pixels, in training varied as `images.augment` says; no labels."""
    from tformer.data.sources.images import augment, to_pixels

    pixels_BCYX = np.stack([example.pixels for example in examples])
    if training and images.augment:
        pixels_BCYX = augment(pixels_BCYX, images.augment, rng)
    return Batch(pixel_values=to_pixels(pixels_BCYX, images.mean, images.std))


def swap_pair(example: Example, special_ids: SpecialIds) -> Example:
    """[CLS] a [SEP] b [SEP] -> [CLS] b [SEP] a [SEP]: the texts change places, the special tokens stay.

    The texts are told apart by their token types; an example without types, or of one text, is returned as it is.
    """
    types = example.token_type_ids
    if types is None or not types.any():
        return example
    before, first, between = _frame(example.ids[types == 0], special_ids)
    start, second, end = _frame(example.ids[types == 1], special_ids)
    left, right = np.concatenate([before, second, between]), np.concatenate([start, first, end])
    new_types = np.repeat(np.array([0, 1], dtype=types.dtype), [len(left), len(right)])
    return replace(example, ids=np.concatenate([left, right]), token_type_ids=new_types)


def _frame(ids: np.ndarray, special_ids: SpecialIds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A segment as (special tokens that open it, its text, special tokens that close it)."""
    closes = np.isin(ids, [token for token in (special_ids.sep, special_ids.eos) if token is not None])
    end = len(ids) - _run(closes[::-1])
    opens = np.isin(ids[:end], [token for token in (special_ids.cls, special_ids.bos) if token is not None])
    start = _run(opens)
    return ids[:start], ids[start:end], ids[end:]


def _run(flags: np.ndarray) -> int:
    """How many of the first flags are True."""
    return len(flags) if flags.all() else int(flags.argmin())


TERM = "classifier"
"""The name of the loss term, and of the head that it reads."""


class Classification:
    """The objective. Raises InputError for class weights that do not fit the classes."""

    def __init__(self, options: ClassificationOptions, context: ObjectiveContext) -> None:
        self.options, self.context = options, context
        self.collator = ExampleCollator(
            context, torch.long, word_dropout=options.word_dropout, swap_pairs=options.swap_pairs
        )
        weights = class_weights(options.class_weights, context.label_counts)
        self.weights_L = None if weights is None else torch.from_numpy(weights).float()

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Examples of texts, or of images, with labels long [B] (None when they have none)."""
        return self.collator(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"classifier": examples in this host batch}."""
        assert batch.labels is not None
        return {TERM: len(batch.labels)}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in nats. Metrics: nll_sum (neither smoothed nor weighted), correct and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        labels_B = batch.labels
        assert labels_B is not None
        scores_BL = output.head(TERM)
        loss_B = F.cross_entropy(scores_BL, labels_B, reduction="none", label_smoothing=self.options.label_smoothing)
        if self.weights_L is not None:
            self.weights_L = self.weights_L.to(labels_B.device)  # once: a copy at every step would wait for a GPU
            loss_B = loss_B * self.weights_L[labels_B]
        with torch.no_grad():
            nll_sum = F.cross_entropy(scores_BL, labels_B, reduction="sum")
            correct = (scores_BL.argmax(dim=-1) == labels_B).sum()
        return LossResult(
            terms={TERM: Term(loss_B.sum(), len(labels_B), self.options.weight)},
            metrics={"nll_sum": nll_sum, "correct": correct, "count": labels_B.new_full((), len(labels_B))},
        )


def class_weights(option: ClassWeights | tuple[float, ...], counts_L: np.ndarray | None) -> np.ndarray | None:
    """fp64 [L] with a mean of 1 over the training examples, or None for none.

    balanced is N / (L n_c) for the L classes that occur (scikit-learn's), 0 for one that does not. Raises InputError
    when there are not as many weights as classes, or when all examples weigh nothing.
    """
    if option == "none":
        return None
    if counts_L is None:
        raise InputError("objectives: class_weights need the labels of the training data")
    if isinstance(option, str):
        return np.divide(
            counts_L.sum() / max(1, np.count_nonzero(counts_L)),
            counts_L,
            out=np.zeros(len(counts_L)),
            where=counts_L > 0,
        )
    weights_L = np.array(option, dtype=np.float64)
    if len(weights_L) != len(counts_L):
        raise InputError(f"objectives: class_weights: expected {len(counts_L)}, one per class, found {len(weights_L)}")
    mean = (weights_L * counts_L).sum() / counts_L.sum()
    if not mean:
        raise InputError("objectives: class_weights: every class of the training data has weight 0")
    return weights_L / mean


"""The name of the loss term, and of the head that it reads."""


class MultiLabel:
    """The objective."""

    def __init__(self, options: MultiLabelOptions, context: ObjectiveContext) -> None:
        self.options, self.context = options, context
        self.collator = ExampleCollator(context, torch.float32, word_dropout=options.word_dropout)

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Examples of texts, or of images, with labels float [B, L] of zeros and ones (None when they have none)."""
        return self.collator(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"classifier": decisions in this host batch, B L}."""
        assert batch.labels is not None
        return {TERM: batch.labels.numel()}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in nats per decision. Metrics: nll_sum, correct (decisions) and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        labels_BL = batch.labels
        assert labels_BL is not None
        scores_BL = output.head(TERM)
        loss_sum = F.binary_cross_entropy_with_logits(scores_BL, labels_BL, reduction="sum")
        correct = ((scores_BL > 0) == labels_BL.bool()).sum()
        count = labels_BL.numel()
        return LossResult(
            terms={TERM: Term(loss_sum, count, self.options.weight)},
            metrics={"nll_sum": loss_sum.detach(), "correct": correct, "count": correct.new_full((), count)},
        )


REGRESSION = "regression"
"""The name of the loss term, and of the head that it reads."""


class Regression:
    """The objective."""

    def __init__(self, options: RegressionOptions, context: ObjectiveContext) -> None:
        self.options, self.context = options, context
        self.collator = ExampleCollator(
            context, torch.float32, word_dropout=options.word_dropout, swap_pairs=options.swap_pairs
        )

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Examples of texts, or of images, with labels float [B] (None when they have none)."""
        return self.collator(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"regression": examples in this host batch}."""
        assert batch.labels is not None
        return {REGRESSION: len(batch.labels)}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """One term, in squared units. Metrics: squared_error_sum, absolute_error_sum and count."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The same, of an `Output` that is shared with other objectives."""
        labels_B = batch.labels
        assert labels_B is not None
        error_B = output.head(REGRESSION).squeeze(-1) - labels_B
        loss_sum = error_B.square().sum()
        return LossResult(
            terms={REGRESSION: Term(loss_sum, len(labels_B), self.options.weight)},
            metrics={
                "squared_error_sum": loss_sum.detach(),
                "absolute_error_sum": error_B.detach().abs().sum(),
                "count": torch.full((), len(labels_B), device=labels_B.device),
            },
        )
