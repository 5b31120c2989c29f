"""Named optimizers: torch's mathematics, who gets which rate and decay, clipping, and exact state by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tformer.optim.muon import Muon
from tformer.optim.optimizers import OPTIMIZERS, NamedOptimizer, OptimizerSettings, build_optimizer
from tformer.recipe.sections import Optimizer as Section
from tformer.recipe.sections import ParameterGroup
from tformer.support.errors import InputError

KINDS = tuple(OPTIMIZERS)


class Tiny(nn.Module):
    """Names as in a real model: an embedding, two blocks, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 4)}) for _ in range(2))
        self.norm = nn.LayerNorm(4)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("blocks.") and parameter.ndim == 2


def rows_of(name: str) -> list[int] | None:
    return [4, 4, 4] if "qkv.weight" in name else None


def make(model: nn.Module, kind: str = "adamw", **options: Any) -> NamedOptimizer:
    settings: dict[str, Any] = {"lr": 0.01, "hidden_matrices": is_hidden_matrix, "splits": rows_of, "device": "cpu"}
    return build_optimizer(model.named_parameters(), OptimizerSettings(kind=kind, **{**settings, **options}))


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None


def take_steps(model: nn.Module, optimizer: NamedOptimizer, seeds: range) -> None:
    for seed in seeds:
        set_gradients(model, seed)
        optimizer.set_lr_scale(1 / (1 + seed))
        optimizer.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()


def settings_by_name(optimizer: NamedOptimizer) -> dict[str, tuple[type, float, float]]:
    """name -> (optimizer class, base rate, weight decay)."""

    def rows() -> Iterator[tuple[str, tuple[type, float, float]]]:
        for part in optimizer.optimizers:
            for group in part.param_groups:
                for parameter in group["params"]:
                    yield optimizer.names[parameter], (type(part), group["base_lr"], group["weight_decay"])

    return dict(rows())


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_adam_kinds_are_torchs(kind: str) -> None:
    ours, theirs = Tiny(), Tiny()
    optimizer = make(ours, kind, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim < 2]
    reference = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind](
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
        foreach=False,
    )
    for seed in range(4):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        optimizer.step()
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_adamw_is_fused_on_the_cpu() -> None:
    assert all(part.defaults["fused"] for part in make(Tiny()).optimizers)


def test_weight_decay_is_for_matrices_and_embeddings_only() -> None:
    model = Tiny()
    found = settings_by_name(make(model, weight_decay=0.1))
    for name, parameter in model.named_parameters():
        assert found[name][2] == (0.1 if parameter.ndim >= 2 else 0.0)
    assert found["embedding.weight"][2] == 0.1


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest_at_its_own_rate() -> None:
    model = Tiny()
    found = settings_by_name(make(model, "muon", lr=0.02, adam_lr=0.003))
    for name, parameter in model.named_parameters():
        expected = (Muon, 0.02) if is_hidden_matrix(name, parameter) else (torch.optim.AdamW, 0.003)
        assert found[name][:2] == expected
    assert {row[1] for row in settings_by_name(make(model, "muon", lr=0.02)).values()} == {0.02}


def test_groups_scale_the_rate_and_replace_the_decay_and_the_last_match_counts() -> None:
    groups = (
        ParameterGroup(match="*.bias", lr_scale=2.0),
        ParameterGroup(match="blocks.0.*", weight_decay=0.5),
        ParameterGroup(match="blocks.0.qkv.bias", lr_scale=3.0),
    )
    found = settings_by_name(make(Tiny(), weight_decay=0.1, groups=groups))
    assert found["blocks.1.qkv.bias"][1:] == (0.02, 0.0)
    assert found["blocks.0.qkv.weight"][1:] == (0.01, 0.5)
    assert found["blocks.0.out.bias"][1:] == (0.01, 0.5)
    assert found["blocks.0.qkv.bias"][1:] == (pytest.approx(0.03), 0.0)
    assert found["norm.weight"][1:] == (0.01, 0.0)


def test_a_frozen_group_is_left_out_and_needs_no_gradient() -> None:
    model = Tiny()
    optimizer = make(model, groups=(ParameterGroup(match="embedding.*", frozen=True),))
    assert not model.embedding.weight.requires_grad
    assert not any(name.startswith("embedding") for name in optimizer.state_by_name())


def test_a_group_that_matches_nothing_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"no parameter matches 'embeding\.weight'") as caught:
        make(Tiny(), groups=(ParameterGroup(match="embeding.weight"),))
    assert caught.value.hint is not None and "embedding.weight" in caught.value.hint


def test_freezing_everything_is_an_input_error() -> None:
    with pytest.raises(InputError, match="nothing is left to train"):
        make(Tiny(), groups=(ParameterGroup(match="*", frozen=True),))


