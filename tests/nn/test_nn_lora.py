"""Adapters of linear layers: they start at the base, merge into one matrix, and leave the base without gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tformer.build import build_model
from tformer.kernels.functions import find
from tformer.model import Transformer
from tformer.nn.linear import Linear
from tformer.nn.lora import (
    AdaptedProduct,
    Adapter,
    FrozenMatrix,
    FrozenProduct,
    Projection,
    adapt,
    frozen_form,
    place,
    projections,
)
from tformer.nn.products import PlainProduct
from tformer.recipe.model import Model

WHOLE = [Projection("x", 0, 12)]
PARTS = [Projection("q", 0, 4), Projection("v", 8, 10)]
OPTIONS = {"rank": 2, "scale": 0.7}


def adapted(projections: list[Projection], **options: Any) -> tuple[Linear, Tensor]:
    """A layer of 12 rows and 7 columns with adapters that change it, and an input."""
    torch.manual_seed(1)
    linear = Linear(7, 12)
    linear.requires_grad_(False)
    nn.init.normal_(linear.weight)
    assert linear.bias is not None
    nn.init.normal_(linear.bias)
    linear.adapter = Adapter(7, projections, rank=3, scale=0.7, **options)
    linear.adapter.start_from(linear.weight)
    return linear, torch.randn(2, 5, 7)


def model(**decoder: Any) -> Transformer:
    torch.manual_seed(0)
    stack = {"num_layers": 2, "num_heads": 2, "positions": {"kind": "learned"}, "feedforward": {"d_ff": 32}} | decoder
    return build_model(Model.model_validate({"d_model": 16, "max_seq_len": 8, "decoder": stack}), vocab_size=11)


def every(made: Transformer) -> list[str]:
    """The names of all projections."""
    return [part.name for _, parts in projections(made).values() for part in parts]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("projections", [WHOLE, PARTS])
def test_a_new_adapter_changes_nothing_and_a_trained_one_is_one_matrix(
    projections: list[Projection], dora: bool
) -> None:
    linear, x = adapted(projections, dora=dora)
    bias = linear.bias
    assert torch.allclose(linear(x), nn.functional.linear(x, linear.weight, bias), atol=1e-6)
    nn.init.normal_(linear.adapter.b)
    if dora:
        nn.init.uniform_(linear.adapter.magnitude, 0.5, 2.0)
    merged = linear.adapter.merged(linear.weight)
    assert torch.allclose(linear(x), nn.functional.linear(x, merged, bias), atol=1e-5)
    changed = (merged != linear.weight).any(dim=1)
    assert changed.tolist() == [any(p.start <= row < p.stop for p in projections) for row in range(12)]


def test_a_row_of_zeros_stays_one_with_dora() -> None:
    linear, x = adapted(WHOLE, dora=True)
    with torch.no_grad():
        linear.weight[3] = 0.0
    linear.adapter.start_from(linear.weight)
    out = linear(x)
    out.square().sum().backward()
    assert torch.allclose(out, nn.functional.linear(x, linear.weight, linear.bias), atol=1e-6)
    assert all(each.grad.isfinite().all() for each in linear.adapter.parameters())
    assert torch.allclose(linear.adapter.merged(linear.weight), linear.weight, atol=1e-6)


def test_the_change_is_s_b_a() -> None:
    linear, _ = adapted(WHOLE)
    nn.init.normal_(linear.adapter.b)
    expected = linear.weight + 0.7 * linear.adapter.b @ linear.adapter.a
    assert torch.allclose(linear.adapter.merged(linear.weight), expected, atol=1e-6)
    assert linear.adapter.a.abs().max() <= 1 / math.sqrt(7)


@pytest.mark.parametrize("projections", [WHOLE, PARTS])
def test_a_prepared_product_with_the_adapters_beside_it_is_that_of_the_merged_matrix(
    projections: list[Projection],
) -> None:
    linear, x = adapted(projections)
    nn.init.normal_(linear.adapter.b)
    product = AdaptedProduct(PlainProduct(linear.weight, linear.bias), linear.adapter, 12)
    expected = nn.functional.linear(x, linear.adapter.merged(linear.weight), linear.bias)
    assert torch.allclose(product(x), expected, atol=1e-5)


def test_dropout_is_of_what_the_adapter_reads_and_only_in_training() -> None:
    linear, x = adapted(WHOLE, dropout=0.5)
    nn.init.normal_(linear.adapter.b)
    torch.manual_seed(3)
    first = linear(x)
    assert not torch.equal(first, linear(x))
    linear.eval()
    assert torch.equal(linear(x), linear(x))


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_a_rounded_matrix_passes_the_gradient_to_its_input(form: Any) -> None:
    if form == "int4" and find() is None:
        pytest.skip("no C kernels")
    torch.manual_seed(2)
    linear = Linear(100, 12)
    linear.requires_grad_(False)
    matrix = FrozenMatrix(linear.weight, form, find())
    error = (matrix.dense() - linear.weight).abs().max() / linear.weight.abs().max()
    assert 0 < error < {"bf16": 0.005, "int8": 0.01, "int4": 0.15}[form]
    linear.product = FrozenProduct(matrix, linear)
    x, same = (torch.randn(3, 100).requires_grad_() for _ in range(2))
    with torch.no_grad():
        same.copy_(x)
    out, expected = linear(x), nn.functional.linear(same, matrix.dense(), linear.bias)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert x.grad is not None and same.grad is not None and torch.allclose(x.grad, same.grad, atol=1e-6)


def test_the_rounding_of_int4_is_that_of_decoding() -> None:
    if (kernels := find()) is None:
        pytest.skip("no C kernels")
    weight = torch.randn(5, 100)
    packed, scales = kernels.round_groups(weight)
    product = kernels.linear(packed, None, scales=scales, in_features=100)
    x = torch.randn(2, 100)
    expected = x @ FrozenMatrix(weight, "int4", kernels).dense().T
    assert torch.allclose(product(x), expected, rtol=0.05, atol=0.2)  # which also rounds x to 8 bits


def test_only_adapters_are_trained_and_frozen_parameters_get_no_gradient() -> None:
    adapted = model()
    frozen = adapt(adapted, targets=every(adapted), **OPTIONS)
    adapted(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    for name, parameter in adapted.named_parameters():
        is_adapter = ".adapter." in name
        assert parameter.requires_grad == is_adapter and (name in frozen) != is_adapter
        assert (parameter.grad is not None) == is_adapter


def test_targets_are_projections_and_a_gated_feedforward_has_two() -> None:
    made = model(feedforward={"d_ff": 32, "gated": True, "activation": "silu"})
    ends = ["q", "k", "v", "out", "gate", "up", "down"]
    assert [name.rpartition(".")[2] for name in every(made)] == ends * 2
    adapt(made, targets={"decoder.blocks.1.feedforward.gate"}, **OPTIONS)
    [adapter] = [module for module in made.modules() if isinstance(module, Adapter)]
    assert [tuple(each[1:]) for each in adapter.projections] == [(0, 32)]


def test_a_matrix_that_is_trained_in_full_has_no_adapter() -> None:
    made = model()
    name = "decoder.blocks.0.feedforward.down.weight"
    frozen = adapt(made, targets=every(made), train={name, "decoder.final_norm.weight"}, **OPTIONS)
    trained = {name for name, each in made.named_parameters() if each.requires_grad and ".adapter." not in name}
    assert trained == {name, "decoder.final_norm.weight"} and not trained & frozen
    assert made.get_submodule(name.removesuffix(".weight")).adapter is None


def test_a_placed_matrix_is_rounded_and_keeps_its_shape_without_numbers() -> None:
    made = model()
    adapt(made, targets=every(made), dora=True, **OPTIONS)
    name = "decoder.blocks.0.self_attention.out"
    weight = torch.randn(16, 16)
    place(made, f"{name}.weight", weight, "bf16", device=torch.device("cpu"), kernels=None)
    left = made.get_parameter(f"{name}.weight")
    assert left.shape == (16, 16) and left.untyped_storage().nbytes() == 4
    assert torch.equal(made.get_submodule(name).adapter.magnitude, weight.bfloat16().float().norm(dim=1))


@pytest.mark.parametrize(("form", "table"), [("fp32", torch.float32), ("int8", torch.bfloat16)])
def test_a_frozen_table_is_bf16_beside_rounded_matrices_and_computes_in_fp32(form: Any, table: torch.dtype) -> None:
    made, same = model(), model()
    adapt(made, targets=every(made), **OPTIONS)
    for name, tensor in same.state_dict().items():
        if name not in made.tied_names():
            place(made, name, tensor.clone(), form, device=torch.device("cpu"), kernels=None)
    made.retie()
    assert made.embedding.weight.dtype == made.heads["lm"].weight.dtype == table
    assert made.get_parameter("decoder.positions.weight").dtype == torch.float32
    for name, parameter in same.named_parameters():
        if (held := frozen_form(made, name, form)) != "fp32":
            parameter.data = FrozenMatrix(parameter, held).dense()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.allclose(made(ids).logits, same(ids).logits, atol=1e-6)
    losses = [each(ids).loss_terms("lm", ids).loss for each in (made, same)]
    assert torch.allclose(*losses, atol=1e-5)
    losses[0].backward()


def test_a_table_of_unit_vectors_stays_in_fp32() -> None:
    made = build_model(Model.model_validate({"d_model": 16, "max_seq_len": 8, "embedding": {"fixnorm": True},
                                             "decoder": {"num_layers": 1, "num_heads": 2}}), vocab_size=11)  # fmt: skip
    assert frozen_form(made, "embedding.weight", "int8") == "fp32"
