"""What a head over whole texts reads where a decoder stands behind the encoder: its last position by default."""

from __future__ import annotations

import pytest

from tformer.errors import InputError
from tformer.recipe import load_recipe
from tformer.recipe.recipe import Recipe

WHOLE_TEXT = ("classification", "multi_label", "regression")


def recipe_of(arch: str, objective: str, *sets: str) -> Recipe:
    return load_recipe(arch=arch, preset="tiny", flags={"objectives": [{"kind": objective}]}, sets=sets).recipe


@pytest.mark.parametrize("objective", WHOLE_TEXT)
@pytest.mark.parametrize(("arch", "pooling"), [("bart", "eos"), ("t5", "eos"), ("transformer", "eos"), ("bert", "cls")])
def test_a_new_head_reads_the_last_position_of_a_decoder(arch: str, pooling: str, objective: str) -> None:
    (head,) = recipe_of(arch, objective).model.heads
    assert getattr(head, "pooling", None) == pooling


@pytest.mark.parametrize("objective", WHOLE_TEXT)
def test_the_first_position_of_a_decoder_is_refused(objective: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe_of("bart", objective, "model.heads.0.pooling=cls")
    assert "model.heads.0.pooling: found cls" in caught.value.message
    assert "expected eos or mean" in caught.value.message and "eos" in str(caught.value.hint)


def test_what_is_set_goes_before_the_head_that_an_objective_brings() -> None:
    (head,) = recipe_of("bart", "classification", "model.heads.0.pooling=mean").model.heads
    assert getattr(head, "pooling", None) == "mean"