def test_layer_decay_lowers_the_rate_towards_the_embeddings() -> None:
    def layer_of(name: str) -> int | None:
        if name.startswith("embedding"):
            return 0
        return int(name.split(".")[1]) + 1 if name.startswith("blocks") else None

    found = settings_by_name(make(Tiny(), lr=1.0, layer_decay=0.5, layer_of=layer_of, num_layers=2))
    assert [found[name][1] for name in ("norm.bias", "blocks.1.out.bias", "blocks.0.out.bias", "embedding.weight")] == [
        1.0,
        0.5,
        0.25,
        0.125,
    ]


def test_set_lr_scale_multiplies_every_groups_base_rate() -> None:
    optimizer = make(Tiny(), "muon", lr=0.02, adam_lr=0.003, groups=(ParameterGroup(match="norm.*", lr_scale=2.0),))
    optimizer.set_lr_scale(0.1)
    optimizer.set_lr_scale(0.5)
    rates = {group["lr"] for part in optimizer.optimizers for group in part.param_groups}
    assert rates == {0.01, 0.0015, 0.003}
    assert optimizer.learning_rate() == 0.01


def test_clip_returns_the_norm_and_scales_like_torch() -> None:
    ours, theirs = Tiny(), Tiny()
    optimizer = make(ours)
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    norm = optimizer.clip(0.5)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    torch.testing.assert_close(norm, expected)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(optimizer.clip(None), torch.tensor(0.5), atol=1e-5, rtol=0)


def test_clip_leaves_small_gradients_as_they_are() -> None:
    model = Tiny()
    set_gradients(model, 0)
    optimizer = make(model)
    before = [gradient.clone() for gradient in optimizer.gradients()]
    norm = optimizer.clip(1e9)
    assert all(torch.equal(one, other) for one, other in zip(before, optimizer.gradients(), strict=True))
    assert torch.equal(norm, optimizer.clip(None))


def test_clip_without_gradients_is_zero() -> None:
    assert make(Tiny()).clip(1.0).item() == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_from_saved_state_is_exact(kind: str, tmp_path: Path) -> None:
    whole = Tiny()
    whole_optimizer = make(whole, kind, weight_decay=0.1)
    take_steps(whole, whole_optimizer, range(6))

    first = Tiny()
    first_optimizer = make(first, kind, weight_decay=0.1)
    take_steps(first, first_optimizer, range(3))
    save_file(first_optimizer.state_by_name(), tmp_path / "optimizer.safetensors")

    second = Tiny()
    second.load_state_dict(first.state_dict())
    second_optimizer = make(second, kind, weight_decay=0.1)
    second_optimizer.load_state_by_name(load_file(tmp_path / "optimizer.safetensors"))
    take_steps(second, second_optimizer, range(3, 6))

    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    saved, resumed = whole_optimizer.state_by_name(), second_optimizer.state_by_name()
    assert saved.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in saved.items())


@pytest.mark.parametrize("kind", KINDS)
def test_state_exists_before_the_first_step_and_is_plain(kind: str) -> None:
    model = Tiny()
    optimizer = make(model, kind)
    before = optimizer.state_by_name()
    take_steps(model, optimizer, range(2))
    after = optimizer.state_by_name()
    assert before.keys() == after.keys()
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in after.values())
    assert {tensor.item() for name, tensor in after.items() if name.endswith(".step")} == {2.0}


def test_loading_copies_and_keeps_no_hold_on_what_it_was_given() -> None:
    model = Tiny()
    optimizer = make(model)
    take_steps(model, optimizer, range(2))
    saved = {name: tensor.clone() for name, tensor in optimizer.state_by_name().items()}
    untouched = {name: tensor.clone() for name, tensor in saved.items()}
    optimizer.load_state_by_name(saved)
    take_steps(model, optimizer, range(2))
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in saved.items())


def test_state_that_does_not_fit_is_an_input_error() -> None:
    optimizer = make(Tiny())
    state = optimizer.state_by_name()
    with pytest.raises(InputError, match=r"1 tensors \(norm.bias.step\) missing, 1 tensors \(other\) unexpected"):
        optimizer.load_state_by_name(
            {("other" if name == "norm.bias.step" else name): tensor for name, tensor in state.items()}
        )
    with pytest.raises(InputError, match=r"norm.bias.exp_avg is \(5,\) torch.float32, expected \(4,\) torch.float32"):
        optimizer.load_state_by_name({**state, "norm.bias.exp_avg": torch.zeros(5)})


def test_the_recipes_section_fits_the_signature() -> None:
    section = Section(kind="muon", layer_decay=0.9)
    options = section.model_dump(exclude={"clip_grad_norm", "groups"})
    make(Tiny(), options.pop("kind"), **options, groups=section.groups)
