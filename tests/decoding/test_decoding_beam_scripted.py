"""Beam search over scripted probabilities, against results worked out by hand; limits and interruptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.decoding.beam_reference import NEVER, Rule, ScriptedStepper, logs, random_rule, table
from tformer.decoding.beam_search import beam_search
from tformer.decoding.settings import BeamSettings, Hypothesis
from tformer.support.errors import InputError, TformerError

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
# What it tells: [EOS] 0.1, [A EOS] 0.3, [B EOS] 0.27, [A B EOS] 0.192, and longer ones.


def search(rule: Rule, *, limit: int = 4, **options: Any) -> list[Hypothesis]:
    options = {"max_new_tokens": limit, "eos_id": EOS, "length_penalty_type": "none"} | options
    return beam_search(ScriptedStepper([rule]), BeamSettings(**options))[0]


def found(hypotheses: list[Hypothesis]) -> dict[tuple[int, ...], float]:
    """Probabilities, rounded."""
    return {hypothesis.ids: round(math.exp(hypothesis.logprob), 6) for hypothesis in hypotheses}


def test_beam_stopping_ends_at_beam_size_finished_hypotheses() -> None:
    """Of a beam of 3: [EOS] ranks third at once, then two more finish, and [A B] is given up."""
    hypotheses = search(STORY, beam_size=3, stopping="beam")
    assert found(hypotheses) == {(A, EOS): 0.3, (B, EOS): 0.27, (EOS,): 0.1}
    assert list(found(hypotheses)) == [(A, EOS), (B, EOS), (EOS,)]
    assert {hypothesis.finish_reason for hypothesis in hypotheses} == {"eos"}


def test_an_end_of_sequence_below_the_first_beam_size_ranks_does_not_finish() -> None:
    """Of a beam of 2, [EOS] ranks third."""
    assert found(search(STORY, beam_size=2)) == {(A, EOS): 0.3, (B, EOS): 0.27}


def test_twice_as_many_candidates_keep_the_beam_full() -> None:
    """Both beams end at the second step, at ranks 1 and 2; two others take their places, and go on to win."""
    rule = table({}, otherwise=(0.25, 0.5, 0.25))
    options: dict[str, Any] = {"length_penalty_type": "avg", "length_penalty": 3.0, "stopping": "exhaustive"}
    hypotheses = search(rule, limit=3, beam_size=2, min_new_tokens=1, **options)
    assert [h.ids for h in hypotheses if len(h.ids) == 2] == [(A, EOS), (B, EOS)]
    assert [h.ids for h in hypotheses[:2]] == [(A, A, EOS), (B, A, EOS)]


@pytest.mark.parametrize(
    ("kind", "alpha", "best", "score"),
    [
        ("none", 1.0, (A, EOS), math.log(0.3)),
        ("avg", 0.0, (A, EOS), math.log(0.3)),
        ("avg", 1.0, (A, B, EOS), math.log(0.192) / 3),
        ("avg", -1.0, (EOS,), math.log(0.1)),  # [A EOS]: 2 ln 0.3
        ("gnmt", 1.0, (A, EOS), math.log(0.3) / (7 / 6)),
        ("gnmt", 5.0, (A, B, EOS), math.log(0.192) / (8 / 6) ** 5),
    ],
)
def test_each_length_penalty_prefers_what_it_should(kind: str, alpha: float, best: tuple[int], score: float) -> None:
    """The length counts the end of sequence: 2 and 3."""
    hypotheses = search(
        STORY, limit=3, beam_size=3, length_penalty=alpha, length_penalty_type=kind, stopping="exhaustive"
    )
    finished = [hypothesis for hypothesis in hypotheses if hypothesis.finish_reason == "eos"]
    assert finished[0].ids == best
    assert finished[0].score == pytest.approx(score, abs=1e-6)


def test_exhaustive_stopping_finds_what_beam_stopping_gives_up() -> None:
    options = {"limit": 3, "beam_size": 3, "length_penalty_type": "avg"}
    assert search(STORY, stopping="beam", **options)[0].ids == (A, EOS)
    assert search(STORY, stopping="exhaustive", **options)[0].ids == (A, B, EOS)


def test_heuristic_stopping_goes_on_while_a_live_hypothesis_is_better_as_it_stands() -> None:
    """Of a beam of 3: [A B] (ln 0.24 / 2) is better than [EOS] (ln 0.1), the worst of three finished ones."""
    options = {"limit": 3, "beam_size": 3, "length_penalty_type": "avg"}
    assert search(STORY, stopping="heuristic", **options)[0].ids == (A, B, EOS)
    assert search(STORY, **options)[0].ids == (A, B, EOS)  # the default


def test_heuristic_stopping_gives_up_what_only_its_length_would_make_better() -> None:
    """[A A] (ln 0.0625 / 8) is worse than [B EOS] (ln 0.09 / 8), but [A A EOS] (ln 0.0375 / 27) would be best."""
    rule = table({}, otherwise=(0.25, 0.6, 0.15))
    options = {"limit": 3, "beam_size": 2, "length_penalty_type": "avg", "length_penalty": 3.0}
    assert [h.ids for h in search(rule, stopping="heuristic", **options)] == [(A, EOS), (B, EOS), (EOS,)]
    assert search(rule, stopping="exhaustive", **options)[0].ids == (A, A, EOS)


@pytest.mark.parametrize("stopping", ["beam", "heuristic", "exhaustive"])
def test_at_the_limit_everything_live_finishes(stopping: str) -> None:
    """[EOS] and [A EOS], which ranks second, are as many as the beam, but [A A] (0.48) ranks first."""
    rule = table({(): (0.6, 0.3, 0.1)}, otherwise=(0.8, 0.15, 0.05))
    assert found(search(rule, limit=2, beam_size=2, stopping=stopping))[(A, A)] == 0.48
    assert search(rule, limit=2, beam_size=2, stopping=stopping)[0].ids == (A, A)


def test_exhaustive_stopping_stops_when_nothing_better_can_come() -> None:
    """Without a penalty sums only fall: after [A EOS] and [B EOS] no live beam of a beam of 2 exceeds 0.24."""
    stepper = ScriptedStepper([STORY])
    options = BeamSettings(
        beam_size=2, length_penalty_type="none", max_new_tokens=50, eos_id=EOS, stopping="exhaustive"
    )
    beam_search(stepper, options)
    assert len(stepper.batches) == 2


def test_a_hypothesis_cut_at_the_maximum_counts_no_end_of_sequence() -> None:
    hypotheses = search(STORY, limit=2, beam_size=2, min_new_tokens=2, length_penalty_type="avg")
    assert [(h.ids, h.finish_reason) for h in hypotheses] == [((A, B), "length"), ((A, A), "length")]
    assert hypotheses[0].score == pytest.approx(math.log(0.24) / 2, abs=1e-6)


def test_a_forced_end_is_the_last_token_of_each_sentences_limit_and_costs_nothing() -> None:
    rule = table({}, otherwise=(0.6, 0.1, 0.3))
    options = BeamSettings(beam_size=1, max_new_tokens=3, min_new_tokens=2, eos_id=EOS, forced_eos=EOS)
    [[one], [two], [three]] = beam_search(ScriptedStepper([rule] * 3), options, limits=[1, 2, 9])
    assert [hypothesis.ids for hypothesis in (one, two, three)] == [(EOS,), (A, EOS), (A, A, EOS)]
    assert [hypothesis.finish_reason for hypothesis in (one, two, three)] == ["eos"] * 3
    assert three.score == pytest.approx(2 * math.log(0.6) / 3, abs=1e-6)
    assert three.logprob == pytest.approx(2 * math.log(0.6) + math.log(0.1), abs=1e-6)


def test_an_end_at_the_limit_is_the_last_token_of_each_sentences_limit_and_counts() -> None:
    rule = table({}, otherwise=(0.6, 0.1, 0.3))
    options = BeamSettings(beam_size=1, max_new_tokens=3, min_new_tokens=2, eos_id=EOS, at_limit="end")
    found = beam_search(ScriptedStepper([rule] * 3), options, limits=[1, 2, 9])
    for length, [hypothesis] in enumerate(found, start=1):
        assert (hypothesis.ids, hypothesis.finish_reason) == ((*[A] * (length - 1), EOS), "eos")
        assert hypothesis.logprobs == pytest.approx([math.log(0.6)] * (length - 1) + [math.log(0.1)], abs=1e-6)
        assert hypothesis.score == pytest.approx(hypothesis.logprob / length, abs=1e-12)


def test_an_end_at_the_limit_of_a_model_that_forces_one_counts_too() -> None:
    rule = table({}, otherwise=(0.6, 0.1, 0.3))
    [hypothesis] = search(rule, limit=2, beam_size=1, min_new_tokens=1, forced_eos=EOS, at_limit="end")
    assert (hypothesis.ids, hypothesis.score) == ((A, EOS), pytest.approx(math.log(0.06), abs=1e-6))


def test_an_impossible_end_at_the_limit_leaves_the_text_without_one() -> None:
    [hypothesis] = search(table({}, otherwise=(0.7, 0.0, 0.3)), limit=2, beam_size=1, at_limit="end")
    assert (hypothesis.ids, hypothesis.finish_reason) == ((A,), "length")


def test_a_forced_token_that_is_no_end_is_cut_after() -> None:
    [hypothesis] = search(STORY, limit=2, beam_size=1, forced_eos=B)
    assert (hypothesis.ids, hypothesis.finish_reason) == ((A, B), "length")


def test_a_start_that_counts_makes_every_hypothesis_longer_to_the_penalty() -> None:
    rule = table({}, otherwise=(0.25, 0.6, 0.15))
    for kind, lp in (("avg", 3.0), ("gnmt", 8 / 6)):
        [first, *_] = search(rule, limit=2, beam_size=2, length_penalty_type=kind, min_new_tokens=1, counted_start=1)
        assert (first.ids, first.score) == ((A, EOS), pytest.approx(math.log(0.15) / lp, abs=1e-6))


def test_finished_and_cut_hypotheses_are_ranked_together() -> None:
    hypotheses = search(STORY, limit=1, beam_size=3)
    assert [(h.ids, h.finish_reason) for h in hypotheses] == [((A,), "length"), ((B,), "length"), ((EOS,), "eos")]


def test_the_minimum_length_holds_the_end_of_sequence_back() -> None:
    """So many tokens come before it; what was finished early otherwise goes on."""
    hypotheses = search(STORY, limit=3, beam_size=2, min_new_tokens=2)
    assert all(len(hypothesis.ids) == 3 for hypothesis in hypotheses)
    assert (hypotheses[0].ids, round(math.exp(hypotheses[0].logprob), 6)) == ((A, B, EOS), 0.192)


def test_the_minimum_length_gives_way_where_the_model_allows_nothing_else() -> None:
    rule = table({(): (1.0, 0.0, 0.0)}, otherwise=(0.0, 1.0, 0.0))
    assert found(search(rule, beam_size=2, min_new_tokens=3)) == {(A, EOS): 1.0}


def test_without_an_end_of_sequence_only_the_length_ends_a_hypothesis() -> None:
    hypotheses = search(STORY, limit=2, beam_size=2, eos_id=None)
    assert found(hypotheses) == {(A, EOS): 0.3, (B, EOS): 0.27}
    assert {hypothesis.finish_reason for hypothesis in hypotheses} == {"length"}


def test_ngram_blocking_masks_tokens_and_never_beams() -> None:
    """A A, then not A again (A A is there), then A, and after A neither A nor B: the end."""
    rule = table({}, otherwise=(0.6, 0.1, 0.3))
    (hypothesis,) = search(rule, limit=9, beam_size=1, no_repeat_ngram=2)
    assert hypothesis.ids == (A, A, B, A, EOS)
    assert hypothesis.logprob == pytest.approx(3 * math.log(0.6) + math.log(0.3) + math.log(0.1), abs=1e-6)


def test_ngram_blocking_looks_back_on_the_history() -> None:
    rule = table({}, otherwise=(0.6, 0.1, 0.3))
    options = BeamSettings(beam_size=1, max_new_tokens=3, eos_id=EOS, no_repeat_ngram=2)
    hypotheses = beam_search(ScriptedStepper([rule, rule]), options, histories=[[B, A, A], [B]])
    assert [found[0].ids for found in hypotheses] == [(B, B, EOS), (A, A, B)]


def test_a_row_with_every_token_blocked_is_left_as_it_was() -> None:
    rule = table({}, otherwise=(0.6, 0.0, 0.4))
    (hypothesis,) = search(rule, limit=4, beam_size=1, no_repeat_ngram=1)
    assert hypothesis.ids == (A, B, A, A)


def test_the_repetition_penalty_multiplies_and_counts_in_the_score_alone() -> None:
    """A (-0.69), then B (-0.92) before A (-1.39), then A (-1.39) before B (-1.83) and the end (-2.30)."""
    rule = table({}, otherwise=(0.5, 0.1, 0.4))
    (hypothesis,) = search(rule, limit=3, beam_size=1, repetition_penalty=2.0)
    assert hypothesis.ids == (A, B, A)
    assert hypothesis.logprob == pytest.approx(math.log(0.5 * 0.4 * 0.5), abs=1e-6)
    assert hypothesis.score == pytest.approx(math.log(0.5 * 0.4 * 0.25), abs=1e-6)


def test_the_repetition_penalty_looks_back_on_the_history() -> None:
    rule = table({}, otherwise=(0.5, 0.1, 0.4))
    options = BeamSettings(beam_size=1, max_new_tokens=1, eos_id=EOS, repetition_penalty=2.0)
    hypotheses = beam_search(ScriptedStepper([rule] * 3), options, histories=[[A], [], [B, A]])
    assert [found[0].ids for found in hypotheses] == [(B,), (A,), (A,)]


def test_ties_go_to_the_lower_token_then_to_the_lower_beam() -> None:
    even = table({}, otherwise=(0.25, 0.0, 0.25, 0.25, 0.25))
    assert [h.ids for h in search(even, limit=1, beam_size=3)] == [(0,), (2,), (3,)]
    assert [h.ids for h in search(even, limit=2, beam_size=3)] == [(0, 0), (2, 0), (3, 0)]


def test_the_n_best_asked_for_do_not_change_the_search() -> None:
    assert search(STORY, beam_size=3, n_best=3) == search(STORY, beam_size=3, n_best=1)


# --- limits, rooms, interruption, impossible numbers ------------------------------------------------------------------


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
    assert hypotheses[3] == [Hypothesis((), (), 0.0, "length")]
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
    assert hypotheses == [[Hypothesis((), (), 0.0, "interrupted")]] * 2
    assert stepper.batches == []


def test_no_sentences_give_no_hypotheses() -> None:
    assert beam_search(ScriptedStepper([]), BeamSettings()) == []


def test_a_beam_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match=r"^beam size 8 is larger than the vocabulary of 5$"):
        beam_search(ScriptedStepper([random_rule(0, vocab_size=5)]), BeamSettings(beam_size=8))


def test_a_beam_as_large_as_the_vocabulary_works() -> None:
    assert len(search(STORY, limit=3, beam_size=3, stopping="beam")) == 3
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
    assert search(lambda prefix: [NEVER] * 3, beam_size=2) == [Hypothesis((), (), 0.0, "length")]
