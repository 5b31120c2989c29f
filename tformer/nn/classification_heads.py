"""Heads that classify or score sequences and tokens: classifier, regression, next sentence, tokens, spans, choices.

    classifier       project(dropout(norm(act(dense(pool(x))))))   regression: one number; the norm is an option
    next_sentence    project(tanh(dense(x_cls)))
    pooler           tanh(dense(x_cls)), a vector without a projection: what published bodies bring along
    embedding        pool(x), perhaps at length 1: the vector of a text (Sentence-BERT, arXiv 1908.10084)
    replaced_token   project(act(dense(x))), one number per token, ELECTRA (arXiv 2003.10555)
    token_classifier project(dropout(x)), L numbers per token; span: two, of the start and the end of an answer
    multiple_choice  project(dropout(tanh(dense(x_cls)))), one number per pair of a question and a choice

Shape legend: B batch, T positions, D d_model, L labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.dropout import dropout
from tformer.nn.feedforward import ACTIVATIONS
from tformer.nn.linear import Linear
from tformer.nn.norm import NormOptions, build_norm
from tformer.nn.taps import Tap, TapSink, tap

HeadActivation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "none"]
LabelKind = Literal["classes", "labels", "score"]

HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: ACTIVATIONS[name] for name in ("relu", "gelu", "gelu_tanh", "silu")},
    "tanh": torch.tanh,
    "none": lambda x: x,
}


@dataclass(frozen=True)
class HeadContext:
    """The model that a head is built for: sizes, norm, dropout, and the embedding table that the output may share."""

    d_model: int
    vocab_size: int | None
    norm: NormOptions
    dropout: float = 0.0
    num_labels: int | None = None
    tied: nn.Parameter | None = None  # the embedding table, when output and embeddings share it
    fixnorm: bool = False


def pool_first(hidden_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
    """[B, D]: the first real position; with left padding it may be anywhere."""
    if mask_BT is None:
        return hidden_BTD[:, 0]
    return _positions(hidden_BTD, mask_BT.bool().long().argmax(dim=1))


def pool_last(hidden_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
    """[B, D]: the last real position."""
    if mask_BT is None:
        return hidden_BTD[:, -1]
    slots_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return _positions(hidden_BTD, torch.where(mask_BT.bool(), slots_T, 0).amax(dim=1))


def _positions(hidden_BTD: Tensor, index_B: Tensor) -> Tensor:
    return hidden_BTD[torch.arange(len(index_B), device=index_B.device), index_B]


def pool_mean(hidden_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
    """[B, D]: the mean of the real positions; zeros where none is real."""
    if mask_BT is None:
        return hidden_BTD.mean(dim=1)
    weights_BT1 = mask_BT.bool().unsqueeze(-1).float()
    total_BD = (hidden_BTD.float() * weights_BT1).sum(dim=1)
    return (total_BD / weights_BT1.sum(dim=1).clamp(min=1.0)).to(hidden_BTD.dtype)


def pool_largest(hidden_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
    """[B, D]: the maximum of the real positions; zeros where none is real."""
    if mask_BT is None:
        return hidden_BTD.amax(dim=1)
    mask_BT = mask_BT.bool()
    largest_BD = hidden_BTD.masked_fill(~mask_BT.unsqueeze(-1), -torch.inf).amax(dim=1)
    return largest_BD.masked_fill(~mask_BT.any(dim=1, keepdim=True), 0.0)


def pool_weighted(hidden_BTD: Tensor, mask_BT: Tensor | None, scores_BT: Tensor) -> Tensor:
    """[B, D]: the mean of the real positions, weighted by the softmax of their scores; zeros where none is real."""
    scores_BT = scores_BT.float()
    if mask_BT is not None:
        mask_BT = mask_BT.bool()
        scores_BT = scores_BT.masked_fill(~mask_BT, torch.finfo(torch.float32).min)
    weights_BT = scores_BT.softmax(dim=-1)
    if mask_BT is not None:
        weights_BT = weights_BT * mask_BT
    return (weights_BT.to(hidden_BTD.dtype).unsqueeze(1) @ hidden_BTD).squeeze(1)


@dataclass(frozen=True)
class PoolingKind:
    """A way in which a head reads one vector from a sequence.

    Attributes:
        meaning: what it takes of the hidden states.
        pool: (hidden states [B, T, D], mask [B, T]: False (0) on padding, None: all are real) → [B, D].
        is_learned: the head scores each position; `pool` has the scores [B, T] as third argument.
        reads_first: it reads the first position alone, where a decoder has read nothing else.
    """

    meaning: str
    pool: Callable[..., Tensor]
    is_learned: bool = False
    reads_first: bool = False


POOLINGS: dict[str, PoolingKind] = {
    "cls": PoolingKind("the first position", pool_first, reads_first=True),
    "mean": PoolingKind("the mean of all positions", pool_mean),
    "max": PoolingKind("the largest value of each number over all positions", pool_largest),
    "eos": PoolingKind("the last position", pool_last),
    "attention": PoolingKind(
        "the sum of all positions, weighted by a softmax over a learned score of each (CCT, arXiv 2104.05704)",
        pool_weighted,
        is_learned=True,
    ),
}

if TYPE_CHECKING:
    HeadPooling = str
    Pooling = str
else:
    HeadPooling = Literal[tuple(POOLINGS)]
    Pooling = Literal[tuple(name for name, kind in POOLINGS.items() if not kind.is_learned)]


class PooledHead(nn.Module):
    """One prediction per sequence: pool → (dense → activation → norm?) → dropout → project; no labels: no projection.

    Attributes:
        reads_every_position: names of the modules that read all positions; the others read the pooled vector.
    """

    reads_every_position: ClassVar[tuple[str, ...]] = ("attend",)

    def __init__(
        self,
        d_model: int,
        num_labels: int | None,
        *,
        pooling: HeadPooling,
        pooler: bool,
        activation: str,
        dropout: float,
        label_kind: LabelKind = "classes",
        pooler_bias: bool = True,
        norm: NormOptions | None = None,
        unit_length: bool = False,
    ) -> None:
        super().__init__()
        self.pooling, self.dropout, self.label_kind = pooling, dropout, label_kind
        self.unit_length = unit_length
        self._pool = POOLINGS[pooling].pool
        self.attend = Linear(d_model, 1, bias=True) if POOLINGS[pooling].is_learned else None
        self.pooler = Linear(d_model, d_model, bias=pooler_bias) if pooler else None
        self.norm = build_norm(norm, d_model) if pooler and norm is not None else None
        self.activation = HEAD_ACTIVATIONS[activation]
        self.project = None if num_labels is None else Linear(d_model, num_labels, bias=True)

    def forward(self, hidden: Tensor, mask_BT: Tensor | None = None, *, taps: TapSink | None = None) -> Tensor:
        """fp32 scores [B, L] (without a projection [B, D]) of hidden states [B, T, D]; `mask_BT`: False on padding."""
        x_BD = tap(taps, "pooled", self.pool(hidden, mask_BT))
        if self.pooler is not None:
            x_BD = self.activation(tap(taps, "pooler", self.pooler(x_BD)))
        if self.norm is not None:
            x_BD = tap(taps, "normalized", self.norm(x_BD))
        x_BD = dropout(x_BD, self.dropout, self.training)
        if self.unit_length:
            return tap(taps, "vector", F.normalize(x_BD.float(), dim=-1))
        return x_BD.float() if self.project is None else tap(taps, "logits", self.project(x_BD).float())

    def taps(self) -> list[Tap]:
        """Inner tensors."""
        meaning = f"pooling {self.pooling}: {POOLINGS[self.pooling].meaning}"
        declared = [Tap("pooled", "B D", meaning, dropout=self.dropout if self.pooler is None else 0.0)]
        if self.pooler is not None:
            meaning = "one more layer, then its activation"
            last = self.dropout if self.norm is None else 0.0
            declared.append(Tap("pooler", "B D", meaning, parameters=("pooler",), dropout=last))
        if self.norm is not None:
            meaning = "each vector normalized"
            declared.append(Tap("normalized", "B D", meaning, parameters=("norm",), dropout=self.dropout))
        if self.unit_length:
            declared.append(Tap("vector", "B D", "each vector at length 1"))
        if self.project is not None:
            declared.append(Tap("logits", "B L", "a score for every label", parameters=("project",)))
        return declared

    def pool(self, hidden_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
        """One vector per sequence, [B, D], by this head's pooling."""
        scores = () if self.attend is None else (self.attend(hidden_BTD).squeeze(-1),)
        return self._pool(hidden_BTD, mask_BT, *scores)


