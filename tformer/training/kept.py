"""What a layer keeps for its backward pass, in bytes a token: tensor by tensor as autograd saves them.

    norm            its input, in fp32 where the kind or the device widens it
    projections     their inputs: the normed stream, the joined heads
    attention       Q, K, V of one product; rotated or normalised Q and K beside them; the weights where a call is so
                    small that they are not made again (`attend_chunked`, `blocked.py`)
    feed-forward    what the activation and the last product need: 2 d_ff, for relu d_ff, gated 4 d_ff
    dropout         one number for each that it may drop

Every kind of attention but those small calls makes its scores again in the backward pass. Beyond Q, K, V and the output
Linformer keeps the projected keys and values, Performer Q, K and V in fp32 where the compute dtype is narrower.

Shape legend: N tokens of a forward pass, B rows of T, S keys, H heads, K kv heads, W d_model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tformer.build import Sizes
from tformer.nn.attention import CROSS_ATTENTION
from tformer.nn.attention.linformer import LinformerOptions
from tformer.nn.attention.performer import PerformerOptions
from tformer.nn.attention.routes import (
    CHUNK_ELEMENTS,
    KEPT_ELEMENTS,
    QUERY_BLOCK,
)
from tformer.recipe.model import Stack

FP32_BYTES = 4
WIDENED_NORMS = {"scalenorm": 2, "groupnorm": 2, "batchnorm": 1}  # fp32 copies that these keep
SAVED_FF = {"relu": 1, "gelu": 2, "gelu_tanh": 2, "silu": 2, "relu2": 2}  # d_ff numbers of a plain feed-forward


@dataclass(frozen=True)
class Shape:
    """Of one forward pass: `rows` sequences of `length` positions in `dtype`; whether on a CPU."""

    rows: int
    length: int
    dtype: torch.dtype
    on_cpu: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def kept_by_layer(
    layer: Stack, sizes: Sizes, shape: Shape, *, max_seq_len: int, causal: bool, source_length: int | None
) -> int:
    """Bytes that one layer keeps until its backward pass. source_length: of the encoder that it looks at, if any."""
    values = _attention_values(layer, sizes, shape, max_seq_len) + _feedforward_values(layer, sizes, shape)
    kept = int(shape.tokens * values) * shape.itemsize + _weights_kept(layer, sizes, shape, shape.length, causal)
    functions = 2
    if source_length is not None:
        heads = sizes.num_heads * (sizes.head_dim + sizes.value_dim)
        source = sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim)
        kept += shape.tokens * (sizes.d_model + heads + _dropped(layer.dropout, sizes.d_model)) * shape.itemsize
        kept += shape.rows * source_length * source * shape.itemsize
        kept += _weights_kept(layer, sizes, shape, source_length, causal=False)
        functions = 3
    return kept + functions * shape.tokens * _norm_bytes(layer, sizes, shape)


def workspace_of_layer(layer: Stack, sizes: Sizes, shape: Shape, *, source_length: int | None) -> int:
    """Bytes that come and go in the largest step of a layer's forward or backward: its feed-forward or its scores."""
    d_ff = (layer.feedforward.d_ff or 4 * sizes.d_model) * (2 if layer.feedforward.gated else 1)
    products = 2 * shape.tokens * (d_ff + sizes.d_model) * shape.itemsize
    keys = max(shape.length, source_length or 0)
    scores = shape.rows * sizes.num_heads * shape.length * keys
    chunk = min(scores, CHUNK_ELEMENTS) if _explicit(layer, shape) else min(scores, KEPT_ELEMENTS) // 8
    return max(products, chunk * (2 * FP32_BYTES + 3 * shape.itemsize))


def _norm_bytes(layer: Stack, sizes: Sizes, shape: Shape) -> int:
    """The input of a norm, a token."""
    kind = layer.norm.kind
    if kind in WIDENED_NORMS:
        return WIDENED_NORMS[kind] * sizes.d_model * FP32_BYTES
    widens = kind == "layernorm" and not shape.on_cpu
    return sizes.d_model * (FP32_BYTES if widens else shape.itemsize) + 2 * FP32_BYTES


def _attention_values(layer: Stack, sizes: Sizes, shape: Shape, max_seq_len: int) -> float:
    """Numbers a token of self-attention: input, Q K V, joined heads, dropout of the output."""
    q, k = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    v, heads = sizes.num_kv_heads * sizes.value_dim, sizes.num_heads * sizes.value_dim
    values: float = sizes.d_model + q + k + v + heads + _dropped(layer.dropout, sizes.d_model)
    values += (q + k) * (layer.attention.qk_norm + (layer.positions.kind == "rope"))
    if isinstance(layer.attention, LinformerOptions):
        values += layer.attention.rank * (k + v) / max_seq_len
    elif isinstance(layer.attention, PerformerOptions) and shape.itemsize < FP32_BYTES:
        values += (q + k + v) * FP32_BYTES / shape.itemsize
    return values


def _feedforward_values(layer: Stack, sizes: Sizes, shape: Shape) -> int:
    options = layer.feedforward
    d_ff = options.d_ff or 4 * sizes.d_model
    hidden = 4 if options.gated else SAVED_FF[options.activation]
    if layer.activation_dropout:
        hidden += 1
    return sizes.d_model + hidden * d_ff + _dropped(layer.dropout, sizes.d_model)


def _dropped(rate: float, width: int) -> int:
    return width if rate else 0


def _explicit(layer: Stack, shape: Shape) -> bool:
    """Whether scores are formed in the open: what no fused kernel can do (`core.attend`)."""
    kind = layer.positions.kind
    return (
        (layer.attention_dropout > 0 and shape.on_cpu)
        or kind in ("shaw", "t5_bias")
        or (kind == "alibi" and shape.itemsize < FP32_BYTES)
        or layer.attention.kind == "additive"
    )


def _weights_kept(layer: Stack, sizes: Sizes, shape: Shape, num_keys: int, causal: bool) -> int:
    """Bytes of the attention weights that one call keeps: all of them where it is small, else none."""
    if layer.attention.kind not in CROSS_ATTENTION:
        return 0
    scores = shape.rows * sizes.num_heads * shape.length * num_keys
    if _explicit(layer, shape):
        size = sizes.head_dim if layer.attention.kind == "additive" else 1
        if shape.length > max(1, CHUNK_ELEMENTS // max(1, shape.rows * sizes.num_heads * num_keys * size)):
            return 0
        narrow = shape.itemsize if shape.itemsize < FP32_BYTES else 0
        return scores * (FP32_BYTES + (2 * shape.itemsize if layer.attention_dropout else narrow))
    if shape.on_cpu and shape.dtype == torch.bfloat16 and scores <= KEPT_ELEMENTS:
        seen = (shape.length + min(QUERY_BLOCK, shape.length)) / (2 * shape.length) if causal else 1.0
        return int(scores * seen) * shape.itemsize
    return 0
