"""The pure functions that turn logits into a token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.decoding.sampling import (
    NgramBlocker,
    UniformStream,
    block_tokens,
    chosen_logprobs,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
    reshape,
)

NEVER = float("-inf")
CHI_SQUARE_999 = {3: 16.27, 7: 24.32, 9: 27.88}  # 99.9 % quantiles


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().squeeze(1).tolist() for row in logits]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits = torch.tensor([[2.0, -2.0, 4.0, -4.0], [2.0, -2.0, 4.0, -4.0]])
    seen = torch.tensor([[True, True, False, False], [False, False, True, True]])
    assert penalise_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 4.0, -4.0], [2.0, -2.0, 2.0, -8.0]]
    assert torch.equal(penalise_repetition(logits, seen, 1.0), logits)


def test_blocked_tokens_are_never_chosen_and_other_rows_stay():
    logits = torch.zeros(3, 4)
    blocked = block_tokens(logits, [[1, 3], [], [0]])
    assert kept(blocked) == [[0, 2], [0, 1, 2, 3], [1, 2, 3]]


def test_a_row_with_every_token_blocked_is_left_as_it_was():
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert block_tokens(logits, [[0, 1], [1]]).tolist() == [[1.0, 2.0], [1.0, NEVER]]


def test_top_k_keeps_exactly_k_even_with_ties():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert kept(keep_top_k(logits, 2))[0] == [1, 3]
    assert len(kept(keep_top_k(logits, 2))[1]) == 2
    assert torch.equal(keep_top_k(logits, 4), logits)
    assert torch.equal(keep_top_k(logits, 99), logits)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept(keep_top_p(logits, 0.4)) == [[0]]
    assert kept(keep_top_p(logits, 0.6)) == [[0, 1]]
    assert kept(keep_top_p(logits, 0.85)) == [[0, 1, 2]]
    assert kept(keep_top_p(logits, 0.99)) == [[0, 1, 2, 3]]


def test_top_p_is_unsorted_back_to_the_right_tokens():
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3], [0.3, 0.15, 0.5, 0.05]]).log()
    assert kept(keep_top_p(logits, 0.6)) == [[1, 3], [0, 2]]


def test_min_p_keeps_tokens_near_the_most_probable():
    logits = torch.tensor([[0.5, 0.26, 0.2, 0.04]]).log()
    assert kept(keep_min_p(logits, 0.5)) == [[0, 1]]
    assert kept(keep_min_p(logits, 0.05)) == [[0, 1, 2, 3]]


def test_a_tiny_temperature_neither_overflows_nor_changes_the_best_token():
    logits = torch.tensor([[80.0, 79.0, -300.0]])
    cold = reshape(logits, temperature=1e-38)
    assert not cold.isnan().any()
    assert draw(cold, torch.tensor([0.999])).tolist() == [0]


@given(
    logits=st.lists(st.integers(-30, 30), min_size=2, max_size=12),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.99),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=80, deadline=None)
def test_every_setting_leaves_the_best_token_and_draws_only_what_is_left(
    logits, temperature, top_k, top_p, min_p, uniform
):
    row = torch.tensor([logits], dtype=torch.float32)
    shaped = reshape(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert row[0, shaped.argmax()] == row.max()
    assert shaped.max() > NEVER
    chosen = int(draw(shaped, torch.tensor([uniform], dtype=torch.float64)))
    assert shaped[0, chosen] > NEVER


def test_draw_never_gives_a_token_of_probability_zero():
    logits = torch.tensor([[NEVER, 0.0, NEVER, 0.0, NEVER]] * 3)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniforms).tolist() == [1, 3, 3]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.randn(1, 8)
    streams = [UniformStream(3, row, 0) for row in range(200)]
    draws = [
        draw(
            reshape(logits.expand(200, 8), temperature=temperature),
            torch.tensor([stream.next() for stream in streams], dtype=torch.float64),
        )
        for _ in range(100)
    ]
    counts = torch.bincount(torch.cat(draws), minlength=8).double()
    assert chi_square(counts, (logits[0] / temperature).double().softmax(-1)) < CHI_SQUARE_999[7]


def test_rare_tokens_of_a_large_vocabulary_keep_their_share():
    logits = torch.zeros(1, 50_000)
    logits[0, 0] = math.log(50_000)  # half of the mass
    # Drawing at u and counting the smallest u that gives a token past k measures the CDF itself.
    for token in (1, 777, 49_999):
        boundary = 0.5 + 0.5 * (token - 1) / 49_999
        below, above = draw(logits.expand(2, -1), torch.tensor([boundary, boundary + 1.6e-5], dtype=torch.float64))
        assert int(below) in (token - 1, token)
        assert int(above) >= token


def test_logprobs_are_those_of_the_softmax():
    logits = torch.randn(3, 7)
    ids = torch.tensor([0, 3, 6])
    assert torch.allclose(chosen_logprobs(logits, ids), logits.log_softmax(-1)[range(3), ids])


def test_a_stream_depends_on_seed_row_and_sample():
    def first(*key: int) -> list[float]:
        stream = UniformStream(*key)
        return [stream.next() for _ in range(100)]

    assert first(1, 2, 3) == first(1, 2, 3)
    assert len({tuple(first(*key)) for key in ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1))}) == 5
    numbers = torch.tensor([value for row in range(50) for value in first(0, row, 0)])
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert chi_square(counts, torch.full((10,), 0.1)) < CHI_SQUARE_999[9]


@given(history=st.lists(st.integers(0, 3), max_size=30), n=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_ngram_blocker_bans_exactly_the_tokens_that_repeat_an_ngram(history, n):
    ngrams = {tuple(history[start : start + n]) for start in range(len(history) - n + 1)}
    tail = tuple(history[len(history) - n + 1 :]) if n > 1 else ()
    expected = [token for token in range(4) if len(tail) == n - 1 and (*tail, token) in ngrams]
    blocker = NgramBlocker(n, history[: len(history) // 2])
    for token in history[len(history) // 2 :]:
        blocker.push(token)
    assert blocker.banned() == expected
