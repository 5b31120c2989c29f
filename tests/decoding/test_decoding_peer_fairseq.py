"""The assertions of fairseq's `tests/test_sequence_generator.py` (commit 3d262bb), over tformer's search.

The probabilities are those of its scripted decoders, by prefix instead of by row of the beam. 71 of the 84 assertions
are restated: not the eight on diverse beam search, the one on a TorchScript copy of the n-gram blocker, nor the four on
an encoder that halves its input. 67 of the 71 hold; the other 4 are scores of diverse siblings search (arXiv
1611.08562). tformer has neither diverse search.

fairseq's `max_len_b` does not count the end of sequence: it is `max_new_tokens` - 1, with `at_limit` end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.decoding.beam_reference import Rule, ScriptedStepper, slow_repeated_ngrams, table
from tests.decoding.conftest import ScriptedModel
from tests.decoding.peers import Claim, tally
from tformer.decoding.beam_search import beam_search
from tformer.decoding.generate import generate
from tformer.decoding.sampling import block_repeated_ngrams, pad_left, repeated_ngrams
from tformer.decoding.settings import BeamSettings, GenerationSettings

EOS, W1, W2 = 0, 2, 3  # 1: the unknown token, which is never probable
NEVER = float("-inf")
ENDS = (1.0, 0.0, 0.0, 0.0)
SENTENCES = [
    table(
        {
            (): (0.0, 0.0, 0.9, 0.1),
            (W1,): (1.0, 0.0, 0.0, 0.0),
            (W2,): (0.0, 0.0, 0.9, 0.1),
            (W2, W1): (0.0, 0.0, 0.1, 0.9),
            (W2, W2): (0.6, 0.0, 0.2, 0.2),
        },
        otherwise=ENDS,
    ),
    table(
        {
            (): (0.0, 0.0, 0.7, 0.3),
            (W1,): (0.25, 0.0, 0.35, 0.4),
            (W2,): (0.0, 0.0, 0.1, 0.9),
            (W1, W2): (0.6, 0.0, 0.4, 0.0),
            (W2, W2): (0.01, 0.0, 0.0, 0.99),
            (W2, W2, W2): (0.1, 0.0, 0.5, 0.4),
        },
        otherwise=ENDS,
    ),
]


def by_step(*steps: tuple[float, ...]) -> Rule:
    """The same probabilities after every prefix of a length."""
    return lambda prefix: [math.log(p) if p else NEVER for p in (*steps, ENDS)[min(len(prefix), len(steps))]]


DIVERSE = [
    by_step((0.0, 0.0, 0.9, 0.1), (0.0, 0.0, 0.6, 0.4), (1.0, 0.0, 0.0, 0.0)),
    by_step((0.0, 0.0, 0.7, 0.3), (0.25, 0.0, 0.35, 0.4), (0.9, 0.0, 0.1, 0.0)),
]
TOP_P = by_step((0.0, 0.0, 1.0, 0.0), (0.25, 0.0, 0.4, 0.35))


def search(rules: list[Rule], **options: Any) -> list[list[tuple[tuple[int, ...], list[float], float]]]:
    """(ids, log-probabilities, score) of the first two hypotheses of each sentence."""
    settings = BeamSettings(**{"beam_size": 2, "max_new_tokens": 200, "eos_id": EOS, "stopping": "beam"} | options)
    found = beam_search(ScriptedStepper(rules), settings)
    return [[(one.ids, list(one.logprobs), one.score) for one in hypotheses[:2]] for hypotheses in found]


def hypotheses(
    test: str, found: Callable[[], Any], expected: list[tuple[tuple[int, ...], list[float]]], *, alpha: float = 1.0
) -> list[Claim]:
    """The claims on the tokens and on the scores of hypotheses 0 and 1 of sentences 0 and 1."""
    claims = []
    for place, (ids, probabilities) in enumerate(expected):
        sentence, rank = divmod(place, 2)
        logs = [math.log(p) for p in probabilities]
        name = f"{test}, sentence {sentence + 1}, hypothesis {rank + 1}"
        claims += [
            Claim(f"{name}: ids", partial(_part, found, sentence, rank, slice(1)), (ids,)),
            Claim(
                f"{name}: scores",
                partial(_part, found, sentence, rank, slice(1, 3)),
                (logs, sum(logs) / len(logs) ** alpha),
            ),
        ]
    return claims


def _part(found: Callable[[], Any], sentence: int, rank: int, part: slice) -> Any:
    return found()[sentence][rank][part]


def samples(p: float, *, seed: int = 0) -> list[list[tuple[tuple[int, ...], list[float], float]]]:
    """Two samples of two sentences. fairseq's score is the mean of the log-probabilities."""
    settings = GenerationSettings(
        max_new_tokens=9, top_p=p, num_samples=2, eos_id=EOS, logprobs=True, seed=seed, temperature=1.0
    )
    model = ScriptedModel(lambda seen: TOP_P(tuple(seen[1:])))
    found = generate(model, [[W1], [W1]], settings, num_start=1)
    return [[(one.ids, list(one.logprobs), float(np.mean(one.logprobs))) for one in ones] for ones in found]


