"""Base class of objectives: facts about the kind, batches out of samples, and the loss as named terms.

A term is a sum over predictions with their count and weight. The training loop adds the counts over the whole global
batch (accumulation and processes) before the first backward pass and minimizes

    loss = sum over terms of weight * sum / count,

so several objectives fit into one model (`Combined`), and splitting a batch changes nothing.

An objective sees a model only as a callable that returns its `ModelOutput`, and special tokens only as `SpecialIds`.

Shapes: B samples, T tokens, V vocabulary, L labels, N = B T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.batching.padding import PadTo, Side
from tformer.data.shards.corpus import Example
from tformer.nn.heads import HeadOptions, ModelOutput
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.options import require_positive, require_probability
from tformer.nn.soft_targets import LogitProjection, linear_divergence, soft_cross_entropy
from tformer.nn.structured_dropout import SharedDraws
from tformer.support.decoding import Use, keys_for
from tformer.support.errors import InputError
from tformer.tokenizer.special import DecoderTokens, SpecialIds

DataKind = Literal[
    "text", "masked_text", "sentences", "labelled", "tagged", "questions", "pairs", "text_pairs", "chat", "preferences"
]  # fmt: skip
"""Kinds of training data: text in windows, text that the objective corrupts, sentences, labelled examples, labelled
words, questions with a context, pairs of a source and a target, pairs of texts that are read alone, conversations,
answers of which one was preferred.
"""

WINDOWED: frozenset[DataKind] = frozenset({"text", "masked_text"})
"""The kinds that are cut into windows, as `data.packing` says."""

TOKEN_HINTS = {
    "mask": ("a mask token ([MASK] or <mask>)", "--template bert, roberta or seq2seq (tokenizer.train.template)"),
    "sentinels": ("sentinels (<extra_id_0>, ...)", "--template t5, or set tokenizer.train.sentinels"),
}
"""For each role of a special token that an objective may need: what it is, and how to train a tokenizer that has it."""


# Keys of the recipe by what they belong to, for `Objective.unused_keys`.
PAIR_KEYS = (
    "data.columns.source",
    "data.columns.target",
    "data.max_length_ratio",
    "data.target_seq_len",
    "data.overlong",
    "tokenizer.separate",
    "tokenizer.source_path",
    "tokenizer.target_path",
    "training.valid_beam_size",
    "training.valid_sentences",
)
LABEL_KEYS = (
    "data.columns.text2",
    "data.columns.label",
    "data.columns.group",
    "data.label_separator",
    "data.truncation",
    "data.valid_split",
)
IMAGE_KEYS = ("data.image_mean", "data.image_std", "data.augment")
SOURCE_KEYS = keys_for(Use.SOURCE)
GENERATION_KEYS = (
    *keys_for(Use.SEARCH, Use.SOURCE),
    *("generation.min_new_tokens", "generation.at_limit", "generation.suppress_tokens"),
)
FORCED_TOKEN_KEYS = ("tokenizer.special_ids.forced_bos", "tokenizer.special_ids.forced_eos")
DECODER_TOKEN_KEYS = ("tokenizer.special_ids.decoder_start", *FORCED_TOKEN_KEYS)


@dataclass(frozen=True)
class Term:
    """One part of a loss: `sum` (a scalar with gradient) over `count` predictions, and its `weight` among the terms."""

    sum: Tensor
    count: Tensor | int
    weight: float = 1.0


@dataclass(frozen=True)
class Metric:
    """A mean that adds up over batches: `sum` (without gradient) over `count`. is_logged: in training too."""

    sum: Tensor
    count: Tensor | int
    is_logged: bool = False


@dataclass(frozen=True)
class LossResult:
    """The terms by name, and the metrics by the names of reports; of predicted tokens "nll", for the perplexity."""

    terms: dict[str, Term]
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class ImageContext:
    """Image statistics per channel, (value in [0, 1] - mean) / std, and the augmentations of training."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...] = ()


