"""Several ends of a text: every one of them ends it, whatever chooses the tokens."""

from __future__ import annotations

import math

import pytest

from tests.decoding.beam_reference import ScriptedStepper, random_rule
from tformer.decoding.beam import beam_search
from tformer.decoding.beam_settings import BeamSettings
from tformer.decoding.generate import generate
from tformer.decoding.settings import GenerationSettings
from tformer.decoding.uncached import uncached_generate
from tformer.recipe.training import Generation

VOCAB = 6


def next_number(seen):
    return [5.0 if token == (seen[-1] + 1) % VOCAB else 0.0 for token in range(VOCAB)]


@pytest.mark.parametrize("engine", [generate, uncached_generate], ids=["cached", "uncached"])
def test_every_stop_token_ends_a_completion(scripted, engine):
    settings = GenerationSettings(temperature=0.0, max_new_tokens=9, eos_id=5, stop_tokens=(2, 4))
    results = engine(scripted(next_number), [[0], [2], [4]], settings)
    assert [one[0].ids for one in results] == [(1, 2), (3, 4), (5,)]
    assert {one[0].finish_reason for one in results} == {"eos"}


def test_none_comes_before_the_least_length_and_none_counts_as_repeated(scripted):
    settings = GenerationSettings(temperature=0.0, max_new_tokens=9, stop_tokens=(2, 4), min_new_tokens=3)
    [[one]] = generate(scripted(lambda seen: [3, 0, 9, 2, 8, 1]), [[2, 4]], settings)
    assert one.ids == (0, 0, 0, 2)
    settings = GenerationSettings(temperature=0.0, max_new_tokens=9, stop_tokens=(2, 99), repetition_penalty=9.0)
    [[one]] = generate(scripted(lambda seen: [3, 0, 4, 0, 0, 0]), [[2]], settings)
    assert one.ids == (2,)


@pytest.mark.parametrize("seed", range(5))
def test_every_stop_token_ends_a_hypothesis_and_counts_in_it(seed):
    rule, ends = random_rule(seed, vocab_size=VOCAB), {1, 3, 4}
    settings = BeamSettings(beam_size=4, max_new_tokens=4, eos_id=1, stop_tokens=(3, 4), length_penalty=0.0)
    [found] = beam_search(ScriptedStepper([rule]), settings)
    for one in found:
        assert not set(one.ids[:-1]) & ends
        assert one.finish_reason == ("eos" if one.ids[-1] in ends else "length")
        logprob = sum(rule(one.ids[:n])[token] for n, token in enumerate(one.ids))
        assert math.isclose(one.logprob, logprob, abs_tol=1e-5)
    assert {one.ids[-1] for one in found} & ends


@pytest.mark.parametrize("seed", range(3))
def test_a_full_beam_goes_on_although_all_ends_rank_first(seed):
    rule = random_rule(seed, vocab_size=VOCAB)
    settings = BeamSettings(beam_size=2, max_new_tokens=3, min_new_tokens=2, eos_id=1, stop_tokens=(0, 2, 3))
    [found] = beam_search(ScriptedStepper([rule]), settings)
    assert len(found) >= 2 and all(len(one.ids) == 3 and set(one.ids[:2]) <= {4, 5} for one in found)


def test_the_recipe_says_which():
    recipe = Generation(stop_tokens=(7, 8))
    assert GenerationSettings.from_recipe(recipe, eos_id=3).ends == (3, 7, 8)
    assert BeamSettings.from_recipe(recipe, eos_id=3).ends == (3, 7, 8)
    assert GenerationSettings.from_recipe(recipe).ends == (7, 8)
    assert BeamSettings().ends == ()