SHORT, LONG = ((W1, EOS), [0.9, 1.0]), ((W2, W1, W2, EOS), [0.1, 0.9, 0.9, 1.0])
THREE, FOUR = ((W1, W2, EOS), [0.7, 0.4, 0.6]), ((W1, W2, W1, EOS), [0.7, 0.4, 0.4, 1.0])
LIMITED = {"max_new_tokens": 3, "at_limit": "end"}
LIMITED_S1, LIMITED_S2 = ((W2, W2, EOS), [0.1, 0.1, 0.6]), ((W2, W2, EOS), [0.3, 0.9, 0.01])
NO_SIBLINGS = "tformer has no penalty on the siblings of a hypothesis: the score is the mean of its log-probabilities"


def siblings() -> list[Claim]:
    """fairseq subtracts 0.5 for each better continuation of the same hypothesis and for the best one itself."""
    expected = [
        ((W1, W1, EOS), [0.9, 0.6, 1.0], [0, 1, 1]),
        ((W1, W2, EOS), [0.9, 0.4, 1.0], [0, 2, 1]),
        ((W1, W2, EOS), [0.7, 0.4, 0.9], [0, 1, 1]),
        ((W1, W1, EOS), [0.7, 0.35, 0.9], [0, 2, 1]),
    ]
    claims = hypotheses("diverse siblings search", partial(search, DIVERSE), [(ids, own) for ids, own, _ in expected])
    for place, (_, own, ranks) in enumerate(expected):
        mine = claims[2 * place + 1]
        theirs = [math.log(p) - 0.5 * rank for p, rank in zip(own, ranks, strict=True)]
        claims[2 * place + 1] = Claim(mine.test, mine.found, (theirs, sum(theirs) / 3), mine.theirs, NO_SIBLINGS)
    return claims


REPEATING = [[2, 2, 2, 2], [3, 3, 3, 3]]
BLOCKED = [[0.0, 0.0, NEVER, 0.0], [0.0, 0.0, 0.0, NEVER]]


def blocked() -> list[list[float]]:
    return block_repeated_ngrams(torch.zeros(2, 4), pad_left(REPEATING), 2, exempt=()).tolist()


def slowly_blocked() -> list[list[float]]:
    banned = [slow_repeated_ngrams(row, 2) for row in REPEATING]
    return [[NEVER if token in tokens else 0.0 for token in range(4)] for tokens in banned]


def both_block_the_same(seed: int) -> bool:
    """Two implementations, random tokens: each sequence, n-gram and number of rows."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, 4, size=(int(random.integers(1, 8)) * int(random.choice([1, 2, 4, 8])), 7))
    n = int(random.choice([1, 2, 3, 4]))
    return repeated_ngrams(rows, n) == [slow_repeated_ngrams(row.tolist(), n) for row in rows]


def high_probability() -> list[Claim]:
    """Each of two tokens may be sampled, with its own probability."""
    claims = []
    for sentence, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        name = f"top-p of two tokens, sentence {sentence + 1}, sample {rank + 1}"

        def is_one_of_two(part: slice, sentence: int = sentence, rank: int = rank) -> set[Any]:
            found = [samples(0.575, seed=seed)[sentence][rank] for seed in range(20)]
            return {str(np.round(one[1], 4)) if part == slice(1, 3) else one[0] for one in found}

        scores = {str(np.round(np.log([1.0, p, 1.0]), 4)) for p in (0.4, 0.35)}
        claims += [
            Claim(f"{name}: ids", partial(is_one_of_two, slice(1)), {(W1, W1, EOS), (W1, W2, EOS)}),
            Claim(f"{name}: scores", partial(is_one_of_two, slice(1, 3)), scores),
        ]
    return claims


CLAIMS = [
    *hypotheses("with normalization", partial(search, SENTENCES), [SHORT, LONG, FOUR, THREE]),
    *hypotheses(
        "without normalization",
        partial(search, SENTENCES, length_penalty_type="none"),
        [SHORT, LONG, THREE, FOUR],
        alpha=0.0,
    ),
    *hypotheses(
        "lenpen favoring short hypos",
        partial(search, SENTENCES, length_penalty=0.6),
        [SHORT, LONG, THREE, FOUR],
        alpha=0.6,
    ),
    *hypotheses(
        "lenpen favoring long hypos",
        partial(search, SENTENCES, length_penalty=5.0),
        [LONG, SHORT, FOUR, THREE],
        alpha=5.0,
    ),
    *hypotheses("maxlen", partial(search, SENTENCES, **LIMITED), [SHORT, LIMITED_S1, THREE, LIMITED_S2]),
    *hypotheses("generation with additional input", partial(search, SENTENCES), [SHORT]),
    *siblings(),
    *hypotheses("top-p of one token", partial(samples, 0.2), [((W1, W1, EOS), [1.0, 0.4, 1.0])] * 4),
    *high_probability(),
    Claim("finds repetitive tokens: extension", blocked, BLOCKED),
    Claim("finds repetitive tokens: baseline", slowly_blocked, BLOCKED),
    Claim("finds repetitive tokens: both are equal", lambda: blocked() == slowly_blocked(), True),
    Claim("ngram blocking same as default: first draw", partial(both_block_the_same, 1), True),
    Claim("ngram blocking same as default: second draw", partial(both_block_the_same, 2), True),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_an_assertion_of_fairseq_holds_or_differs_by_a_definition(claim: Claim) -> None:
    claim.check()


def test_of_71_assertions_of_fairseq_67_hold() -> None:
    assert tally(CLAIMS) == (67, 71)
