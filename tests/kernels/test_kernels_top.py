"""The largest numbers of a row: exactly those of PyTorch's way, ties, NaN and all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tformer.decoding.beam_candidates import _top_by_chunks, top_candidates
from tformer.kernels.functions import Kernels, find

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


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 12), st.integers(0, 10_000))
def test_both_ways_agree_on_ties_and_on_what_is_no_number(columns: int, k: int, seed: int) -> None:
    found = find()
    if found is None:
        pytest.skip("no compiler for kernels here")
    drawn = torch.Generator().manual_seed(seed)
    x = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (4, columns), generator=drawn)]
    k = min(k, columns)
    assert same(found.top(x, k), _top_by_chunks(x, k))


def test_a_slice_of_a_wider_table(kernels: Kernels) -> None:
    x = torch.randn(4, 100)
    assert same(kernels.top(x[:, :90], 5), kernels.top(x[:, :90].contiguous(), 5))
    assert same(kernels.top(x.T, 3), kernels.top(x.T.contiguous(), 3))


def test_candidates_come_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 300)
    first = top_candidates(x, 4)
    monkeypatch.setattr("tformer.decoding.beam_candidates.find", lambda **_: None)
    assert same(top_candidates(x, 4), first)
