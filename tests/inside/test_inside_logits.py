"""Direct logit attribution: parts add up to the logit in every family, and are those of the published formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.inside.lens_models import RECIPES, head_of, inputs_of, length_of, loaded_of
from tformer.inside.logits import Contributions, LogitPart, attribute_logits
from tformer.loading import Loaded
from tformer.nn.norm import NORMS, NormOptions, build_norm


def parts_of(loaded: Loaded, targets: list[int], against: list[int] | None = None) -> Contributions:
    side = "encoder" if loaded.model.decoder is None else "decoder"
    return attribute_logits(
        loaded.model,
        inputs_of(loaded),
        side=side,
        head=head_of(loaded),
        places=range(length_of(loaded)),
        targets=targets,
        against=against,
    )


def two_targets(loaded: Loaded) -> tuple[list[int], list[int]]:
    count = length_of(loaded)
    return [place % 2 for place in range(count)], [1 - place % 2 for place in range(count)]


@torch.no_grad()
def logits_of(loaded: Loaded) -> np.ndarray:
    """Before a soft cap [N, V]."""
    logits = loaded.model(**inputs_of(loaded)).logits.reshape(length_of(loaded), -1)
    cap = getattr(loaded.model.heads[head_of(loaded)], "softcap", None)
    return (logits if cap is None else cap * torch.atanh((logits / cap).double())).numpy()


@pytest.mark.parametrize("family", RECIPES)
def test_the_parts_add_up_to_the_logit_and_to_the_difference_of_two(family: str) -> None:
    """Within 1e-4 in fp32, in pre-norm and in post-norm models, for every kind of norm and of pooling."""
    loaded = loaded_of(family)
    (ones, others), logits, rows = two_targets(loaded), logits_of(loaded), np.arange(length_of(loaded))
    found = parts_of(loaded, ones)
    np.testing.assert_allclose(found.values.sum(1), logits[rows, ones], atol=1e-4)
    np.testing.assert_allclose(found.logits, logits[rows, ones], atol=1e-4)
    assert found.gap < 1e-4
    difference = parts_of(loaded, ones, others)
    np.testing.assert_allclose(difference.values.sum(1), (logits[rows, ones] - logits[rows, others]), atol=2e-4)
    np.testing.assert_allclose(difference.values, found.values - parts_of(loaded, others).values, atol=1e-4)


def test_every_part_has_its_name_once() -> None:
    names = [part.name for part in parts_of(loaded_of("bart"), [0] * 5).parts]
    assert len(set(names)) == len(names)
    assert names[:2] == ["embedding", "positions"] and names[-1] == "bias"
    assert {"L0H3", "L2C0", "L1 attention_bias", "L2 feedforward"} <= set(names)


def value_of(found: Contributions, *part: Any) -> np.ndarray:
    return found.values[:, found.parts.index(LogitPart(*part))]


@torch.no_grad()
def test_parts_by_the_formula_of_a_pre_norm_decoder() -> None:
    """((c - mean c) / s * gain) . W[token], s of the whole stream; c of a head is its z times its rows of W_O."""
    loaded = loaded_of("gpt")
    model: Any = loaded.model
    targets, _ = two_targets(loaded)
    found = parts_of(loaded, targets)
    names = ["decoder.embedding.positions", "decoder.0.self_attention.heads", "decoder.1.feedforward.down"]
    names.append("decoder.1.hidden")
    positions, z_1HTv, down, hidden = (model(**inputs_of(loaded), taps=names).taps[name] for name in names)
    norm, matrix = model.decoder.final_norm, model.heads["lm"].weight
    s = (hidden[0].var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()

    def formula(c_TD: Tensor) -> Tensor:
        return ((c_TD - c_TD.mean(-1, keepdim=True)) / s * norm.weight * matrix[targets]).sum(-1)

    out = model.decoder.blocks[0].self_attention.out.weight
    size = z_1HTv.shape[-1]
    for head in range(z_1HTv.shape[1]):
        own = z_1HTv[0, head] @ out[:, head * size : (head + 1) * size].T
        np.testing.assert_allclose(value_of(found, "self_attention", 0, head), formula(own), atol=1e-4)
    np.testing.assert_allclose(value_of(found, "feedforward", 1), formula(down[0]), atol=1e-4)
    np.testing.assert_allclose(value_of(found, "positions"), formula(positions[0]), atol=1e-4)
    bias = matrix[targets] @ norm.bias + model.heads["lm"].bias[targets]
    np.testing.assert_allclose(value_of(found, "bias"), bias, atol=1e-4)


@torch.no_grad()
def test_rmsnorm_does_not_centre() -> None:
    loaded = loaded_of("llama")
    model: Any = loaded.model
    targets, _ = two_targets(loaded)
    taps = model(**inputs_of(loaded), taps=["decoder.embedding", "decoder.1.hidden"]).taps
    norm = model.decoder.final_norm
    rate = (taps["decoder.1.hidden"][0].square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    expected = (taps["decoder.embedding"][0] * rate * norm.weight * model.heads["lm"].weight[targets]).sum(-1)
    np.testing.assert_allclose(value_of(parts_of(loaded, targets), "embedding"), expected, atol=1e-4)


@torch.no_grad()
def test_a_part_of_a_post_norm_encoder_passes_every_later_norm_and_the_gelu_of_the_head() -> None:
    """GELU is x Phi(x) with Phi held fixed; each norm has the deviation of this pass."""
    loaded = loaded_of("bert")
    model: Any = loaded.model
    targets, _ = two_targets(loaded)
    names = ["encoder.1.feedforward.down", "encoder.1.feedforward.residual"]
    later = [f"encoder.2.{name}.residual" for name in ("self_attention", "feedforward")]
    taps = model(**inputs_of(loaded), taps=[*names, *later]).taps
    c = taps[names[0]][0]

    def through(norm: Any, stream: Tensor, c: Tensor) -> Tensor:
        rate = (stream.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
        return (c - c.mean(-1, keepdim=True)) * rate * norm.weight

    blocks, head = model.encoder.blocks, model.heads["masked_lm"]
    norms = (blocks[1].feedforward_norm, blocks[2].self_attention_norm, blocks[2].feedforward_norm)
    for norm, name in zip(norms, (names[1], *later), strict=True):
        c = through(norm, taps[name][0], c)
    before = F.linear(model(**inputs_of(loaded)).hidden[0], head.dense.weight, head.dense.bias)
    phi = torch.special.ndtr(before)
    expected = (through(head.norm, before * phi, F.linear(c, head.dense.weight) * phi) * head.weight[targets]).sum(-1)
    np.testing.assert_allclose(value_of(parts_of(loaded, targets), "feedforward", 1), expected, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_linear_with_fixed_statistics(kind: Any) -> None:
    torch.manual_seed(0)
    norm: Any = build_norm(NormOptions(kind=kind, groups=4 if kind == "groupnorm" else None), 16).eval()
    for tensor in (*norm.parameters(), *norm.buffers()):
        tensor += torch.rand(tensor.shape)
    x, a, b = torch.randn(3, 5, 16).unbind()
    linear = norm.linear_at(x)
    torch.testing.assert_close(linear(2.0 * a + b), 2.0 * linear(a) + linear(b))
    constant = norm(x) - linear(x)
    torch.testing.assert_close(constant, constant[:1].expand_as(constant), atol=1e-5, rtol=1e-5)
    if norm.bias is not None and kind != "batchnorm":
        torch.testing.assert_close(constant[0], norm.bias, atol=1e-5, rtol=1e-5)


def test_no_parameter_gets_a_gradient() -> None:
    loaded = loaded_of("vit")
    loaded.model.zero_grad()  # other tests share it
    parts_of(loaded, [0])
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