@dataclass(frozen=True)
class ObjectiveContext:
    """Facts about tokenizer, data and models for objectives. Parts that no objective of a run needs keep their default.

    Attributes:
        special_ids: ids of the special tokens.
        seq_len: maximum number of tokens of an example, special tokens included.
        padding, pad_to: the recipe's `data.padding` and `data.pad_to`.
        vocab_size: number of ids of the tokenizer, for random replacements.
        never_masked: bool [V], True for special tokens.
        word_starts: bool [V], True for tokens that begin a word; None: every token is a word.
        label_counts: int [L], examples of each class in the training data.
        generator: ELECTRA's second model.
        images: None for text.
        target: first and last tokens of a decoder beside an encoder, None without one; `target_special_ids` and
            `target_seq_len` belong to the target side where it differs from the source side.
        frame: special ids before and after a source text.
        sentence_ends: bool [V], True for tokens that can end a sentence.
    """

    special_ids: SpecialIds
    seq_len: int
    padding: Side = "right"
    pad_to: PadTo = "longest"
    vocab_size: int = 0
    never_masked: np.ndarray | None = None
    word_starts: np.ndarray | None = None
    label_counts: np.ndarray | None = None
    generator: Callable[..., Any] | None = None
    images: ImageContext | None = None
    target: DecoderTokens | None = None
    target_special_ids: SpecialIds | None = None
    target_seq_len: int | None = None
    frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    sentence_ends: np.ndarray | None = None

    @property
    def special_V(self) -> np.ndarray:
        """bool [V]: `never_masked`, or True for the ids in `special_ids` alone."""
        if self.never_masked is not None:
            return self.never_masked
        table = np.zeros(self.vocab_size, dtype=bool)
        table[list(self.special_ids.all)] = True
        return table


