"""Objectives of labelled examples: classification, several labels per example, regression; texts, pairs or images.

    classification   loss = sum_i w_(y_i) * l_i,   l_i = -sum_c t_c log softmax(head(x_i))_c,
                     t_c = (1 - eps) [c = y_i] + eps / L
    multi_label      loss = -sum_(i, c) [ y_ic log sigmoid(s_ic) + (1 - y_ic) log(1 - sigmoid(s_ic)) ],   s = head(x)
    regression       loss = sum_i (head(x_i) - y_i)^2

(BERT, arXiv 1810.04805, section 4; ViT, 2010.11929.) Class weights are scaled so that their mean over the training
examples is 1: the loss stays a mean over examples, whatever is in a batch, and the learning rate means the same with
and without them. Scores of a regression are neither shifted nor scaled: a head that starts at the mean of the training
scores does as well, and the model predicts the data's own numbers.

Training may change the examples:

- word dropout (`collate.py`): a share of the text's tokens becomes [MASK], so that no single word decides.
- swapped pairs: half of the pairs are read in the other order, [CLS] b [SEP] a [SEP] for [CLS] a [SEP] b [SEP].
- augmentation of images, and mixtures of two (`data/sources/augmentation.py`): t_c are then the shares of the classes.

A decoder beside the encoder reads the same text again: `read_again`.

Shapes: B examples, T tokens, L labels, C channels, Y x X pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.data.sources.augmentation import augment, mix
from tformer.nn.classification_heads import ClassifierHeadOptions, RegressionHeadOptions
from tformer.nn.heads import ModelOutput
from tformer.nn.options import require
from tformer.nn.soft_targets import soft_binary_cross_entropy
from tformer.objectives.base import (
    FORCED_TOKEN_KEYS,
    GENERATION_KEYS,
    PAIR_KEYS,
    CheckedOptions,
    DataKind,
    ImageContext,
    LossResult,
    Metric,
    Objective,
    ObjectiveContext,
    Term,
    class_soft_loss,
    in_order,
)
from tformer.objectives.collate import MASK_FIRST, WordDropout, pad_examples
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds

if TYPE_CHECKING:
    from tformer.data.sources.images import ImageExample

SWAPPED_SHARE = 0.5

ClassWeights = Literal["none", "balanced"]


class LabelledObjective(Objective):
    """Base class of the objectives with one label, several labels or a score per example.

    `label_dtype`: dtype of the batch's labels. Raises InputError for word dropout with a tokenizer that has neither a
    mask, an unknown nor a padding token.
    """

    data: ClassVar[DataKind] = "labelled"
    parts: ClassVar[tuple[str, ...]] = ()
    trains_bodies = True
    unused_keys: ClassVar[tuple[str, ...]] = (
        *PAIR_KEYS,
        *GENERATION_KEYS,
        *FORCED_TOKEN_KEYS,
        "data.document_mask",
        "generator",
    )
    label_dtype: ClassVar[torch.dtype] = torch.float32

    def originals(self, sample: Any) -> dict[str, np.ndarray]:
        return {} if self.context.images is not None else super().originals(sample)

    def __init__(self, options: Any, context: ObjectiveContext) -> None:
        super().__init__(options, context)
        self.swaps_pairs = getattr(options, "swap_pairs", False)
        if options.word_dropout:
            excluded = np.flatnonzero(context.special_V)
            self.drop = WordDropout(options.word_dropout, context.special_ids, excluded=excluded, roles=MASK_FIRST)

    @property
    def collates_at_random(self) -> bool:
        images = self.context.images
        if images is not None:
            return bool(images.augment)
        options = self.options
        return bool(options.word_dropout or self.swaps_pairs) or self.context.padding == "random"

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """One batch of `Example` or `ImageExample`; `labels` is None when the first sample has none.

        `rng`: random padding, and what training varies. Raises ValueError for a text of more than `seq_len` ids.
        """
        if self.context.images is not None:
            batch = collate_images(samples, self.context.images, rng=rng, training=training)
        else:
            batch = self._texts(samples, rng=rng, training=training)
        if samples[0].label is None:
            return batch
        labels = torch.from_numpy(np.array([sample.label for sample in samples])).to(self.label_dtype)
        return replace(batch, labels=labels)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{term: examples of this host batch}."""
        assert batch.labels is not None
        return {self.head.kind: len(batch.labels)}

    def _texts(self, examples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool) -> Batch:
        if training and self.swaps_pairs:
            chosen = rng.random(len(examples)) < SWAPPED_SHARE
            special_ids = self.context.special_ids
            examples = [
                swap_pair(example, special_ids) if swap else example
                for example, swap in zip(examples, chosen.tolist(), strict=True)
            ]
        batch = pad_examples(examples, self.context, rng=rng)
        if training and self.options.word_dropout:
            assert batch.input_ids is not None
            batch = replace(batch, input_ids=torch.from_numpy(self.drop(batch.input_ids.numpy(), rng)))
        return batch if self.context.target is None else read_again(batch, self.context.target.start)


