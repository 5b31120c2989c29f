"""Beam search: settings, candidates, rules on repeated tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.decoding.beam_reference import slow_repeated_ngrams
from tformer.decoding.beam_candidates import CHUNK, top_candidates
from tformer.decoding.beam_search import FinishedHypotheses
from tformer.decoding.sampling import NO_TOKEN, block_repeated_ngrams, pad_left, penalize_repetition, repeated_ngrams
from tformer.decoding.settings import BeamSettings, Hypothesis, length_penalty
from tformer.recipe.sections import Generation
from tformer.support.errors import InputError

SEARCH = Generation(beam_size=4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_best": 5}, "--n-best 5 is larger than generation.beam_size 4"),
        ({"max_new_tokens": 9, "min_new_tokens": 10}, "--min-new-tokens 10 is larger than --max-new-tokens 9"),
        ({"min_new_tokens": 300}, "--min-new-tokens 300 is larger than generation.max_new_tokens 200"),
        ({"beam_size": 0}, "beam_size must be at least 1, found 0"),
    ],
)
def test_what_was_asked_for_and_contradicts_is_an_error(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        BeamSettings.from_recipe(SEARCH, eos_id=3, **overrides)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Generation(min_new_tokens=300), "generation.min_new_tokens 300 is larger than generation.max_new_tokens 200"),
        (Generation(length_penalty=11), "generation.length_penalty must be between -10 and 10"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_told_by_its_keys(recipe: Generation, message: str) -> None:
    with pytest.raises(InputError) as caught:
        BeamSettings.from_recipe(recipe, eos_id=3)
    assert caught.value.message.startswith(message) and "--" not in f"{caught.value.message}{caught.value.hint}"


NEVER = float("-inf")
histories = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_best": 5}, "--n-best 5 is larger than --beam-size 4"),
        ({"beam_size": 0}, "beam_size must be at least 1, found 0"),
        ({"n_best": 0}, "n_best must be at least 1, found 0"),
        ({"beam_size": 10**11}, "beam_size must be at most 65,536, found 100000000000"),
        ({"max_new_tokens": 10**12}, "max_new_tokens must be at most 1,073,741,824, found 1000000000000"),
        ({"length_penalty_type": "wu"}, "length_penalty_type must be gnmt, avg or none, found wu"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number, found nan"),
        ({"stopping": "never"}, "stopping must be beam, heuristic or exhaustive, found never"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, found 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "--min-new-tokens 9 is larger than --max-new-tokens 8"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be above 0 \(1 is off\) and finite, found 0.0"),
        ({"no_repeat_ngram": -1}, r"no_repeat_ngram must be at least 0 \(0 is off\), found -1"),
    ],
)
def test_settings_say_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        BeamSettings(**wrong)


def test_settings_come_from_the_recipe_and_overrides() -> None:
    recipe = Generation(beam_size=6, length_penalty=0.6, stopping="exhaustive")
    made = BeamSettings.from_recipe(recipe, eos_id=7, n_best=2, length_penalty_type="gnmt", max_new_tokens=None)
    assert made == BeamSettings(
        beam_size=6,
        length_penalty=0.6,
        stopping="exhaustive",
        eos_id=7,
        n_best=2,
        length_penalty_type="gnmt",
    )


def test_length_penalties_are_the_published_formulas() -> None:
    assert length_penalty(4, alpha=0.6, kind="gnmt") == pytest.approx((9 / 6) ** 0.6)
    assert length_penalty(4, alpha=0.5, kind="avg") == 2.0
    assert length_penalty(4, alpha=0.5, kind="none") == 1.0
    assert length_penalty(0, alpha=-1.0, kind="avg") == 1.0


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 2, 7, CHUNK, 3 * CHUNK, 9 * CHUNK + 1, 20 * CHUNK, 30 * CHUNK + 63]),
    k=st.integers(1, 9),
    levels=st.sampled_from([2, 20, 10**6]),
)
def test_the_best_candidates_are_the_first_of_a_stable_sort(seed: int, vocab_size: int, k: int, levels: int) -> None:
    """With ties, -inf and both zeros, in vocabularies that are cut into chunks or not."""
    k = min(k, vocab_size)
    rng = np.random.default_rng(seed)
    values = -rng.integers(0, levels, (3, vocab_size)).astype(np.float32) * rng.choice([1.0, -1e-3]).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = NEVER
    values[0] = NEVER
    rows = torch.from_numpy(values)
    expected_values, expected_ids = rows.sort(dim=-1, descending=True, stable=True)
    found_values, found_ids = top_candidates(rows, k)
    assert torch.equal(found_values, expected_values[:, :k])
    assert torch.equal(found_ids, expected_ids[:, :k])


@pytest.mark.parametrize("vocab_size", [5, 2000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_is_none_is_among_the_best_candidates(vocab_size: int, sign: int) -> None:
    rows = torch.zeros(2, vocab_size)
    rows[1, vocab_size - 1] = torch.tensor(float("nan")).copysign(torch.tensor(float(sign)))
    assert top_candidates(rows, 2)[0].isnan().tolist() == [[False, False], [True, False]]


@given(rows=histories, n=st.integers(1, 4))
def test_repeated_ngrams_are_found(rows: list[list[int]], n: int) -> None:
    assert repeated_ngrams(pad_left(rows), n) == [slow_repeated_ngrams(row, n) for row in rows]


@given(rows=histories)
def test_repeated_tokens_are_penalized_once_each(rows: list[list[int]]) -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -4.0]]).repeat(len(rows), 1)
    expected = [
        [value * (1.5 if token in row else 1.0) for token, value in enumerate([-1.0, -2.0, -3.0, -4.0])] for row in rows
    ]
    assert penalize_repetition(logprobs, pad_left(rows), 1.5, exempt=()).tolist() == expected


def test_what_is_looked_at_stays_as_it_was() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, NEVER]])
    before = logprobs.clone()
    penalized = penalize_repetition(logprobs, pad_left([[1, 1], [1]]), 2.0, exempt=())
    assert penalized.tolist() == [[-1.0, -4.0], [-3.0, NEVER]]
    blocked = block_repeated_ngrams(logprobs, pad_left([[1, 0], [1]]), 1, exempt=())
    assert blocked.tolist() == [[-1.0, -2.0], [-3.0, NEVER]]  # row 0: nothing would be left
    assert torch.equal(logprobs, before)


def test_padding_stands_on_the_left() -> None:
    assert pad_left([[1, 2], [], [3]]).tolist() == [[1, 2], [NO_TOKEN] * 2, [NO_TOKEN, 3]]
    assert pad_left([(), ()]).shape == (2, 0)


def test_the_finished_are_ranked_by_score_then_by_when_they_finished() -> None:
    finished = FinishedHypotheses(BeamSettings(beam_size=2, length_penalty=1.0), num_sentences=2)

    def add(ids: tuple[int, ...], total: float, reason: Any = "eos") -> None:
        finished.add(1, ids=ids, logprobs=(total - 1.0,), total=total, reason=reason)

    add((5, 1), -4.0)
    assert finished.worst_kept[1] == NEVER
    add((4, 4, 1), -6.0)
    assert (finished.worst_kept[1], finished.counts.tolist()) == (-2.0, [0, 2])
    add((6,), -0.5, "interrupted")
    add((7, 7, 7, 1), -4.0)
    assert finished.worst_kept[1] == -1.0
    first, second = finished.ranked()
    assert first == []
    assert [hypothesis.ids for hypothesis in second] == [(7, 7, 7, 1), (5, 1), (4, 4, 1), (6,)]
    assert second[0] == Hypothesis((7, 7, 7, 1), logprobs=(-5.0,), score=-1.0, finish_reason="eos")
