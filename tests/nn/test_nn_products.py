"""Matrix products prepared for inference, and the C kernels behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.nn.attention_cases import attend, calls_of_few
from tformer.kernels.functions import Kernels, find
from tformer.nn.cache import FEW_SLOTS, fastest_dtype
from tformer.nn.linear import Linear
from tformer.nn.products import (
    EVERY,
    FEW_FP32_ROWS,
    FEW_ROWS,
    LARGEST,
    Int8Product,
    KernelProduct,
    PackedProduct,
    Quantize,
    is_possible,
    prepare_product,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(48,), (1, 48), (7, 48), (2, 3, 48), (0, 48), (2, 0, 48)]

packed = pytest.mark.skipif(
    prepare_product(torch.ones(2, 2, dtype=torch.bfloat16), None, "none") is None, reason="no packed products here"
)
in_8_bits = pytest.mark.skipif(not is_possible("int8", CPU), reason="no 8-bit products here")
biased = pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def parts(dtype: torch.dtype = torch.float32, *, with_bias: bool = False) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(0)
    weight = torch.randn(37, 48).mul_(0.1).to(dtype)
    return weight, torch.randn(37).to(dtype) if with_bias else None


def product(weight: Tensor, bias: Tensor | None, quantize: Quantize) -> PackedProduct | Int8Product:
    found = prepare_product(weight, bias, quantize)
    assert isinstance(found, PackedProduct | Int8Product)
    return found


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """[*, O]: the most that a sum moves by when both sides are rounded to multiples of their rows' scales.

    |x w - x' w'| <= |x| |w - w'| + |w'| |x - x'|, each difference half a scale. A scale is max/126 to bf16's rounding.
    """
    x, weight = x.double(), weight.double()
    step_x, step_w = (y.abs().amax(-1, keepdim=True) / LARGEST * 1.004 for y in (x, weight))
    from_weight = x.abs().sum(-1, keepdim=True) * step_w.T / 2
    from_input = (weight.abs() + step_w / 2).sum(-1) * step_x / 2
    return from_weight + from_input


@packed
@of_dtypes
@biased
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, with_bias: bool, shape: tuple[int, ...]) -> None:
    weight, bias = parts(dtype, with_bias=with_bias)
    x = torch.randn(shape).to(dtype)
    found, expected = product(weight, bias, "none")(x), F.linear(x, weight, bias)
    assert found.dtype == dtype and found.shape == expected.shape
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@packed
@of_dtypes
def test_packing_keeps_rows_of_zeros_strides_and_what_is_no_number(dtype: torch.dtype) -> None:
    weight, bias = parts(dtype, with_bias=True)
    assert bias is not None
    call = product(weight, bias, "none")
    assert torch.equal(call(torch.zeros(3, 48, dtype=dtype)), bias.expand(3, 37))
    for x in (
        torch.randn(5, 96).to(dtype)[:, ::2],
        torch.randn(48, 5).to(dtype).T,
        torch.randn(3, 2, 48).to(dtype)[:, 1],
    ):
        torch.testing.assert_close(call(x), call(x.contiguous()))
    broken = torch.randn(2, 48).to(dtype)
    broken[0, 3] = torch.nan
    found = call(broken)
    assert found[0].isnan().all() and found[1].isfinite().all()


@packed
def test_a_packed_product_answers_in_the_dtype_of_its_input_or_the_one_it_was_given() -> None:
    weight, _ = parts(torch.bfloat16)
    x = torch.randn(3, 48)
    assert product(weight, None, "none")(x).dtype == torch.float32
    wide = prepare_product(weight, None, "none", out_dtype=torch.float32)
    assert wide is not None and wide(x.bfloat16()).dtype == torch.float32


@in_8_bits
@of_dtypes
@biased
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_8_bits_stay_within_the_bound_of_their_scales(
    dtype: torch.dtype, with_bias: bool, shape: tuple[int, ...]
) -> None:
    weight, bias = parts(dtype, with_bias=with_bias)
    x = torch.randn(shape).to(dtype)
    found, exact = product(weight, bias, "int8")(x), F.linear(x.double(), weight.double())
    if bias is not None:
        exact += bias.double()
    assert found.dtype == dtype and found.shape == exact.shape
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype] * (exact.abs() + 1)  # of the result, in its dtype
    assert (found.double() - exact).abs().le(bound(x, weight) + rounding).all()
    if x.numel():  # and errors do not all add up
        assert (found.double() - exact).abs().max() < bound(x, weight).max() / 2


@in_8_bits
@of_dtypes
@pytest.mark.parametrize("width", [1, 5, 48, 300])
def test_a_row_of_8_bits_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(1)
    call = product(torch.randn(37, width).to(dtype), torch.randn(37).to(dtype), "int8")
    x = torch.randn(67, width).to(dtype)
    x[5] *= 1e4  # an outlier has a scale of its own
    x[6] = 0
    whole = call(x)
    for rows in ([0], [5], [6], [4, 5], list(range(33)), list(range(66, -1, -1))):
        assert torch.equal(call(x[rows]), whole[rows])
    assert torch.equal(call(x[9]), whole[9])


@in_8_bits
@of_dtypes
def test_rows_of_zeros_and_of_one_sign(dtype: torch.dtype) -> None:
    """The largest sums of all: no unit of the processor may hold them in fewer bits than they need."""
    weight, bias = parts(dtype, with_bias=True)
    assert bias is not None
    assert torch.equal(product(weight, bias, "int8")(torch.zeros(2, 48, dtype=dtype)), bias.expand(2, 37))
    flat = product(torch.zeros(4, 48, dtype=dtype), None, "int8")(torch.randn(3, 48).to(dtype))
    assert torch.equal(flat, torch.zeros(3, 4, dtype=dtype))
    for sign in (1.0, -1.0):
        same = product(torch.full((4, 2000), 3.0 * sign, dtype=dtype), None, "int8")
        x = torch.full((20, 2000), 2.0, dtype=dtype)
        torch.testing.assert_close(same(x), torch.full((20, 4), sign * 12000, dtype=dtype), rtol=1e-2, atol=0)
        torch.testing.assert_close(same(-x), torch.full((20, 4), -sign * 12000, dtype=dtype), rtol=1e-2, atol=0)


@in_8_bits
@of_dtypes
def test_tiny_and_huge_rows_keep_their_precision(dtype: torch.dtype) -> None:
    weight, _ = parts(dtype)
    call = product(weight, None, "int8")
    x = torch.randn(4, 48).to(dtype)
    for factor in (2.0**-50, 2.0**50):
        torch.testing.assert_close(call(x * factor) / factor, call(x), rtol=2**-6, atol=1e-2)


@in_8_bits
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_none_afterwards_in_its_own_row_alone(value: float) -> None:
    weight, bias = parts(with_bias=True)
    call = product(weight, bias, "int8")
    x = torch.randn(3, 48)
    clean = call(x)
    x[1, 7] = value
    found = call(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@in_8_bits
def test_8_bit_products_of_strided_inputs() -> None:
    call = product(*parts(), "int8")
    for x in (torch.randn(5, 96)[:, ::2], torch.randn(48, 5).T, torch.randn(3, 2, 48)[:, 1]):
        assert torch.equal(call(x), call(x.contiguous()))


def test_elsewhere_the_plain_product_stays_and_8_bits_are_refused() -> None:
    meta = torch.empty(4, 8, device="meta")
    assert prepare_product(meta, None, "none") is None
    assert prepare_product(torch.ones(4, 8, dtype=torch.float16), None, "none") is None
    for kind in get_args(Quantize)[1:]:
        assert not is_possible(kind, meta.device) and not is_possible(kind, torch.device("cuda"))
    with pytest.raises(ValueError, match="int8 products need a CPU"):
        prepare_product(meta, None, "int8")


@in_8_bits
def test_fp16_has_no_8_bit_products() -> None:
    with pytest.raises(ValueError, match=r"found torch\.float16"):
        prepare_product(torch.ones(4, 8, dtype=torch.float16), None, "int8")


def test_a_processor_without_8_bit_sums_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from tformer.nn import products

    monkeypatch.setattr(products, "_has_onednn", lambda device: True)
    monkeypatch.setattr(products, "Int8Product", lambda weight, bias: lambda x: (x @ weight.T).clamp(max=4.0))
    monkeypatch.setattr(products, "_sums_are_exact", products._sums_are_exact.__wrapped__)
    assert not is_possible("int8", CPU)


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=packed), pytest.param("int8", marks=in_8_bits)])
@biased
def test_a_frozen_layer_lets_go_of_its_numbers_and_keeps_its_shape(quantize: Quantize, with_bias: bool) -> None:
    torch.manual_seed(2)
    layer = Linear(48, 37, bias=with_bias)
    x = torch.randn(3, 48)
    with torch.no_grad():
        expected = layer(x)
        count = sum(parameter.numel() for parameter in layer.parameters())
        layer.freeze(quantize)
        torch.testing.assert_close(layer(x), expected, atol=1e-5 if quantize == "none" else 2e-2, rtol=1e-5)
    assert layer.weight.isnan().all() and layer.weight.shape == (37, 48) and not layer.weight.requires_grad
    assert layer.weight.untyped_storage().nbytes() == 4  # one number is kept of all
    assert sum(parameter.numel() for parameter in layer.parameters()) == count


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=packed), pytest.param("int8", marks=in_8_bits)])
def test_a_layer_that_is_frozen_twice_is_a_mistake_that_shows(quantize: Quantize) -> None:
    """The second product would be made of the NaN that the first left."""
    layer = Linear(8, 4)
    layer.freeze(quantize)
    x = torch.randn(2, 8)
    before = layer(x)
    with pytest.raises(AssertionError, match="already frozen"):
        layer.freeze(quantize)
    assert torch.equal(layer(x), before) and before.isfinite().all()


needs_int8 = pytest.mark.skipif(not is_possible("int8", CPU), reason="no 8-bit products here")


@pytest.fixture
def kernels() -> Kernels:
    found = find()
    if found is None:
        pytest.skip("no compiler for kernels here")
    return found


def both_ways(function: Callable[[Kernels | None], Tensor], kernels: Kernels) -> tuple[Tensor, Tensor]:
    """With the kernels, and without."""
    with torch.no_grad():
        return function(kernels), function(None)


def test_a_cache_is_kept_as_it_is_computed(kernels: Kernels) -> None:
    assert fastest_dtype(torch.bfloat16, CPU, slots=1, kernels=kernels) == torch.bfloat16
    assert fastest_dtype(torch.bfloat16, CPU, slots=FEW_SLOTS) == torch.float32


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
    asked = calls_of_few(monkeypatch)
    terms = {"bias_fn": lambda rows: bias[:, :, rows]} if biased else {}
    first, second = both_ways(lambda used: attend(q, k, v, mask=mask, scale=0.25, kernels=used, **terms)[0], kernels)
    assert len(asked) == (1 if biased else 2)  # without kernels, a bias goes the explicit way
    torch.testing.assert_close(first.float(), second.float(), atol=2e-2, rtol=2e-2)
    if masked:
        assert not first[1, :, 1].any()


def test_a_gradient_goes_past_them(kernels: Kernels) -> None:
    q, k, v = (torch.randn(1, 2, n, 16).bfloat16().requires_grad_() for n in (1, 5, 5))
    attend(q, k, v, scale=0.25, kernels=kernels)[0].sum().backward()
    assert all(part.grad is not None for part in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=packed)])
def test_a_product_of_every_number_of_rows_takes_the_way_of_each(kernels: Kernels, dtype: torch.dtype) -> None:
    weight = torch.randn(1024, 1024).to(dtype)
    product = prepare_product(weight, None, "none", kernels=kernels, rows=EVERY)
    assert isinstance(product, KernelProduct) and isinstance(product.other, PackedProduct)
    x = torch.randn(32, 1024).to(dtype)
    expected = x.float() @ weight.float().T
    for rows in (1, 4, 9, 32):
        assert product.takes(x[:rows]) == (rows <= (FEW_FP32_ROWS if dtype == torch.float32 else FEW_ROWS["none"]))
        torch.testing.assert_close(product(x[:rows]).float(), expected[:rows], atol=0.5, rtol=0.02)


@pytest.mark.parametrize(
    ("quantize", "rows", "dtype", "expected"),
    [
        pytest.param("none", FEW_ROWS["none"], torch.bfloat16, KernelProduct, marks=packed),
        pytest.param("none", FEW_ROWS["none"] + 1, torch.bfloat16, PackedProduct, marks=packed),
        pytest.param("none", None, torch.bfloat16, PackedProduct, marks=packed),
        ("none", FEW_FP32_ROWS, torch.float32, KernelProduct),
        ("none", FEW_FP32_ROWS + 1, torch.float32, PackedProduct),
        pytest.param("int8", FEW_ROWS["int8"], torch.float32, KernelProduct, marks=needs_int8),
        pytest.param("int8", FEW_ROWS["int8"] + 1, torch.bfloat16, Int8Product, marks=needs_int8),
        ("int4", 1, torch.float32, KernelProduct),
        ("int4", None, torch.bfloat16, KernelProduct),
    ],
)
def test_which_product_is_prepared(
    kernels: Kernels,
    quantize: Quantize,
    rows: int | None,
    dtype: torch.dtype,
    expected: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tformer.nn.products.LARGE_FP32", 40)
    weight = torch.randn(5, 8, dtype=dtype)
    found = prepare_product(weight, None, quantize, kernels=kernels, rows=rows)
    if found is None:
        pytest.skip("no oneDNN for this here")
    assert type(found) is expected
    small = prepare_product(torch.ones(5, 7), None, "none", kernels=kernels, rows=rows)
    assert type(small) is not KernelProduct  # in the cache
    if quantize == "int4":
        with pytest.raises(ValueError, match="int4 products need a CPU with the C kernels"):
            prepare_product(weight, None, quantize, rows=rows)
    else:
        assert not isinstance(prepare_product(weight, None, quantize, rows=rows), KernelProduct)


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("rows", [1, 100, None])
def test_without_instructions_for_a_format_the_kernels_multiply_any_number_of_rows(
    kernels: Kernels, quantize: Quantize, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.nn.products._packs", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr("tformer.nn.products._sums_are_exact", lambda: False)
    weight, x = torch.randn(5, 40).bfloat16(), torch.randn(30, 40)
    found = prepare_product(weight, None, quantize, kernels=kernels, rows=rows)
    assert isinstance(found, KernelProduct) and found.other is None
    torch.testing.assert_close(found(x), x @ weight.float().T, atol=1e-4 if quantize == "none" else 0.6, rtol=0.02)


@pytest.mark.parametrize("rows", [1, FEW_ROWS["none"], FEW_ROWS["none"] + 1])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("quantize", get_args(Quantize))
def test_they_answer_in_the_dtype_of_the_input_or_the_one_given_for_any_number_of_rows(
    kernels: Kernels, quantize: Quantize, rows: int, x_dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(7, 40).bfloat16(), torch.randn(7), torch.randn(2, rows, 40).to(x_dtype)
    product = prepare_product(weight, bias, quantize, kernels=kernels, rows=1, out_dtype=out_dtype)
    assert isinstance(product, KernelProduct)
    found = product(x)
    assert found.dtype == (out_dtype or x_dtype)
    expected = x.float() @ weight.float().T + bias
    within = {"none": 0.05, "int8": 0.6, "int4": 3.0}[quantize]
    torch.testing.assert_close(found.float(), expected, atol=within, rtol=0.02)


@needs_int8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_8_bit_products_of_many_rows_are_the_same(kernels: Kernels, dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 40, 64).to(dtype), torch.randn(24, 64), torch.randn(24) if with_bias else None
    first, second = both_ways(lambda used: Int8Product(weight, bias, kernels=used)(x), kernels)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(first.float(), second.float(), atol=10 * tolerance, rtol=tolerance)
