"""What `tformer generate` makes of its options, before and after the model is known."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from tformer.cli.generate import generate
from tformer.cli.generate_models import names_of_models
from tformer.cli.generate_request import Asked
from tformer.errors import InputError
from tformer.recipe.training import Generation

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(generate).parameters.items()}


def asked(**options: Any) -> Asked:
    return Asked(**{**DEFAULTS, **options})


def test_every_option_is_an_attribute_in_the_same_order():
    assert [field.name for field in fields(Asked)] == list(DEFAULTS)


@pytest.mark.parametrize(
    ("options", "recipe", "of_encoder_decoder", "of_decoder"),
    [
        ({}, {}, "beam", "sample"),
        ({}, {"beam_size": 4}, "beam", "beam"),
        ({"greedy": True}, {"beam_size": 4}, "beam", "sample"),
        ({"temperature": 0.0}, {"beam_size": 4}, "beam", "sample"),
        ({"temperature": 0.7}, {"beam_size": 4}, "sample", "sample"),
        ({"top_k": 0}, {}, "beam", "sample"),
        ({"num_samples": 2}, {"beam_size": 4}, "sample", "sample"),
        ({"beam_size": 1}, {}, "beam", "beam"),
        ({"n_best": 1}, {}, "beam", "beam"),
        ({"greedy": True, "min_new_tokens": 3}, {}, "beam", "sample"),
        ({"min_new_tokens": 3, "top_k": 5}, {}, "sample", "sample"),
        ({"stop": ["x"]}, {}, "sample", "sample"),
        ({"stop": ["x"], "greedy": True}, {"beam_size": 4}, "sample", "sample"),
    ],
)
def test_who_searches_and_who_samples(options, recipe, of_encoder_decoder, of_decoder):
    generation = Generation(**recipe)
    request = asked(**options)
    request.check()
    assert request.engine(generation, encoder_decoder=True) == of_encoder_decoder
    assert request.engine(generation, encoder_decoder=False) == of_decoder


def test_an_encoder_decoder_never_samples_unasked():
    settings = asked(stop=["x"]).sampling_settings(Generation(temperature=1.0), eos_id=3, encoder_decoder=True)
    assert settings.greedy
    settings = asked(top_p=0.9).sampling_settings(Generation(temperature=0.8), eos_id=3, encoder_decoder=True)
    assert settings.temperature == 0.8


def test_a_stop_text_is_refused_by_a_beam():
    with pytest.raises(InputError, match="beam of 4"):
        asked(stop=["x"]).engine(Generation(beam_size=4), encoder_decoder=True)


def test_the_recipe_gives_what_was_not_asked():
    generation = Generation(beam_size=4, length_penalty=0.6, length_penalty_type="gnmt", min_new_tokens=2)
    settings = asked(n_best=3, length_penalty=0.0).beam_settings(generation, eos_id=7)
    assert (settings.beam_size, settings.n_best, settings.length_penalty) == (4, 3, 0.0)
    assert (settings.length_penalty_type, settings.min_new_tokens, settings.eos_id) == ("gnmt", 2, 7)
    assert asked(greedy=True).beam_settings(generation, eos_id=7).beam_size == 1


def test_the_least_length_is_for_samples_too():
    assert asked(min_new_tokens=3).sampling_settings(Generation(), eos_id=3, encoder_decoder=False).min_new_tokens == 3
    with pytest.raises(InputError, match="--min-new-tokens 9 is larger than --max-new-tokens 8"):
        asked(min_new_tokens=9, max_new_tokens=8).sampling_settings(Generation(), eos_id=3, encoder_decoder=False)


def test_one_group_has_no_diversity_penalty_of_the_recipe():
    generation = Generation(beam_size=4, beam_groups=2, diversity_penalty=0.5)
    settings = asked(beam_groups=1).beam_settings(generation, eos_id=7)
    assert (settings.beam_size, settings.beam_groups, settings.diversity_penalty) == (4, 1, 0.0)


def test_groups_of_the_recipe_are_for_the_beam_of_the_recipe():
    generation = Generation(beam_size=4, beam_groups=2, diversity_penalty=0.5)
    assert asked().beam_settings(generation, eos_id=7).beam_groups == 2
    assert asked(beam_size=6).beam_settings(generation, eos_id=7).beam_groups == 2
    single = asked(greedy=True).beam_settings(generation, eos_id=7)
    assert (single.beam_groups, single.diversity_penalty) == (1, 0.0)
    with pytest.raises(InputError, match="3 groups"):
        asked(beam_size=4, beam_groups=3).beam_settings(generation, eos_id=7)


def test_models_after_ensemble_are_words_commas_and_repeats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_of_models([], []) == [None]
    assert names_of_models(["run"], []) == ["run"]
    assert names_of_models(["b", "c"], ["a"]) == ["a", "b", "c"]
    assert names_of_models([], ["a,b", "c"]) == ["a", "b", "c"]
    assert names_of_models(["a"], ["a", "b"]) == ["a", "b"]
    assert names_of_models([], ["a,", "b"]) == ["a", "b"]
    (tmp_path / "x,y").mkdir()
    assert names_of_models([], ["x,y"]) == ["x,y"]
    with pytest.raises(InputError, match="unexpected argument 'b'"):
        names_of_models(["a", "b"], [])
