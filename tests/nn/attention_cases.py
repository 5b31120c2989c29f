"""What the tests of attention share: random tensors, a plain formula, small layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tformer.kernels.functions import Kernels
from tformer.nn.attention import Mechanism, core, routes
from tformer.nn.attention.context import AttentionContext, AttentionInputs, Weighted
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.positions import PositionSizes
from tformer.nn.positions.base import NoPositionsOptions, Positions
from tformer.nn.positions.biases import AlibiOptions, T5BiasOptions
from tformer.nn.positions.rope import RopeOptions
from tformer.nn.positions.shaw import ShawOptions
from tformer.nn.taps import TapSink

LAYER_KINDS = [NoPositionsOptions(), RopeOptions(), AlibiOptions(), T5BiasOptions(), ShawOptions(clip=3)]


class ScorePositions(Positions):
    """Positions whose terms are given functions of the queries' positions, which count from 0."""

    def __init__(self, bias_fn: Any = None, score_fn: Any = None, mix_fn: Any = None) -> None:
        super().__init__()
        self.bias_fn, self.score_fn, self.mix_fn = bias_fn, score_fn, mix_fn
        self.has_bias, self.has_score, self.has_mix = (f is not None for f in (bias_fn, score_fn, mix_fn))  # type: ignore[misc]

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        return self.bias_fn(q_pos_BT[0])

    def score(self, q_BHTh: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        return self.score_fn(q_BHTh, q_pos_BT[0])

    def mix(self, weights_BHTS: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        return self.mix_fn(weights_BHTS, q_pos_BT[0])


class Largest(TorchDispatchMode):
    """The largest number of elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):  # an expanded tensor takes no more than its storage
                storage = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.elements = max(self.elements, min(storage, leaf.numel()))
        return found


def weights_tap() -> TapSink:
    return TapSink(frozenset({"weights"}))


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, is_causal: bool = False,
    dropout: float = 0.0, need_weights: bool = False, kernels: Kernels | None = None, **terms: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`core.attend` with a mask, and the terms of positions as functions."""
    context = AttentionContext(arange(q.shape[2]), arange(k.shape[2]), mask=mask, is_causal=is_causal)
    taps, positions = weights_tap() if need_weights else None, ScorePositions(**terms) if terms else None
    return core.attend(AttentionInputs(q, k, v, context, scale, positions, dropout, taps, kernels=kernels))


def attend_few(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
    """`routes.attend_few` with a mask."""
    context = AttentionContext(arange(q.shape[2]), arange(k.shape[2]), mask=mask)
    return routes.attend_few(AttentionInputs(q, k, v, context, scale))[0]


def calls_of_few(monkeypatch: pytest.MonkeyPatch) -> list[AttentionInputs]:
    """The inputs that the route for few queries takes from now on."""
    taken: list[AttentionInputs] = []

    def noted(inputs: AttentionInputs) -> Weighted:
        taken.append(inputs)
        return routes.attend_few(inputs)

    changed = [route._replace(run=noted) if route.run is routes.attend_few else route for route in core.ROUTES]
    monkeypatch.setattr(core, "ROUTES", changed)
    return taken


def run(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, **others: Any
) -> tuple[Tensor, Tensor | None]:
    """Output and weights of a mechanism; others: of `AttentionInputs`."""
    dropout = mechanism.dropout if mechanism.training else 0.0
    return mechanism(AttentionInputs(q, k, v, context, mechanism.scale, dropout=dropout, **others))


def context_of(
    length: int, causal: bool = False, key_mask: Tensor | None = None, *, keys: int | None = None, **limits: Any
) -> AttentionContext:
    """The context of `length` queries, the last of `keys` (default: as many), with its dense mask."""
    k_pos = arange(length if keys is None else keys)
    return AttentionContext(k_pos[:, -length:], k_pos, causal=causal, key_mask=key_mask, **limits).with_mask()


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