class ReplacedTokenHead(nn.Module):
    """One logit per token: whether it was replaced."""

    def __init__(self, d_model: int, *, activation: str) -> None:
        super().__init__()
        self.dense = Linear(d_model, d_model, bias=True)
        self.activation = HEAD_ACTIVATIONS[activation]
        self.project = Linear(d_model, 1, bias=True)

    def forward(self, hidden: Tensor, mask_BT: Tensor | None = None, *, taps: TapSink | None = None) -> Tensor:
        """fp32 logits [B, T] of hidden states [B, T, D]."""
        features = tap(taps, "features", self.dense(hidden))
        return tap(taps, "logits", self.project(self.activation(features)).squeeze(-1).float())

    def taps(self) -> list[Tap]:
        """Inner tensors."""
        return [
            Tap("features", "B T D", "one more layer, at every position", parameters=("dense",)),
            Tap("logits", "B T", "was this token replaced?", parameters=("project",)),
        ]


class TokenHead(nn.Module):
    """Scores of every token: (dense → activation → norm)? → dropout → project.

    Attributes:
        chooses: what a label names: "labels", one of each token; "positions", one of the text for each column.
    """

    def __init__(
        self,
        d_model: int,
        outputs: int,
        *,
        dropout: float,
        chooses: Literal["labels", "positions"] = "labels",
        transform: tuple[str, NormOptions] | None = None,
        dense_bias: bool = True,
    ) -> None:
        super().__init__()
        self.dropout, self.chooses = dropout, chooses
        self.dense = Linear(d_model, d_model, bias=dense_bias) if transform else None
        self.norm = build_norm(transform[1], d_model) if transform else None
        self.activation = HEAD_ACTIVATIONS[transform[0] if transform else "none"]
        self.project = Linear(d_model, outputs, bias=True)

    def forward(self, hidden: Tensor, mask_BT: Tensor | None = None, *, taps: TapSink | None = None) -> Tensor:
        """fp32 logits [B, T, L] of hidden states [B, T, D]."""
        if self.dense is not None and self.norm is not None:
            hidden = self.activation(tap(taps, "features", self.dense(hidden)))
            hidden = tap(taps, "normalized", self.norm(hidden))
        return tap(taps, "logits", self.project(dropout(hidden, self.dropout, self.training)).float())

    def taps(self) -> list[Tap]:
        """Inner tensors."""
        inner = []
        if self.dense is not None:
            inner.append(Tap("features", "B T D", "one more layer, at every position", parameters=("dense",)))
            meaning = "activated and normalized"
            inner.append(Tap("normalized", "B T D", meaning, parameters=("norm",), dropout=self.dropout))
        meaning = "a score for every label, at every position"
        letters = "B T L"
        if self.chooses == "positions":
            meaning, letters = "does the answer start here, does it end here?", f"B T {self.project.out_features}"
        return [*inner, Tap("logits", letters, meaning, parameters=("project",))]


