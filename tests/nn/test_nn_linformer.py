"""Linformer: equal to its definition in plain loops, forward and gradients; what it has no place for is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.attention_cases import arange, run, weights_tap
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


def by_loops(layer: LinformerAttention, qkv: Tensors, mask: Tensor | None) -> Tensor:
    q, k, v = qkv
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    rows = []
    for b in range(batch):
        for head in range(heads):
            kv_head = head // group
            e, f = (m[kv_head] if m.ndim == 3 else m for m in (layer.keys, layer.values))
            real = [s for s in range(length) if mask is None or mask[b, s]]
            nothing = torch.zeros(5, dtype=q.dtype), torch.zeros(v.shape[-1], dtype=q.dtype)
            keys = [sum((e[r, s] * k[b, kv_head, s] for s in real), nothing[0]) for r in range(layer.rank)]
            values = [sum((f[r, s] * v[b, kv_head, s] for s in real), nothing[1]) for r in range(layer.rank)]
            for t in range(length):
                weights = torch.stack([0.4 * (q[b, head, t] @ key) for key in keys]).softmax(0)
                rows.append(sum((weights[r] * values[r] for r in range(layer.rank)), nothing[1]))
    return torch.stack(rows).view(batch, heads, length, -1)


def unequal_lengths(length: int) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, length - length // 3 :] = False
    return mask


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("length", [1, 7, 12])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("v", [5, 3])
def test_equals_its_definition_in_loops(sharing: str, length: int, padded: bool, v: int) -> None:
    layer, qkv = mechanism(sharing=sharing), draw(t=length, v=v)
    mask = unequal_lengths(length) if padded else None
    expected = by_loops(layer, qkv, mask)
    out, weights = run(layer, *qkv, **call(length, mask))
    assert weights is None
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    grad, inputs = torch.randn_like(expected), [*qkv, *layer.parameters()]
    found, wanted = (torch.autograd.grad(o, inputs, grad, retain_graph=True) for o in (out, expected))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)


def test_fp32_agrees_with_the_definition() -> None:
    layer, qkv = mechanism(), draw(t=10)
    mask = unequal_lengths(10)
    expected = by_loops(layer, qkv, mask)
    out, _ = run(layer.float(), *(x.float() for x in qkv), **call(10, mask))
    assert (out - expected).abs().max() < 1e-5


def test_padding_adds_nothing() -> None:
    layer, (q, k, v) = mechanism(), draw(t=10)
    mask = unequal_lengths(10)
    hidden = ~mask[:, None, :, None]
    before, _ = run(layer, q, k, v, **call(10, mask))
    after, _ = run(layer, q, k.masked_fill(hidden, 9.0), v.masked_fill(hidden, float("inf")), **call(10, mask))
    assert torch.equal(before, after)
    shorter, _ = run(layer, *(x[:1, :, :7] for x in (q, k, v)), **call(7))
    torch.testing.assert_close(before[:1, :, :7], shorter)


def test_a_row_of_padding_gives_zeros_and_finite_gradients() -> None:
    layer, qkv = mechanism(), draw(t=6)
    mask = torch.tensor([[0] * 6, [1] * 6])
    out, weights = run(layer, *qkv, **call(6, mask), taps=weights_tap())
    assert weights is not None and not out[0].any() and not weights[0].any() and out[1].any()
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.sum(), qkv))


@pytest.mark.parametrize("sharing", SHARING)
def test_effective_weights_make_the_output_from_the_values(sharing: str) -> None:
    layer, (q, k, v) = mechanism(sharing=sharing), draw(t=9)
    out, weights = run(layer, q, k, v, **call(9, unequal_lengths(9)), taps=weights_tap())
    assert weights is not None and weights.shape == (2, 4, 9, 9)
    torch.testing.assert_close(weights.double() @ v.repeat_interleave(2, dim=1), out, atol=1e-5, rtol=1e-5)
    assert not weights[0, :, :, 6:].any()
    assert (weights < 0).any()  # a projection may subtract


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


def test_dropout_drops_weights_over_the_projected_keys() -> None:
    layer, qkv = mechanism(), tuple(x.detach() for x in draw(t=8))
    torch.manual_seed(0)
    layer.dropout = 0.5
    outs = run(layer, *(x.repeat(2000, 1, 1, 1) for x in qkv), **call(8))[0].unflatten(0, (2000, 2))
    assert not torch.equal(outs[0], outs[1])
    layer.eval()
    torch.testing.assert_close(outs.mean(0), run(layer, *qkv, **call(8))[0], atol=0.3, rtol=0.1)


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
