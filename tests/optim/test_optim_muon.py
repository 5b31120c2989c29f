"""Muon: agreement with torch's, with a loop in float64, and what orthogonalizing means."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tformer.optim import muon
from tformer.optim.muon import COEFFICIENTS, Muon, newton_schulz

SHAPES = [(8, 8), (6, 12), (12, 6), (24, 8), (8, 8), (6, 12), (1, 5)]


def make_parameters(shapes: list[tuple[int, int]], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def loop_orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz on one matrix in float64."""
    a, b, c = COEFFICIENTS
    x = matrix.double()
    if x.shape[0] > x.shape[1]:
        return loop_orthogonal(matrix.T).T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def loop_muon(weight: Tensor, gradients: list[Tensor], lr: float, decay: float, momentum: float) -> Tensor:
    weight, average = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        average = momentum * average + (1 - momentum) * gradient.double()
        update = (1 - momentum) * gradient.double() + momentum * average
        scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
        weight = weight * (1 - lr * decay) - lr * scale * loop_orthogonal(update)
    return weight


def loop_normuon(weight: Tensor, gradients: list[Tensor], lr: float, momentum: float, beta: float) -> Tensor:
    """The paper's second moments of rows with their bias removed, and the norm of Muon's update."""
    weight, average = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    second = torch.zeros(weight.shape[0], 1, dtype=torch.float64)
    for step, gradient in enumerate(gradients, start=1):
        average = momentum * average + (1 - momentum) * gradient.double()
        update = loop_orthogonal((1 - momentum) * gradient.double() + momentum * average)
        second = beta * second + (1 - beta) * update.square().mean(dim=1, keepdim=True)
        even = update / (second / (1 - beta**step)).sqrt()
        scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1])) * update.norm() / even.norm()
        weight = weight - lr * scale * even
    return weight


def test_normuon_equals_a_loop_over_matrices_in_float64() -> None:
    shapes = [*SHAPES, (20, 8)]
    parameters = make_parameters(shapes)
    fused = parameters[-1]
    starts = [parameter.detach().clone() for parameter in (*parameters[:-1], *fused.split([8, 8, 4]))]
    optimizer = Muon(parameters, lr=0.1, momentum=0.9, row_decay=0.8, compute_dtype=torch.float32,
                     row_splits={fused: [8, 8, 4]})  # fmt: skip
    history: list[list[Tensor]] = [[] for _ in starts]
    for step in range(3):
        set_gradients(parameters, seed=step + 10)
        assert fused.grad is not None
        gradients = [parameter.grad for parameter in parameters[:-1]] + list(fused.grad.split([8, 8, 4]))
        for past, gradient in zip(history, gradients, strict=True):
            assert gradient is not None
            past.append(gradient.clone())
        optimizer.step()
    for found, start, past in zip((*parameters[:-1], *fused.split([8, 8, 4])), starts, history, strict=True):
        expected = loop_normuon(start, past, lr=0.1, momentum=0.9, beta=0.8)
        torch.testing.assert_close(found.detach().double(), expected, atol=1e-4, rtol=0)


def test_normuon_moves_nothing_for_a_zero_gradient_and_makes_rows_of_similar_size() -> None:
    still, uneven = make_parameters([(4, 6), (6, 12)])
    before = uneven.detach().clone(), still.detach().clone()
    still.grad = torch.zeros_like(still)
    sizes = torch.tensor([[1e-3]] * 3 + [[1.0]] * 3)
    uneven.grad = torch.randn(6, 12, generator=torch.Generator().manual_seed(1)) * sizes
    Muon([still, uneven], lr=0.1, row_decay=0.95, compute_dtype=torch.float32).step()
    assert torch.equal(still, before[1])
    lengths = (uneven.detach() - before[0]).norm(dim=1)
    torch.testing.assert_close(lengths, lengths.mean().expand(6))


