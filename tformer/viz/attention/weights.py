"""Attention weights from taps, their visible cells, merging of tokens, and attention rollout.

A cell that the pattern forbids differs from a weight of zero: causal order and sparse patterns (sliding window,
BigBird) limit what a query can see, and pictures hatch the other cells. Linformer's weights are effective ones,
softmax(...) F: they may be negative and need not sum to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from tformer.decoding.inference import inference
from tformer.inside.reading import ModelInputs, TokenSequence
from tformer.loading import Loaded
from tformer.nn.attention import AttentionContext
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.support.errors import InputError, require_finite
from tformer.support.formatting import plural

# Shapes: H heads, T queries, S keys.

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")
NAMES: dict[Kind, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}


@dataclass(frozen=True)
class Layer:
    """The heads of one layer that are shown.

    Attributes:
        number, heads: numbers from 0.
        weights_HTS: fp32; forbidden cells are 0.
        visible_TS: bool, what the pattern allows.
        pattern: the kind of attention.
        signed: weights may be negative, and rows need not sum to 1.
    """

    number: int
    heads: tuple[int, ...]
    weights_HTS: np.ndarray
    visible_TS: np.ndarray
    pattern: str = "full"
    signed: bool = False


@dataclass(frozen=True)
class AttentionMaps:
    """One kind of attention: its axes and its layers. `causal`: queries see no later key."""

    kind: Kind
    queries: TokenSequence
    keys: TokenSequence
    layers: tuple[Layer, ...]
    causal: bool = False

    @property
    def cells(self) -> int:
        return sum(layer.weights_HTS.size for layer in self.layers)


@dataclass(frozen=True)
class Chosen:
    """The attentions, layers and heads to show; None: all. pairs: of these only the (layer, head)."""

    kinds: tuple[Kind, ...] | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    pairs: frozenset[tuple[int, int]] | None = None


def kinds_of(loaded: Loaded) -> tuple[Kind, ...]:
    """The kinds of attention of a model."""
    encoder, decoder = loaded.model.encoder is not None, loaded.model.decoder is not None
    has = {"encoder": encoder, "decoder": decoder, "cross": encoder and decoder}
    return tuple(kind for kind in KINDS if has[kind])


def modules_of(loaded: Loaded, kind: Kind) -> list[MultiHeadAttention]:
    """The attention module of each layer."""
    stack = loaded.model.encoder if kind == "encoder" else loaded.model.decoder
    assert stack is not None
    found = [block.cross_attention if kind == "cross" else block.self_attention for block in stack.layers]
    return [module for module in found if module is not None]


def check(loaded: Loaded, chosen: Chosen) -> tuple[Kind, ...]:
    """The kinds to show. InputError for a kind, layer or head that the model does not have."""
    has = kinds_of(loaded)
    for kind in chosen.kinds or ():
        if kind not in has:
            raise InputError(
                f"{loaded.path} has no {NAMES[kind]}", hint=f"it has {' and '.join(NAMES[known] for known in has)}"
            )
    kinds = chosen.kinds or has
    for kind in kinds:
        modules = modules_of(loaded, kind)
        _check_range("--layers", chosen.layers, len(modules), f"the {NAMES[kind]} has {plural(len(modules), 'layer')}")
        shown = modules if chosen.layers is None else [modules[layer] for layer in chosen.layers]
        most = max(module.num_heads for module in shown)
        _check_range("--heads", chosen.heads, most, f"the {NAMES[kind]} has {plural(most, 'head')} a layer")
        for layer, head in sorted(chosen.pairs or ()):
            most = modules[layer].num_heads
            _check_range("--heads", [head], most, f"layer {layer} has {plural(most, 'head')}")
    return kinds


def _check_range(option: str, numbers: Sequence[int] | None, count: int, found: str) -> None:
    for number in numbers or ():
        if not 0 <= number < count:
            raise InputError(f"{option}: {number} is out of range: {found}, 0 to {count - 1}")


def num_cells(loaded: Loaded, reading: ModelInputs, kind: Kind, chosen: Chosen) -> int:
    """The number of weights to show, computed without a forward pass."""
    modules = modules_of(loaded, kind)
    layers = range(len(modules)) if chosen.layers is None else chosen.layers
    heads = sum(len(_heads(layer, modules[layer].num_heads, chosen)) for layer in layers)
    queries, keys = axes_of(reading, kind)
    return heads * len(queries) * len(keys)


def axes_of(reading: ModelInputs, kind: Kind) -> tuple[TokenSequence, TokenSequence]:
    """Tokens of the queries and of the keys; in cross-attention the decoder's and the encoder's."""
    if kind == "cross":
        return reading.sides["decoder"], reading.sides["encoder"]
    return reading.sides[kind], reading.sides[kind]


def compute(loaded: Loaded, reading: ModelInputs, kinds: Sequence[Kind], chosen: Chosen) -> dict[Kind, AttentionMaps]:
    """The weights of the chosen layers and heads, from one forward pass."""
    layers: dict[Kind, Sequence[int]] = {
        kind: range(len(modules_of(loaded, kind))) if chosen.layers is None else chosen.layers for kind in kinds
    }
    taps = {_tap(kind, layer) for kind in kinds for layer in layers[kind]}
    device = next(loaded.model.parameters()).device
    inputs = {name: value.to(device) for name, value in reading.inputs.items()}
    with inference(loaded.model):
        found = loaded.model(**inputs, taps=taps).taps
    for name in sorted(taps):
        require_finite(found[name], name)
    return {
        kind: _attention(
            loaded, reading, kind, {layer: found.pop(_tap(kind, layer))[0] for layer in layers[kind]}, chosen
        )
        for kind in kinds
    }


def _tap(kind: Kind, layer: int) -> str:
    if kind == "cross":
        return f"decoder.{layer}.cross_attention.weights"
    return f"{kind}.{layer}.self_attention.weights"


def _heads(layer: int, count: int, chosen: Chosen) -> tuple[int, ...]:
    """The chosen heads of a layer with `count` heads; pruned layers have fewer than others."""
    found = (head for head in (range(count) if chosen.heads is None else chosen.heads) if head < count)
    return tuple(head for head in found if chosen.pairs is None or (layer, head) in chosen.pairs)


def _attention(
    loaded: Loaded, reading: ModelInputs, kind: Kind, taps: dict[int, torch.Tensor], chosen: Chosen
) -> AttentionMaps:
    modules, (queries, keys) = modules_of(loaded, kind), axes_of(reading, kind)
    # The cells that one row of tokens without padding may use.
    context = AttentionContext.for_length(len(queries), len(keys), causal=kind == "decoder")
    layers = []
    for number, weights in taps.items():
        heads, module = _heads(number, weights.shape[0], chosen), modules[number]
        shown = weights if len(heads) == weights.shape[0] else weights[list(heads)]
        layers.append(
            Layer(
                number,
                heads,
                shown.float().cpu().numpy(),
                module.mechanism.visible_mask(context)[0, 0].numpy(),
                pattern=module.mechanism.kind,
                signed=module.mechanism.signed_weights,
            )
        )
    return AttentionMaps(kind, queries, keys, tuple(layers), causal=kind == "decoder")


# --- tokens hidden and merged: t queries and s keys are left ---------------------------------------------------------

Words = list[tuple[int, int, str]]


@dataclass(frozen=True)
class Changes:
    """Options that remove rows and columns: special tokens hidden, tokens of one word merged."""

    hide_special: bool = False
    merge_subwords: bool = False

    def __bool__(self) -> bool:
        return self.hide_special or self.merge_subwords

    def notes(self) -> list[str]:
        said = []
        if self.hide_special:
            said.append("special tokens are hidden; each row is divided by the sum of the rest")
        if self.merge_subwords:
            said.append("tokens of one word are merged: sums over keys, means over queries")
        return said


def changed(attention: AttentionMaps, changes: Changes) -> AttentionMaps:
    """The attention after these changes."""
    if not changes:
        return attention
    queries, keys = attention.queries, attention.keys
    rows = _pooling(_words(queries, changes), len(queries), mean=False)
    columns = _pooling(_words(keys, changes), len(keys), mean=False)
    layers = tuple(
        replace(
            layer,
            weights_HTS=changed_matrix(layer.weights_HTS, queries, keys, changes, normalized=not layer.signed),
            # A merged cell is visible if any of its cells is.
            visible_TS=(rows @ layer.visible_TS.astype(np.float32) @ columns.T) > 0,
        )
        for layer in attention.layers
    )
    return replace(attention, queries=changed_side(queries, changes), keys=changed_side(keys, changes), layers=layers)


def changed_side(side: TokenSequence, changes: Changes) -> TokenSequence:
    words = _words(side, changes)
    firsts = [start for start, _, _ in words]
    from_ = side.written_from
    return TokenSequence(
        side.name,
        tuple(text for _, _, text in words),
        tuple(side.special[first] for first in firsts),
        tuple(changes.merge_subwords or side.starts[first] for first in firsts),
        tuple(side.text_of[first] for first in firsts) if side.text_of else (),
        None if from_ is None else sum(first < from_ for first in firsts),
    )


def changed_matrix(
    weights_xTS: np.ndarray, queries: TokenSequence, keys: TokenSequence, changes: Changes, *, normalized: bool = True
) -> np.ndarray:
    """fp32 [..., t, s]. `normalized`: after hiding, each row is scaled to its previous sum."""
    rows, columns = _words(queries, changes), _words(keys, changes)
    if changes.hide_special:
        hidden = np.array(keys.special, dtype=bool)
        total = weights_xTS.sum(axis=-1, keepdims=True, dtype=np.float64)
        weights_xTS = np.where(hidden, np.float32(0), weights_xTS)
        if normalized:
            left = weights_xTS.sum(axis=-1, keepdims=True, dtype=np.float64)
            weights_xTS = (weights_xTS * (total / np.where(left > 0, left, 1))).astype(np.float32)
    merged = weights_xTS @ _pooling(columns, len(keys), mean=False).T
    return (_pooling(rows, len(queries), mean=True) @ merged).astype(np.float32, copy=False)


def _words(side: TokenSequence, changes: Changes) -> Words:
    if changes.merge_subwords:
        words = side.words()
    else:
        words = [(place, place + 1, token) for place, token in enumerate(side.tokens)]
    return [word for word in words if not (changes.hide_special and side.special[word[0]])]


def _pooling(words: Words, length: int, *, mean: bool) -> np.ndarray:
    """fp32 [t, T]: for each word ones at its tokens, or for a mean their shares."""
    matrix = np.zeros((len(words), length), dtype=np.float32)
    for row, (start, stop, _) in enumerate(words):
        matrix[row, start:stop] = 1 / (stop - start) if mean else 1
    return matrix


# --- rollout ---------------------------------------------------------------------------------------------------------

HEURISTIC = (
    "Rollout through cross-attention is a heuristic: each layer keeps half of a position and takes half from the "
    "source; what is missing in a row came from the decoder's own tokens"
)
BASIC = "Rollout is the product over layers of half the mean attention of the heads and half the identity"


def rollout(kind: Kind, found: Mapping[Kind, AttentionMaps]) -> np.ndarray:
    """Attention rollout, fp32 [T, S], over the given layers and heads; `cross`: through encoder and decoder."""
    if kind != "cross":
        return _through(found[kind]).astype(np.float32)
    decoder, cross, encoder_SS = found["decoder"], found["cross"], _through(found["encoder"])
    from_source = np.zeros((len(cross.queries), len(cross.keys)))
    for own, other in zip(decoder.layers, cross.layers, strict=True):
        from_source = _half(own.weights_HTS) @ from_source
        from_source = 0.5 * from_source + 0.5 * other.weights_HTS.mean(axis=0, dtype=np.float64) @ encoder_SS
    return from_source.astype(np.float32)


def _through(attention: AttentionMaps) -> np.ndarray:
    product = np.eye(len(attention.keys))
    for layer in attention.layers:
        product = _half(layer.weights_HTS) @ product
    return product


def _half(weights_HTT: np.ndarray) -> np.ndarray:
    mean = weights_HTT.mean(axis=0, dtype=np.float64)
    return 0.5 * mean + 0.5 * np.eye(len(mean))