@dataclass(frozen=True)
class HeadFacts:
    """What the options of every head state about it.

    Attributes:
        over_vocabulary: it predicts tokens.
        pools: it reads one vector per sequence.
        labels_tokens: the labels are of tokens: tags of words, borders of an answer.
    """

    over_vocabulary: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    labels_tokens: ClassVar[bool] = False

    @property
    def label_kind(self) -> LabelKind | None:
        """The kind of an example's label: one of L classes, any of L labels, or a score; None: no label."""
        return None


@dataclass(frozen=True)
class CountedOptions(HeadFacts):
    """Options of a head with a score for each of a number of labels."""

    kind: str
    num_labels: int | None = None  # null: taken from the data's labels

    def count(self, context: HeadContext) -> int:
        """The number of labels. Raises ValueError where neither the options nor the data have it."""
        found = context.num_labels if self.num_labels is None else self.num_labels
        if found is None:
            raise ValueError(f"a {self.kind} head needs num_labels")
        return found


@dataclass(frozen=True)
class PooledOptions(HeadFacts):
    """Options of a head that projects one pooled hidden state."""

    pools: ClassVar[bool] = True
    kind: str
    # which hidden state, or mean or maximum of them, the head reads; attention: a learned mean (arXiv 2104.05704)
    pooling: HeadPooling = "cls"
    pooler: bool = True  # dense -> activation before the projection
    activation: HeadActivation = "tanh"  # of the pooler
    pooler_bias: bool = True  # bias of the pooler
    pooler_norm: bool = False  # normalize what the pooler gives, with the stack's kind of norm (ModernBERT)
    dropout: float | None = None  # null: the stack's dropout

    def pooled_head(self, context: HeadContext, outputs: int, label_kind: LabelKind) -> nn.Module:
        return PooledHead(
            context.d_model,
            outputs,
            pooling=self.pooling,
            pooler=self.pooler,
            activation=self.activation,
            dropout=context.dropout if self.dropout is None else self.dropout,
            label_kind=label_kind,
            pooler_bias=self.pooler_bias,
            norm=context.norm if self.pooler_norm else None,
        )


@dataclass(frozen=True)
class ClassifierHeadOptions(PooledOptions, CountedOptions):  # the order of its keys: kind, num_labels, pooling, ...
    """Class scores of a whole text or image, from one pooled hidden state (arXiv 1810.04805)."""

    kind: Literal["classifier"] = "classifier"
    multi_label: bool = False  # any number of labels per example

    @property
    def label_kind(self) -> LabelKind:
        return "labels" if self.multi_label else "classes"

    def build(self, context: HeadContext) -> nn.Module:
        return self.pooled_head(context, self.count(context), self.label_kind)


