"""Who looks at whom: attention weights by taps, and which cells a pattern forbids.

A forbidden cell is not one of weight zero: causal order and the patterns of sparse kinds (sliding window, BigBird) say
what can be seen at all, and pictures hatch the rest. Linformer's weights are effective ones, softmax(...) F: they may
be negative and need not sum to one.
"""

# Shapes: H heads, T queries, S keys.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from tformer.decoding.generate import inference
from tformer.errors import InputError
from tformer.loading import Loaded
from tformer.nn.attention import Mechanism, Reach, bigbird, sliding_window
from tformer.nn.attention.linformer import LinformerAttention
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.viz.attention.reading import Reading
from tformer.viz.attention.sides import Side

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
        number, heads: counted from 0.
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
class Attention:
    """One kind of attention: its axes and its layers. `causal`: queries see no later key."""

    kind: Kind
    queries: Side
    keys: Side
    layers: tuple[Layer, ...]
    causal: bool = False

    @property
    def cells(self) -> int:
        return sum(layer.weights_HTS.size for layer in self.layers)


@dataclass(frozen=True)
class Chosen:
    """Which attentions, layers and heads to look at; None: all."""

    kinds: tuple[Kind, ...] | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None


def kinds_of(loaded: Loaded) -> tuple[Kind, ...]:
    """What a model has."""
    encoder, decoder = loaded.model.encoder is not None, loaded.model.decoder is not None
    has = {"encoder": encoder, "decoder": decoder, "cross": encoder and decoder}
    return tuple(kind for kind in KINDS if has[kind])


def modules_of(loaded: Loaded, kind: Kind) -> list[MultiHeadAttention]:
    """The attention of each layer."""
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
        _check_range("--layers", chosen.layers, len(modules), f"the {NAMES[kind]} has {len(modules)} layers")
        shown = modules if chosen.layers is None else [modules[layer] for layer in chosen.layers]
        most = max(module.num_heads for module in shown)
        _check_range("--heads", chosen.heads, most, f"the {NAMES[kind]} has {most} heads a layer")
    return kinds


def _check_range(option: str, numbers: Sequence[int] | None, count: int, found: str) -> None:
    for number in numbers or ():
        if not 0 <= number < count:
            raise InputError(f"{option}: {number} is out of range: {found}, 0 to {count - 1}")


def num_cells(loaded: Loaded, reading: Reading, kind: Kind, chosen: Chosen) -> int:
    """How many weights would be shown, known before any is computed."""
    modules = modules_of(loaded, kind)
    layers = range(len(modules)) if chosen.layers is None else chosen.layers
    heads = sum(len(_heads(modules[layer].num_heads, chosen)) for layer in layers)
    queries, keys = axes_of(reading, kind)
    return heads * len(queries) * len(keys)


def axes_of(reading: Reading, kind: Kind) -> tuple[Side, Side]:
    """Queries and keys: in cross-attention the decoder asks, and the encoder is looked at."""
    if kind == "cross":
        return reading.sides["decoder"], reading.sides["encoder"]
    return reading.sides[kind], reading.sides[kind]


def compute(loaded: Loaded, reading: Reading, kinds: Sequence[Kind], chosen: Chosen) -> dict[Kind, Attention]:
    """One forward pass; the weights of the chosen layers and heads."""
    layers: dict[Kind, Sequence[int]] = {
        kind: range(len(modules_of(loaded, kind))) if chosen.layers is None else chosen.layers for kind in kinds
    }
    taps = {_tap(kind, layer) for kind in kinds for layer in layers[kind]}
    device = next(loaded.model.parameters()).device
    inputs = {name: value.to(device) for name, value in reading.inputs.items()}
    with inference(loaded.model):
        found = loaded.model(**inputs, taps=taps).taps
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


def _heads(count: int, chosen: Chosen) -> tuple[int, ...]:
    """Those of the chosen heads that a layer has: pruned layers have fewer."""
    return tuple(head for head in (range(count) if chosen.heads is None else chosen.heads) if head < count)


def _attention(
    loaded: Loaded, reading: Reading, kind: Kind, taps: dict[int, torch.Tensor], chosen: Chosen
) -> Attention:
    modules, (queries, keys) = modules_of(loaded, kind), axes_of(reading, kind)
    layers = []
    for number, weights in taps.items():
        heads, module = _heads(weights.shape[0], chosen), modules[number]
        shown = weights if len(heads) == weights.shape[0] else weights[list(heads)]
        layers.append(
            Layer(
                number,
                heads,
                shown.float().cpu().numpy(),
                visible(module.mechanism, len(queries), len(keys), causal=kind == "decoder"),
                pattern=pattern_of(module.mechanism),
                signed=isinstance(module.mechanism, LinformerAttention),
            )
        )
    return Attention(kind, queries, keys, tuple(layers), causal=kind == "decoder")


# --- what the pattern allows -----------------------------------------------------------------------------------------


def visible(mechanism: Mechanism, num_queries: int, num_keys: int, *, causal: bool) -> np.ndarray:
    """bool [T, S]: the cells that one row of real tokens may use."""
    reach = Reach(causal=causal)
    if isinstance(mechanism, sliding_window.SlidingWindowAttention):
        allowed = sliding_window.allowed(mechanism.options, reach, num_queries, num_keys)
    elif isinstance(mechanism, bigbird.BigBirdAttention):
        allowed = bigbird.allowed(mechanism.options, reach, num_queries, num_keys, layer=mechanism.layer)
    else:
        allowed = torch.ones(num_queries, num_keys, dtype=torch.bool)
        allowed = allowed.tril() if causal else allowed
    return allowed.reshape(-1, num_queries, num_keys)[0].numpy()


def pattern_of(mechanism: Mechanism) -> str:
    """What a kind of attention is called in a recipe: sliding_window for SlidingWindowAttention."""
    name = type(mechanism).__name__.removesuffix("Attention")
    return {"BigBird": "bigbird", "SlidingWindow": "sliding_window"}.get(name, name.lower())


def mean_of_heads(attention: Attention) -> Attention:
    """Each layer with the mean of its shown heads for its only one."""
    layers = [
        replace(layer, heads=(-1,), weights_HTS=layer.weights_HTS.mean(axis=0, keepdims=True))
        for layer in attention.layers
    ]
    return replace(attention, layers=tuple(layers))