class SingleLabel(LabelledObjective):
    """One class per example. Raises InputError for class weights that do not fit the classes."""

    head = ClassifierHeadOptions()
    reads_images = True
    image_options = ("mixup", "cutmix")
    text_options = ("word_dropout", "swap_pairs")
    metrics = ("loss", "accuracy", "f1_binary", "f1_macro", "mcc")
    unused_keys = (*LabelledObjective.unused_keys, "data.label_separator")
    label_dtype = torch.long
    predicts = "one class of the example"

    def __init__(self, options: ClassificationOptions, context: ObjectiveContext) -> None:
        super().__init__(options, context)
        weights = class_weights(options.class_weights, context.label_counts)
        self.weights_L = None if weights is None else torch.from_numpy(weights).float()
        self.mixes = bool(options.mixup or options.cutmix)

    @property
    def collates_at_random(self) -> bool:
        return self.mixes or super().collates_at_random

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """A batch of labelled examples; with mixup or CutMix labels are shares of classes, fp32 [B, L]."""
        batch = super().collate(samples, rng=rng, training=training)
        if not (training and self.mixes) or batch.labels is None:
            return batch
        options = self.options
        assert batch.pixel_values is not None and self.context.label_counts is not None
        pixels, labels = mix(
            batch.pixel_values,
            batch.labels,
            num_classes=len(self.context.label_counts),
            mixup=options.mixup,
            cutmix=options.cutmix,
            cutmix_share=options.cutmix_share,
            rng=rng,
        )
        return replace(batch, pixel_values=pixels, labels=labels)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """One term. Metric: accuracy, for a mixed image the share of the predicted class in the mixture."""
        labels, scores_BL = batch.labels, output.head(self.head.kind)
        assert labels is not None
        mixed = labels.ndim == 2  # [B, L], shares of the classes; else [B]
        if mixed:
            labels = labels.to(scores_BL.dtype)
        if self.weights_L is not None:
            self.weights_L = self.weights_L.to(scores_BL)  # once: a copy at every step would wait for a GPU
        loss_B = F.cross_entropy(
            scores_BL, labels, weight=self.weights_L, reduction="none", label_smoothing=self.options.label_smoothing
        )
        with torch.no_grad():
            guesses_B = scores_BL.argmax(dim=-1)
            correct = (labels.gather(1, guesses_B[:, None]) if mixed else guesses_B == labels).sum()
        return LossResult(
            terms={self.head.kind: Term(loss_B.sum(), len(labels), self.options.weight)},
            metrics={"accuracy": Metric(correct, len(labels))},
        )

    def soft_loss(
        self, student: ModelOutput, teacher: ModelOutput, batch: Batch, *, temperature: float, order_L: Tensor | None
    ) -> Tensor:
        """Soft targets over the classes."""
        return class_soft_loss(student, teacher, self.head.kind, temperature, order_L)


@dataclass(frozen=True)
class ClassificationOptions(CheckedOptions):
    """One class per example: a text, a pair of texts, or an image."""

    kind: Literal["classification"] = "classification"
    label_smoothing: float = 0.0  # torch's: eps spread over all classes, each part times the weight of its class
    class_weights: ClassWeights | tuple[float, ...] = "none"  # balanced: N / (L * count), as in scikit-learn
    word_dropout: float = 0.0  # this share of the text's tokens becomes [MASK] (or [UNK]) while training
    swap_pairs: bool = False  # while training, half of the pairs are read in the other order
    mixup: float = 0.0  # images: alpha of mixtures of two in training (arXiv 1710.09412); 0: off
    cutmix: float = 0.0  # images: alpha of rectangles of another one (arXiv 1905.04899); 0: off
    cutmix_share: float = 0.5  # with cutmix, the share of the images that it changes; mixup changes the others
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = SingleLabel

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mixup", "cutmix"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0, found {getattr(self, name)}")
        require(0 <= self.cutmix_share <= 1, f"cutmix_share must lie in [0, 1], found {self.cutmix_share}")
        if not isinstance(self.class_weights, str):
            require(
                len(self.class_weights) > 0 and all(weight >= 0 for weight in self.class_weights),
                f"class_weights must be none, balanced or numbers of at least 0, found {self.class_weights}",
            )