@dataclass(frozen=True)
class RegressionHeadOptions(PooledOptions):
    """One number for a whole text, from one pooled hidden state."""

    kind: Literal["regression"] = "regression"

    @property
    def label_kind(self) -> LabelKind:
        return "score"

    def build(self, context: HeadContext) -> nn.Module:
        return self.pooled_head(context, 1, self.label_kind)


@dataclass(frozen=True)
class NextSentenceHeadOptions(HeadFacts):
    """Does the second text follow the first? (BERT, arXiv 1810.04805)"""

    pools: ClassVar[bool] = True
    kind: Literal["next_sentence"] = "next_sentence"

    def build(self, context: HeadContext) -> nn.Module:
        return PooledHead(context.d_model, 2, pooling="cls", pooler=True, activation="tanh", dropout=0.0)


@dataclass(frozen=True)
class PoolerHeadOptions(HeadFacts):
    """The pooled vector of the first position. No objective trains it; BERT's published bodies have one."""

    pools: ClassVar[bool] = True
    kind: Literal["pooler"] = "pooler"

    def build(self, context: HeadContext) -> nn.Module:
        return PooledHead(context.d_model, None, pooling="cls", pooler=True, activation="tanh", dropout=0.0)


@dataclass(frozen=True)
class EmbeddingHeadOptions(HeadFacts):
    """The vector of a whole text, pooled from the hidden states (arXiv 1908.10084). It has no parameters."""

    pools: ClassVar[bool] = True
    kind: Literal["embedding"] = "embedding"
    pooling: Pooling = "mean"  # which hidden state, or mean or maximum of them, is the vector
    normalize: bool = True  # vectors of length 1

    def build(self, context: HeadContext) -> nn.Module:
        return PooledHead(
            context.d_model,
            None,
            pooling=self.pooling,
            pooler=False,
            activation="none",
            dropout=0.0,
            unit_length=self.normalize,
        )


@dataclass(frozen=True)
class ReplacedTokenHeadOptions(HeadFacts):
    """Was this token replaced? A score for each token (ELECTRA, arXiv 2003.10555)."""

    kind: Literal["replaced_token"] = "replaced_token"
    activation: HeadActivation = "gelu"  # of the transform

    def build(self, context: HeadContext) -> nn.Module:
        return ReplacedTokenHead(context.d_model, activation=self.activation)


@dataclass(frozen=True)
class TokenClassifierHeadOptions(CountedOptions):
    """Scores of L labels for each token, as for named entities (BERT, arXiv 1810.04805, section 5.3)."""

    labels_tokens: ClassVar[bool] = True
    kind: Literal["token_classifier"] = "token_classifier"
    transform: bool = False  # dense, activation and norm before the projection (ModernBERT)
    activation: HeadActivation = "gelu"  # activation of the transform
    dense_bias: bool = True  # bias of the transform
    dropout: float | None = None  # null: the stack's dropout

    def build(self, context: HeadContext) -> nn.Module:
        return _token_head(self, context, self.count(context))


@dataclass(frozen=True)
class SpanHeadOptions(HeadFacts):
    """Two scores for each token: the answer starts here, it ends here (SQuAD; BERT, arXiv 1810.04805, section 4.2)."""

    labels_tokens: ClassVar[bool] = True
    kind: Literal["span"] = "span"
    transform: bool = False  # dense, activation and norm before the projection (ModernBERT)
    activation: HeadActivation = "gelu"  # activation of the transform
    dense_bias: bool = True  # bias of the transform
    dropout: float | None = 0.0  # null: the stack's dropout

    def build(self, context: HeadContext) -> nn.Module:
        return _token_head(self, context, 2)


@dataclass(frozen=True)
class MultipleChoiceHeadOptions(HeadFacts):
    """One score for each pair of a question and a choice (SWAG; BERT, arXiv 1810.04805, section 4.4)."""

    pools: ClassVar[bool] = True
    kind: Literal["multiple_choice"] = "multiple_choice"
    dropout: float | None = None  # null: the stack's dropout

    def build(self, context: HeadContext) -> nn.Module:
        rate = context.dropout if self.dropout is None else self.dropout
        return PooledHead(context.d_model, 1, pooling="cls", pooler=True, activation="tanh", dropout=rate)


def _token_head(options: TokenClassifierHeadOptions | SpanHeadOptions, context: HeadContext, outputs: int) -> nn.Module:
    return TokenHead(
        context.d_model,
        outputs,
        dropout=context.dropout if options.dropout is None else options.dropout,
        chooses="positions" if options.kind == "span" else "labels",
        transform=(options.activation, context.norm) if options.transform else None,
        dense_bias=options.dense_bias,
    )
