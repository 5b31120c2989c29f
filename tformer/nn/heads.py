"""Heads over the vocabulary, the table of all heads, and the output of a forward pass, which applies heads on demand.

Vocabulary heads (`lm`, `masked_lm`) have two parts, `features` and a projection, so that the loss can be computed in
chunks (`losses.linear_cross_entropy`) and decoding can project the last position only: logits over a vocabulary are the
largest tensor of a small model, and those of a whole batch need never exist.

    lm           features = x · scale;                          logits = features Wᵀ (+ b), soft-capped c·tanh(z/c)
    masked_lm    features = norm(act(dense(x))), BERT (arXiv 1810.04805)

Shape legend: B batch, T queries, S keys of the encoder, N = B T, D d_model, E embedding size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.kernels.functions import Kernels
from tformer.nn.classification_heads import (
    HEAD_ACTIVATIONS,
    ClassifierHeadOptions,
    EmbeddingHeadOptions,
    HeadActivation,
    HeadContext,
    HeadFacts,
    MultipleChoiceHeadOptions,
    NextSentenceHeadOptions,
    PoolerHeadOptions,
    RegressionHeadOptions,
    ReplacedTokenHeadOptions,
    SpanHeadOptions,
    TokenClassifierHeadOptions,
)
from tformer.nn.linear import Linear
from tformer.nn.losses import IGNORED_LABEL, LOGIT_ELEMENTS, CrossEntropy, cross_entropy_of, linear_cross_entropy
from tformer.nn.norm import NormOptions, build_norm
from tformer.nn.options import require_positive
from tformer.nn.products import Product, Quantize, prepare_product
from tformer.nn.taps import Tap, TapSink, tap

FEW = 1 / 8  # of the labels: computing the loss of so few ignored labels costs less than leaving them out


class VocabularyHead(nn.Module):
    """Logits over the vocabulary; `weight` [V, E] is the embedding table where `context.tied` is given.

    A model with narrower embeddings needs a map D → E: the dense layer of the transform, or else `project`.
    """

    def __init__(
        self,
        context: HeadContext,
        *,
        bias: bool = False,
        scale: float = 1.0,
        softcap: float | None = None,
        transform: tuple[str, NormOptions] | None = None,
        dense_bias: bool = True,
        labels_are_few: bool = False,
    ) -> None:
        super().__init__()
        d_model, vocab_size, tied = context.d_model, context.vocab_size, context.tied
        if vocab_size is None:
            raise ValueError("a head over the vocabulary needs vocab_size")
        size = d_model if tied is None else tied.shape[1]
        self.weight = nn.Parameter(torch.empty(vocab_size, size)) if tied is None else tied
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.is_tied = tied is not None
        self.scale, self.softcap, self.fixnorm = scale, softcap, context.fixnorm
        self.labels_are_few = labels_are_few  # most positions have no label: the loss leaves them out
        self.dense = Linear(d_model, size, bias=dense_bias) if transform else None
        self.norm = build_norm(transform[1], size) if transform else None
        self.activation = HEAD_ACTIVATIONS[transform[0]] if transform else None
        self.project = Linear(d_model, size, bias=False) if size != d_model and not transform else None
        self.product: Product | None = None  # replaces the matrix once it no longer changes

    def features(self, hidden: Tensor, taps: TapSink | None = None) -> Tensor:
        """[..., D] → [..., E]: everything before the product with the vocabulary."""
        if self.dense is not None and self.activation is not None and self.norm is not None:
            hidden = self.norm(self.activation(tap(taps, "features", self.dense(hidden))))
            hidden = tap(taps, "normalized", hidden)
        elif self.project is not None:
            hidden = tap(taps, "features", self.project(hidden))
        return hidden if self.scale == 1.0 else tap(taps, "scaled", hidden * self.scale)

    def matrix(self) -> Tensor:
        """The [V, E] matrix of the product: FixNorm uses its rows at length 1."""
        return F.normalize(self.weight, dim=-1) if self.fixnorm else self.weight

    def forward(self, hidden: Tensor, mask_BT: Tensor | None = None, *, taps: TapSink | None = None) -> Tensor:
        """fp32 logits [..., V] of hidden states [..., D]."""
        features = self.features(hidden, taps)
        if self.product is not None:
            logits = self.product(features)
        else:
            bias = None if self.bias is None else self.bias.to(features.dtype)
            logits = F.linear(features, self.matrix().to(features.dtype), bias).float()
        return tap(taps, "logits", logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap))

    def taps(self) -> list[Tap]:
        """Inner tensors."""
        bridge = self.project if self.dense is None else self.dense
        last = "input of the product with the vocabulary"
        e = "D" if bridge is None or self.weight.shape[1] == bridge.in_features else "E"
        declared = []
        if bridge is not None:
            meaning, name = (last, "project") if self.norm is None else ("one more layer", "dense")
            declared.append(Tap("features", f"B T {e}", meaning, parameters=(name,)))
        if self.norm is not None:
            meaning = f"activated and normalized: {last}"
            declared.append(Tap("normalized", f"B T {e}", meaning, parameters=("norm",)))
        if self.scale != 1.0:
            declared.append(Tap("scaled", f"B T {e}", f"times {self.scale:.4g}"))
        capped = "" if self.softcap is None else f", capped at ±{self.softcap:g} by tanh"
        rows = "; the rows of the table at length 1 (FixNorm)" if self.fixnorm else ""
        meaning = f"a score for every token, at every position{capped}{rows}"
        return [*declared, Tap("logits", "B T V", meaning, parameters=("weight", "bias"))]

    @torch.no_grad()
    def freeze(
        self, quantize: Quantize, dtype: torch.dtype, rows: int | None = None, *, kernels: Kernels | None = None
    ) -> None:
        """Prepare the product for inference. The weight stays, because it may be the embedding table too.

        With int4 it has 8 bits: it decides between tokens, and is a small part of a large model.
        """
        matrix, kind = self.matrix().to(dtype), "int8" if quantize == "int4" else quantize
        self.product = prepare_product(matrix, self.bias, kind, kernels=kernels, rows=rows, out_dtype=torch.float32)


@dataclass(frozen=True)
class LmHeadOptions(HeadFacts):
    """Next-token (or decoder) logits. `scale` multiplies the hidden state: a number, or d^-1/2 as in T5 v1.0."""

    over_vocabulary: ClassVar[bool] = True
    kind: Literal["lm"] = "lm"
    bias: bool = False  # a bias for each vocabulary entry
    scale: Literal["none", "inverse_sqrt_d"] | float = "none"  # factor of the hidden state; T5 v1.0: d^-1/2
    softcap: float | None = None  # c * tanh(logits / c)

    def __post_init__(self) -> None:
        require_positive(softcap=self.softcap)

    def factor(self, d_model: int) -> float:
        """The number that `scale` means for hidden states of this width."""
        named = {"none": 1.0, "inverse_sqrt_d": 1.0 / math.sqrt(d_model)}
        return named[self.scale] if isinstance(self.scale, str) else self.scale

    def build(self, context: HeadContext) -> nn.Module:
        return VocabularyHead(context, bias=self.bias, scale=self.factor(context.d_model), softcap=self.softcap)


@dataclass(frozen=True)
class MaskedLmHeadOptions(HeadFacts):
    """BERT's dense -> activation -> norm transform before the (tied) projection."""

    over_vocabulary: ClassVar[bool] = True
    kind: Literal["masked_lm"] = "masked_lm"
    bias: bool = True  # a bias for each vocabulary entry
    transform: bool = True  # dense, activation and norm before the projection
    activation: HeadActivation = "gelu"  # activation of the transform
    dense_bias: bool = True  # bias of the transform

    def build(self, context: HeadContext) -> nn.Module:
        transform = (self.activation, context.norm) if self.transform else None
        return VocabularyHead(
            context, bias=self.bias, transform=transform, dense_bias=self.dense_bias, labels_are_few=True
        )