class Objective:
    """Base class of objectives: class attributes state facts about the kind; methods make batches and the loss.

    The options of an objective are a frozen dataclass beside its class, with the class as `objective`.

    Attributes:
        data: kind of training data; the key of its task in `tformer.tasks`.
        head: options of the head that a new model gets. `head.kind` names the head and the loss term.
        parts, without: sections of the recipe's `model` that the objective needs, and those that must be null.
        reads_images: whether `model.patches` is allowed.
        image_options, text_options: names of options that only models of images take, and only models of texts.
        metrics: names of the metrics that validation reports; `training.best_metric` is one of them.
        decoded_metrics: the metrics that need decoded outputs.
        shown_metrics: {metric of this objective alone: its format in the line of a validation}.
        unused_keys: keys of the recipe that the objective does not read.
        special_tokens: roles of `SpecialIds` that the tokenizer must have.
        needs_generator: whether the recipe needs a second model (ELECTRA's generator).
        companion_of: kind of the objective that this one stands beside; None: it stands alone or first.
        predicts_tokens: whether the exponential of its loss is a perplexity.
        trains_bodies: whether it usually trains a body that another objective has trained.
        reads_scores: whether the pairs of texts that it reads have scores.
        compares_batch: whether its loss is no sum over the examples of a batch, so that a batch is never divided.
        compares_base: whether its loss compares the model with the frozen base of its adapters.
        predicts: what the labels are, as a phrase for users.
        room: maximum tokens of text per example, where the objective adds tokens itself; None: `seq_len`.
        shared: draws of `loss` where several processes share a micro-batch, see `Batch.share`; the training loop sets
            it before every forward.
    """

    data: ClassVar[DataKind]
    head: ClassVar[HeadOptions]
    parts: ClassVar[tuple[str, ...]]
    without: ClassVar[tuple[str, ...]] = ()
    reads_images: ClassVar[bool] = False
    image_options: ClassVar[tuple[str, ...]] = ()
    text_options: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    decoded_metrics: ClassVar[tuple[str, ...]] = ()
    shown_metrics: ClassVar[Mapping[str, str]] = {}
    unused_keys: ClassVar[tuple[str, ...]] = ()
    special_tokens: ClassVar[tuple[str, ...]] = ()
    needs_generator: ClassVar[bool] = False
    companion_of: ClassVar[str | None] = None
    predicts_tokens: ClassVar[bool] = False
    trains_bodies: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = False
    compares_batch: ClassVar[bool] = False
    compares_base: ClassVar[bool] = False
    predicts: ClassVar[str]
    room: int | None = None
    shared: SharedDraws | None = None

    def __init__(self, options: Any, context: ObjectiveContext) -> None:
        self.options, self.context = options, context

    @staticmethod
    def predicted_share(head: str, options: Any) -> float:
        """Share of an example's tokens that the head of this kind predicts while training."""
        return 1.0

    @staticmethod
    def target_length(source: float, target: float, options: Any) -> float:
        """Mean number of ids that the decoder reads. source, target: mean numbers of ids of an example, and of its
        target.
        """
        return target

    def originals(self, sample: Any) -> dict[str, np.ndarray]:
        """The ids of a sample before `collate`, by the name of the text; none for images."""
        return {"text": sample.ids if isinstance(sample, Example) else sample}

    @property
    def members(self) -> tuple[Objective, ...]:
        """The objectives that share a forward pass: this one, or all of a `Combined`."""
        return (self,)

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the loss reads, of all trained models."""
        return tuple(member.head.kind for member in self.members)

    @property
    def collates_at_random(self) -> bool:
        """Whether `collate` draws in training. Then each of several processes collates whole micro-batches.

        Otherwise a process reads its own rows only.
        """
        return True

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """One batch on the host from samples; `rng` is the only source of randomness.

        `training=False` leaves out augmentation and word dropout; masking stays.
        """
        raise NotImplementedError

    def label_count(self, batch: Batch) -> dict[str, int]:
        """The number of predictions of each term on this host batch, before any forward pass."""
        raise NotImplementedError

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """Run the model on the batch; its terms, in nats, and metrics."""
        return self.terms(model(**batch.model_inputs()), batch)

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The terms and metrics from the `ModelOutput` of a forward pass on the batch."""
        raise NotImplementedError

    def soft_loss(
        self, student: ModelOutput, teacher: ModelOutput, batch: Batch, *, temperature: float, order_L: Tensor | None
    ) -> Tensor:
        """Sum over the head's predictions of the divergence from the teacher's, times temperature².

        order_L: place of each of the student's labels among the teacher's; None: the same places. An objective without
        this method cannot be learned from a teacher.
        """
        raise NotImplementedError


class CheckedOptions:
    """Base class of options of objectives. Raises ValueError for a share outside [0, 1) and a weight of 0 or less."""

    weight: float

    def __post_init__(self) -> None:
        shares = ("label_smoothing", "word_dropout", "z_loss")
        require_probability(**{name: getattr(self, name) for name in shares if hasattr(self, name)})
        require_positive(weight=self.weight)


