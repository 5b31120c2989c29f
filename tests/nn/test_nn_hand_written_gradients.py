"""Functions with hand-written gradients: RMSNorm, squared ReLU, rotation, dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.dropout import dropout, keep_mask
from tformer.nn.feedforward import relu2
from tformer.nn.layer_norm import rms_norm
from tformer.nn.positions.rope import Rotation


def grads(out: Tensor, upstream: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, upstream)


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 12), (1, 16), (0, 8)])
def test_rms_norm_gradcheck(shape: tuple[int, ...], gain: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    g = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True) if gain else None
    assert torch.autograd.gradcheck(lambda *a: rms_norm(a[0], a[1] if gain else None, 0.1), (x, g) if gain else (x,))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 1.6e-2)])
@pytest.mark.parametrize("dim", [32, 48, 192, 200])
@pytest.mark.parametrize("gain", [False, True])
def test_rms_norm_agrees_with_torch(dtype: torch.dtype, tolerance: float, dim: int, gain: bool) -> None:
    torch.manual_seed(dim)
    x = torch.randn(5, 3, dim).to(dtype).requires_grad_()
    g = torch.randn(dim, requires_grad=True) if gain else None  # an fp32 gain beside a bf16 stream
    up = torch.randn(5, 3, dim).to(dtype)
    inputs = [x] + ([g] if g is not None else [])
    exact_x = x.detach().double().requires_grad_()
    exact_g = None if g is None else g.detach().double().requires_grad_()
    exact_inputs = [exact_x] + ([exact_g] if exact_g is not None else [])
    out, exact = rms_norm(x, g, 1e-5), F.rms_norm(exact_x, (dim,), exact_g, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)
    for found, expected in zip(grads(out, up, *inputs), grads(exact, up.double(), *exact_inputs), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=tolerance * 4, rtol=tolerance)


def test_rms_norm_backward_has_no_systematic_error_in_bf16() -> None:
    """sqrt(192) is not a bf16 number: no gradient may be off by that factor."""
    torch.manual_seed(1)
    for gain in (None, torch.ones(192)):
        x = torch.randn(256, 192).bfloat16().requires_grad_()
        up = torch.randn(256, 192).bfloat16()
        exact_x = x.detach().double().requires_grad_()
        (found,) = grads(rms_norm(x, gain, 1e-5), up, x)
        (expected,) = grads(F.rms_norm(exact_x, (192,), None, 1e-5), up.double(), exact_x)
        slope = (found.double() * expected).sum() / (expected * expected).sum()
        assert abs(slope.item() - 1.0) < 2e-4
        (along,) = grads(rms_norm(x, gain, 0.0), x.detach(), x)  # exactly zero in exact arithmetic
        assert along.norm() < 4e-3 * x.norm()


def test_rms_norm_of_strided_rows_and_of_zeros() -> None:
    x = torch.randn(2, 4, 3, 8, requires_grad=True)
    view = x.transpose(1, 2)[..., ::2]
    up = torch.randn(2, 3, 4, 4)
    (found,) = grads(rms_norm(view, None, 1e-5), up, x)
    (expected,) = grads(F.rms_norm(view, (4,), None, 1e-5), up, x)
    torch.testing.assert_close(found, expected)
    zeros = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(zeros, None, 1e-6)
    (grad,) = grads(out, torch.ones_like(out), zeros)
    assert torch.equal(out, torch.zeros(2, 8)) and grad.isfinite().all()


def test_rms_norm_leaves_its_input_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(3, 8).to(dtype)
        before = x.clone()
        rms_norm(x, torch.ones(8), 1e-5)
        assert torch.equal(x, before)


def test_relu2_value_and_gradient() -> None:
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(relu2, (x,))
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.randn(4, 9).to(dtype).requires_grad_()
        up = torch.randn(4, 9).to(dtype)
        assert torch.equal(relu2(y), F.relu(y).square())
        torch.testing.assert_close(grads(relu2(y), up, y), grads(F.relu(y).square(), up, y))


def rotate_pairs(x_BHTh: Tensor, cos_BTp: Tensor, sin_BTp: Tensor, *, interleaved: bool) -> Tensor:
    return Rotation(cos_BTp, sin_BTp, like=x_BHTh, interleaved=interleaved, heads=x_BHTh.shape[1]).rotate(x_BHTh)


def naive_rotation(x_BHTh: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    out = torch.empty_like(x_BHTh)
    half = x_BHTh.shape[-1] // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[..., i].unsqueeze(1), sin[..., i].unsqueeze(1)
        out[..., a] = x_BHTh[..., a] * c - x_BHTh[..., b] * s
        out[..., b] = x_BHTh[..., a] * s + x_BHTh[..., b] * c
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_rotation_agrees_with_the_formula(interleaved: bool, rows: int) -> None:
    torch.manual_seed(0)
    angle = torch.randn(rows, 5, 3, dtype=torch.float64)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    out = rotate_pairs(x, angle.cos(), angle.sin(), interleaved=interleaved)
    torch.testing.assert_close(out, naive_rotation(x.detach(), angle.cos(), angle.sin(), interleaved))
    assert torch.autograd.gradcheck(lambda y: rotate_pairs(y, angle.cos(), angle.sin(), interleaved=interleaved), (x,))
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_rotation_of_slices_of_a_fused_projection(interleaved: bool, dtype: torch.dtype, tolerance: float) -> None:
    """As multi-head attention calls it: a view with a row stride, here an odd one."""
    projected = torch.randn(2, 5, 31).to(dtype)
    x = projected[..., 1:25].unflatten(-1, (4, 6)).transpose(1, 2)
    angle = torch.randn(1, 5, 3)
    before = projected.clone()
    out = rotate_pairs(x, angle.cos(), angle.sin(), interleaved=interleaved)
    expected = naive_rotation(x.float(), angle.cos(), angle.sin(), interleaved)
    assert out.dtype == dtype and torch.equal(projected, before)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_formulas_used_off_the_cpu_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch of accelerators and compilers computes the same."""
    x, gain = torch.randn(2, 4, 5, 6), torch.randn(6)
    angle = torch.randn(2, 5, 3)

    def everything() -> list[Tensor]:
        turned = [rotate_pairs(x, angle.cos(), angle.sin(), interleaved=flag) for flag in (False, True)]
        return [rms_norm(x, gain, 1e-5), relu2(x), *turned]

    by_hand = everything()
    for module in ("layer_norm", "feedforward", "positions.rope"):
        monkeypatch.setattr(f"tformer.nn.{module}.eager_on_cpu", lambda x: False)
    torch.testing.assert_close(everything(), by_hand)


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