HeadOptions = (
    LmHeadOptions
    | MaskedLmHeadOptions
    | ClassifierHeadOptions
    | RegressionHeadOptions
    | NextSentenceHeadOptions
    | PoolerHeadOptions
    | EmbeddingHeadOptions
    | ReplacedTokenHeadOptions
    | TokenClassifierHeadOptions
    | SpanHeadOptions
    | MultipleChoiceHeadOptions
)
"""The table of heads: the options of each, which build it."""

HEADS: dict[str, Any] = {options.kind: options for options in get_args(HeadOptions)}


@dataclass
class ModelOutput:
    """The result of a forward pass: hidden states, with predictions and losses of the heads on demand.

    Attributes:
        hidden: last hidden states of the decoder if there is one, else of the encoder [B, T, D].
        encoder_hidden: last hidden states of the encoder beside a decoder [B, S, D].
        taps: the requested intermediate tensors by name.
        compiled: the forward pass was compiled; then the loss is compiled too on a GPU.
    """

    hidden: Tensor
    heads: nn.ModuleDict = field(repr=False)
    mask: Tensor | None = field(default=None, repr=False)  # real positions of `hidden` [B, T]; None: all
    encoder_hidden: Tensor | None = None
    taps: dict[str, Tensor] = field(default_factory=dict)
    compiled: bool = False

    @property
    def logits(self) -> Tensor:
        """Predictions of the first head on all positions, fp32: [B, T, V] for a language model."""
        return self.head(next(iter(self.heads)))

    def head(self, name: str) -> Tensor:
        """Predictions of the head `name`, fp32."""
        return self._head(name)(self.hidden, self.mask)

    def logits_at(self, index: int | Tensor = -1) -> Tensor:
        """Logits [B, V] of the first head at one position: an int for all rows, or a tensor [B]."""
        if isinstance(index, int):
            hidden_BD = self.hidden[:, index]
        else:
            hidden_BD = self.hidden[torch.arange(len(index), device=index.device), index]
        return self._head(next(iter(self.heads)))(hidden_BD)

    def loss_terms(
        self, name: str, labels_BT: Tensor, *, num_labels: int | None = None, **options: Any
    ) -> CrossEntropy:
        """(loss sum, unsmoothed loss sum, count, correct) of a vocabulary head against labels [B, T].

        `options`: those of `losses.linear_cross_entropy`. Where many labels are ignored (masked LM, padding),
        the head reads the other positions only. A frozen head uses its prepared product, without gradient.
        `num_labels`: number of labels that are not ignored, if known; otherwise a GPU has to be synchronized.
        """
        head = self._vocabulary_head(name)
        hidden_ND, labels_N = self.hidden.flatten(0, 1), labels_BT.flatten()
        labelled_N = labels_N != IGNORED_LABEL
        # Whether the head skips positions without a label. Counting them would synchronize a GPU.
        if labelled_N.device.type == "cpu":
            skips = int(labelled_N.sum()) < (1 - FEW) * len(labelled_N)
        else:
            skips = head.labels_are_few
        if options.get("reduction", "sum") == "sum" and skips:
            places_n = _places(labelled_N, num_labels)
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

        `count`: number of these places, if known; otherwise a GPU has to be synchronized.
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


@dataclass
class CachedOutput(ModelOutput):
    """An output that forms each head's predictions once: several losses compare the same ones, dropout included."""

    formed: dict[str, Tensor] = field(default_factory=dict)

    def head(self, name: str) -> Tensor:
        if name not in self.formed:
            self.formed[name] = super().head(name)
        return self.formed[name]


def _places(chosen_N: Tensor, count: int | None) -> Tensor:
    """Indices of the True elements, long [n]; with their exact `count` a GPU is not synchronized."""
    if count is None or chosen_N.device.type == "cpu":
        return chosen_N.nonzero().squeeze(1)
    return counted_places(chosen_N, count)


def counted_places(chosen_N: Tensor, count: int) -> Tensor:
    """Indices [count] of the `count` True elements, in order, by operations of known sizes."""
    numbers_N = torch.arange(len(chosen_N), device=chosen_N.device)
    rank_N = torch.where(chosen_N, chosen_N.cumsum(0) - 1, count)  # the last cell collects all other elements
    return numbers_N.new_zeros(count + 1).scatter_(0, rank_N, numbers_N)[:count]
