"""Where a beam search ends: limits, rooms, interruption; and what it makes of impossible numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.decoding.beam_reference import NEVER, Rule, ScriptedStepper, logs, random_rule, table
from tformer.decoding.beam_search import beam_search
from tformer.decoding.settings import (
    BeamSettings,
    Hypothesis,
)
from tformer.errors import InputError, TformerError

A, EOS, B = 0, 1, 2
STORY = table(
    {
        (): (0.6, 0.1, 0.3),
        (A,): (0.1, 0.5, 0.4),
        (B,): (0.05, 0.9, 0.05),
        (A, B): (0.1, 0.8, 0.1),
    },
    otherwise=(0.3, 0.4, 0.3),
)


def search(rule: Rule, *, limit: int = 4, **options: Any) -> list[Hypothesis]:
    options = {"max_new_tokens": limit, "eos_id": EOS, "length_penalty_type": "none"} | options
    return beam_search(ScriptedStepper([rule]), BeamSettings(**options))[0]


def found(hypotheses: list[Hypothesis]) -> dict[tuple[int, ...], float]:
    """Probabilities, rounded."""
    return {hypothesis.ids: round(math.exp(hypothesis.logprob), 6) for hypothesis in hypotheses}


def stopping_after(polls: int) -> Callable[[], bool]:
    answers: Iterator[bool] = iter([False] * polls)
    return lambda: next(answers, True)


def test_finished_sentences_leave_the_batch_at_once() -> None:
    rules = [table({(A,) * steps: (0.0, 1.0, 0.0)}, otherwise=(1.0, 0.0, 0.0)) for steps in (3, 1, 5, 1)]
    stepper = ScriptedStepper(rules)
    hypotheses = beam_search(stepper, BeamSettings(beam_size=1, max_new_tokens=9, eos_id=EOS))
    assert [len(found[0].ids) for found in hypotheses] == [4, 2, 6, 2]
    assert stepper.batches == [4, 4, 2, 2, 1, 1]


def test_a_sentence_has_its_own_limit_and_its_own_room() -> None:
    endless = table({}, otherwise=(0.7, 0.0, 0.3))
    stepper = ScriptedStepper([endless] * 5, rooms=[9, 9, 2, 9, 3])
    options = BeamSettings(beam_size=2, max_new_tokens=5, eos_id=EOS)
    hypotheses = beam_search(stepper, options, limits=[1, 8, 8, 0, 4])
    assert [len(found[0].ids) for found in hypotheses] == [1, 5, 2, 0, 3]
    assert hypotheses[3] == [Hypothesis((), 0.0, 0.0, "length")]
    assert {h.finish_reason for found in hypotheses for h in found} == {"length"}
    assert stepper.batches == [5, 3, 2, 1, 1]


def test_an_interrupted_search_returns_what_is_there() -> None:
    """[EOS] has finished; after two steps [A EOS] and [B EOS] too, and [A B] is live."""
    options = BeamSettings(beam_size=3, max_new_tokens=9, eos_id=EOS, stopping="exhaustive")
    (early,) = beam_search(ScriptedStepper([STORY]), options, should_stop=stopping_after(1))
    assert [(h.ids, h.finish_reason) for h in early] == [
        ((EOS,), "eos"),
        ((A,), "interrupted"),
        ((B,), "interrupted"),
    ]
    (later,) = beam_search(ScriptedStepper([STORY]), options, should_stop=stopping_after(2))
    assert [h.ids for h in later if h.finish_reason == "eos"] == [(A, EOS), (B, EOS), (EOS,)]
    assert later[3].ids == (A, B) and later[3].finish_reason == "interrupted"
    assert later[3].score == pytest.approx(math.log(0.24) / 2, abs=1e-6)


def test_a_search_interrupted_at_once_reads_nothing() -> None:
    stepper = ScriptedStepper([STORY, STORY])
    hypotheses = beam_search(stepper, BeamSettings(eos_id=EOS, beam_size=2), should_stop=lambda: True)
    assert hypotheses == [[Hypothesis((), 0.0, 0.0, "interrupted")]] * 2
    assert stepper.batches == []


def test_no_sentences_give_no_hypotheses() -> None:
    assert beam_search(ScriptedStepper([]), BeamSettings()) == []


def test_a_beam_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match=r"^beam size 8 is larger than the vocabulary of 5$"):
        beam_search(ScriptedStepper([random_rule(0, vocab_size=5)]), BeamSettings(beam_size=8))


def test_a_beam_as_large_as_the_vocabulary_works() -> None:
    assert len(search(STORY, limit=3, beam_size=3)) == 3
    assert found(search(lambda prefix: [0.0], limit=2, beam_size=1, eos_id=None)) == {(0, 0): 1.0}


@pytest.mark.parametrize("bad_step", [0, 2])
def test_numbers_that_are_not_numbers_are_told(bad_step: int) -> None:
    def rule(prefix: tuple[int, ...]) -> list[float]:
        return [-math.nan] * 3 if len(prefix) == bad_step else logs(0.6, 0.0, 0.4)

    with pytest.raises(TformerError, match="not numbers"):
        search(rule, beam_size=2, limit=6)


def test_tokens_of_probability_zero_are_never_chosen() -> None:
    rule = table({(A,): (0.0, 0.0, 0.0)}, otherwise=(0.5, 0.5, 0.0))
    assert found(search(rule, beam_size=3)) == {(EOS,): 0.5}


def test_a_model_that_allows_no_token_ends_the_hypotheses_as_they_are() -> None:
    def rule(prefix: tuple[int, ...]) -> list[float]:
        return [NEVER] * 3 if len(prefix) >= 2 else logs(0.6, 0.0, 0.4)

    hypotheses = search(rule, beam_size=2, limit=9)
    assert found(hypotheses) == {(A, A): 0.36, (B, A): 0.24}
    assert {hypothesis.finish_reason for hypothesis in hypotheses} == {"length"}
    assert search(lambda prefix: [NEVER] * 3, beam_size=2) == [Hypothesis((), 0.0, 0.0, "length")]
