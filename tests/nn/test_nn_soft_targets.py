"""Soft targets: chunked = direct, and the properties of Hinton's loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tformer.nn import soft_targets
from tformer.nn.soft_targets import (
    LogitProjection,
    linear_divergence,
    soft_binary_cross_entropy,
    soft_cross_entropy,
)

N, D, E, V = 23, 6, 8, 40


def projections(
    *, softcap: float | None = None, bias: bool = True, rows: tuple[int, int] = (V, V)
) -> tuple[LogitProjection, LogitProjection]:
    torch.manual_seed(0)
    sides = []
    for size, classes in zip((D, E), rows, strict=True):
        tensors = [torch.randn(N, size), torch.randn(classes, size), torch.randn(classes)]
        features, matrix, offset = (tensor.double().requires_grad_(size == D) for tensor in tensors)
        sides.append(LogitProjection(features, matrix, offset if bias else None, softcap))
    return sides[0], sides[1]


def logits(projection: LogitProjection, classes: int = V) -> Tensor:
    z = projection.features @ projection.matrix[:classes].T
    z = z if projection.bias is None else z + projection.bias[:classes]
    return z if projection.softcap is None else projection.softcap * torch.tanh(z / projection.softcap)


def gradients(value: Tensor, projection: LogitProjection) -> list[Tensor]:
    inputs = [tensor for tensor in projection[:3] if isinstance(tensor, Tensor)]
    return list(torch.autograd.grad(value, inputs, retain_graph=True))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("elements", [(2**25, 2**18), (7 * V, 3 * V), (V, V)])
def test_chunks_give_value_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, bias: bool, elements: tuple[int, int]
) -> None:
    monkeypatch.setattr(soft_targets, "LOGIT_ELEMENTS", elements[0])
    monkeypatch.setattr(soft_targets, "BLOCK_ELEMENTS", elements[1])
    student, teacher = projections(softcap=softcap, bias=bias)
    counted = torch.arange(N) % 3 != 0
    chunked = 1.7 * linear_divergence(student, teacher, temperature=2.5, counted_N=counted)
    direct = 1.7 * soft_cross_entropy(logits(student), logits(teacher), temperature=2.5)[counted].sum()
    torch.testing.assert_close(chunked, direct)
    for one, other in zip(gradients(chunked, student), gradients(direct, student), strict=True):
        torch.testing.assert_close(one, other)


def test_memory_is_bounded_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor as large as the logits of all positions is ever made."""
    monkeypatch.setattr(soft_targets, "LOGIT_ELEMENTS", 4 * V)
    monkeypatch.setattr(soft_targets, "BLOCK_ELEMENTS", 2 * V)
    student, teacher = projections()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        linear_divergence(student, teacher, temperature=2.0).backward()
    assert largest <= max(4 * V, V * E, N * E) < N * V


@pytest.mark.parametrize("rows", [(V + 5, V), (V, V + 5)])
def test_rows_that_only_one_model_has_do_not_count(rows: tuple[int, int]) -> None:
    student, teacher = projections(rows=rows)
    found = linear_divergence(student, teacher, temperature=2.0)
    torch.testing.assert_close(found, soft_cross_entropy(logits(student), logits(teacher), temperature=2.0).sum())
    assert gradients(found, student)[1][V:].abs().sum() == 0


@given(temperature=st.floats(0.1, 20.0), seed=st.integers(0, 99))
def test_it_is_zero_for_equal_models_and_else_positive(temperature: float, seed: int) -> None:
    torch.manual_seed(seed)
    z, other = torch.randn(5, 9), torch.randn(5, 9)
    assert soft_cross_entropy(z, z, temperature=temperature).abs().max() == 0
    assert soft_cross_entropy(z, z + 3.0, temperature=temperature).abs().max() < 1e-3  # a shift changes no probability
    assert (soft_cross_entropy(z, other, temperature=temperature) > 0).all()
    assert soft_binary_cross_entropy(z, z, temperature=temperature).abs().max() == 0
    assert (soft_binary_cross_entropy(z, other, temperature=temperature) > -1e-4).all()  # rounding, times T²


def test_a_one_hot_teacher_at_temperature_1_is_the_cross_entropy() -> None:
    labels = torch.randint(V, (N,), generator=torch.Generator().manual_seed(0))
    student, _ = projections()
    sure = LogitProjection(F.one_hot(labels, V).double() * 200, torch.eye(V, dtype=torch.float64))
    soft = linear_divergence(student, sure, temperature=1.0)
    hard = F.cross_entropy(logits(student), labels, reduction="sum")
    torch.testing.assert_close(soft, hard)
    for one, other in zip(gradients(soft, student), gradients(hard, student), strict=True):
        torch.testing.assert_close(one, other)


def test_the_factor_keeps_the_gradient_at_high_temperatures() -> None:
    """For T -> infinity it is that of matching logits: (z_student - z_teacher) / V, centred (1503.02531, 2.1)."""
    torch.manual_seed(0)
    z, goal = torch.randn(4, V, dtype=torch.float64, requires_grad=True), torch.randn(4, V, dtype=torch.float64)
    [found] = torch.autograd.grad(soft_cross_entropy(z, goal, temperature=1e4).sum(), [z])
    apart = z.detach() - goal
    torch.testing.assert_close(found, (apart - apart.mean(-1, keepdim=True)) / V, rtol=1e-3, atol=1e-6)


def test_two_classes_are_one_decision() -> None:
    torch.manual_seed(0)
    z, goal = torch.randn(6), torch.randn(6)
    one = soft_binary_cross_entropy(z, goal, temperature=3.0)
    two = soft_cross_entropy(
        torch.stack([z, torch.zeros(6)], -1), torch.stack([goal, torch.zeros(6)], -1), temperature=3.0
    )
    torch.testing.assert_close(one, two)


def test_the_teacher_gets_no_gradient_and_16_bits_come_near() -> None:
    student, teacher = projections()
    exact = linear_divergence(student, teacher, temperature=2.0)
    narrow = []
    for features, matrix, bias, _ in (student, teacher):
        assert bias is not None
        narrow.append(LogitProjection(features.bfloat16(), matrix.bfloat16(), bias.bfloat16()))
    found = linear_divergence(narrow[0], narrow[1], temperature=2.0)
    assert found.dtype == torch.float32 and abs(found.item() / exact.item() - 1) < 0.05
    exact.backward()
    assert all(tensor is None or tensor.grad is None for tensor in teacher[:3])
