"""The C kernels against plain PyTorch: attention, products of few rows, the largest values of a row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.pairwise import pairwise
from tformer.decoding.beam_candidates import _top_by_chunks, top_candidates
from tformer.kernels.functions import GROUP, Kernels, find
from tformer.nn.products import LARGEST, ZERO_POINT, _unsigned_rows, rounded_rows


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def attention_parts(
    rows: int, heads: int, kv_heads: int, queries: int, keys: int, size: int, value: int
) -> tuple[Tensor, ...]:
    torch.manual_seed(keys)
    shapes = (rows, heads, queries, size), (rows, kv_heads, keys, size), (rows, kv_heads, keys, value)
    return tuple(torch.randn(shape).bfloat16() for shape in shapes)


@pytest.mark.parametrize(
    ("lengths", "sizes", "masked", "biased", "dtype"),
    pairwise(
        lengths=[(1, 1), (1, 15), (1, 16), (4, 17), (8, 70)],
        sizes=[(4, 64, 64), (2, 20, 33), (1, 7, 130), (4, 32, 16)],
        masked=[None, "rows", "queries"],
        biased=[None, "shared", "rows"],
        dtype=[torch.bfloat16, torch.float32],
    ),
)
def test_few_queries_equal_the_formula(
    kernels: Kernels,
    lengths: tuple[int, int],
    sizes: tuple[int, int, int],
    masked: str | None,
    biased: str | None,
    dtype: torch.dtype,
) -> None:
    """lengths: queries and keys. sizes: kv heads, size of a query and of a value."""
    queries, keys = lengths
    kv_heads, size, value = sizes
    q, k, v = (part.to(dtype) for part in attention_parts(3, 4, kv_heads, queries, keys, size, value))
    mask = bias = None
    if masked is not None:
        mask = torch.rand(3, 1, queries if masked == "queries" else 1, keys) < 0.6
        mask[2] = False
    if biased is not None:
        bias = torch.randn(3 if biased == "rows" else 1, 4, queries, keys)
    found = kernels.attend(q, k, v, scale=0.2, mask=mask, bias=bias)
    expected = formula(q, k, v, 0.2, mask, bias)
    assert found.shape == expected.shape and found.dtype == dtype
    within = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, atol=within, rtol=within)
    if mask is not None:
        assert not found[2].any()


def test_heads_lie_innermost_so_that_the_output_projection_copies_nothing(kernels: Kernels) -> None:
    found = kernels.attend(*attention_parts(2, 4, 4, 3, 5, 8, 8), scale=1.0)
    assert found.transpose(1, 2).is_contiguous()


def test_views_of_a_cache_and_of_a_fused_projection(kernels: Kernels) -> None:
    q, k, v = attention_parts(3, 4, 4, 2, 9, 16, 16)
    whole = torch.full((3, 4, 20, 16), torch.nan, dtype=torch.bfloat16)  # nothing beyond the keys is read
    caches = [whole.clone(), whole.clone()]
    for cache, part in zip(caches, (k, v), strict=True):
        cache[:, :, :9] = part
    views = [q.transpose(1, 2).contiguous().transpose(1, 2), *(cache[:, :, :9] for cache in caches)]
    assert torch.equal(kernels.attend(*views, scale=0.3), kernels.attend(q, k, v, scale=0.3))
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert torch.equal(kernels.attend(*columns, scale=0.3), kernels.attend(q, k, v, scale=0.3))


def test_what_a_mask_hides_may_be_no_number(kernels: Kernels) -> None:
    q, k, v = attention_parts(2, 2, 2, 1, 6, 16, 16)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[..., 4:] = False
    expected = kernels.attend(q, k[:, :, :4], v[:, :, :4], scale=0.3)
    k[:, :, 4:] = v[:, :, 4:] = torch.nan
    assert torch.equal(kernels.attend(q, k, v, scale=0.3, mask=mask), expected)
    assert kernels.attend(q, k, v, scale=0.3).isnan().all()


@pytest.mark.parametrize("size", [1e3, 1e30, -1e30])
def test_scores_of_any_size_give_weights_that_sum_to_one(kernels: Kernels, size: float) -> None:
    q, k, v = attention_parts(2, 2, 2, 1, 33, 16, 16)
    bias = torch.zeros(1, 1, 1, 33)
    bias[..., 1:] = size
    found = kernels.attend(q, k, torch.ones_like(v), scale=1.0, bias=bias)
    torch.testing.assert_close(found.float(), torch.ones(2, 2, 1, 16), atol=2**-7, rtol=0)
    torch.testing.assert_close(
        kernels.attend(q, k, v, scale=1.0, bias=bias).double(), formula(q, k, v, 1.0, None, bias.double()),
        atol=2**-6, rtol=2**-6,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "queries"), [(0, 1), (2, 0)])
def test_an_empty_batch_gives_an_empty_result(kernels: Kernels, rows: int, queries: int) -> None:
    assert kernels.attend(*attention_parts(rows, 2, 2, queries, 5, 8, 8), scale=1.0).shape == (rows, 2, queries, 8)


# Every remainder of a tile's four rows, of its two columns and of a vector's numbers.
INNER = [32, 1, 31, 64, 100, 300]
ROWS = [1, 0, 2, 3, 4, 5, 7, 8, 9, 17]
FORMATS = ["bf16", "fp32", "int8", "int4"]
DTYPES = [torch.bfloat16, torch.float32]


def linear_parts(rows: int, inner: int, columns: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + inner)
    return torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16(), torch.randn(columns)


def unpacked(packed: Tensor, scales: Tensor, inner: int) -> Tensor:
    """The weight that `round_groups` stands for, fp64 [O, D]."""
    rows, groups = scales.shape
    pairs = packed.view(rows, groups // 2, GROUP).int()
    numbers = torch.stack([pairs & 15, pairs >> 4], dim=2).view(rows, groups, GROUP) - 8
    return (numbers.double() * scales.double().unsqueeze(2)).flatten(1)[:, :inner]


def product_of(
    kernels: Kernels, weight: Tensor, bias: Tensor | None, form: str, out_dtype: torch.dtype | None = torch.float32
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The kernels' product with a bf16 weight in a format, and what it stands for in fp64."""
    addend = 0 if bias is None else bias.double()
    if form == "int8":
        rounded, scales = rounded_rows(weight)
        exact = rounded.double() * scales.double().unsqueeze(1)
        found = kernels.linear(rounded, bias, scales=scales, out_dtype=out_dtype)
    elif form == "int4":
        packed, scales = kernels.round_groups(weight)
        exact = unpacked(packed, scales, weight.shape[1])
        found = kernels.linear(packed, bias, scales=scales, in_features=weight.shape[1], out_dtype=out_dtype)
    else:
        exact = weight.double()
        found = kernels.linear(weight if form == "bf16" else weight.float(), bias, out_dtype=out_dtype)

    def expected(x: Tensor) -> Tensor:
        if form in ("int8", "int4"):
            rounded, scales = _unsigned_rows(x)
            return ((rounded.double() - ZERO_POINT) * scales.double().unsqueeze(1)) @ exact.T + addend
        return x.double() @ exact.T + addend

    return found, expected


