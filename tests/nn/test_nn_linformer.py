"""Linformer: its matrices and what it has no place for; what it computes is in the contract of all kinds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.attention_cases import arange, run
from tformer.nn.attention import AttentionContext, AttentionSizes
from tformer.nn.attention.linformer import LinformerAttention, LinformerOptions

Tensors = tuple[Tensor, Tensor, Tensor]
SHARING = ["none", "headwise", "key_value", "layerwise"]


def mechanism(*, kv_heads: int = 2, max_seq_len: int | None = 12, **options: Any) -> LinformerAttention:
    torch.manual_seed(1)
    sizes = AttentionSizes(24, 4, kv_heads, 5, 5, max_seq_len=max_seq_len)
    return LinformerAttention(LinformerOptions(**{"rank": 3, "scale": 0.4, **options}), sizes).double()


def draw(*, t: int, h: int = 4, k: int = 2, v: int = 5, dtype: Any = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(t)
    shapes = ((2, h, t, 5), (2, k, t, 5), (2, k, t, v))
    q, keys, values = (torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes)
    return q, keys, values


def call(length: int, mask: Tensor | None = None, **others: Any) -> dict[str, Any]:
    """Named arguments of the mechanism."""
    return {
        "context": AttentionContext(arange(length), arange(length), key_mask=mask, **others),
        "x_BTD": torch.empty(0),
    }


def test_parameters_of_every_sharing() -> None:
    shapes = {
        sharing: [tuple(p.shape) for p in mechanism(sharing=sharing, kv_heads=4).parameters()] for sharing in SHARING
    }
    one = (3, 12)
    assert shapes == {"none": [(4, *one)] * 2, "headwise": [one, one], "key_value": [one], "layerwise": [one]}


def test_layers_share_one_matrix_or_say_why_not() -> None:
    first, second = mechanism(sharing="layerwise"), mechanism(sharing="layerwise")
    second.share_with(first)
    assert second.keys is second.values is first.keys
    for other in (mechanism(sharing="layerwise", rank=4), mechanism(sharing="headwise")):
        with pytest.raises(ValueError, match="sharing: layerwise needs the same rank"):
            other.share_with(first)
    apart = mechanism(), mechanism()
    apart[1].share_with(apart[0])
    assert apart[1].keys is not apart[0].keys


def test_projections_start_with_variance_one_over_the_rank() -> None:
    sizes = AttentionSizes(8, 1, 1, 8, 8, max_seq_len=1000)
    for parameter in LinformerAttention(LinformerOptions(rank=50), sizes).parameters():
        assert float(parameter.detach().std()) == pytest.approx(1 / math.sqrt(50), rel=0.02)


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"rank": 13}, {}, r"rank: found 13, expected at most max_seq_len \(12\)"),
        ({"rank": 3}, {"max_seq_len": None}, "kind: linformer needs max_seq_len"),
        ({"rank": 3}, {"causal": True}, "kind: linformer has no causal mode"),
        ({"rank": 3}, {"is_cross": True}, "kind: linformer .* no cross-attention"),
    ],
)
def test_what_cannot_be_built_is_named(options: dict[str, Any], sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinformerAttention(LinformerOptions(**options), AttentionSizes(**{**_SIZES, **sizes}))


_SIZES = {"d_model": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "value_dim": 4, "max_seq_len": 12}


def test_rank_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rank must be greater than 0, found 0"):
        LinformerOptions(rank=0)


def test_what_cannot_be_computed_is_refused() -> None:
    layer = mechanism()
    with pytest.raises(ValueError, match="linformer's projections have 12 columns, the input needs 13"):
        run(layer, *draw(t=13), **call(13))
    with pytest.raises(ValueError, match="linformer has no causal mode"):
        run(layer, *draw(t=5), **call(5, causal=True))
    with pytest.raises(ValueError, match="document_ids: linformer"):
        run(layer, *draw(t=5), **call(5, document_ids=torch.zeros(2, 5, dtype=torch.long)))
