"""The recipe of a training that starts from a checkpoint: what it keeps of the stored one, and what it does not."""

from __future__ import annotations

import pytest

from tformer.recipe import load_recipe
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import OF_DATA, OF_MACHINE
from tformer.support.errors import InputError
from tformer.training.fine_tuning import fields_with, for_new_data, with_body

OTHER = {
    "data": {"folder": "/a", "train": [{"path": "a.txt"}], "valid": [{"path": "b.txt"}], "folds": 3, "fold": 2,
             "columns": {"text": "a"}, "format": "messages", "labels": ["x", "y"], "seq_len": 8, "fraction": 0.5},
    "training": {"precision": "bf16", "compile": "on", "device": "cuda", "threads": 7, "log_every": 3},
}  # fmt: skip


def stored(**training: object) -> Recipe:
    recipe = load_recipe(arch="gpt", preset="tiny").recipe
    values = recipe.model_dump(by_alias=True)
    for section, own in (*OTHER.items(), ("training", training)):
        values[section] |= own
    return Recipe.model_validate(values)


def test_what_belongs_to_data_or_machine_has_its_default_again_and_all_else_stays() -> None:
    before = stored(max_epochs=None)
    after = for_new_data(before, ["causal_lm"])
    facts = {"data": OF_DATA, "training": OF_MACHINE}
    for name, fact in facts.items():
        own, section = getattr(before, name), getattr(after, name)
        reset = fields_with(fact, own)
        assert reset and set(OTHER[name]) - {"seq_len", "fraction", "log_every"} == set(reset)
        for field, facts_of_field in type(own).model_fields.items():
            kept, default = getattr(own, field), facts_of_field.get_default()
            assert getattr(section, field) == (default if field in reset else kept), field
    assert after.model == before.model and after.optimizer == before.optimizer


def test_steps_that_followed_from_the_data_are_open_again() -> None:
    whole = for_new_data(stored(max_epochs=None, max_steps=70, eval_every=7), ["causal_lm"]).training
    assert (whole.max_steps, whole.eval_every) == (70, 7)
    by_epochs = for_new_data(stored(max_epochs=2.0, max_steps=70, eval_every=7), ["causal_lm"]).training
    assert by_epochs.max_steps > 10**6 and by_epochs.eval_every is None and by_epochs.save_every is None


def test_a_preset_takes_the_body_and_keeps_its_own_dropout_and_training() -> None:
    body, preset = stored(max_epochs=None), load_recipe(arch="gpt", preset="modern").recipe
    taken = with_body(preset, body)
    assert taken.model.d_model == body.model.d_model and taken.training == preset.training
    assert taken.model.decoder is not None and preset.model.decoder is not None
    assert taken.model.decoder.dropout == preset.model.decoder.dropout
    with pytest.raises(InputError, match="the checkpoint has no encoder, bert/tiny has one"):
        with_body(load_recipe(arch="bert", preset="tiny").recipe, body)
