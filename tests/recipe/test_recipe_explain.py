"""`config explain`: every key of the schema has a type, a default and a meaning; papers and presets are found."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from tformer.nn.attention import AttentionOptions
from tformer.nn.positions import PositionOptions
from tformer.objectives import OBJECTIVES
from tformer.recipe import list_presets, load_recipe, recipe_to_data
from tformer.recipe.explain import ARXIV, explain, explained_keys, preset_values
from tformer.recipe.recipe import Recipe
from tformer.recipe.schema import (
    MISSING,
    all_sections,
    field_descriptions,
    fields_of,
    item_field,
    known_paths,
    sections_in,
)
from tformer.support.errors import InputError


def every_path(section: Any = Recipe, before: str = "") -> list[str]:
    """Every key of the schema, those inside lists included."""
    paths = []
    for name, field in fields_of(section).items():
        paths.append(before + name)
        item = item_field(field.annotation)
        for inner in (*sections_in(field.annotation), *(sections_in(item.annotation) if item else ())):
            paths += every_path(inner, f"{before}{name}.")
    return list(dict.fromkeys(paths))


def test_every_key_of_the_schema_has_a_type_and_a_meaning() -> None:
    paths = every_path()
    assert {".".join(path) for path in known_paths()} < set(paths) and "objectives.label_smoothing" in paths
    for path in paths:
        for one in explain(path):
            assert one.type and (one.meaning or one.choices), path
            assert "Options(" not in one.meaning, f"{path}: a docstring that dataclass made"
            assert all(one.choices.values()), path
            json.dumps(one.to_json())


def test_every_value_is_described_beside_its_own_field() -> None:
    for section in all_sections():
        described = dict(field_descriptions(section))
        for name, field in fields_of(section).items():
            item = item_field(field.annotation)
            is_section = sections_in(field.annotation) or (item and sections_in(item.annotation))
            assert is_section or name in described or name == "kind", f"{section.__name__}.{name}"


def test_the_meaning_of_a_section_is_one_sentence_with_that_of_its_key() -> None:
    [one] = explain("data.train")
    assert one.meaning.endswith("`builtin:NAME`; empty: the built-in source of the objective")


def test_a_default_is_that_of_the_recipe() -> None:
    written = recipe_to_data(load_recipe(arch="gpt", preset="tiny").recipe)
    [seed], [frozen] = explain("seed"), explain("optimizer.groups.0.frozen")
    assert seed.default == Recipe.model_fields["seed"].default and frozen.default is False
    assert explain("data.train.path")[0].default is MISSING
    assert written.keys() == set(fields_of(Recipe))


def test_a_key_names_its_type_choices_papers_and_presets() -> None:
    [place] = explain("model.encoder.norm.place")
    assert (place.type, place.default) == ("pre | post | res_post | sandwich", "pre")
    assert place.papers == ("2002.04745", "1706.03762", "2111.09883", "2105.13290") and "before" in place.meaning
    assert "transformer/base" in preset_values("model.encoder.norm.place")['"post"']
    [layers] = explain("model.decoder.num_layers")
    assert layers.type == "integer above 0 and at most 1024"
    [kind] = explain("model.decoder.positions.kind")
    assert kind.choices.keys() == {options.kind for options in get_args(PositionOptions)}
    assert kind.type == " | ".join(kind.choices) and kind.default == "learned"


def test_a_key_of_several_kinds_is_explained_for_each_meaning() -> None:
    kinds = {one.kinds: one for one in explain("model.encoder.positions.base")}
    assert kinds.keys() == {("sinusoidal",), ("rope",), ("patch2d",)}
    assert kinds[("rope",)].papers == ("2104.09864",)
    [shared] = explain("model.encoder.attention.qkv_bias")
    assert set(shared.kinds) == {options.kind for options in get_args(AttentionOptions)}


@pytest.mark.parametrize("path", ["model.encoder.positions", "model.encoder.attention", "objectives"])
def test_every_kind_is_summarized(path: str) -> None:
    [section] = explain(path)
    assert all(len(summary) > 10 for summary in section.choices.values())
    if path == "objectives":
        assert section.choices.keys() == OBJECTIVES.keys()
    else:
        assert all(ARXIV.search(summary) for summary in section.choices.values())


def test_presets_are_those_that_write_the_key() -> None:
    named = {name for names in preset_values("model").values() for name in names}
    assert named <= {f"{arch}/{name}" for arch, names in list_presets().items() for name in names}
    assert preset_values("objectives.label_smoothing") == preset_values("objectives.0.label_smoothing")
    assert preset_values("model.encoder.positions.scaling") == {}


def test_the_list_has_every_key_outside_lists_once() -> None:
    listed = dict(explained_keys())
    assert list(listed) == list(dict.fromkeys(".".join(path) for path in known_paths()))


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("", "known: arch"),
        ("nonsense", "known: arch"),
        ("lr", "did you mean 'optimizer.lr'?"),
        ("model.encodr", "did you mean 'encoder'?"),
        ("model.encoder.norm.plce", "did you mean 'place'?"),
        ("seed.more", "it is a value and has no keys: tformer config explain seed"),
        ("0", "a dotted path"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(path: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        explain(path)
    assert hint in str(caught.value.hint) and "\n" not in caught.value.message
