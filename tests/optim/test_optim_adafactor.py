"""Adafactor: agreement with transformers' and torch's, with a loop in float64, and what factoring means."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tformer.optim.adafactor import CLIP_RMS, EPS_SCALE, Adafactor

SHAPES = [(6, 12), (12, 6), (1, 5), (7,), (1,), (40, 3)]


def make_parameters(std: float = 1.0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(std * torch.randn(shape, generator=draw)) for shape in SHAPES]


def gradients(steps: int, scale: float = 1.0) -> Iterator[list[Tensor]]:
    """Gradients whose size changes from step to step by up to a factor of 100."""
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        size = scale * 10.0 ** (2 * math.sin(step))
        yield [size * torch.randn(shape, generator=draw) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int, scale: float = 1.0) -> None:
    for found in gradients(steps, scale):
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def loop(weight: Tensor, history: list[Tensor], rate: float, decay: float) -> Tensor:
    """Algorithms 4 and 5 with the paper's sums, one number at a time, in float64."""
    weight = weight.double()
    matrix = weight.ndim == 2
    rows, columns, second = (torch.zeros(n, dtype=torch.float64) for n in (len(weight), weight.shape[-1], len(weight)))
    for step, gradient in enumerate(history, start=1):
        beta, squares = 1 - step**-0.8, gradient.double() ** 2 + 1e-30
        if matrix:
            rows = beta * rows + (1 - beta) * squares.sum(dim=1)
            columns = beta * columns + (1 - beta) * squares.sum(dim=0)
            estimate = torch.outer(rows, columns) / rows.sum()
        else:
            estimate = second = beta * second + (1 - beta) * squares
        update = gradient.double() / estimate.sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item())
        size = max(1e-3, weight.square().mean().sqrt().item())
        weight = (1 - rate * decay) * weight - rate * size * update
    return weight


@pytest.mark.parametrize("std", [1.0, 1e-5], ids=["ordinary weights", "weights below eps2"])
def test_adafactor_equals_a_loop_in_float64(std: float) -> None:
    parameters = make_parameters(std)
    starts = [parameter.detach().clone() for parameter in parameters]
    train(Adafactor(parameters, lr=0.02, weight_decay=0.1), parameters, 6)
    history = [list(column) for column in zip(*gradients(6), strict=True)]
    for start, past, parameter in zip(starts, history, parameters, strict=True):
        torch.testing.assert_close(parameter.double(), loop(start, past, 0.02, 0.1), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 0.0], ids=["ordinary", "tiny gradients", "no gradients"])
def test_adafactor_equals_transformers(scale: float) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    ours, theirs = make_parameters(), make_parameters()
    train(Adafactor(ours, lr=0.01), ours, 8, scale)  # min(1e-2, t^-1/2) is 0.01 up to step 10,000
    reference = optimization.Adafactor(theirs, lr=None, scale_parameter=True, relative_step=True, warmup_init=False)
    train(reference, theirs, 8, scale)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-7)


def test_adafactor_equals_torchs_where_its_bound_does_not_bind() -> None:
    ours, theirs = make_parameters(), make_parameters()
    train(Adafactor(ours, lr=0.01, weight_decay=0.1), ours, 8)
    train(torch.optim.Adafactor(theirs, lr=0.01, eps=(1e-30, 1e-3), weight_decay=0.1), theirs, 8)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-7)


def test_parts_of_a_fused_matrix_are_matrices_of_their_own() -> None:
    rows = [4, 2, 6]
    draw = torch.Generator().manual_seed(2)
    whole = nn.Parameter(torch.randn(12, 5, generator=draw))
    parts = [nn.Parameter(part.detach().clone()) for part in whole.split(rows)]
    fused, separate = Adafactor([whole], row_splits={whole: rows}), Adafactor(parts)
    for _ in range(4):
        whole.grad = torch.randn(12, 5, generator=draw)
        for part, gradient in zip(parts, whole.grad.split(rows), strict=True):
            part.grad = gradient.clone()
        fused.step()
        separate.step()
    assert torch.equal(whole.detach(), torch.cat([part.detach() for part in parts]))


def test_a_filter_is_the_matrix_of_its_first_dimension_and_the_rest() -> None:
    draw = torch.Generator().manual_seed(3)
    filters = nn.Parameter(torch.randn(6, 3, 2, 2, generator=draw))
    matrix = nn.Parameter(filters.detach().flatten(1).clone())
    filters.grad = torch.randn(6, 3, 2, 2, generator=draw)
    matrix.grad = filters.grad.flatten(1)
    for parameter in (filters, matrix):
        Adafactor([parameter]).step()
    assert torch.equal(filters.detach().flatten(1), matrix.detach())


def test_a_matrix_needs_as_much_state_as_it_has_rows_and_columns() -> None:
    parameters = make_parameters()
    optimizer = Adafactor(parameters)
    train(optimizer, parameters, 1)
    for parameter in parameters:
        numbers = sum(tensor.numel() for tensor in optimizer.state[parameter].values()) - 1  # the step
        assert numbers == sum(parameter.shape)


def test_an_update_is_bounded_whatever_the_gradient() -> None:
    """The first step after long silence: the second moments are small, the gradient is huge."""
    weight = nn.Parameter(torch.full((8, 8), 0.5))
    optimizer = Adafactor([weight], lr=0.01)
    for size in (1e-6, 1e-6, 1e-6, 1e6):
        before = weight.detach().clone()
        weight.grad = size * torch.randn(8, 8, generator=torch.Generator().manual_seed(4))
        optimizer.step()
        moved = (weight.detach() - before).square().mean().sqrt()
        assert moved <= 0.01 * before.square().mean().sqrt() * CLIP_RMS * 1.0001


def test_a_parameter_that_starts_at_zero_can_leave_it() -> None:
    bias = nn.Parameter(torch.zeros(4))
    bias.grad = torch.ones(4)
    Adafactor([bias], lr=0.01).step()
    torch.testing.assert_close(bias.detach(), torch.full((4,), -0.01 * EPS_SCALE))


def test_splits_that_do_not_add_up_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="add up"):
        Adafactor([weight], row_splits={weight: [1, 2]})
