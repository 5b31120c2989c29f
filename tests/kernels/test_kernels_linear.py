"""Products of few rows: the plain product to fp32's rounding, in 8 bits exactly the rule of `nn/products.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tformer.kernels.functions import Kernels
from tformer.nn.products import LARGEST, ZERO_POINT, _rounded, _unsigned_rows

every_size = pytest.mark.parametrize("inner", [1, 31, 32, 64, 100])
every_number_of_rows = pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17])


def parts(rows: int, inner: int, columns: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + inner)
    return torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16(), torch.randn(columns)


@every_size
@every_number_of_rows
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_a_product_of_few_rows_is_the_plain_one(kernels: Kernels, rows: int, inner: int, with_bias: bool) -> None:
    x, weight, bias = parts(rows, inner)
    given = bias if with_bias else None
    expected = x.double() @ weight.double().T + (bias if with_bias else 0)
    found = kernels.linear(weight, given, scales_O=None, out_dtype=torch.float32)(x)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
    rounded = kernels.linear(weight, given, scales_O=None, out_dtype=torch.bfloat16)(x)
    assert torch.equal(rounded, found.bfloat16())


@every_size
@every_number_of_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_8_bit_product_follows_the_rule_of_rounding(
    kernels: Kernels, rows: int, inner: int, dtype: torch.dtype
) -> None:
    x, weight, bias = parts(rows, inner)
    x = x.to(dtype)
    weight_8, scales = _rounded(weight)
    x_8, x_scales = _unsigned_rows(x)
    sums = (x_8.long() - ZERO_POINT) @ weight_8.long().T
    expected = sums.double() * scales.double() * x_scales.double().unsqueeze(1) + bias
    found = kernels.linear(weight_8, bias, scales_O=scales, out_dtype=torch.float32)(x)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_are_rounded_as_by_pytorchs_operators(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(50, 83) * torch.logspace(-30, 30, 50).unsqueeze(1)).to(dtype)
    x[3] = 0
    rounded, scales = kernels.round_rows(x)
    expected, expected_scales = _unsigned_rows(x)
    assert torch.equal(rounded, expected) and torch.equal(scales, expected_scales.float())
    assert (rounded[3] == ZERO_POINT).all() and (rounded.int() - ZERO_POINT).abs().max() <= LARGEST + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rescaling_multiplies_each_row_and_adds_the_bias(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y, scales, bias = torch.randn(5, 19).to(dtype), torch.rand(5), torch.randn(19)
    for given in (None, bias):
        expected = y.float() * scales.unsqueeze(1) + (0 if given is None else given)
        found = kernels.rescale_rows(y.clone(), scales, given)
        torch.testing.assert_close(found.float(), expected.to(dtype).float(), atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_what_is_no_number_spoils_its_own_row_alone(kernels: Kernels, broken: float, in_8_bits: bool) -> None:
    x, weight, bias = parts(3, 48)
    x[1, 7] = broken
    weight_8, scales = _rounded(weight)
    given = (weight_8, scales) if in_8_bits else (weight, None)
    found = kernels.linear(given[0], bias, scales_O=given[1], out_dtype=torch.float32)(x)
    assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2].isfinite().all()


def test_views_leading_dimensions_and_threads(kernels: Kernels) -> None:
    x, weight, bias = parts(8, 48)
    call = kernels.linear(weight, bias, scales_O=None, out_dtype=torch.float32)
    expected = call(x)
    assert torch.equal(call(x.view(2, 4, 48)), expected.view(2, 4, 37))
    assert torch.equal(call(x.repeat_interleave(2, 0)[::2]), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(call(x), expected)
    finally:
        torch.set_num_threads(threads)


def test_a_rows_result_does_not_depend_on_the_rows_beside_it(kernels: Kernels) -> None:
    x, weight, _ = parts(16, 100)
    call = kernels.linear(weight, None, scales_O=None, out_dtype=torch.float32)
    together = call(x)
    for rows in (1, 3, 8):
        assert torch.equal(call(x[:rows]), together[:rows])
