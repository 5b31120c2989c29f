"""Direct logit attribution: what each part of a model adds to a logit, or to the difference of two.

The stream is a sum, embedding + outputs of attention + outputs of feed-forwards (Elhage et al. 2021, A Mathematical
Framework for Transformer Circuits). With the statistics of every later norm held at their values in this pass, all that
follows a part is linear, and a part c adds

    ((c - mean c) / s * gain) . W[token]        LayerNorm, s its standard deviation; RMSNorm does not centre

Post-norm models are decomposed through all norms that follow. An activation after the stack (the dense layer of a
masked language model, the pooler of a classifier) is x f(x)/x with the factor f(x)/x held fixed, as GELU is x Phi(x).
A head adds its output z times its rows of W_O; the output bias belongs to the layer, to no head. All biases of norms
and of the head are one part. The parts add up to the logit; of a soft-capped head to what stands before the cap.

Each part is a leaf of autograd in a copy of the stream that is linear: gradient times value is what it adds.
"""

# Shapes: T positions, N shown positions, D d_model, H heads, v value size, E embedding size, C parts.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.inside.options import head_name
from tformer.model import Transformer
from tformer.nn.classification_heads import POOLINGS, PooledHead
from tformer.nn.embedding import Embedding
from tformer.nn.heads import VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.positions.base import Positions
from tformer.support.errors import require_finite

TAPPED = (".embedding", ".sum", ".positions", ".segments", ".heads", ".down", ".convolved")  # ends of names


class LogitPart(NamedTuple):
    """A part of a logit.

    kind: embedding, positions, segments, self_attention, cross_attention, attention_bias, feedforward, convolution, or
    bias (of norms, projections and the head). head: of attention.
    """

    kind: str
    layer: int | None = None
    head: int | None = None

    @property
    def name(self) -> str:
        """`embedding`, `L3 feedforward`, `L3H5`, of cross-attention `L3C5`."""
        if self.layer is None:
            return self.kind
        cross = self.kind == "cross_attention"
        return f"L{self.layer} {self.kind}" if self.head is None else head_name(self.layer, self.head, cross=cross)

    @property
    def column(self) -> str:
        """Its column in a table of layers: H3 a head of self-attention, C3 of cross-attention, bias, FF."""
        if self.head is None:
            return {"attention_bias": "bias", "feedforward": "FF"}.get(self.kind, self.kind)
        return f"{'C' if self.kind == 'cross_attention' else 'H'}{self.head}"


@dataclass(frozen=True)
class Contributions:
    """Contributions of parts to a logit, or to the difference of two logits.

    Attributes:
        parts: in the order of computation [C].
        values: [N, C]; a classifier has N = 1.
        logits: the logit or difference itself, before a soft cap [N].
    """

    parts: tuple[LogitPart, ...]
    values: np.ndarray
    logits: np.ndarray

    @property
    def gap(self) -> float:
        """The largest difference between a logit and the sum of its parts: rounding."""
        return float(np.abs(self.values.sum(axis=1) - self.logits).max())


@dataclass
class _Stream:
    """The leaves of a linear copy of the stream, each with its part."""

    leaves: list[tuple[LogitPart, Tensor]] = field(default_factory=list)

    def add(self, part: LogitPart, value: Tensor) -> Tensor:
        leaf = value.detach().clone().requires_grad_()
        self.leaves.append((part, leaf))
        return leaf

    def normalized(self, norm: Any, x: Tensor) -> Tensor:
        """norm(x), linear in x."""
        state = x.detach()
        linear = norm.linear_at(state)
        return linear(x) + self.add(LogitPart("bias"), norm(state) - linear(state))

    def product(self, linear: Linear, x: Tensor, bias: LogitPart = LogitPart("bias")) -> Tensor:
        y = F.linear(x, linear.weight)
        return y if linear.bias is None else y + self.add(bias, linear.bias.expand_as(y))


def attribute_logits(
    model: Transformer,
    inputs: Mapping[str, Tensor],
    *,
    side: str,
    head: str,
    places: Sequence[int],
    targets: Sequence[int],
    against: Sequence[int] | None = None,
) -> Contributions:
    """Split the logit of `targets[n]` at `places[n]`, minus the logit of `against[n]` if given, into parts.

    Args:
        inputs: of `Transformer.forward`, one row each.
        side: the stack that the head reads: `decoder`, or `encoder` of a model without a decoder.
        head: name of a head over the vocabulary, or of a classifier, whose places have no meaning.

    Raises:
        NotImplementedError: a norm that has no linear form.
        NotFiniteError: logits that are NaN or infinite.
    """
    module, stream = model.heads[head], _Stream()
    pools = isinstance(module, PooledHead)
    names = [name for name in model.tap_names() if name.startswith(f"{side}.") and name.endswith(TAPPED)]
    with torch.no_grad():
        output = model(**inputs, taps=names)
    with torch.enable_grad():
        x_1TD = _through_stack(model, side, output.taps, stream)
        features = _pooled if pools else _features
        y_NE = features(module, x_1TD, stream)[0]
        y_NE = y_NE if pools else y_NE[list(places)]
        direction_NE, bias_N = _directions(module, targets)
        if against is not None:
            other_NE, other_N = _directions(module, against)
            direction_NE, bias_N = direction_NE - other_NE, bias_N - other_N
        total = (y_NE * direction_NE.detach()).sum()
        gradients = torch.autograd.grad(total, [leaf for _, leaf in stream.leaves], allow_unused=True)
    found: dict[LogitPart, Tensor] = {}
    for (part, leaf), gradient in zip(stream.leaves, gradients, strict=True):
        share = leaf.new_zeros(leaf.shape[:-1]) if gradient is None else (leaf.detach() * gradient).sum(dim=-1)
        share = share.sum(dim=-1, keepdim=True) if pools else share[..., list(places)]  # [1, N], of heads [1, H, N]
        for number, value_N in enumerate(share[0]) if share.ndim == 3 else [(None, share[0])]:
            own = part._replace(head=number)
            found[own] = found[own] + value_N if own in found else value_N
    found[LogitPart("bias")] = bias_N.detach() + found.pop(LogitPart("bias"), torch.zeros(()))
    logits_N = _logits(module, output.hidden, places, targets)
    if against is not None:
        logits_N = logits_N - _logits(module, output.hidden, places, against)
    require_finite(logits_N, "logits")
    values_NC = torch.stack(list(found.values()), dim=1)
    return Contributions(tuple(found), values_NC.cpu().numpy(), logits_N.cpu().numpy())


