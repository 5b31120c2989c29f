"""Attention of few queries against its formula in fp64: lengths, sizes, masks, biases, memory orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tformer.kernels.functions import Kernels


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def parts(rows: int, heads: int, kv_heads: int, queries: int, keys: int, size: int, value: int) -> tuple[Tensor, ...]:
    torch.manual_seed(keys)
    shapes = (rows, heads, queries, size), (rows, kv_heads, keys, size), (rows, kv_heads, keys, value)
    return tuple(torch.randn(shape).bfloat16() for shape in shapes)


@pytest.mark.parametrize("masked", [None, "rows", "queries"])
@pytest.mark.parametrize("biased", [None, "shared", "rows"])
@pytest.mark.parametrize(("kv_heads", "size", "value"), [(4, 64, 64), (2, 20, 33), (1, 7, 130), (4, 32, 16)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 15), (1, 16), (4, 17), (8, 70)])
def test_few_queries_equal_the_formula(
    kernels: Kernels,
    queries: int,
    keys: int,
    kv_heads: int,
    size: int,
    value: int,
    masked: str | None,
    biased: str | None,
) -> None:
    q, k, v = parts(3, 4, kv_heads, queries, keys, size, value)
    mask = bias = None
    if masked is not None:
        mask = torch.rand(3, 1, queries if masked == "queries" else 1, keys) < 0.6
        mask[2] = False
    if biased is not None:
        bias = torch.randn(3 if biased == "rows" else 1, 4, queries, keys)
    found = kernels.attend(q, k, v, scale=0.2, mask=mask, bias=bias)
    expected = formula(q, k, v, 0.2, mask, bias)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=2**-7, rtol=2**-7)
    if mask is not None:
        assert not found[2].any()


def test_heads_lie_innermost_so_that_the_output_projection_copies_nothing(kernels: Kernels) -> None:
    found = kernels.attend(*parts(2, 4, 4, 3, 5, 8, 8), scale=1.0)
    assert found.transpose(1, 2).is_contiguous()


def test_views_of_a_cache_and_of_a_fused_projection(kernels: Kernels) -> None:
    q, k, v = parts(3, 4, 4, 2, 9, 16, 16)
    whole = torch.full((3, 4, 20, 16), torch.nan, dtype=torch.bfloat16)  # nothing beyond the keys is read
    caches = [whole.clone(), whole.clone()]
    for cache, part in zip(caches, (k, v), strict=True):
        cache[:, :, :9] = part
    views = [q.transpose(1, 2).contiguous().transpose(1, 2), *(cache[:, :, :9] for cache in caches)]
    assert torch.equal(kernels.attend(*views, scale=0.3), kernels.attend(q, k, v, scale=0.3))
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert torch.equal(kernels.attend(*columns, scale=0.3), kernels.attend(q, k, v, scale=0.3))


def test_what_a_mask_hides_may_be_no_number(kernels: Kernels) -> None:
    q, k, v = parts(2, 2, 2, 1, 6, 16, 16)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[..., 4:] = False
    expected = kernels.attend(q, k[:, :, :4], v[:, :, :4], scale=0.3)
    k[:, :, 4:] = v[:, :, 4:] = torch.nan
    assert torch.equal(kernels.attend(q, k, v, scale=0.3, mask=mask), expected)
    assert kernels.attend(q, k, v, scale=0.3).isnan().all()


@pytest.mark.parametrize("size", [1e3, 1e30, -1e30])
def test_scores_of_any_size_give_weights_that_sum_to_one(kernels: Kernels, size: float) -> None:
    q, k, v = parts(2, 2, 2, 1, 33, 16, 16)
    bias = torch.zeros(1, 1, 1, 33)
    bias[..., 1:] = size
    found = kernels.attend(q, k, torch.ones_like(v), scale=1.0, bias=bias)
    torch.testing.assert_close(found.float(), torch.ones(2, 2, 1, 16), atol=2**-7, rtol=0)
    torch.testing.assert_close(
        kernels.attend(q, k, v, scale=1.0, bias=bias).double(), formula(q, k, v, 1.0, None, bias.double()),
        atol=2**-6, rtol=2**-6,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "queries"), [(0, 1), (2, 0)])
def test_nobody_asks(kernels: Kernels, rows: int, queries: int) -> None:
    assert kernels.attend(*parts(rows, 2, 2, queries, 5, 8, 8), scale=1.0).shape == (rows, 2, queries, 8)
