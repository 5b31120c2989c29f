"""Beam search against the enumeration of everything, and against a slow search over lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.beam_reference import (
    ScriptedStepper,
    enumerate_all,
    penalty,
    random_rule,
    slow_beam_search,
)
from tformer.decoding.beam import beam_search
from tformer.decoding.beam_settings import BeamSettings

EOS = 1
seeds = st.integers(0, 2**32 - 1)
penalties = pytest.mark.parametrize(
    ("kind", "alpha"),
    [("none", 1.0), *((kind, alpha) for kind in ("avg", "gnmt") for alpha in (-0.7, 0.0, 0.6, 1.0, 2.0))],
)


@st.composite
def searches(draw: st.DrawFn) -> BeamSettings:
    """Settings of all sorts for a vocabulary of at least 6."""
    size, groups = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (6, 3)]))
    return BeamSettings(
        beam_size=size,
        beam_groups=groups,
        diversity_penalty=draw(st.sampled_from([0.0, 0.3, 5.0])) if groups > 1 else 0.0,
        length_penalty=draw(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 3.0])),
        length_penalty_type=draw(st.sampled_from(["avg", "gnmt", "none"])),
        max_new_tokens=draw(st.integers(2, 6)),
        min_new_tokens=draw(st.integers(0, 2)),
        eos_id=draw(st.sampled_from([EOS, EOS, EOS, None])),
        stopping=draw(st.sampled_from(["beam", "heuristic", "exhaustive"])),
        forced_eos=draw(st.sampled_from([None, None, EOS, 3])),
        counted_start=draw(st.sampled_from([0, 0, 1])),
        no_repeat_ngram=draw(st.sampled_from([0, 0, 1, 2, 3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
    )


@penalties
@pytest.mark.parametrize("stopping", ["beam", "heuristic", "exhaustive"])
@pytest.mark.parametrize(("tokens", "limit", "beam"), [(3, 4, 24), (4, 3, 36), (5, 4, 320)])
def test_a_beam_wide_enough_is_exhaustive_search(
    kind: Any, alpha: float, stopping: Any, tokens: int, limit: int, beam: int
) -> None:
    """The search keeps all that there is; tokens of probability zero make room for a beam so wide."""
    options = BeamSettings(
        beam_size=beam,
        length_penalty=alpha,
        length_penalty_type=kind,
        max_new_tokens=limit,
        eos_id=EOS,
        stopping=stopping,
    )
    rule = random_rule(tokens, vocab_size=tokens, pad_to=beam)
    (found,) = beam_search(ScriptedStepper([rule]), options)
    expected = enumerate_all(rule, options, limit=limit, tokens=tokens)
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], rel=1e-12)
    assert [h.ids for h in found] == [h.ids for h in expected]
    assert [h.finish_reason for h in found] == [h.finish_reason for h in expected]
    assert len(found) == sum((tokens - 1) ** length for length in range(limit + 1))


@penalties
@pytest.mark.parametrize("minimum", [0, 2])
def test_exhaustive_stopping_finds_the_best_of_everything(kind: Any, alpha: float, minimum: int) -> None:
    """Every prefix of the longest length has a beam (27 of 3 tokens), and the search may stop before that length."""
    options = BeamSettings(
        beam_size=27,
        length_penalty=alpha,
        length_penalty_type=kind,
        max_new_tokens=4,
        min_new_tokens=minimum,
        eos_id=EOS,
        stopping="exhaustive",
    )
    rules = [random_rule(seed, vocab_size=4, pad_to=27) for seed in range(8)]
    for rule, found in zip(rules, beam_search(ScriptedStepper(rules), options), strict=True):
        best = enumerate_all(rule, options, limit=4, tokens=4)[0]
        assert found[0].ids == best.ids
        assert found[0].score == pytest.approx(best.score, rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(
    options=searches(),
    seed=seeds,
    levels=st.sampled_from([None, 2, 5]),
    never=st.sampled_from([(), (0,), (2, 5)]),
    sentences=st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=3),
)
def test_the_search_is_the_slow_search_of_each_sentence_alone(
    options: BeamSettings,
    seed: int,
    levels: int | None,
    never: tuple[int, ...],
    sentences: list[tuple[int, list[int]]],
) -> None:
    """Hypotheses, sums and scores to the last bit, ties included, whatever else is in the batch."""
    rules = [random_rule(seed + place, vocab_size=6, levels=levels) for place in range(len(sentences))]
    limits, histories = [limit for limit, _ in sentences], [history for _, history in sentences]
    found = beam_search(ScriptedStepper(rules), options, limits=limits, histories=histories, never=never)
    for rule, limit, history, hypotheses in zip(rules, limits, histories, found, strict=True):
        assert hypotheses == slow_beam_search(rule, options, limit=limit, history=history, never=never)


@settings(max_examples=40, deadline=None)
@given(options=searches(), seed=seeds, order=st.permutations(range(5)))
def test_results_do_not_depend_on_the_batch_or_its_order(options: BeamSettings, seed: int, order: list[int]) -> None:
    rules = [random_rule(seed + place, vocab_size=7) for place in range(5)]
    together = beam_search(ScriptedStepper(rules), options)
    shuffled = beam_search(ScriptedStepper([rules[place] for place in order]), options)
    assert shuffled == [together[place] for place in order]
    for rule, hypotheses in zip(rules, together, strict=True):
        assert beam_search(ScriptedStepper([rule]), options) == [hypotheses]


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    beam=st.integers(1, 4),
    alpha=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    kind=st.sampled_from(["avg", "gnmt", "none"]),
)
def test_exhaustive_stopping_loses_nothing_and_is_never_worse(seed: int, beam: int, alpha: float, kind: Any) -> None:
    """The `beam_size` best are those of a search that never stops, and the best is no worse than `beam` stopping's."""
    common: dict[str, Any] = {
        "beam_size": beam,
        "length_penalty": alpha,
        "length_penalty_type": kind,
        "max_new_tokens": 8,
        "eos_id": EOS,
    }
    rule = random_rule(seed, vocab_size=5)
    patient = BeamSettings(stopping="exhaustive", **common)
    (exhaustive,) = beam_search(ScriptedStepper([rule]), patient)
    (quick,) = beam_search(ScriptedStepper([rule]), BeamSettings(stopping="beam", **common))
    unending = slow_beam_search(rule, patient, never_stop=True)
    assert [h.score for h in exhaustive[:beam]] == [h.score for h in unending[:beam]]
    assert exhaustive[0].score >= quick[0].score
    assert {h.ids for h in quick if h.finish_reason == "eos"} <= {h.ids for h in exhaustive}


