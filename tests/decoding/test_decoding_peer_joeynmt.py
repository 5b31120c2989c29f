"""The assertions of JoeyNMT's `test/unit/test_search.py` (version 2.3.0, commit cdc4d03), over tformer's search.

`joeynmt_logprobs.json` holds the log-probabilities of the models of those tests: for each sentence of each model, those
of the 8 tokens after every prefix that the searches here reach. 40 of the 49 assertions are restated; the other 9 are
about the attention of JoeyNMT's models. 33 of the 40 hold, 7 differ by a definition.

Their search excludes bos, sep and language tags (beam search pad too), and forces at least one token before the end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.decoding.beam_reference import Rule, ScriptedStepper, slow_beam_search
from tests.decoding.conftest import ScriptedModel
from tests.decoding.peers import Claim, tally
from tformer.decoding.beam_search import beam_search
from tformer.decoding.generate import generate
from tformer.decoding.settings import BeamSettings, Generated, GenerationSettings, Hypothesis

UNK, PAD, EOS = 0, 1, 3
READ_ONLY = (2, 4, 5, 6)  # bos, sep, two language tags
LOGPROBS: dict[str, Any] = json.loads((Path(__file__).parent / "joeynmt_logprobs.json").read_text())
Ids = tuple[int, ...]


def rules(model: str, prompts: Sequence[Ids] | None = None) -> list[Rule]:
    """The rule of each sentence: new tokens -> log-probabilities. `prompts`: the first tokens of each."""
    tables = LOGPROBS[model]
    starts = [()] * len(tables) if prompts is None else prompts
    return [partial(_logprobs, table, start) for table, start in zip(tables, starts, strict=True)]


def _logprobs(table: dict[str, list[float]], start: Ids, new: Ids) -> list[float]:
    return table[" ".join(map(str, (*start, *new)))]


@cache
def greedy(
    model: str, limits: Ids, *, prompts: tuple[Ids, ...] | None = None, excluded: Ids = READ_ONLY, **options: Any
) -> list[Generated]:
    """Greedy decoding of each sentence."""
    all_rules = rules(model, prompts)
    scripted = ScriptedModel(lambda seen: all_rules[seen[0]](tuple(seen[1:])))  # the first id is the sentence's number
    settings = GenerationSettings(
        max_new_tokens=max(limits), min_new_tokens=1, temperature=0.0, eos_id=EOS, logprobs=True, **options
    )
    sentences = [[number] for number in range(len(all_rules))]
    found = generate(scripted, sentences, settings, limits=limits, num_start=1, suppressed=excluded)
    return [one for [one] in found]


BEAMS: dict[str, dict[str, Any]] = {
    "beam1": {"model": "transformer", "limits": (3, 3), "beam_size": 1, "length_penalty": 0.0},
    "beam7": {"model": "transformer", "limits": (3, 3)},
    "beam7_with_prompt": {"model": "transformer with a prompt", "limits": (7, 8), "prompts": ((7, 7, 4), (7, 4))},
    "repetition_penalty": {"model": "transformer", "limits": (3, 3), "repetition_penalty": 1.5},
    "ngram_blocker": {"model": "transformer", "limits": (7, 7), "beam_size": 3, "n_best": 3, "no_repeat_ngram": 3},
    "recurrent_beam1": {"model": "recurrent", "limits": (3, 3), "beam_size": 1, "length_penalty": 0.0},
    "recurrent_beam7": {"model": "recurrent", "limits": (3, 3)},
}


def beam_case(name: str) -> tuple[list[Rule], Ids, BeamSettings]:
    options = {"beam_size": 7, "length_penalty": 1.0, "length_penalty_type": "gnmt"} | BEAMS[name]
    options["n_best"] = options.get("n_best", min(options["beam_size"], 5))
    limits = options.pop("limits")
    of_sentences = rules(options.pop("model"), options.pop("prompts", None))
    more = {"max_new_tokens": max(limits), "min_new_tokens": 1, "eos_id": EOS, "stopping": "exhaustive"}
    return of_sentences, limits, BeamSettings(**options, **more)


@cache
def beams(name: str) -> list[Hypothesis]:
    """The `n_best` hypotheses of each sentence, one after the other."""
    of_sentences, limits, settings = beam_case(name)
    found = beam_search(ScriptedStepper(of_sentences), settings, limits=limits, suppressed=(PAD, *READ_ONLY))
    return [hypothesis for hypotheses in found for hypothesis in hypotheses[: settings.n_best]]


def padded(found: Sequence[Generated] | Sequence[Hypothesis], *, prompts: Sequence[Ids] = ((),)) -> list[Ids]:
    """Ids with their prompt, ended hypotheses filled with pad as JoeyNMT does."""
    each = len(found) // len(prompts)
    rows = [(*prompts[place // each], *one.ids) for place, one in enumerate(found)]
    return [(*row, *[PAD] * (max(map(len, rows)) - len(row))) for row in rows]


def shape(rows: Sequence[Ids]) -> tuple[int, int]:
    assert len({len(row) for row in rows}) == 1
    return len(rows), len(rows[0])


def scores(name: str) -> list[float]:
    return [hypothesis.score for hypothesis in beams(name)]


PROMPTS = BEAMS["beam7_with_prompt"]["prompts"]
FIRST = partial(greedy, "transformer", (3, 3))
PROMPTED = partial(greedy, "transformer with a prompt", (4, 5), prompts=PROMPTS)
WITHOUT_UNK = partial(greedy, "transformer of three", (3, 3, 3), excluded=(UNK, *READ_ONLY))
PENALIZED = partial(WITHOUT_UNK, repetition_penalty=1.5)
MASKED = partial(greedy, "transformer of three, padded", (3, 3, 3), excluded=(UNK, *READ_ONLY), repetition_penalty=1.5)
NGRAMS = partial(greedy, "transformer", (7, 7), no_repeat_ngram=3)
RECURRENT = partial(greedy, "recurrent", (3, 3))


def ids_of(found: Any) -> Any:
    return lambda: padded(found())


def logprobs_of(found: Any) -> Any:
    return lambda: [one.logprobs for one in found()]


def ids_of_beams(name: str) -> Any:
    return lambda: padded(beams(name))


def prompted_logprobs() -> list[list[float]]:
    """JoeyNMT writes 0 for the forced tokens."""
    return [[0.0] * len(prompt) + list(one.logprobs or ()) for prompt, one in zip(PROMPTS, PROMPTED(), strict=True)]


GREEDY_IDS, GREEDY_SCORES = [(0, 0, 0), (0, 0, 7)], [[-0.5425, -0.4908, -0.5439], [-0.8726, -0.9898, -0.9668]]
RECURRENT_IDS, RECURRENT_SCORES = [(0, 0, 0)] * 2, [[-2.7310, -1.1748, -0.8349], [-1.8635, -1.6904, -1.4866]]
PREFIX_IS_FREE = "a target prefix is one for all hypotheses, and the length penalty does not count it"
SOURCE_IS_FREE = "the repetition penalty looks at the target, never at the source"
ALL_BUT_ENDS = "n-gram blocking leaves the ends alone, and no other special token"
CLAIMS = [
    Claim("transformer greedy: shape", lambda: shape(padded(FIRST())), (2, 3)),
    Claim("transformer greedy: ids", ids_of(FIRST), GREEDY_IDS),
    Claim("transformer greedy: shape of scores", lambda: shape([one.logprobs for one in FIRST()]), (2, 3)),
    Claim("transformer greedy: scores", logprobs_of(FIRST), GREEDY_SCORES),
    Claim("greedy with prompt: shape", lambda: shape(padded(PROMPTED(), prompts=PROMPTS)), (2, 7)),
    Claim(
        "greedy with prompt: ids",
        lambda: padded(PROMPTED(), prompts=PROMPTS),
        [(7, 7, 4, 0, 0, 0, 0), (7, 4, 0, 0, 0, 0, 0)],
    ),
    Claim("greedy with prompt: shape of scores", lambda: shape([tuple(row) for row in prompted_logprobs()]), (2, 7)),
    Claim(
        "greedy with prompt: scores",
        prompted_logprobs,
        [
            [0.0000, 0.0000, 0.0000, -0.4631, -0.3289, -0.3042, -0.3404],
            [0.0000, 0.0000, -0.7532, -0.6751, -0.5730, -0.4957, -0.5718],
        ],
    ),
    Claim("transformer beam1: shape", lambda: shape(padded(beams("beam1"))), (2, 3)),
    Claim("transformer beam1: ids", ids_of_beams("beam1"), GREEDY_IDS),
    Claim("transformer beam1: scores", lambda: scores("beam1"), [-1.5772, -2.8292]),
    Claim("transformer beam1: ids are greedy", lambda: padded(beams("beam1")) == padded(FIRST()), True),
    Claim("transformer beam1: greedy scores", logprobs_of(FIRST), GREEDY_SCORES),
    Claim("transformer beam7: shape", lambda: shape(padded(beams("beam7"))), (10, 3)),
    Claim(
        "transformer beam7: ids",
        ids_of_beams("beam7"),
        [
            *[(0, 0, 0), (0, 0, 7), (0, 7, 0), (7, 0, 0), (7, 0, 7)],
            *[(0, 0, 7), (7, 0, 0), (0, 0, 0), (0, 7, 0), (7, 0, 7)],
        ],
    ),
    Claim(
        "transformer beam7: scores",
        lambda: scores("beam7"),
        [-1.1829, -1.6948, -1.7128, -2.0805, -2.9899, -2.1219, -2.1881, -2.1931, -2.3707, -2.4195],
    ),
    Claim("beam7 with prompt: shape", lambda: shape(padded(beams("beam7_with_prompt"), prompts=PROMPTS)), (10, 10)),
    Claim(
        "beam7 with prompt: ids",
        lambda: padded(beams("beam7_with_prompt"), prompts=PROMPTS),
        [
            *[(7, 7, 4, 0, 0, 0, 0, 0, 0, 0), (7, 7, 4, 0, 0, 0, 0, 0, 7, 0), (7, 7, 4, 0, 0, 0, 0, 0, 0, 7)],
            *[(7, 7, 4, 0, 0, 0, 0, 0, 0, 0), (7, 7, 4, 0, 0, 0, 0, 7, 0, 0)],
            *[(7, 4, 0, 0, 0, 0, 0, 0, 0, 0), (7, 4, 0, 0, 0, 0, 0, 0, 0, 7), (7, 4, 0, 0, 0, 0, 0, 0, 7, 7)],
            *[(7, 4, 0, 0, 0, 0, 0, 0, 7, 0), (7, 4, 0, 0, 0, 0, 0, 7, 7, 0)],
        ],
        [
            *[(7, 7, 4, 0, 0, 0, 0, 0, 0, 0), (7, 7, 4, 0, 0, 0, 0, 0, 7, 0), (7, 7, 4, 0, 0, 0, 0, 0, 0, 7)],
            *[(7, 7, 4, 0, 0, 0, 0, 7, 0, 0), (7, 7, 4, 0, 0, 0, 0, 0, 7, 7)],
            *[(7, 4, 0, 0, 0, 0, 0, 0, 0, 0), (7, 4, 0, 0, 0, 0, 0, 0, 0, 7), (7, 4, 0, 0, 0, 0, 0, 0, 7, 7)],
            *[(7, 4, 0, 0, 0, 0, 0, 0, 7, 0), (7, 4, 0, 0, 0, 0, 0, 7, 7, 0)],
        ],
        f"{PREFIX_IS_FREE}: JoeyNMT's beams all begin with it, and two of them stay the same",
    ),
    Claim(
        "beam7 with prompt: scores",
        lambda: scores("beam7_with_prompt"),
        [-1.2273, -1.3972, -1.3999, -1.4480, -1.6088, -2.2729, -2.2850, -2.3435, -2.4353, -2.4680],
        [-1.5342, -1.7465, -1.7499, -2.0110, -2.1938, -2.6226, -2.6365, -2.7041, -2.8100, -2.8477],
        PREFIX_IS_FREE,
    ),
    Claim("no unknown token: ids", ids_of(WITHOUT_UNK), [(1, 1, 1)] * 3),
    Claim("no unknown token: count", lambda: sum(token != UNK for row in padded(WITHOUT_UNK()) for token in row), 9),
    Claim("repetition penalty: ids", ids_of(PENALIZED), [(1, 1, 1), (1, 1, 1), (1, 1, 3)]),
    Claim(
        "repetition penalty on the source: ids",
        ids_of(MASKED),
        [(1, 7, 3), (1, 7, 1), (1, 1, 1)],
        [(1, 1, 3), (1, 1, 1), (1, 1, 3)],
        SOURCE_IS_FREE,
    ),
    Claim(
        "repetition penalty in beam search: ids",
        ids_of_beams("repetition_penalty"),
        [
            *[(0, 0, 0), (0, 7, 0), (0, 0, 7), (7, 0, 0), (7, 0, 7)],
            *[(7, 0, 0), (0, 0, 7), (7, 0, 7), (0, 7, 0), (0, 0, 0)],
        ],
    ),
    Claim(
        "repetition penalty in beam search: scores",
        lambda: scores("repetition_penalty"),
        [-1.5709, -1.8617, -1.8788, -2.2284, -3.5925, -2.4791, -2.4931, -2.8261, -2.8357, -2.9624],
    ),
    Claim(
        "ngram blocker: ids",
        ids_of(NGRAMS),
        [(0, 0, 0, 0, 0, 0, 0), (0, 0, 7, 0, 1, 0, 0)],
        [(0, 0, 0, 7, 0, 0, 1), (0, 0, 7, 0, 1, 0, 0)],
        ALL_BUT_ENDS,
    ),
    Claim(
        "ngram blocker: scores",
        logprobs_of(NGRAMS),
        [
            [-0.5425, -0.4908, -0.5439, -0.7328, -0.6922, -0.6422, -0.6464],
            [-0.8726, -0.9898, -0.9668, -1.3988, -0.6783, -1.0269, -0.6804],
        ],
        [
            [-0.5425, -0.4908, -0.5439, -1.2038, -0.9143, -0.7705, -1.4054],
            [-0.8726, -0.9898, -0.9668, -1.3988, -0.6783, -1.0269, -0.6804],
        ],
        ALL_BUT_ENDS,
    ),
    Claim(
        "ngram blocker in beam search: ids",
        ids_of_beams("ngram_blocker"),
        [
            *[(0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 7), (0, 0, 0, 0, 0, 7, 7)],
            *[(7, 0, 0, 0, 0, 0, 7), (0, 0, 0, 7, 3, 1, 1), (7, 0, 0, 0, 0, 0, 0)],
        ],
        [
            *[(0, 0, 0, 7, 0, 0, 3), (0, 0, 0, 7, 0, 7, 7), (0, 0, 7, 0, 0, 0, 3)],
            *[(0, 0, 0, 7, 3, 1, 1), (7, 0, 0, 0, 7, 3, 1), (0, 0, 0, 7, 0, 3, 1)],
        ],
        ALL_BUT_ENDS,
    ),
    Claim(
        "ngram blocker in beam search: scores",
        lambda: scores("ngram_blocker"),
        [-2.1454, -2.4287, -2.4680, -3.2931, -3.3489, -3.4080],
        [-3.4990, -3.5522, -3.9027, -3.3489, -3.7663, -3.8173],
        ALL_BUT_ENDS,
    ),
    Claim("recurrent greedy: shape", lambda: shape(padded(RECURRENT())), (2, 3)),
    Claim("recurrent greedy: ids", ids_of(RECURRENT), RECURRENT_IDS),
    Claim("recurrent greedy: scores", logprobs_of(RECURRENT), RECURRENT_SCORES),
    Claim("recurrent beam1: shape", lambda: shape(padded(RECURRENT())), (2, 3)),
    Claim("recurrent beam1: greedy ids", ids_of(RECURRENT), RECURRENT_IDS),
    Claim("recurrent beam1: greedy scores", logprobs_of(RECURRENT), RECURRENT_SCORES),
    Claim("recurrent beam1: ids are greedy", lambda: padded(beams("recurrent_beam1")) == padded(RECURRENT()), True),
    Claim("recurrent beam1: scores", lambda: scores("recurrent_beam1"), [-4.7406, -5.0405]),
    Claim("recurrent beam7: shape", lambda: shape(padded(beams("recurrent_beam7"))), (10, 3)),
    Claim(
        "recurrent beam7: ids",
        ids_of_beams("recurrent_beam7"),
        [
            *[(0, 0, 0), (7, 0, 0), (0, 7, 0), (0, 3, 1), (0, 0, 3)],
            *[(0, 0, 0), (7, 0, 0), (0, 7, 0), (0, 0, 7), (0, 3, 1)],
        ],
    ),
    Claim(
        "recurrent beam7: scores",
        lambda: scores("recurrent_beam7"),
        [-3.5555, -4.2165, -5.1052, -5.1194, -5.5383, -3.7804, -4.0709, -4.7656, -5.0124, -5.4101],
    ),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_an_assertion_of_joeynmt_holds_or_differs_by_a_definition(claim: Claim) -> None:
    claim.check()


def test_of_40_assertions_of_joeynmt_33_hold() -> None:
    assert tally(CLAIMS) == (33, 40)


@pytest.mark.parametrize("name", BEAMS)
def test_a_search_over_joeynmts_numbers_is_the_slow_search(name: str) -> None:
    of_sentences, limits, settings = beam_case(name)
    excluded = (PAD, *READ_ONLY)
    found = beam_search(ScriptedStepper(of_sentences), settings, limits=limits, suppressed=excluded)
    for rule, limit, hypotheses in zip(of_sentences, limits, found, strict=True):
        slow = slow_beam_search(rule, settings, limit=limit, suppressed=excluded)
        assert [one.ids for one in hypotheses] == [one.ids for one in slow]
        assert [one.score for one in hypotheses] == pytest.approx([one.score for one in slow], abs=1e-6)
