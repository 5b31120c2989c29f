"""Norms: agreement with torch.nn, fp32 statistics, gradients, running statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.nn.init import InitOptions, initialize
from tformer.nn.norm import NORMS, BatchNorm, NormOptions, build_norm, frozen_statistics
from tformer.recipe.model import Model
from tformer.support.errors import InputError

KINDS = sorted(NORMS)


def options_of(kind: str, **changes: object) -> NormOptions:
    return NormOptions(kind=kind, **({"groups": 4} if kind == "groupnorm" else {}), **changes)


def randomized(norm: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(1.0, 0.3)
    return norm


EQUAL = {
    "layernorm": ({"kind": "layernorm", "eps": 1e-5}, torch.nn.LayerNorm(12)),
    "layernorm without bias": ({"kind": "layernorm", "eps": 1e-5, "bias": False}, torch.nn.LayerNorm(12, bias=False)),
    "rmsnorm": ({"kind": "rmsnorm", "eps": 1e-6}, torch.nn.RMSNorm(12, eps=1e-6)),
    "batchnorm": ({"kind": "batchnorm"}, torch.nn.BatchNorm1d(12)),
    "batchnorm without bias": ({"kind": "batchnorm", "bias": False}, torch.nn.BatchNorm1d(12)),
    **{f"groupnorm {n}": ({"kind": "groupnorm", "groups": n}, torch.nn.GroupNorm(n, 12)) for n in (1, 3, 6)},
}


@pytest.mark.parametrize(("options", "theirs"), list(EQUAL.values()), ids=list(EQUAL))
def test_equals_torch_forward_and_backward_in_training_and_evaluation(
    options: dict[str, Any], theirs: torch.nn.Module
) -> None:
    """The norm treats every position as one example, as PyTorch does, and batchnorm updates the same statistics."""
    torch.manual_seed(0)
    ours = randomized(build_norm(NormOptions(**options), 12))
    theirs.load_state_dict(ours.state_dict(), strict=options["kind"] != "batchnorm")
    for training in (True, True, False):
        x = (torch.randn(3, 5, 12) * 4 + 1).requires_grad_()
        found, expected = ours.train(training)(x), theirs.train(training)(x.reshape(15, 12)).view_as(x)
        torch.testing.assert_close(found, expected)
        up, theirs_of = torch.randn_like(x), dict(theirs.named_parameters())
        parameters = dict(ours.named_parameters())
        grads = torch.autograd.grad(found, [x, *parameters.values()], up)
        others = torch.autograd.grad(expected, [x, *(theirs_of[name] for name in parameters)], up)
        tolerance = 1e-3 if options.get("groups") == 6 else 1e-5  # two numbers of a group may be nearly equal
        torch.testing.assert_close(grads, others, atol=tolerance, rtol=tolerance)
        for name, statistic in ours.named_buffers():
            torch.testing.assert_close(statistic, theirs.get_buffer(name))


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
    norm = randomized(build_norm(options_of(kind), 64))
    x = (torch.randn(8, 64) * 3 + 5).bfloat16()
    out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), norm(x.float()), atol=0.04, rtol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_unlearned_norms_have_no_parameters(kind: str) -> None:
    norm = build_norm(options_of(kind, learned=False), 8)
    assert not list(norm.parameters())
    fresh = build_norm(options_of(kind), 8)
    x = torch.randn(2, 8)
    torch.testing.assert_close(norm(x), fresh(x))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_parameters_and_input_in_bf16(kind: str) -> None:
    norm = build_norm(options_of(kind), 8)
    x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    norm(x).float().square().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in norm.parameters())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gain_of_1_plus_w_is_that_gain_computed_in_fp32(kind: str, dtype: torch.dtype) -> None:
    """Values, gradients and the linear form are those of the plain norm; a fresh one has the gain 1."""
    torch.manual_seed(0)
    offset, plain = (build_norm(options_of(kind, unit_offset=unit), 16) for unit in (True, False))
    x = (torch.randn(3, 16) * 3 + 1).to(dtype).requires_grad_()
    torch.testing.assert_close(offset(x), plain(x))
    with torch.no_grad():
        offset.weight.copy_(torch.linspace(-0.01, 0.01, 16))  # of 1 + w, bf16 would keep two or three bits
        plain.weight.copy_(1 + offset.weight)
    # `rms_norm` multiplies in x's dtype: the reference gets fp32.
    torch.testing.assert_close(offset(x), plain(x.float()).to(dtype), atol=0, rtol=0)
    grads = [torch.autograd.grad(norm(x).sum(), [x, norm.weight]) for norm in (offset, plain)]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(offset.linear_at(x)(x), plain.linear_at(x)(x))
    offset.reset_parameters()
    assert not offset.weight.any()


@pytest.mark.parametrize(("kind", "learned"), [("scalenorm", True), ("batchnorm", True), ("rmsnorm", False)])
def test_a_gain_of_1_plus_w_belongs_to_layernorm_and_rmsnorm_with_gains(kind: str, learned: bool) -> None:
    with pytest.raises(ValueError, match=f"unit_offset: only for layernorm and rmsnorm with gains, found {kind}"):
        NormOptions(kind=kind, learned=learned, unit_offset=True)


def test_eps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="eps must be greater than 0"):
        NormOptions(eps=0.0)


def test_one_group_is_layernorm_and_the_papers_32_are_the_default() -> None:
    x = torch.randn(2, 3, 64)
    one = build_norm(NormOptions(kind="groupnorm", groups=1), 64)
    torch.testing.assert_close(one(x), torch.nn.functional.layer_norm(x, (64,)))
    assert build_norm(NormOptions(kind="groupnorm"), 64).groups == 32


def test_groups_that_do_not_divide_the_width_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"norm\.groups 5 does not divide d_model 12"):
        build_norm(NormOptions(kind="groupnorm", groups=5), 12)
    decoder = {"num_layers": 1, "num_heads": 2, "norm": {"kind": "groupnorm", "groups": 5}}
    with pytest.raises(InputError, match=r"^model\.decoder\.norm\.groups 5 does not divide d_model 12$"):
        build_model(Model.model_validate({"d_model": 12, "vocab_size": 7, "decoder": decoder}))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "groupnorm"])
def test_groups_belong_to_groupnorm_alone(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"groups must be left out of {kind}"):
        NormOptions(kind=kind, groups=4)
    with pytest.raises(ValueError, match="groups must be greater than 0"):
        NormOptions(kind="groupnorm", groups=0)


def test_batchnorm_statistics_are_fp32_whatever_comes_in() -> None:
    norm = build_norm(NormOptions(kind="batchnorm"), 4)
    x = (torch.randn(64, 4) + 300).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
    torch.testing.assert_close(norm.running_mean, 0.1 * x.float().mean(dim=0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * x.float().var(dim=0), rtol=1e-4, atol=1e-4)


def test_batchnorm_in_evaluation_sees_one_position_at_a_time() -> None:
    norm = randomized(build_norm(NormOptions(kind="batchnorm"), 6))
    norm(torch.randn(4, 9, 6))
    x = torch.randn(2, 5, 6)
    torch.testing.assert_close(norm.eval()(x)[:, :2], norm(x[:, :2]))
    before = norm.state_dict()["running_mean"].clone()
    norm(x)
    assert torch.equal(norm.running_mean, before)


def test_batchnorm_of_one_vector_has_no_variance_and_uses_the_running_statistics() -> None:
    norm = build_norm(NormOptions(kind="batchnorm"), 6)
    x = torch.randn(1, 1, 6)
    torch.testing.assert_close(norm(x), norm.eval()(x))
    assert torch.equal(norm.running_mean, torch.zeros(6))
    assert norm.train()(x[:, :0]).shape == (1, 0, 6)


def test_kept_statistics_normalize_by_the_batch_without_taking_it_in() -> None:
    norm = build_norm(NormOptions(kind="batchnorm"), 6)
    x = torch.randn(8, 6) + 1
    with frozen_statistics(norm):
        inside = norm(x)
    assert torch.equal(norm.running_mean, torch.zeros(6)) and torch.equal(norm.running_var, torch.ones(6))
    assert torch.equal(inside, norm(x)) and not torch.equal(norm.running_mean, torch.zeros(6))


def test_initialization_resets_gains_and_statistics() -> None:
    norm = randomized(build_norm(NormOptions(kind="batchnorm"), 6))
    norm(torch.randn(8, 6) + 1)
    holder = torch.nn.ModuleList([norm, randomized(build_norm(NormOptions(kind="groupnorm", groups=2), 6))])
    initialize(holder, InitOptions())
    fresh = BatchNorm(6, eps=1e-5).state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in norm.state_dict().items())
    assert torch.equal(holder[1].weight, torch.ones(6)) and torch.equal(holder[1].bias, torch.zeros(6))


@pytest.mark.parametrize("kind", ["batchnorm", "groupnorm"])
def test_a_causal_model_with_this_norm_never_sees_the_future_in_evaluation(kind: str) -> None:
    torch.manual_seed(0)
    norm = {"kind": kind, **({"groups": 4} if kind == "groupnorm" else {})}
    decoder = {"num_layers": 2, "num_heads": 2, "norm": norm}
    model = build_model(Model.model_validate({"d_model": 16, "vocab_size": 7, "decoder": decoder}))
    ids = torch.randint(0, 7, (3, 8))
    model(ids)  # statistics
    model.eval()
    changed = ids.clone()
    changed[:, 5:] = (ids[:, 5:] + 1) % 7
    torch.testing.assert_close(model(ids).logits[:, :5], model(changed).logits[:, :5])
