"""Heads, and the output of a forward pass, which applies them on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.dropout import dropout
from tformer.nn.feedforward import ACTIVATIONS
from tformer.nn.linear import Linear
from tformer.nn.losses import IGNORED_LABEL, LOGIT_ELEMENTS, CrossEntropy, cross_entropy_of, linear_cross_entropy
from tformer.nn.norm import NormOptions, build_norm
from tformer.nn.options import require_positive
from tformer.nn.products import Product, Quantize, prepare_product

# Shapes: B batch, T positions, D d_model, E embedding size, V vocabulary, L labels.


HeadActivation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "none"]
Pooling = Literal["cls", "mean", "eos"]
LabelKind = Literal["classes", "labels", "score"]
"""What a head predicts for an example: one class of several, any number of labels, or a score."""


@dataclass(frozen=True)
class LmHeadOptions:
    """Next-token (or decoder) logits. `scale` multiplies the hidden state: number, or d^-1/2 as in T5 v1.0."""

    kind: Literal["lm"] = "lm"
    bias: bool = False
    scale: Literal["none", "inverse_sqrt_d"] | float = "none"
    softcap: float | None = None  # c * tanh(logits / c)
    label_kind: ClassVar[LabelKind | None] = None

    def __post_init__(self) -> None:
        require_positive(softcap=self.softcap)


@dataclass(frozen=True)
class MaskedLmHeadOptions:
    """BERT's dense -> activation -> norm transform before the (tied) projection."""

    kind: Literal["masked_lm"] = "masked_lm"
    bias: bool = True
    transform: bool = True
    activation: HeadActivation = "gelu"
    label_kind: ClassVar[LabelKind | None] = None


@dataclass(frozen=True)
class ClassifierHeadOptions:
    kind: Literal["classifier"] = "classifier"
    num_labels: int | None = None  # null: taken from the data's labels
    pooling: Pooling = "cls"
    pooler: bool = True  # dense -> activation before the projection
    activation: HeadActivation = "tanh"
    dropout: float | None = None  # null: the stack's dropout
    multi_label: bool = False

    @property
    def label_kind(self) -> LabelKind:
        """What the head predicts for an example."""
        return "labels" if self.multi_label else "classes"


@dataclass(frozen=True)
class RegressionHeadOptions:
    kind: Literal["regression"] = "regression"
    pooling: Pooling = "cls"
    pooler: bool = True
    activation: HeadActivation = "tanh"
    dropout: float | None = None
    label_kind: ClassVar[LabelKind | None] = "score"


@dataclass(frozen=True)
class NextSentenceHeadOptions:
    kind: Literal["next_sentence"] = "next_sentence"
    label_kind: ClassVar[LabelKind | None] = None


@dataclass(frozen=True)
class ReplacedTokenHeadOptions:
    kind: Literal["replaced_token"] = "replaced_token"
    activation: HeadActivation = "gelu"
    label_kind: ClassVar[LabelKind | None] = None


HeadOptions = (
    LmHeadOptions
    | MaskedLmHeadOptions
    | ClassifierHeadOptions
    | RegressionHeadOptions
    | NextSentenceHeadOptions
    | ReplacedTokenHeadOptions
)

HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: ACTIVATIONS[name] for name in ("relu", "gelu", "gelu_tanh", "silu")},
    "tanh": torch.tanh,
    "none": lambda x: x,
}


def pool(hidden_BTD: Tensor, mask_BT: Tensor | None, how: Pooling) -> Tensor:
    """One vector per sequence, [B, D]: the first real position, the last one, or the mean of the real ones."""
    if mask_BT is None:
        return {"cls": hidden_BTD[:, 0], "eos": hidden_BTD[:, -1]}[how] if how != "mean" else hidden_BTD.mean(dim=1)
    mask_BT = mask_BT.bool()
    if how == "mean":
        weights_BT1 = mask_BT.unsqueeze(-1).float()
        total_BD = (hidden_BTD.float() * weights_BT1).sum(dim=1)
        return (total_BD / weights_BT1.sum(dim=1).clamp(min=1.0)).to(hidden_BTD.dtype)
    slots_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    if how == "cls":  # left padding puts the first token anywhere
        index_B = mask_BT.long().argmax(dim=1)
    else:
        index_B = torch.where(mask_BT, slots_T, 0).amax(dim=1)
    return hidden_BTD[torch.arange(len(index_B), device=index_B.device), index_B]