class MultiLabel(LabelledObjective):
    """Any number of labels per example: binary cross-entropy of every label, B L decisions."""

    head = ClassifierHeadOptions(multi_label=True)
    predicts = "any of the labels of the example"
    metrics = ("loss", "accuracy", "f1_micro", "f1_macro")

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{term: decisions on the labels of this host batch, B L}."""
        assert batch.labels is not None
        return {self.head.kind: batch.labels.numel()}

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """One term, per decision. Metric: accuracy of decisions."""
        labels_BL = batch.labels
        assert labels_BL is not None
        scores_BL = output.head(self.head.kind)
        loss_sum = F.binary_cross_entropy_with_logits(scores_BL, labels_BL, reduction="sum")
        correct = ((scores_BL > 0) == labels_BL.bool()).sum()
        count = labels_BL.numel()
        return LossResult(
            terms={self.head.kind: Term(loss_sum, count, self.options.weight)},
            metrics={"accuracy": Metric(correct, count)},
        )

    def soft_loss(
        self, student: ModelOutput, teacher: ModelOutput, batch: Batch, *, temperature: float, order_L: Tensor | None
    ) -> Tensor:
        """Soft targets over yes and no of every label."""
        scores_BL = in_order(teacher.head(self.head.kind), order_L)
        return soft_binary_cross_entropy(student.head(self.head.kind), scores_BL, temperature=temperature).sum()


@dataclass(frozen=True)
class MultiLabelOptions(CheckedOptions):
    """Any number of labels per example, each decided alone (binary cross-entropy)."""

    kind: Literal["multi_label"] = "multi_label"
    word_dropout: float = 0.0  # share of the words hidden in training
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = MultiLabel


class Regression(LabelledObjective):
    """One score per example, by squared error."""

    head = RegressionHeadOptions()
    predicts = "the score of the example"
    metrics = ("loss", "pearson", "spearman")
    unused_keys = (*LabelledObjective.unused_keys, "data.label_separator", "data.labels")

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """One term, in squared units, and no metric."""
        labels_B = batch.labels
        assert labels_B is not None
        error_B = output.head(self.head.kind).squeeze(-1) - labels_B
        loss_sum = error_B.square().sum()
        return LossResult({self.head.kind: Term(loss_sum, len(labels_B), self.options.weight)}, metrics={})

    def soft_loss(
        self, student: ModelOutput, teacher: ModelOutput, batch: Batch, *, temperature: float, order_L: Tensor | None
    ) -> Tensor:
        """Squared distance to the teacher's score."""
        return (student.head(self.head.kind) - teacher.head(self.head.kind)).square().sum()


@dataclass(frozen=True)
class RegressionOptions(CheckedOptions):
    """One score per example, by squared error."""

    kind: Literal["regression"] = "regression"
    word_dropout: float = 0.0  # share of the words hidden in training
    swap_pairs: bool = False  # show the texts of a pair in either order
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = Regression


def class_weights(option: ClassWeights | tuple[float, ...], counts_L: np.ndarray | None) -> np.ndarray | None:
    """fp64 [L] with a mean of 1 over the training examples; None for "none".

    balanced is N / (L n_c) for the L classes that occur (scikit-learn's), 0 for one that does not. Raises InputError
    when there are not as many weights as classes, or when the weights of all examples are 0.
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


def read_again(batch: Batch, start: int) -> Batch:
    """The decoder reads the encoder's text, shifted right after `start`, and sees all of it at its last token (BART).

    `start` replaces the first real token, with padding on either side.
    """
    assert batch.input_ids is not None
    ids, mask = batch.input_ids.roll(1, dims=1), batch.attention_mask
    first_B = torch.zeros(len(ids), dtype=torch.long) if mask is None else mask.long().argmax(dim=1)
    ids[torch.arange(len(ids)), first_B] = start
    return replace(batch, decoder_input_ids=ids, decoder_attention_mask=mask, num_tokens=-1)


def collate_images(
    examples: Sequence[ImageExample] | np.ndarray, images: ImageContext, *, rng: np.random.Generator, training: bool
) -> Batch:
    """Normalized pixels, augmented by `images.augment` while training; no labels."""
    from tformer.data.sources.images import to_pixels

    pixels_BCYX = np.stack([example.pixels for example in examples])
    if training and images.augment:
        pixels_BCYX = augment(pixels_BCYX, images.augment, rng)
    return Batch(pixel_values=to_pixels(pixels_BCYX, images.mean, images.std))


def swap_pair(example: Example, special_ids: SpecialIds) -> Example:
    """[CLS] a [SEP] b [SEP] -> [CLS] b [SEP] a [SEP]: the texts change places, the special tokens stay.

    Token types separate the texts; an example without types, or of one text, is returned unchanged.
    """
    types = example.token_type_ids
    if types is None or not types.any():
        return example
    before, first, between = _split_segment(example.ids[types == 0], special_ids)
    start, second, end = _split_segment(example.ids[types == 1], special_ids)
    left, right = np.concatenate([before, second, between]), np.concatenate([start, first, end])
    new_types = np.repeat(np.array([0, 1], dtype=types.dtype), [len(left), len(right)])
    return replace(example, ids=np.concatenate([left, right]), token_type_ids=new_types)


def _split_segment(ids: np.ndarray, special_ids: SpecialIds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(opening special tokens, text, closing special tokens) of a segment."""
    closes = np.isin(ids, [token for token in (special_ids.sep, special_ids.eos) if token is not None])
    end = len(ids) - _leading_true(closes[::-1])
    opens = np.isin(ids[:end], [token for token in (special_ids.cls, special_ids.bos) if token is not None])
    start = _leading_true(opens)
    return ids[:start], ids[start:end], ids[end:]


def _leading_true(flags: np.ndarray) -> int:
    """The number of True values before the first False."""
    return len(flags) if flags.all() else int(flags.argmin())
