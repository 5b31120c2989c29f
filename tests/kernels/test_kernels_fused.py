"""What the kernels do around a product and around attention, against PyTorch's operators one after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.pairwise import pairwise
from tformer.kernels.functions import ACTIVATIONS, Kernels
from tformer.nn.feedforward import ACTIVATIONS as FUNCTIONS
from tformer.nn.layer_norm import LayerNorm, Norm, RMSNorm
from tformer.nn.linear import Activation
from tformer.nn.norm import BatchNorm

NORMS: dict[str, Callable[[int], Norm]] = {
    "layer": lambda size: LayerNorm(size, eps=1e-5),
    "layer, no bias": lambda size: LayerNorm(size, eps=1e-5, bias=False),
    "layer, not learned": lambda size: LayerNorm(size, eps=1e-6, learned=False),
    "rms": lambda size: RMSNorm(size, eps=1e-6),
}


def norm_of(name: str, size: int) -> Norm:
    norm = NORMS[name](size)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=1.0, std=0.3)
    return norm.requires_grad_(False)


@pytest.mark.parametrize(
    ("norm", "activation", "gated", "residual", "rows", "dtype"),
    pairwise(
        norm=[None, *NORMS],
        activation=[None, *ACTIVATIONS],
        gated=[False, True],
        residual=[False, True],
        rows=[1, 4, 9, 70],
        dtype=[torch.float32, torch.bfloat16],
    ),
)
def test_one_kernel_is_the_operators_one_after_another(
    kernels: Kernels,
    norm: str | None,
    activation: str | None,
    gated: bool,
    residual: bool,
    rows: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows)
    gated = gated and activation is not None
    x, weight, bias = torch.randn(rows, 100).mul(3).to(dtype), torch.randn(76, 100).mul(0.1), torch.randn(76)
    module = None if norm is None else norm_of(norm, 100)
    added = torch.randn(rows, 38 if gated else 76).to(dtype) if residual else None
    product = kernels.linear(weight.to(dtype), bias)
    assert product.takes(module, activation)
    found = product(x, norm=module, activation=activation, gated=gated, residual=added)
    before = x if module is None else module(x)
    expected = torch.nn.functional.linear(before.float(), weight.to(dtype).float(), bias).to(dtype)
    if activation is not None:
        expected = Activation(activation, gated, FUNCTIONS[activation])(expected)
    expected = expected if added is None else added + expected
    assert found.dtype == dtype and found.shape == expected.shape
    within = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.float(), expected.float(), atol=within, rtol=within)


@pytest.mark.parametrize("name", ACTIVATIONS[1:])
def test_activations_are_those_of_pytorch_to_a_millionth(kernels: Kernels, name: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 5001), torch.tensor([0.0, 1e-20, -1e-20, 60.0, -60.0, 1e30])]).unsqueeze(1)
    one = kernels.linear(torch.ones(1, 1), None)
    torch.testing.assert_close(one(x, activation=name), FUNCTIONS[name](x), atol=1e-6, rtol=2e-6)
    assert one(torch.tensor([[torch.nan]]), activation=name).isnan().all()


def test_what_a_kernel_does_not_know_it_does_not_take(kernels: Kernels) -> None:
    product = kernels.linear(torch.ones(4, 8), None)
    assert not product.takes(BatchNorm(8, eps=1e-5), None) and not product.takes(None, "swish_of_tomorrow")
    assert not product.takes(LayerNorm(8, eps=1e-5).bfloat16(), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value"), [(4, 4, 16, 16), (4, 2, 10, 7), (3, 1, 64, 33)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_appends_to_the_cache_and_attends(
    kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, size: int, value: int, masked: bool
) -> None:
    torch.manual_seed(0)
    rows, length, room = 3, 6, 9
    step = kernels.attention_step(heads=heads, kv_heads=kv_heads, head_dim=size, value_dim=value, scale=0.3)
    keys = torch.full((rows, kv_heads, room, size), torch.nan, dtype=dtype)
    values = torch.full((rows, kv_heads, room, value), torch.nan, dtype=dtype)
    keys[:, :, : length - 1], values[:, :, : length - 1] = 0.5, 0.25
    keys[:, :, : length - 1].normal_()
    values[:, :, : length - 1].normal_()
    for length_now in (length, length + 1):
        qkv = torch.randn(rows, 1, (heads + kv_heads) * size + kv_heads * value).to(dtype)
        mask = (torch.rand(rows, 1, 1, length_now) < 0.7) if masked else None
        parts = qkv.split_with_sizes([heads * size, kv_heads * size, kv_heads * value], dim=-1)
        q, k, v = (
            part.view(rows, 1, count, -1).transpose(1, 2)
            for part, count in zip(parts, (heads, kv_heads, kv_heads), strict=True)
        )
        found = step(qkv, keys, values, length=length_now, mask=mask)
        last = length_now - 1
        assert torch.equal(keys[:, :, last : last + 1], k) and torch.equal(values[:, :, last : last + 1], v)
        expected = kernels.attend(q, keys[:, :, :length_now], values[:, :, :length_now], scale=0.3, mask=mask)
        assert torch.equal(found, expected.transpose(1, 2).flatten(2))
    assert keys[:, :, length + 1 :].isnan().all() and values[:, :, length + 1 :].isnan().all()


def test_a_step_follows_a_cache_that_grows_or_moves(kernels: Kernels) -> None:
    step = kernels.attention_step(heads=2, kv_heads=2, head_dim=8, value_dim=8, scale=1.0)
    for rows, room in ((2, 4), (2, 12), (5, 12)):
        keys, values = (torch.zeros(rows, 2, room, 8) for _ in range(2))
        qkv = torch.randn(rows, 1, 48)
        found: Tensor = step(qkv, keys, values, length=1, mask=None)
        assert torch.equal(found, qkv[..., 32:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value"), [(4, 2, 10, 7), (2, 2, 64, 64)])
def test_a_step_reads_each_slot_in_the_row_that_wrote_it(
    kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, size: int, value: int
) -> None:
    torch.manual_seed(0)
    rows, length, room = 5, 20, 24
    step = kernels.attention_step(heads=heads, kv_heads=kv_heads, head_dim=size, value_dim=value, scale=0.3)
    keys = torch.randn(rows, kv_heads, room, size).to(dtype)
    values = torch.randn(rows, kv_heads, room, value).to(dtype)
    origins = torch.randint(rows, (rows, room), dtype=torch.int32)
    origins[:, length - 1] = torch.arange(rows)
    qkv = torch.randn(rows, 1, (heads + kv_heads) * size + kv_heads * value).to(dtype)
    own_keys, own_values = (
        x[origins.long(), :, torch.arange(room)].transpose(1, 2).contiguous() for x in (keys, values)
    )
    expected = step(qkv, own_keys, own_values, length=length, mask=None)
    assert torch.equal(step(qkv, keys, values, length=length, mask=None, origins_BS=origins), expected)