class TokenObjective(Objective):
    """Base class of objectives that predict tokens: cross-entropy over the vocabulary at the labelled positions.

    Attributes:
        smoothing: those of the options `label_smoothing`, `smoothing_kind` and `z_loss` that the objective has.
    """

    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    predicts = "the token of every position with a label"
    predicts_tokens = True

    def __init__(self, options: Any, context: ObjectiveContext) -> None:
        super().__init__(options, context)
        names = ("label_smoothing", "smoothing_kind", "z_loss")
        self.smoothing = {name: getattr(options, name) for name in names if hasattr(options, name)}

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{term: labels of this host batch that are not ignored}."""
        assert batch.labels is not None
        return {self.head.kind: int((batch.labels != IGNORED_LABEL).sum())}

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """One term. Metrics: nll (never smoothed) and accuracy."""
        loss_sum, nll_sum, count, correct = output.loss_terms(
            self.head.kind, batch.labels, num_labels=batch.num_labels, **self.smoothing
        )
        return LossResult(
            terms={self.head.kind: Term(loss_sum, count, self.options.weight)},
            metrics={"nll": Metric(nll_sum, count), "accuracy": Metric(correct, count)},
        )

    def soft_loss(
        self, student: ModelOutput, teacher: ModelOutput, batch: Batch, *, temperature: float, order_L: Tensor | None
    ) -> Tensor:
        """Soft targets over the vocabulary at the labelled positions."""
        (ours, theirs), counted_N = self._projections((student, teacher), batch)
        return linear_divergence(ours, theirs, temperature=temperature, counted_N=counted_N)

    def _projections(self, outputs: Sequence[ModelOutput], batch: Batch) -> tuple[list[LogitProjection], Tensor]:
        """The projection of each output's head at selected positions [n], and a mask [n] of the labelled ones."""
        assert batch.labels is not None
        labelled_N = batch.labels.flatten() != IGNORED_LABEL
        # Leaving positions out means counting them, which stalls a GPU; with few labels, as in masked LM, it is faster.
        few = outputs[0].heads[self.head.kind].labels_are_few
        selected_N = labelled_N if labelled_N.device.type == "cpu" or few else slice(None)
        sides = []
        for output in outputs:
            module: Any = output.heads[self.head.kind]
            features = module.features(output.hidden.flatten(0, 1)[selected_N])
            sides.append(LogitProjection(features, module.matrix(), module.bias, module.softcap))
        return sides, labelled_N[selected_N]


def total_loss(terms: Mapping[str, Term], counts: Mapping[str, int | Tensor] | None = None) -> Tensor:
    """The scalar to minimize. `counts`: of the global batch, by term; None: use each term's own count."""
    parts = [term.weight * term.sum / (term.count if counts is None else counts[name]) for name, term in terms.items()]
    loss = parts[0]
    for part in parts[1:]:
        loss = loss + part
    return loss


class Combined(Objective):
    """Several objectives of one model: one batch, one forward pass, the terms of all (BERT's two, for example).

    The first objective makes the batches; each forms its own terms from the same `ModelOutput`.
    """

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self.objectives = tuple(objectives)

    @property
    def members(self) -> tuple[Objective, ...]:
        return self.objectives

    def originals(self, sample: Any) -> dict[str, np.ndarray]:
        """The ids that the first objective shows."""
        return self.objectives[0].originals(sample)

    @property
    def collates_at_random(self) -> bool:
        return self.objectives[0].collates_at_random

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """The first objective's batch."""
        return self.objectives[0].collate(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """The number of predictions of every term of this host batch."""
        return {name: count for each in self.objectives for name, count in each.label_count(batch).items()}

    def terms(self, output: Any, batch: Batch) -> LossResult:
        """The terms and metrics of all objectives."""
        results = [objective.terms(output, batch) for objective in self.objectives]
        return LossResult(
            terms={name: term for result in results for name, term in result.terms.items()},
            metrics={name: value for result in results for name, value in result.metrics.items()},
        )


def require_special_tokens(options: Any, special_ids: SpecialIds) -> None:
    """Raise InputError for a tokenizer that lacks a special token that the objective of these options needs."""
    for role in options.objective.special_tokens:
        if getattr(special_ids, role) in (None, ()):
            token, template = TOKEN_HINTS[role]
            raise InputError(
                f"{options.kind} needs a tokenizer with {token}, this one has none", hint=f"train one with {template}"
            )


def class_soft_loss(
    student: ModelOutput, teacher: ModelOutput, head: str, temperature: float, order_L: Tensor | None
) -> Tensor:
    """Sum over the examples of T² KL(teacher || student) over the classes."""
    return soft_cross_entropy(student.head(head), in_order(teacher.head(head), order_L), temperature=temperature).sum()


def in_order(scores_BL: Tensor, order_L: Tensor | None) -> Tensor:
    """The teacher's scores in the order of the student's labels."""
    return scores_BL if order_L is None else scores_BL[:, order_L]
