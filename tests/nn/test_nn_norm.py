"""Norms: agreement with torch.nn, fp32 statistics, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from tformer.nn.norm import NORMS, NormOptions, build_norm

KINDS = sorted(NORMS)


def randomised(norm: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(1.0, 0.3)
    return norm


@pytest.mark.parametrize("bias", [True, False])
def test_layernorm_equals_torch(bias: bool) -> None:
    ours = randomised(build_norm(NormOptions(kind="layernorm", eps=1e-5, bias=bias), 12))
    theirs = torch.nn.LayerNorm(12, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 12) * 4 + 1
    torch.testing.assert_close(ours(x), theirs(x))


def test_rmsnorm_equals_torch_forward_and_backward() -> None:
    ours = randomised(build_norm(NormOptions(kind="rmsnorm", eps=1e-6), 12))
    theirs = torch.nn.RMSNorm(12, eps=1e-6)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 12)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    probe = torch.randn(3, 5, 12)
    ours(a).backward(probe)
    theirs(b).backward(probe)
    torch.testing.assert_close(ours(a), theirs(b))
    torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_scalenorm_gives_every_vector_the_length_g() -> None:
    norm = build_norm(NormOptions(kind="scalenorm"), 16)
    assert norm.weight.item() == pytest.approx(math.sqrt(16))
    lengths = norm(torch.randn(4, 16) * 7).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full((4,), 4.0))
    assert sum(p.numel() for p in norm.parameters()) == 1


def test_scalenorm_of_a_tiny_vector_divides_by_eps() -> None:
    norm = build_norm(NormOptions(kind="scalenorm", eps=1e-2), 4)
    x = torch.full((1, 4), 1e-4)
    torch.testing.assert_close(norm(x), x * 2.0 / 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_input_keeps_its_dtype_and_fp32_statistics(kind: str) -> None:
    norm = randomised(build_norm(NormOptions(kind=kind), 64))
    x = (torch.randn(8, 64) * 3 + 5).bfloat16()
    out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), norm(x.float()), atol=0.04, rtol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_unlearned_norms_have_no_parameters(kind: str) -> None:
    norm = build_norm(NormOptions(kind=kind, learned=False), 8)
    assert not list(norm.parameters())
    fresh = build_norm(NormOptions(kind=kind), 8)
    x = torch.randn(2, 8)
    torch.testing.assert_close(norm(x), fresh(x))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_parameters_and_input_in_bf16(kind: str) -> None:
    norm = build_norm(NormOptions(kind=kind), 8)
    x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    norm(x).float().square().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in norm.parameters())


def test_eps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="eps must be greater than 0"):
        NormOptions(eps=0.0)
