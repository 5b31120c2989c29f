"""Dropout: its statistics, its gradient, and that it is a pure function of torch's generator."""

from __future__ import annotations

import pytest
import torch

from tformer.nn.dropout import dropout, keep_mask


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keeps_the_share_it_promises(p: float) -> None:
    torch.manual_seed(0)
    count = 400_000
    kept = keep_mask(count, p).double().mean().item()
    assert kept == pytest.approx(1 - p, abs=4 * (p * (1 - p) / count) ** 0.5 + 2**-16)


def test_neighbouring_decisions_are_independent() -> None:
    torch.manual_seed(0)
    keep = keep_mask(400_000, 0.5).double() - 0.5
    for distance in range(1, 9):
        assert abs((keep[:-distance] * keep[distance:]).mean().item()) < 4 * 0.25 / 400_000**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (2, 0), (64, 64)])
def test_zeroes_or_scales_and_passes_the_same_factors_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.rand(shape).add(0.5).to(dtype).requires_grad_()
    y = dropout(x, 0.25, training=True)
    assert y.shape == x.shape and y.dtype == dtype
    y.sum().backward()
    factors = torch.where(y == 0, 0.0, torch.ones(()).to(dtype) / 0.75)
    torch.testing.assert_close(x.grad, factors.to(dtype))


def test_equal_seeds_drop_equal_elements() -> None:
    x = torch.ones(1000)
    torch.manual_seed(5)
    first = dropout(x, 0.3, training=True)
    torch.manual_seed(5)
    assert torch.equal(first, dropout(x, 0.3, training=True))
    assert not torch.equal(first, dropout(x, 0.3, training=True))


def test_does_nothing_outside_training_or_with_zero_probability() -> None:
    x = torch.randn(4, 4)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0, training=True) is x