@pytest.mark.parametrize(
    ("form", "rows", "inner", "dtype", "with_bias"),
    pairwise(form=FORMATS, rows=ROWS, inner=INNER, dtype=DTYPES, with_bias=[False, True]),
)
def test_a_product_is_the_plain_one_with_the_rounded_numbers(
    kernels: Kernels, form: str, rows: int, inner: int, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight, bias = linear_parts(rows, inner)
    x = x.to(dtype)
    found, expected = product_of(kernels, weight, bias if with_bias else None, form)
    torch.testing.assert_close(found(x).double(), expected(x), atol=1e-4, rtol=1e-5)
    own, _ = product_of(kernels, weight, bias if with_bias else None, form, None)
    assert torch.equal(own(x), found(x).to(dtype))


@pytest.mark.parametrize("columns", [1, 2, 3, 48, 49, 130])
@pytest.mark.parametrize("form", FORMATS)
def test_any_number_of_columns(kernels: Kernels, form: str, columns: int) -> None:
    x, weight, bias = linear_parts(5, 200, columns)
    found, expected = product_of(kernels, weight, bias, form)
    torch.testing.assert_close(found(x).double(), expected(x), atol=1e-4, rtol=1e-5)


def test_sums_in_8_bits_are_equal_on_every_instruction_set(built: Callable[[str], Kernels], kernels: Kernels) -> None:
    """Bit for bit, at the largest sums too."""
    x, weight, bias = linear_parts(6, 3000)
    x[1], weight[1] = 1.0, -1.0
    here, plain = (product_of(each, weight, bias, "int8")[0](x) for each in (kernels, built("plain")))
    assert torch.equal(here, plain)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "gated", "dtype"),
    pairwise(
        rows=[16, 17, 19, 24, 70],
        inner=[1, 15, 16, 17, 300, 2048],
        columns=[2, 6, 16, 34, 62, 128],
        gated=[False, True],
        dtype=DTYPES,
    ),
)
def test_many_rows_in_8_bits_give_what_few_give_bit_for_bit(
    kernels: Kernels, rows: int, inner: int, columns: int, gated: bool, dtype: torch.dtype
) -> None:
    """A text's result does not depend on the texts beside it."""
    torch.manual_seed(rows + inner)
    x, weight, bias = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner), torch.randn(columns)
    x[1], weight[1] = 1.0, -1.0  # the largest sums
    rounded, scales = rounded_rows(weight)
    product = kernels.linear(rounded, bias, scales=scales)
    after = {"activation": "silu", "gated": True} if gated else {}
    assert torch.equal(product(x, **after), torch.cat([product(part, **after) for part in x.split(5)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("inner", [32, 100, 256])
def test_4_bits_are_near_the_weight_and_zeros_stay_zero(kernels: Kernels, dtype: torch.dtype, inner: int) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(9, inner) * torch.logspace(-20, 20, 9).unsqueeze(1)).to(dtype)
    weight[3] = 0
    found = unpacked(*kernels.round_groups(weight), inner)
    assert not found[3].any()
    off = (found - weight.double()).square().sum(1).sqrt() / weight.double().norm(dim=1).clamp(min=1e-30)
    assert off.max() < 0.12  # 4 bits of a normal distribution: 0.08 on average
    weight[2, 5] = torch.inf
    assert unpacked(*kernels.round_groups(weight), inner).isfinite().all(1).tolist() == [row != 2 for row in range(9)]
    exact = torch.tensor([[-8.0, 7, 1, 0] * 8], dtype=dtype)
    assert torch.equal(unpacked(*kernels.round_groups(exact), 32), exact.double())


def test_the_scale_of_4_bits_has_a_smaller_error_than_that_of_the_largest_number(kernels: Kernels) -> None:
    torch.manual_seed(1)
    weight = torch.randn(16, 512)
    groups = weight.view(16, -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    simple = ((groups / largest).round().clamp(-8, 7) * largest).flatten(1)
    found = unpacked(*kernels.round_groups(weight), 512)
    assert (found - weight).square().mean() < 0.95 * (simple - weight).square().mean()


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
    for addend in (None, bias):
        expected = y.float() * scales.unsqueeze(1) + (0 if addend is None else addend)
        found = kernels.rescale_rows(y.clone(), scales, addend)
        torch.testing.assert_close(found.float(), expected.to(dtype).float(), atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_number_spoils_its_own_row_alone(kernels: Kernels, broken: float, form: str) -> None:
    x, weight, bias = linear_parts(3, 48)
    x[1, 7] = broken
    found = product_of(kernels, weight, bias, form)[0](x)
    assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2].isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
def test_views_leading_dimensions_and_threads(kernels: Kernels, form: str) -> None:
    x, weight, bias = linear_parts(8, 48)
    call, _ = product_of(kernels, weight, bias, form)
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


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_a_rows_result_does_not_depend_on_the_rows_beside_it(kernels: Kernels, form: str, dtype: torch.dtype) -> None:
    x, weight, _ = linear_parts(130, 100)
    call, _ = product_of(kernels, weight, None, form)
    together = call(x.to(dtype))
    for rows in (1, 3, 8, 129):
        assert torch.equal(call(x[:rows].to(dtype)), together[:rows])


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0]


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(found[1], expected[1]) and torch.equal(found[0].nan_to_num(7.5), expected[0].nan_to_num(7.5))


@pytest.mark.parametrize(("columns", "k"), [(1, 1), (5, 5), (63, 3), (64, 8), (65, 8), (1000, 8), (1000, 100)])
def test_the_largest_are_those_of_a_sort(kernels: Kernels, columns: int, k: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, columns)
    values, indices = kernels.top(x, k)
    expected = torch.sort(x, dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k]) and torch.equal(indices, expected.indices[:, :k])


@given(st.integers(1, 200), st.integers(1, 12), st.integers(0, 10_000))
def test_both_ways_agree_on_ties_and_on_what_is_no_number(columns: int, k: int, seed: int) -> None:
    found = find()
    if found is None:
        pytest.skip("no compiler for kernels here")
    drawn = torch.Generator().manual_seed(seed)
    x = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (4, columns), generator=drawn)]
    k = min(k, columns)
    assert same(found.top(x, k), _top_by_chunks(x, k))


def test_the_x87_unit_works_afterwards(kernels: Kernels) -> None:
    """MMX registers are those of the x87 unit, with which OpenBLAS computes norms."""
    columns = np.random.default_rng(0).normal(size=(6, 2))
    for k in (1, 8, 40):
        kernels.top(torch.randn(9, 1000), k)
        assert np.isfinite(np.linalg.lstsq(columns, np.arange(6.0), rcond=None)[0]).all()


def test_a_slice_of_a_wider_table(kernels: Kernels) -> None:
    x = torch.randn(4, 100)
    assert same(kernels.top(x[:, :90], 5), kernels.top(x[:, :90].contiguous(), 5))
    assert same(kernels.top(x.T, 3), kernels.top(x.T.contiguous(), 3))


def test_candidates_come_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 300)
    first = top_candidates(x, 4)
    monkeypatch.setattr("tformer.decoding.beam_candidates.find", lambda **_: None)
    assert same(top_candidates(x, 4), first)