def test_muon_equals_a_loop_over_matrices_in_float64() -> None:
    parameters = make_parameters(SHAPES)
    starts = [parameter.detach().clone() for parameter in parameters]
    optimizer = Muon(parameters, lr=0.1, weight_decay=0.2, momentum=0.9, compute_dtype=torch.float32)
    history: list[list[Tensor]] = [[] for _ in parameters]
    for step in range(3):
        set_gradients(parameters, seed=step + 10)
        for past, parameter in zip(history, parameters, strict=True):
            assert parameter.grad is not None
            past.append(parameter.grad.clone())
        optimizer.step()
    for parameter, start, past in zip(parameters, starts, history, strict=True):
        expected = loop_muon(start, past, lr=0.1, decay=0.2, momentum=0.9)
        torch.testing.assert_close(parameter.detach().double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
def test_muon_agrees_with_torch_within_bfloat16(shape: tuple[int, int]) -> None:
    ours, theirs = make_parameters([shape]), make_parameters([shape])
    mine = Muon(ours, lr=0.1, weight_decay=0.1, momentum=0.95)
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, momentum=0.95)
    for step in range(3):
        set_gradients(ours, seed=step)
        set_gradients(theirs, seed=step)
        mine.step()
        reference.step()
    moved = (theirs[0] - make_parameters([shape])[0]).norm()
    assert (ours[0] - theirs[0]).norm() < 0.03 * moved


def test_newton_schulz_keeps_singular_vectors_and_evens_the_values() -> None:
    matrix = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    result = newton_schulz(matrix[None], compute_dtype=torch.float32)[0]
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    core = left.T @ result @ right.T  # diagonal where the singular vectors are kept
    assert (core - torch.diag(core.diagonal())).abs().max() < 1e-4


def test_newton_schulz_ignores_the_size_of_the_gradient() -> None:
    matrix = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(0))
    small, large = (newton_schulz(matrix * factor, compute_dtype=torch.float32) for factor in (1e-4, 1e4))
    torch.testing.assert_close(small, large, atol=1e-4, rtol=0)


def test_a_zero_gradient_moves_nothing() -> None:
    (parameter,) = make_parameters([(4, 6)])
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    Muon([parameter], lr=0.1).step()
    assert torch.equal(parameter, before)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    used, unused = make_parameters([(4, 4), (4, 4)])
    before = unused.detach().clone()
    used.grad = torch.ones_like(used)
    Muon([used, unused], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(unused, before)


def test_row_splits_orthogonalize_each_projection_by_itself() -> None:
    (fused,) = make_parameters([(20, 8)])
    parts = [nn.Parameter(part.clone()) for part in fused.detach().split([8, 8, 4])]
    set_gradients([fused], seed=1)
    assert fused.grad is not None
    for part, gradient in zip(parts, fused.grad.split([8, 8, 4]), strict=True):
        part.grad = gradient.clone()
    Muon([fused], lr=0.1, compute_dtype=torch.float32, row_splits={fused: [8, 8, 4]}).step()
    Muon(parts, lr=0.1, compute_dtype=torch.float32).step()
    torch.testing.assert_close(fused.detach(), torch.cat([part.detach() for part in parts]), atol=1e-6, rtol=0)


def test_cutting_large_stacks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = make_parameters(SHAPES), make_parameters(SHAPES)
    set_gradients(whole, seed=2)
    set_gradients(cut, seed=2)
    Muon(whole, lr=0.1, compute_dtype=torch.float32).step()
    monkeypatch.setattr(muon, "MAX_STACK_ELEMENTS", 1)
    Muon(cut, lr=0.1, compute_dtype=torch.float32).step()
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_muon_refuses_vectors_and_wrong_splits() -> None:
    with pytest.raises(ValueError, match=r"\(3,\)"):
        Muon([nn.Parameter(torch.zeros(3))])
    (parameter,) = make_parameters([(6, 4)])
    with pytest.raises(ValueError, match=r"\[3, 2\] do not add up to the 6 rows"):
        Muon([parameter], row_splits={parameter: [3, 2]})