def _through_stack(model: Transformer, side: str, tapped: Mapping[str, Tensor], stream: _Stream) -> Tensor:
    """The output of a stack [1, T, D]."""
    stack = getattr(model, side)
    own = side == "decoder" and model.decoder_embedding is not None
    embedding = model.decoder_embedding if own else model.embedding
    assert isinstance(embedding, Embedding)
    x = _embedded(embedding, stack.positions_of(0), f"{side}.embedding", tapped, stream)
    for layer, block in enumerate(stack.layers):
        for name in ("self_attention", "cross_attention", "feedforward"):
            function, norm = getattr(block, name), getattr(block, f"{name}_norm")
            if function is None:
                continue
            if name == "feedforward":
                update = stream.add(LogitPart(name, layer), tapped[f"{side}.{layer}.{name}.down"])
            else:
                z_1HTv = stream.add(LogitPart(name, layer), tapped[f"{side}.{layer}.{name}.heads"])
                joined = z_1HTv.transpose(1, 2).flatten(2)
                update = stream.product(function.out, joined, LogitPart("attention_bias", layer))
            if (after := block.output_norm(name)) is not None:
                update = stream.normalized(after, update)
            x = x + update * block.multiplier
            if block.place == "post":
                x = stream.normalized(norm, x)
        if block.convolution is not None and block.convolution_norm is not None:
            convolved = stream.add(LogitPart("convolution", layer), tapped[f"{side}.{layer}.convolution.convolved"])
            x = stream.normalized(block.convolution_norm, x + convolved)
    return x if stack.final_norm is None else stream.normalized(stack.final_norm, x)


def _embedded(
    embedding: Embedding, positions: Positions, name: str, tapped: Mapping[str, Tensor], stream: _Stream
) -> Tensor:
    """The input of a stack [1, T, D]: tokens or patches, positions and segments apart where they are added up."""
    if not positions.has_embed:
        return stream.add(LogitPart("embedding"), tapped[name])
    total = tapped[f"{name}.sum"]
    convolves = getattr(embedding, "convolve", None) is not None  # which mixes segments with tokens
    kinds = [kind for kind in ("positions", "segments") if f"{name}.{kind}" in tapped]
    added = {kind: tapped[f"{name}.{kind}"].expand_as(total) for kind in kinds if kind == "positions" or not convolves}
    x = stream.add(LogitPart("embedding"), total - sum(added.values()))
    for kind, value in added.items():
        x = x + stream.add(LogitPart(kind), value)
    if embedding.norm is not None:
        x = stream.normalized(embedding.norm, x)
    return x if embedding.project is None or embedding.project_first else stream.product(embedding.project, x)


def _activated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) as x times function(x) / x, linear in x."""
    state = x.detach()
    return x * torch.where(state == 0, 0.0, function(state) / state)


def _features(head: nn.Module, x_1TD: Tensor, stream: _Stream) -> Tensor:
    """The features that a head over the vocabulary multiplies with its matrix, [1, T, E]."""
    assert isinstance(head, VocabularyHead)
    if head.dense is not None and head.activation is not None and head.norm is not None:
        x_1TD = stream.normalized(head.norm, _activated(head.activation, stream.product(head.dense, x_1TD)))
    elif head.project is not None:
        x_1TD = stream.product(head.project, x_1TD)
    return x_1TD * head.scale


def _pooled(head: nn.Module, x_1TD: Tensor, stream: _Stream) -> Tensor:
    """The pooled vector that a classifier multiplies with its matrix, [1, 1, D]."""
    assert isinstance(head, PooledHead)
    scores = () if head.attend is None else (head.attend(x_1TD.detach()).squeeze(-1),)
    pooled_11D = POOLINGS[head.pooling].pool(x_1TD, None, *scores).unsqueeze(1)
    if head.pooler is None:
        return pooled_11D
    active_11D = _activated(head.activation, stream.product(head.pooler, pooled_11D))
    return active_11D if head.norm is None else stream.normalized(head.norm, active_11D)


@torch.no_grad()
def _logits(head: nn.Module, hidden_1TD: Tensor, places: Sequence[int], ids: Sequence[int]) -> Tensor:
    """The logits [N] of tokens at their places, before a soft cap; for a classifier, of labels."""
    if isinstance(head, PooledHead):
        return head(hidden_1TD)[0, list(ids)]
    assert isinstance(head, VocabularyHead)
    rows_NE, bias_N = _directions(head, ids)
    return (head.features(hidden_1TD)[0, list(places)] * rows_NE).sum(dim=-1) + bias_N


def _directions(head: nn.Module, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows of a head's matrix [N, E] and its biases [N] for tokens or labels."""
    rows = list(ids)
    if isinstance(head, VocabularyHead):
        matrix, bias = head.matrix(), head.bias
    else:
        assert isinstance(head, PooledHead) and head.project is not None
        matrix, bias = head.project.weight, head.project.bias
    return matrix[rows], matrix.new_zeros(len(rows)) if bias is None else bias[rows]
