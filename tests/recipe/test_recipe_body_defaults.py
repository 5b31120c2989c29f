"""Defaults that follow the body: the rates by width, what a user gives stays, and bodies that keep their own recipe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.recipe import load_recipe, recipe_to_yaml
from tformer.recipe.body_defaults import EMBEDDINGS, NARROW, RULES, follow_body
from tformer.recipe.load import Resolved

FLAGS: dict[str, dict[str, Any]] = {"lora": {"lora.rank": 8}, "full": {}}


def resolve(width: int, what: str, **given: Any) -> Resolved:
    """The recipe of a body of this width, by the preset for labels and the user's values."""
    heads = {"model.d_model": width, "model.encoder.num_heads": 2}
    flags = {**heads, **FLAGS[what], **given.pop("flags", {})}
    return load_recipe(preset="bert/finetune", flags=flags, **given)


def followed(resolved: Resolved, *, imported: bool = True) -> tuple[Any, str | None]:
    recipe, note = follow_body(resolved.recipe, resolved.origins, imported=imported, own="file body")
    return recipe.optimizer, note


@pytest.mark.parametrize(("width", "full", "lora"), [
    (64, 1e-3, 3e-3), (128, 7.3e-4, 3e-3), (384, 1.4e-4, 1e-3), (768, 5e-5, 5e-4), (1024, 3.2e-5, 3.8e-4),
    (2048, 1.1e-5, 2e-4), (4096, 1e-5, 2e-4), (16384, 1e-5, 2e-4),
])  # fmt: skip
def test_the_rates_fall_with_the_width(width: int, full: float, lora: float) -> None:
    assert (RULES["full"].rate(width), RULES["lora"].rate(width)) == (full, lora)


@given(st.integers(1, 10**6))
def test_adapters_take_a_larger_rate_and_no_rate_grows_with_the_width(width: int) -> None:
    full, *adapted = RULES.values()
    for rule in (full, *adapted):
        assert rule.least <= rule.rate(width + 1) <= rule.rate(width) <= rule.most
    assert all(rule.rate(width) > 2 * full.rate(width) for rule in adapted)


@pytest.mark.parametrize("what", FLAGS)
def test_a_body_is_trained_by_adamw_and_the_line_names_rate_and_width(what: str) -> None:
    optimizer, note = followed(resolve(64, what))
    assert (optimizer.kind, optimizer.lr, optimizer.adam_lr) == ("adamw", RULES[what].rate(64), None)
    assert (optimizer.betas, optimizer.weight_decay) == ((0.9, 0.999), RULES[what].decay)
    assert note is not None and "width 64: AdamW" in note and f"peak rate {optimizer.lr:g}" in note and "--lr" in note
    assert ("adapters" in note) == (what == "lora")


@pytest.mark.parametrize(("width", "follows"), [(NARROW, False), (NARROW + 2, True)])
def test_a_narrow_body_of_our_own_keeps_the_preset_in_full_training(width: int, follows: bool) -> None:
    resolved = resolve(width, "full")
    optimizer, note = followed(resolved, imported=False)
    assert (optimizer != resolved.recipe.optimizer) == (note is not None) == follows
    adapters, said = followed(resolve(width, "lora"), imported=False)
    assert said is not None and ("the embeddings are trained too" in said) != follows
    rule = RULES["lora" if follows else "lora of a narrow body"]
    assert (adapters.kind, adapters.lr) == ("adamw", rule.rate(width))  # adapters of any body


@pytest.mark.parametrize("given", [
    {"flags": {"optimizer.lr": 0.02}}, {"sets": ["optimizer.lr=0.02"]}, {"sets": ["optimizer.adam_lr=0.02"]},
    {"sets": ["optimizer.kind=adamw"]},
])  # fmt: skip
def test_the_rates_and_the_kind_of_a_user_stay(given: dict[str, Any]) -> None:
    resolved = resolve(64, "full", **given)
    assert followed(resolved) == (resolved.recipe.optimizer, None)


def test_the_rate_of_a_user_is_that_of_adapters_too() -> None:
    """By the preset's Muon, whose `lr` trains no adapter, it would change nothing."""
    optimizer, note = followed(resolve(64, "lora", flags={"optimizer.lr": 0.02}))
    assert (optimizer.kind, optimizer.lr, optimizer.adam_lr, note) == ("adamw", 0.02, None, None)


def test_adapters_of_a_narrow_body_of_our_own_leave_the_embeddings_free_where_labels_are_learned() -> None:
    def trained(width: int = 64, imported: bool = False, **given: Any) -> tuple[str, ...]:
        resolved = resolve(width, "lora", **given)
        lora = follow_body(resolved.recipe, resolved.origins, imported=imported, own="file body")[0].lora
        assert lora is not None
        return lora.train

    assert trained() == trained(flags={"optimizer.lr": 0.02}) == EMBEDDINGS
    assert trained(imported=True) == trained(NARROW + 2) == trained(sets=["lora.train=[]"]) == ()
    assert trained(sets=["lora.targets=[q,v]"]) == (), "a user who names matrices names all of them"
    assert trained(sets=["lora.train=[final_norm.*]"]) == ("final_norm.*",)
    pre_training = load_recipe(preset="bert/pretrain", flags={"model.d_model": 64, "lora.rank": 8})
    recipe, _ = follow_body(pre_training.recipe, pre_training.origins, imported=False, own="file body")
    assert recipe.lora is not None and recipe.lora.train == (), "no labels"


def test_the_rate_of_noam_stays() -> None:
    resolved = resolve(64, "lora", sets=["schedule.kind=noam"])
    assert followed(resolved) == (resolved.recipe.optimizer, None)


def test_values_of_a_file_and_other_settings_of_the_optimizer_stay(tmp_path: Any) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("optimizer: {lr: 0.02}\n")
    base = recipe_to_yaml(resolve(64, "full").recipe)
    resolved = load_recipe(base_yaml=base, base_name="body/recipe.yaml", config=file)
    assert followed(resolved) == (resolved.recipe.optimizer, None)
    sets = ["optimizer.weight_decay=0.3", "optimizer.layer_decay=0.9"]
    optimizer, note = followed(load_recipe(base_yaml=base, base_name="body/recipe.yaml", sets=sets))
    assert (optimizer.weight_decay, optimizer.layer_decay) == (0.3, 0.9) and optimizer.kind == "adamw" and note
