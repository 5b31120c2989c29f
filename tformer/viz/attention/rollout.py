r"""Attention rollout (arXiv 2005.00928): where information may have come from, through all layers.

    R_0 = I,   R_l = (A_l / 2 + I / 2) R_{l-1},   A_l the mean over the heads

The halves stand for the residual connection. Through cross-attention there is no published rule; ours is a heuristic:
a decoder position is a mixture of its own tokens (R) and of source tokens (C), whose shares sum to one:

    self     R <- (A/2 + I/2) R,   C <- (A/2 + I/2) C
    cross    R <- R/2,             C <- C/2 + X R_encoder / 2,   X the mean over the heads of cross-attention
"""

# Shapes: T queries, S keys.

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tformer.viz.attention.weights import Attention, Kind

HEURISTIC = (
    "Rollout through cross-attention is a heuristic: each layer keeps half of a position and takes half from the "
    "source; what is missing in a row came from the decoder's own tokens"
)
BASIC = "Rollout is the product over layers of half the mean attention of the heads and half the identity"


def needs(kind: Kind) -> tuple[Kind, ...]:
    """Which attentions a rollout is made of."""
    return ("encoder", "decoder", "cross") if kind == "cross" else (kind,)


def rollout(kind: Kind, found: Mapping[Kind, Attention]) -> np.ndarray:
    """fp32 [T, S] over the layers and heads that are given; of `cross`, through encoder and decoder."""
    if kind != "cross":
        return _through(found[kind]).astype(np.float32)
    decoder, cross, encoder_SS = found["decoder"], found["cross"], _through(found["encoder"])
    from_source = np.zeros((len(cross.queries), len(cross.keys)))
    for own, other in zip(decoder.layers, cross.layers, strict=True):
        from_source = _half(own.weights_HTS) @ from_source
        from_source = 0.5 * from_source + 0.5 * other.weights_HTS.mean(axis=0, dtype=np.float64) @ encoder_SS
    return from_source.astype(np.float32)


def _through(attention: Attention) -> np.ndarray:
    product = np.eye(len(attention.keys))
    for layer in attention.layers:
        product = _half(layer.weights_HTS) @ product
    return product


def _half(weights_HTT: np.ndarray) -> np.ndarray:
    mean = weights_HTT.mean(axis=0, dtype=np.float64)
    return 0.5 * mean + 0.5 * np.eye(len(mean))
