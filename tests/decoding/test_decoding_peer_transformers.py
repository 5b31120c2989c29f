"""The assertions of `tests/generation/test_logits_process.py` of `transformers` (commit 019af3a), over tformer's rules.

Restated are those on rules that tformer has: minimum length, temperature, repetition penalty (on logits for sampling,
on log-probabilities for beam search: `normalize=True`), top-k, top-p, min-p, n-gram blocking, forced end,
normalization, numbers that are not finite, several rules in a row. 55 of 59 hold, 4 differ by a definition.

Not restated: a penalty or n-gram blocking that looks at the source or leaves out the prompt, forced beginnings (tformer
puts them into the prefix), sequences of bad words or with a bias, allowed prefixes, typical, epsilon, eta and top-h
sampling, exponential length decay, guidance, watermarks, audio: tformer has none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.decoding.peers import Claim, tally
from tformer.decoding.sampling import (
    TokenChooser,
    block_repeated_ngrams,
    chosen_logprobs,
    force_token,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    pad_left,
    penalize_repetition,
    reshape,
)
from tformer.decoding.settings import GenerationSettings
from tformer.support.errors import TformerError

NEVER = float("-inf")
AT_LEAST_ONE = "top-p and min-p always keep at least one token: there is no other number to set"
EXACTLY_K = "top-k keeps exactly k tokens, also where further ones are as probable as the last of them"


def uniform(rows: int, size: int) -> Tensor:
    return torch.ones(rows, size) / size


def leaves(rule: Callable[[Tensor], Tensor], logits: Tensor) -> bool:
    """Whether a rule leaves the logits that it is given as they are, and gives other ones."""
    before = logits.clone()
    return not torch.equal(rule(logits), logits) and torch.equal(logits, before)


def is_never(logits: Tensor) -> list[list[bool]]:
    return (logits == NEVER).tolist()


def kept(logits: Tensor) -> list[int]:
    return logits.isfinite().sum(-1).tolist()


# --- minimum length ---------------------------------------------------------------------------------------------------


def ends_are_ruled_out(least: int, written: int, ends: Sequence[int] = (0,)) -> bool:
    """Whether the minimum length removes the ends from 4 rows with `written` new tokens whose logits favour an end."""
    found = set()
    for end in ends:
        settings = GenerationSettings(
            max_new_tokens=50, min_new_tokens=least, eos_id=ends[0], stop_tokens=tuple(ends[1:]), temperature=0.0
        )
        chooser = TokenChooser(settings, keys=[(row, 0) for row in range(4)], histories=[()] * 4, limits=[50] * 4)
        logits = uniform(4, 20)
        for _ in range(written):
            chooser.choose(logits)
        logits[:, end] = 50.0
        found.add(all(token not in ends for token in chooser.choose(logits)[0]))
    [answer] = found
    return answer


LENGTH = [
    # A minimum length of 10 with a prompt of 5 are 5 new tokens.
    Claim("min length: end ruled out at 5", partial(ends_are_ruled_out, 10 - 5, 0), True),
    Claim("min length: end allowed at 15", partial(ends_are_ruled_out, 10 - 5, 10), False),
    *(
        Claim(f"min new tokens, {len(ends)} ends: at {5 + new}", partial(ends_are_ruled_out, 3, new, ends), new < 3)
        for ends in ((0,), (0, 18))
        for new in (0, 1, 2, 3, 10)
    ),
]

# --- temperature ------------------------------------------------------------------------------------------------------

PEAK = uniform(2, 20)
PEAK[1, 5], PEAK[1, 10] = 1 / 20 + 0.1, 1 / 20 - 0.4


def at(temperature: float) -> Tensor:
    return reshape(PEAK, temperature=temperature).softmax(-1)


TEMPERATURE = [
    Claim("temperature: uniform stays, sharper", lambda: at(0.5)[0].tolist(), [1 / 20] * 20),
    Claim("temperature: uniform stays, smoother", lambda: at(1.3)[0].tolist(), [1 / 20] * 20),
    Claim("temperature: sharper raises the peak", lambda: bool(at(0.5)[1].max() > at(1.0)[1].max()), True),
    Claim("temperature: sharper lowers the valley", lambda: bool(at(0.5)[1].min() < at(1.0)[1].min()), True),
    Claim("temperature: smoother lowers the peak", lambda: bool(at(1.3)[1].max() < at(1.0)[1].max()), True),
    Claim("temperature: smoother raises the valley", lambda: bool(at(1.3)[1].min() > at(1.0)[1].min()), True),
    Claim("temperature: not in place", lambda: leaves(partial(reshape, temperature=1.3), PEAK), True),
]

# --- repetition -------------------------------------------------------------------------------------------------------

SEEN = pad_left([[0, 1], [5, 0]])
TENTHS = uniform(2, 10)
TENTHS[0, 0], TENTHS[1, 5] = -1 / 10, 4 / 10
LOGS, REWARDED = TENTHS.log_softmax(-1), torch.cat((torch.tensor([[0.5]]), uniform(1, 10)[:, 1:]), 1).log_softmax(-1)


def penalized(row: int, token: int, logits: Tensor = TENTHS, penalty: float = 2.0) -> Callable[[], float]:
    return lambda: float(penalize_repetition(logits, SEEN[: len(logits)], penalty, exempt=())[row, token])


def penalize(logits: Tensor) -> Tensor:
    return penalize_repetition(logits, SEEN, 2.0, exempt=())


REPETITION = [
    Claim("repetition penalty: negative", penalized(0, 0), -2 / 10),
    Claim("repetition penalty: positive", penalized(0, 1), 1 / 20),
    Claim("repetition penalty: positive of row 2", penalized(1, 0), 1 / 20),
    Claim("repetition penalty: peak", penalized(1, 5), 4 / 20),
    Claim("repetition penalty: not in place", lambda: leaves(penalize, TENTHS), True),
    *(
        Claim(f"normalized penalty: row {row}, token {token}", penalized(row, token, LOGS), 2 * float(LOGS[row, token]))
        for row, token in ((0, 0), (0, 1), (1, 5))
    ),
    Claim("normalized penalty: unseen", penalized(0, 2, LOGS), float(LOGS[0, 2])),
    Claim("normalized penalty: not in place", lambda: leaves(penalize, LOGS), True),
    *(
        Claim(f"normalized reward: token {token}", penalized(0, token, REWARDED, 0.5), float(REWARDED[0, token]) / 2)
        for token in (0, 1)
    ),
    Claim("normalized reward: raises", lambda: penalized(0, 0, REWARDED, 0.5)() > float(REWARDED[0, 0]), True),
]

# --- truncation -------------------------------------------------------------------------------------------------------

RAMP = torch.arange(10.0).repeat(2, 1)
SHIFTED = torch.stack((RAMP[0], torch.where(RAMP[0] < 5, RAMP[0] + 10, RAMP[0])))
STEEP = torch.stack((RAMP[0] - 5, (RAMP[0] - 5) * 100))
FOUR = torch.tensor([[0.3, 0.1, 0.1, 0.5], [0.15, 0.3, 0.3, 0.25]]).log()
PEAKED = torch.tensor([[0.9, 0.0274, 0.047, 0.0274], [0.15, 0.3, 0.3, 0.25], [0.97, 0.01, 0.01, 0.01]]).log()
TRUNCATION = [
    Claim("top-k: row 1", lambda: is_never(keep_top_k(SHIFTED, 3))[0], [True] * 7 + [False] * 3),
    Claim("top-k: row 2", lambda: is_never(keep_top_k(SHIFTED, 3))[1], [True] * 2 + [False] * 3 + [True] * 5),
    Claim("top-k: not in place", lambda: leaves(partial(keep_top_k, k=3), SHIFTED), True),
    Claim("top-k: 3 of 5 equal ones", lambda: kept(keep_top_k(uniform(2, 5), 3)), [5, 5], [3, 3], EXACTLY_K),
    Claim("top-k: 3 of a ramp", lambda: kept(keep_top_k(RAMP[:, :5], 3)), [3, 3]),
    Claim(
        "top-p: 0.8 of 0.5 and 0.3",
        lambda: keep_top_p(FOUR, 0.8).exp().tolist(),
        [[0.3, 0.0, 0.0, 0.5], [0.0, 0.3, 0.3, 0.25]],
    ),
    Claim("top-p: not in place", lambda: leaves(partial(keep_top_p, p=0.8), FOUR), True),
    Claim("top-p: extreme logits", lambda: kept(keep_top_p(STEEP, 0.9)), [3, 2], [3, 1], AT_LEAST_ONE),
    Claim(
        "min-p: 0.05",
        lambda: keep_min_p(PEAKED, 0.05).exp().tolist(),
        [[0.9, 0.0, 0.047, 0.0], [0.15, 0.3, 0.3, 0.25], [0.97, 0.0, 0.0, 0.0]],
    ),
    Claim("min-p: not in place", lambda: leaves(partial(keep_min_p, min_p=0.05), PEAKED), True),
    Claim("min-p: extreme logits", lambda: kept(keep_min_p(STEEP, 0.9)), [2, 2], [1, 1], AT_LEAST_ONE),
]

# --- n-grams, forced end, normalization -------------------------------------------------------------------------------

WRITTEN = [[1, 1, 2, 1], [0, 1, 0, 1]]


def without_ngrams(rows: list[list[int]], n: int, size: int = 3) -> Tensor:
    return block_repeated_ngrams(uniform(len(rows), size), pad_left(rows), n, exempt=())


def block(logits: Tensor, n: int) -> Tensor:
    return block_repeated_ngrams(logits, pad_left(WRITTEN), n, exempt=())


def forced(at_limit: bool) -> Tensor:
    return force_token(uniform(4, 20), torch.tensor([at_limit] * 4), 0, counts=False)


def force(logits: Tensor) -> Tensor:
    return force_token(logits, torch.tensor([True] * 4), 0, counts=False)


def refuses_what_is_no_number() -> str:
    """transformers writes 0, the largest and the smallest number in the place of NaN, inf and -inf."""
    settings = GenerationSettings(temperature=0.0)
    chooser = TokenChooser(settings, keys=[(0, 0)] * 2, histories=[()] * 2, limits=[9] * 2)
    with pytest.raises(TformerError) as refusal:
        chooser.choose(torch.tensor([[0.0, 0.7, 0.8, float("nan")], [0.1, float("inf"), 0.3, NEVER]]))
    return str(refusal.value)


LARGE = torch.tensor([[-23.18, -29.96, -43.54, 47.77], [-33.58, -26.87, -32.96, 22.51]])


def normalized(logits: Tensor) -> Tensor:
    """Log-probabilities as the results hold them, of every token."""
    every = [chosen_logprobs(logits, torch.full((len(logits),), token)) for token in range(logits.shape[1])]
    return torch.stack(every, -1)


def one_by_one(logits: Tensor) -> list[list[float]]:
    return keep_min_p(keep_top_p(keep_top_k(logits / 0.5, 3), 0.8), 0.1).softmax(-1).tolist()


def in_a_row(logits: Tensor) -> list[list[float]]:
    return reshape(logits, temperature=0.5, top_k=3, top_p=0.8, min_p=0.1).softmax(-1).tolist()


RULES = [
    Claim("n-grams of 2", lambda: is_never(without_ngrams(WRITTEN, 2)), [[False, True, True], [True, False, False]]),
    Claim("n-grams of 3", lambda: is_never(without_ngrams(WRITTEN, 3)), [[False] * 3, [True, False, False]]),
    Claim("n-grams of 2: not in place", lambda: leaves(partial(block, n=2), uniform(2, 3)), True),
    Claim("n-grams of 3: not in place", lambda: leaves(partial(block, n=3), uniform(2, 3)), True),
    Claim(
        "n-grams: a banned token reappears",
        lambda: without_ngrams([[1, 2, 5, 7, 8, 5, 1, 2]], 3, 10).isinf().nonzero()[:, 1].tolist(),
        [5],
    ),
    Claim("n-grams: too few tokens", lambda: is_never(without_ngrams([[1, 2], [0, 1]], 3)), [[False] * 3] * 2),
    Claim("forced end: others are ruled out", lambda: bool((forced(True)[:, 1:] == NEVER).all()), True),
    Claim("forced end: certain", lambda: forced(True)[:, 0].tolist(), [0.0] * 4),
    Claim("forced end: not in place", lambda: leaves(force, uniform(4, 20)), True),
    Claim("forced end: not before the limit", lambda: bool(forced(False).isinf().any()), False),
    Claim(
        "not a number",
        refuses_what_is_no_number,
        [[0.0, 0.7, 0.8, 0.0], [0.1, torch.finfo(torch.float32).max, 0.3, torch.finfo(torch.float32).min]],
        "the model's logits are not numbers (NaN)",
        "a model whose logits are not numbers is an error",
    ),
    Claim("normalization: sums", lambda: normalized(LARGE).exp().sum(-1).tolist(), [1.0, 1.0]),
    Claim("normalization: softmax", lambda: normalized(LARGE).exp().tolist(), LARGE.softmax(-1).tolist()),
    Claim("normalization: not in place", lambda: leaves(normalized, LARGE), True),
    Claim("several rules: as one by one", lambda: in_a_row(SHIFTED), one_by_one(SHIFTED)),
    Claim("several rules: not in place", lambda: leaves(partial(reshape, temperature=0.5, top_k=3), SHIFTED), True),
]
CLAIMS = [*LENGTH, *TEMPERATURE, *REPETITION, *TRUNCATION, *RULES]


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_an_assertion_of_transformers_holds_or_differs_by_a_definition(claim: Claim) -> None:
    claim.check()


def test_of_59_assertions_of_transformers_55_hold() -> None:
    assert tally(CLAIMS) == (55, 59)
