"""From a plan to its cells: products, coupled keys, stacks, and names that tell variants apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.recipe.yaml_text import parse_value
from tformer.workflows.sweep.grid import as_text, axes_of, cells_of, expand_key, variants_of
from tformer.workflows.sweep.plan import Task

BOTH: dict[str, Any] = {"model": {"encoder": {"norm": {}}, "decoder": {"norm": {}}}}
DECODER: dict[str, Any] = {"model": {"encoder": None, "decoder": {"norm": {}}}}


def of(vary: dict[str, list[Any]], recipe: dict[str, Any] = BOTH) -> list[Any]:
    return variants_of(Task(vary={key: tuple(values) for key, values in vary.items()}), recipe=recipe, prefix="")


def test_axes_make_their_product_with_the_last_axis_fastest() -> None:
    variants = of({"optimizer.lr": [0.1, 0.2], "optimizer.kind": ["adam", "adamw", "muon"]})
    assert [variant.choices for variant in variants] == [
        {"lr": lr, "optimizer.kind": kind} for lr in ("0.1", "0.2") for kind in ("adam", "adamw", "muon")
    ]
    assert variants[1].sets == ("optimizer.lr=0.1", "optimizer.kind=adamw")


def test_no_axis_is_one_variant() -> None:
    [variant] = of({})
    assert (variant.sets, variant.choices, variant.slug) == ((), {}, "base")


def test_a_star_stands_for_the_stacks_that_the_recipe_has() -> None:
    [variant] = of({"model.*.norm.place": ["post"]})
    assert variant.sets == ("model.encoder.norm.place=post", "model.decoder.norm.place=post")
    [variant] = of({"model.*.norm.place": ["post"]}, DECODER)
    assert variant.sets == ("model.decoder.norm.place=post",)
    assert expand_key("training.*.x", BOTH) == ["training.*.x"]  # for the recipe to refuse


def test_coupled_keys_change_together_and_show_the_first_where_it_tells_all() -> None:
    axis = {"model.*.norm.place,model.*.final_norm": [["pre", True], ["post", False]]}
    first, second = of(axis, DECODER)
    assert first.sets == ("model.decoder.norm.place=pre", "model.decoder.final_norm=true")
    assert second.sets == ("model.decoder.norm.place=post", "model.decoder.final_norm=false")
    assert (first.choices, second.choices) == ({"norm.place": "pre"}, {"norm.place": "post"})
    assert (first.slug, second.slug) == ("pre", "post")
    ambiguous = {"optimizer.lr,schedule.warmup_steps": [[0.1, 0], [0.1, 5]]}
    assert [variant.choices for variant in of(ambiguous)] == [
        {"lr + warmup_steps": "0.1 + 0"},
        {"lr + warmup_steps": "0.1 + 5"},
    ]


def test_labels_are_short_but_never_the_same() -> None:
    axes = axes_of(
        Task(vary={"model.encoder.dropout": (0, 1), "model.decoder.dropout": (0, 1), "optimizer.lr": (1, 2)})
    )
    assert [axis.label for axis in axes] == ["model.encoder.dropout", "model.decoder.dropout", "lr"]


def test_a_mapping_is_shown_by_its_kind() -> None:
    variants = of({"model.*.positions": [{"kind": "rope"}, {"kind": "rope", "base": 100}]}, DECODER)
    assert [variant.choices["positions"] for variant in variants] == ["rope", "rope (base 100)"]
    assert variants[1].sets == ('model.decoder.positions={"kind": "rope", "base": 100}',)


def test_slugs_are_safe_names_and_unlike_one_another() -> None:
    odd = ["a/b", "a b", "../x", "ü", "", "y" * 300, "y" * 301]
    slugs = [variant.slug for variant in of({"training.sample_prompt": odd})]
    assert len(set(slugs)) == len(odd)
    for slug in slugs:
        assert 0 < len(slug) <= 90 and "/" not in slug and not slug.startswith(".")


def test_every_variant_has_the_first_seed_before_any_has_the_second() -> None:
    variants = of({"optimizer.lr": [0.1, 0.2]})
    names = [cell.name for cell in cells_of(variants, seeds=[7, 8])]
    assert names == ["lr-0.1-seed7", "lr-0.2-seed7", "lr-0.1-seed8", "lr-0.2-seed8"]


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=12)


@given(
    st.recursive(SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
)
def test_a_value_survives_the_command_line(value: Any) -> None:
    """What `--set` reads of the text is the value, of the same type."""
    try:
        read = parse_value(as_text(value), name="--set")
    except Exception as error:  # a text that YAML itself refuses, as a lone byte-order mark
        assert "not valid YAML" in str(error)
        return
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("text", ["true", "1e-3", "null", "", " x", "[a]", "{a: 1}", "'q'", '"q"', "on", "a=b", "a, b"])
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    assert parse_value(as_text(text), name="--set") == text
