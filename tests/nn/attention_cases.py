"""What the tests of attention share: random tensors, a plain formula, small layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.positions import PositionSizes
from tformer.nn.positions.base import NoPositionsOptions
from tformer.nn.positions.biases import AlibiOptions, T5BiasOptions
from tformer.nn.positions.rope import RopeOptions
from tformer.nn.positions.shaw import ShawOptions

LAYER_KINDS = [NoPositionsOptions(), RopeOptions(), AlibiOptions(), T5BiasOptions(), ShawOptions(clip=3)]


def tensors(
    *, b: int = 2, h: int = 4, k: int = 4, t: int = 6, s: int = 6, dim: int = 5, v: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((b, h, t, dim), (b, k, s, dim), (b, k, s, v))
    q, keys, values = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, keys, values


def naive(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale + bias) v with repeated heads; rows that may look nowhere are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias
    if mask is None:
        weights = scores.softmax(-1)
    else:
        weights = scores.masked_fill(~mask, -1e30).softmax(-1) * mask.any(-1, keepdim=True)
    return weights @ v, weights


def positions_for(options: Any, layer: MultiHeadAttention, *, bidirectional: bool = False) -> Any:
    module = options.build(
        PositionSizes(
            d_model=16,
            num_heads=layer.num_heads,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            max_seq_len=64,
            bidirectional=bidirectional,
        )
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def self_attention(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(3)
    layer = MultiHeadAttention(16, **{"num_heads": 4, **options})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def arange(length: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + length).unsqueeze(0)