@settings(max_examples=60, deadline=None)
@given(options=searches(), seed=seeds)
def test_sums_are_those_of_the_tokens_and_scores_those_of_the_sums(options: BeamSettings, seed: int) -> None:
    rule = random_rule(seed, vocab_size=8)
    (found,) = beam_search(ScriptedStepper([rule]), options)
    assert found == sorted(found, key=lambda hypothesis: -hypothesis.score)
    assert len({hypothesis.ids for hypothesis in found}) == len(found) >= options.beam_size // options.beam_groups
    for hypothesis in found:
        steps = [rule(hypothesis.ids[:place])[token] for place, token in enumerate(hypothesis.ids)]
        assert hypothesis.logprob == pytest.approx(sum(steps), abs=1e-12)
        assert (hypothesis.ids[-1] == options.eos_id) == (hypothesis.finish_reason == "eos")
        assert options.eos_id not in hypothesis.ids[:-1]
        if options.repetition_penalty == 1.0 and options.forced_eos is None:
            assert hypothesis.score == hypothesis.logprob / penalty(options, len(hypothesis.ids))


@settings(max_examples=40, deadline=None)
@given(seed=seeds, limit=st.integers(1, 8), levels=st.sampled_from([None, 3]))
def test_a_beam_of_one_is_greedy(seed: int, limit: int, levels: int | None) -> None:
    rule = random_rule(seed, vocab_size=6, levels=levels)
    ids: tuple[int, ...] = ()
    while len(ids) < limit and EOS not in ids:
        row = rule(ids)
        ids = (*ids, row.index(max(row)))
    options = BeamSettings(beam_size=1, max_new_tokens=limit, eos_id=EOS)
    assert beam_search(ScriptedStepper([rule]), options)[0][0].ids == ids