class VocabularyHead(nn.Module):
    """Logits over the vocabulary; `weight` [V, E] is its own, or the embedding table's when `tied` is given.

    A model narrower at its embeddings needs a bridge D → E: the transform's dense layer, or else `project`.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        *,
        tied: nn.Parameter | None = None,
        bias: bool = False,
        scale: float = 1.0,
        softcap: float | None = None,
        fixnorm: bool = False,
        transform: tuple[str, NormOptions] | None = None,
    ) -> None:
        super().__init__()
        size = d_model if tied is None else tied.shape[1]
        self.weight = nn.Parameter(torch.empty(vocab_size, size)) if tied is None else tied
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.is_tied = tied is not None
        self.scale, self.softcap, self.fixnorm = scale, softcap, fixnorm
        self.dense = Linear(d_model, size, bias=True) if transform else None
        self.norm = build_norm(transform[1], size) if transform else None
        self.activation = HEAD_ACTIVATIONS[transform[0]] if transform else None
        self.project = Linear(d_model, size, bias=False) if size != d_model and not transform else None
        self.product: Product | None = None  # what takes the matrix's place once it no longer changes

    def features(self, hidden: Tensor) -> Tensor:
        """[..., D] → [..., E]: everything before the product with the vocabulary."""
        if self.dense is not None and self.activation is not None and self.norm is not None:
            hidden = self.norm(self.activation(self.dense(hidden)))
        elif self.project is not None:
            hidden = self.project(hidden)
        return hidden if self.scale == 1.0 else hidden * self.scale

    def matrix(self) -> Tensor:
        """The [V, E] matrix of the product: FixNorm uses its rows at length 1."""
        return F.normalize(self.weight, dim=-1) if self.fixnorm else self.weight

    def forward(self, hidden: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """fp32 logits [..., V] of hidden states [..., D]."""
        features = self.features(hidden)
        if self.product is not None:
            logits = self.product(features)
        else:
            bias = None if self.bias is None else self.bias.to(features.dtype)
            logits = F.linear(features, self.matrix().to(features.dtype), bias).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @torch.no_grad()
    def freeze(self, quantize: Quantize, dtype: torch.dtype, rows: int | None = None) -> None:
        """For inference alone: prepare the product. The weight stays, for it may be the embedding table too."""
        matrix = self.matrix().to(dtype)
        self.product = prepare_product(matrix, self.bias, quantize, rows=rows, out_dtype=torch.float32)


class PooledHead(nn.Module):
    """One prediction per sequence: pool → (dense → activation) → dropout → project."""

    def __init__(
        self, d_model: int, num_labels: int, *, pooling: Pooling, pooler: bool, activation: str, dropout: float
    ) -> None:
        super().__init__()
        self.pooling, self.dropout = pooling, dropout
        self.pooler = Linear(d_model, d_model, bias=True) if pooler else None
        self.activation = HEAD_ACTIVATIONS[activation]
        self.project = Linear(d_model, num_labels, bias=True)

    def forward(self, hidden: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """fp32 scores [B, L] of hidden states [B, T, D]; `mask_BT` tells padding apart."""
        x_BD = pool(hidden, mask_BT, self.pooling)
        if self.pooler is not None:
            x_BD = self.activation(self.pooler(x_BD))
        return self.project(dropout(x_BD, self.dropout, self.training)).float()


class ReplacedTokenHead(nn.Module):
    """One logit per token: was this token replaced?"""

    def __init__(self, d_model: int, *, activation: str) -> None:
        super().__init__()
        self.dense = Linear(d_model, d_model, bias=True)
        self.activation = HEAD_ACTIVATIONS[activation]
        self.project = Linear(d_model, 1, bias=True)

    def forward(self, hidden: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """fp32 logits [B, T] of hidden states [B, T, D]."""
        return self.project(self.activation(self.dense(hidden))).squeeze(-1).float()


@dataclass(frozen=True)
class HeadContext:
    """What a head needs to know of the model it stands on."""

    d_model: int
    vocab_size: int | None
    norm: NormOptions
    dropout: float = 0.0
    num_labels: int | None = None
    tied: nn.Parameter | None = None  # the embedding table, when output and embeddings are one
    fixnorm: bool = False


def _vocabulary(context: HeadContext) -> int:
    if context.vocab_size is None:
        raise ValueError("a head over the vocabulary needs vocab_size")
    return context.vocab_size


def _lm(options: LmHeadOptions, context: HeadContext) -> nn.Module:
    named = {"none": 1.0, "inverse_sqrt_d": 1.0 / math.sqrt(context.d_model)}
    scale = named[options.scale] if isinstance(options.scale, str) else options.scale
    return VocabularyHead(
        context.d_model,
        _vocabulary(context),
        tied=context.tied,
        bias=options.bias,
        scale=scale,
        softcap=options.softcap,
        fixnorm=context.fixnorm,
    )


def _masked_lm(options: MaskedLmHeadOptions, context: HeadContext) -> nn.Module:
    transform = (options.activation, context.norm) if options.transform else None
    return VocabularyHead(
        context.d_model,
        _vocabulary(context),
        tied=context.tied,
        bias=options.bias,
        fixnorm=context.fixnorm,
        transform=transform,
    )


def _classifier(options: ClassifierHeadOptions, context: HeadContext) -> nn.Module:
    num_labels = context.num_labels if options.num_labels is None else options.num_labels
    if num_labels is None:
        raise ValueError("a classifier head needs num_labels")
    return _pooled(options, context, num_labels)


def _regression(options: RegressionHeadOptions, context: HeadContext) -> nn.Module:
    return _pooled(options, context, 1)


def _pooled(options: ClassifierHeadOptions | RegressionHeadOptions, context: HeadContext, outputs: int) -> nn.Module:
    return PooledHead(
        context.d_model,
        outputs,
        pooling=options.pooling,
        pooler=options.pooler,
        activation=options.activation,
        dropout=context.dropout if options.dropout is None else options.dropout,
    )


def _next_sentence(options: NextSentenceHeadOptions, context: HeadContext) -> nn.Module:
    return PooledHead(context.d_model, 2, pooling="cls", pooler=True, activation="tanh", dropout=0.0)


def _replaced_token(options: ReplacedTokenHeadOptions, context: HeadContext) -> nn.Module:
    return ReplacedTokenHead(context.d_model, activation=options.activation)


HEADS: dict[str, Callable[[Any, HeadContext], nn.Module]] = {
    "lm": _lm,
    "masked_lm": _masked_lm,
    "classifier": _classifier,
    "regression": _regression,
    "next_sentence": _next_sentence,
    "replaced_token": _replaced_token,
}


def build_head(options: HeadOptions, context: HeadContext) -> nn.Module:
    """The head that `options` describe; ValueError when the model lacks what it needs."""
    return HEADS[options.kind](options, context)


# Shapes: B batch, T queries, S keys of the encoder, D d_model, V vocabulary, N = B T.


MASKED = "masked_lm"  # the head whose labels are ignored for the most part
FEW = 1 / 8  # of the labels: so many ignored ones cost less than leaving them out


@dataclass
class Output:
    """What a forward pass found.

    Attributes:
        hidden: last hidden states of the decoder if there is one, else of the encoder [B, T, D].
        encoder_hidden: last hidden states of the encoder beside a decoder [B, S, D].
        taps: the tensors that were asked for, by name.
        compiled: a compiler made the forward pass: then the loss of a GPU is compiled too.
    """

    hidden: Tensor
    heads: nn.ModuleDict = field(repr=False)
    mask: Tensor | None = field(default=None, repr=False)  # real positions of `hidden` [B, T]; None: all
    encoder_hidden: Tensor | None = None
    taps: dict[str, Tensor] = field(default_factory=dict)
    compiled: bool = False

    @property
    def logits(self) -> Tensor:
        """The first head's predictions on all positions, fp32: [B, T, V] for a language model."""
        return self.head(next(iter(self.heads)))

    def head(self, name: str) -> Tensor:
        """The predictions of the head called `name`, fp32."""
        return self._head(name)(self.hidden, self.mask)

    def logits_at(self, index: int | Tensor = -1) -> Tensor:
        """The first head's logits [B, V] at one position: an int for all rows, or a tensor [B]."""
        if isinstance(index, int):
            hidden_BD = self.hidden[:, index]
        else:
            hidden_BD = self.hidden[torch.arange(len(index), device=index.device), index]
        return self._head(next(iter(self.heads)))(hidden_BD)

    def loss_terms(
        self, name: str, labels_BT: Tensor, *, num_labels: int | None = None, **options: Any
    ) -> CrossEntropy:
        """(loss sum, unsmoothed loss sum, count, correct) of a vocabulary head against labels [B, T].

        `options` go to `losses.linear_cross_entropy`. Where more than a few labels are ignored (masked LM, padding),
        the head sees the other positions only. A frozen head's loss is that of its own product, without gradient.
        `num_labels`: how many are not ignored, if that is known; else a GPU has to be asked, and waited for.
        """
        head = self._vocabulary_head(name)
        hidden_ND, labels_N = self.hidden.flatten(0, 1), labels_BT.flatten()
        kept_N = labels_N != IGNORED_LABEL
        if options.get("reduction", "sum") == "sum" and _leaves_out(name, kept_N):
            places_n = _places(kept_N, num_labels)
            hidden_ND, labels_N = hidden_ND.index_select(0, places_n), labels_N.index_select(0, places_n)
        if head.product is not None:
            return cross_entropy_of(head, hidden_ND, labels_N, classes=head.weight.shape[0], **options)
        return linear_cross_entropy(
            head.features(hidden_ND),
            head.matrix(),
            labels_N,
            bias=head.bias,
            softcap=head.softcap,
            compiled=self.compiled and hidden_ND.device.type == "cuda",
            **options,
        )

    def logit_chunks(self, name: str, places_BT: Tensor, *, count: int | None = None) -> Iterator[Tensor]:
        """The fp32 logits of a vocabulary head where `places_BT` is True, in order: parts [n, V] of bounded size.

        `count`: how many places that are, if it is known; else a GPU has to be waited for.
        """
        head = self._vocabulary_head(name)
        hidden_ND = self.hidden.flatten(0, 1).index_select(0, _places(places_BT.flatten(), count))
        size = max(1, LOGIT_ELEMENTS // head.weight.shape[0])
        for start in range(0, max(1, len(hidden_ND)), size):
            yield head(hidden_ND[start : start + size])

    def _vocabulary_head(self, name: str) -> VocabularyHead:
        head = self._head(name)
        if not isinstance(head, VocabularyHead):
            raise ValueError(f"'{name}' is a {type(head).__name__}, expected a head over the vocabulary")
        return head

    def _head(self, name: str) -> nn.Module:
        if name not in self.heads:
            raise ValueError(f"the model has no head '{name}'; it has: {', '.join(self.heads) or 'none'}")
        return self.heads[name]


def _leaves_out(name: str, kept_N: Tensor) -> bool:
    """Whether ignored positions are dropped before the head. Counting them would stall any device but a CPU."""
    if kept_N.device.type != "cpu":
        return name == MASKED
    return int(kept_N.sum()) < (1 - FEW) * len(kept_N)


def _places(kept_N: Tensor, count: int | None) -> Tensor:
    """Where `kept_N` is True, long [n]. With `count`, which must be right, no device is asked how many these are."""
    if count is None or kept_N.device.type == "cpu":
        return kept_N.nonzero().squeeze(1)
    return counted_places(kept_N, count)


def counted_places(kept_N: Tensor, count: int) -> Tensor:
    """The places [count] of the `count` True elements, in order, by operations whose sizes are known beforehand."""
    numbers_N = torch.arange(len(kept_N), device=kept_N.device)
    rank_N = torch.where(kept_N, kept_N.cumsum(0) - 1, count)  # one further cell takes those that are not kept
    return numbers_N.new_zeros(count + 1).scatter_(0, rank_N, numbers_N)[:count]
