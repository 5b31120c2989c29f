"""What the core does with kernels that were brought, beside what it does without: the same to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tformer.kernels.functions import Kernels, find
from tformer.nn.attention import few
from tformer.nn.attention.core import attend
from tformer.nn.kernels import bring
from tformer.nn.layer_cache import FEW_SLOTS, quickest_dtype
from tformer.nn.products import (
    FEW_ROWS,
    FewRowsInt8Product,
    FewRowsProduct,
    Int8Product,
    PackedProduct,
    Quantize,
    int8_is_possible,
    prepare_product,
)

CPU = torch.device("cpu")
needs_int8 = pytest.mark.skipif(not int8_is_possible(CPU), reason="no 8-bit products here")


@pytest.fixture
def kernels() -> Kernels:
    """Brought; `conftest` takes them away again."""
    found = find()
    if found is None:
        pytest.skip("no compiler for kernels here")
    bring(found)
    return found


def both_ways(function: Callable[[], Tensor], kernels: Kernels) -> tuple[Tensor, Tensor]:
    """With the kernels, and without."""
    with torch.no_grad():
        bring(kernels)
        first = function()
        bring(None)
        return first, function()


def test_a_cache_is_kept_as_it_is_computed(kernels: Kernels) -> None:
    assert quickest_dtype(torch.bfloat16, CPU, slots=1) == torch.bfloat16
    bring(None)
    assert quickest_dtype(torch.bfloat16, CPU, slots=FEW_SLOTS) == torch.float32


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value_dim", [16, 24])
def test_attention_of_few_queries_is_that_of_the_other_ways(
    kernels: Kernels, biased: bool, masked: bool, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, n, size).bfloat16() for heads, n, size in ((4, 2, 16), (2, 9, 16), (2, 9, value_dim))
    )
    mask = torch.rand(2, 1, 2, 9) < 0.7 if masked else None
    if mask is not None:
        mask[1, :, 1] = False
    bias = torch.randn(1, 4, 2, 9)
    asked: list[bool] = []

    def noted(*given: Tensor, **named: Any) -> Tensor:
        asked.append(True)
        return few.attend_few(*given, **named)

    monkeypatch.setattr("tformer.nn.attention.core.attend_few", noted)
    first, second = both_ways(
        lambda: attend(q, k, v, mask=mask, scale=0.25, bias_fn=(lambda rows: bias[:, :, rows]) if biased else None)[0],
        kernels,
    )
    assert len(asked) == (1 if biased else 2)  # without kernels, a bias goes the explicit way
    torch.testing.assert_close(first.float(), second.float(), atol=2e-2, rtol=2e-2)
    if masked:
        assert not first[1, :, 1].any()


def test_a_gradient_goes_past_them(kernels: Kernels) -> None:
    q, k, v = (torch.randn(1, 2, n, 16).bfloat16().requires_grad_() for n in (1, 5, 5))
    attend(q, k, v, scale=0.25)[0].sum().backward()
    assert all(part.grad is not None for part in (q, k, v))


@pytest.mark.parametrize(
    ("quantize", "rows", "dtype", "expected"),
    [
        ("none", FEW_ROWS["none"], torch.bfloat16, FewRowsProduct),
        ("none", FEW_ROWS["none"] + 1, torch.bfloat16, PackedProduct),
        ("none", None, torch.bfloat16, PackedProduct),
        ("none", 1, torch.float32, PackedProduct),
        pytest.param("int8", FEW_ROWS["int8"], torch.float32, FewRowsInt8Product, marks=needs_int8),
        pytest.param("int8", FEW_ROWS["int8"] + 1, torch.bfloat16, Int8Product, marks=needs_int8),
    ],
)
def test_which_product_is_prepared(
    kernels: Kernels, quantize: Quantize, rows: int | None, dtype: torch.dtype, expected: type
) -> None:
    weight = torch.randn(5, 8, dtype=dtype)
    found = prepare_product(weight, None, quantize, rows=rows)
    if found is None:
        pytest.skip("no oneDNN for this here")
    assert type(found) is expected
    bring(None)
    assert not isinstance(prepare_product(weight, None, quantize, rows=rows), FewRowsProduct | FewRowsInt8Product)


@pytest.mark.parametrize("rows", [1, FEW_ROWS["none"], FEW_ROWS["none"] + 1])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("product", [FewRowsProduct, FewRowsInt8Product])
def test_they_answer_in_the_dtype_of_the_input_or_the_one_given_for_any_number_of_rows(
    kernels: Kernels,
    product: type[FewRowsProduct] | type[FewRowsInt8Product],
    rows: int,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(7, 40).bfloat16(), torch.randn(7), torch.randn(2, rows, 40).to(x_dtype)
    found = product(kernels, weight, bias, out_dtype)(x)
    assert found.dtype == (out_dtype or x_dtype)
    expected = x.float() @ weight.float().T + bias
    within = 0.05 if product is FewRowsProduct else 0.6
    torch.testing.assert_close(found.float(), expected, atol=within, rtol=0.02)


@needs_int8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_8_bit_products_of_many_rows_are_the_same(kernels: Kernels, dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 40, 64).to(dtype), torch.randn(24, 64), torch.randn(24) if with_bias else None
    product = Int8Product(weight, bias)
    first, second = both_ways(lambda: product(x), kernels)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(first.float(), second.float(), atol=10 * tolerance, rtol=tolerance)
