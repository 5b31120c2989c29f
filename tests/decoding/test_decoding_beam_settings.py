"""Settings of beam search out of a recipe: which of them give way to another beam, and what messages call them."""

from __future__ import annotations

from typing import Any

import pytest

from tformer.decoding.beam_settings import BeamSettings, fitting_beam_settings
from tformer.errors import InputError
from tformer.recipe.training import Generation

GROUPS = Generation(beam_size=4, beam_groups=2, diversity_penalty=0.5)


@pytest.mark.parametrize(
    ("overrides", "groups", "diversity"),
    [
        ({}, 2, 0.5),
        ({"beam_size": 6}, 2, 0.5),
        ({"beam_size": 1}, 1, 0.0),
        ({"beam_size": 5}, 1, 0.0),
        ({"beam_groups": 1}, 1, 0.0),
        ({"beam_size": 6, "beam_groups": 3}, 3, 0.5),
        ({"beam_size": 6, "diversity_penalty": 0.1}, 2, 0.1),
    ],
)
def test_the_recipes_groups_stay_where_the_beam_holds_them(
    overrides: dict[str, Any], groups: int, diversity: float
) -> None:
    made = fitting_beam_settings(GROUPS, eos_id=3, length_penalty=None, **overrides)
    assert (made.beam_groups, made.diversity_penalty, made.eos_id) == (groups, diversity, 3)
    assert made.beam_size == overrides.get("beam_size", 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"beam_size": 5, "beam_groups": 2}, "--beam-size 5 cannot be divided into 2 groups of one size"),
        ({"beam_groups": 3}, "generation.beam_size 4 cannot be divided into 3 groups of one size"),
        ({"beam_size": 5, "diversity_penalty": 0.1}, "--diversity-penalty 0.1 has nothing to act on with one group"),
        ({"n_best": 5}, "--n-best 5 is larger than generation.beam_size 4"),
        ({"max_new_tokens": 9, "min_new_tokens": 10}, "--min-new-tokens 10 is larger than --max-new-tokens 9"),
        ({"min_new_tokens": 300}, "--min-new-tokens 300 is larger than generation.max_new_tokens 200"),
        ({"beam_size": 0}, "beam_size must be at least 1, found 0"),
    ],
)
def test_what_was_asked_for_and_contradicts_is_an_error(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        fitting_beam_settings(GROUPS, eos_id=3, **overrides)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Generation(min_new_tokens=300), "generation.min_new_tokens 300 is larger than generation.max_new_tokens 200"),
        (Generation(beam_size=4, beam_groups=3), "generation.beam_size 4 cannot be divided into 3 groups"),
        (Generation(diversity_penalty=0.5), "generation.diversity_penalty 0.5 has nothing to act on"),
        (Generation(length_penalty=11), "generation.length_penalty must be between -10 and 10"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_told_by_its_keys(recipe: Generation, message: str) -> None:
    with pytest.raises(InputError) as caught:
        BeamSettings.from_recipe(recipe, eos_id=3)
    assert caught.value.message.startswith(message) and "--" not in f"{caught.value.message}{caught.value.hint}"
