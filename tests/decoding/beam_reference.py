"""A stepper whose probabilities are written down, a slow beam search over lists, and the enumeration of everything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.settings import BeamSettings, Hypothesis, length_penalty

NEVER = float("-inf")
Rule = Callable[[tuple[int, ...]], Sequence[float]]  # new tokens so far -> log-probabilities [V]


def slow_repeated_ngrams(tokens: Sequence[int], n: int) -> list[int]:
    """The tokens that would complete an n-gram among `tokens`, one place after the other."""
    tail = tuple(tokens[len(tokens) - (n - 1) :])
    if len(tail) < n - 1:
        return []
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return sorted({ngram[-1] for ngram in ngrams if ngram[:-1] == tail})


class ScriptedStepper:
    """Each sentence has a rule of its own. Remembers what it was asked for, and checks that it may be."""

    def __init__(self, rules: Sequence[Rule], *, rooms: Sequence[int] | None = None) -> None:
        self.rules = list(rules)
        self.rooms = list(rooms) if rooms is not None else [1000] * len(rules)
        self.num_sentences = len(rules)
        self.vocab_size = len(self.rules[0](())) if rules else 5
        self.batches: list[int] = []  # sentences at each step

    def start(self, beams: int) -> Tensor:
        self.beams = beams
        self.rows: list[tuple[int, ...]] = [()] * (beams * self.num_sentences)
        self.batches.append(self.num_sentences)
        return torch.tensor([rule(()) for rule in self.rules], dtype=torch.float32)

    def step(self, ids_R: Tensor) -> Tensor:
        ids = ids_R.tolist()
        assert len(ids) == len(self.rows) == self.beams * self.num_sentences
        assert all(0 <= token < self.vocab_size for token in ids)
        self.batches.append(self.num_sentences)
        self.rows = [(*row, token) for row, token in zip(self.rows, ids, strict=True)]
        rules = [rule for rule in self.rules for _ in range(self.beams)]
        return torch.tensor([rule(row) for rule, row in zip(rules, self.rows, strict=True)], dtype=torch.float32)

    def reorder(self, rows_R: Tensor) -> None:
        rows = rows_R.tolist()
        assert [row // self.beams for row in rows] == [row // self.beams for row in range(len(self.rows))]
        self.rows = [self.rows[row] for row in rows]

    def keep(self, sentences: Tensor) -> None:
        kept = sentences.tolist()
        assert kept == sorted(set(kept)) and kept
        self.rows = [self.rows[sentence * self.beams + beam] for sentence in kept for beam in range(self.beams)]
        self.rules = [self.rules[sentence] for sentence in kept]
        self.num_sentences = len(kept)


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) if p > 0 else NEVER for p in probabilities]


def table(probabilities: Mapping[tuple[int, ...], Sequence[float]], otherwise: Sequence[float]) -> Rule:
    """A rule written down prefix by prefix."""
    return lambda prefix: logs(*probabilities.get(prefix, otherwise))


def random_rule(seed: int, *, vocab_size: int, levels: int | None = None, pad_to: int = 0) -> Rule:
    """Random log-probabilities for every prefix; `levels`: rounded to so many values, so that there are ties.

    `pad_to` adds tokens of probability zero, for beams that would be larger than the vocabulary.
    """
    memory: dict[tuple[int, ...], list[float]] = {}

    def rule(prefix: tuple[int, ...]) -> list[float]:
        if prefix not in memory:
            values = np.random.default_rng((seed, *prefix)).normal(size=vocab_size) * 1.5
            logprobs = values - np.logaddexp.reduce(values)
            if levels is not None:
                logprobs = -1.0 - np.floor(np.exp(logprobs) * levels) / levels
            memory[prefix] = logprobs.astype(np.float32).tolist() + [NEVER] * (pad_to - vocab_size)
        return memory[prefix]

    return rule


def penalty(settings: BeamSettings, length: int) -> float:
    counted = length + settings.counted_start
    return length_penalty(counted, alpha=settings.length_penalty, kind=settings.length_penalty_type)


Values = tuple[float, ...]


def finished(settings: BeamSettings, ids: tuple[int, ...], logprobs: Values, total: float, reason: str) -> Hypothesis:
    return Hypothesis(ids, logprobs, total / penalty(settings, len(ids)), reason)  # type: ignore[arg-type]


def enumerate_all(rule: Rule, settings: BeamSettings, *, limit: int, tokens: int) -> list[Hypothesis]:
    """Every hypothesis over the first `tokens` ids, best first."""
    found = []
    for length in range(limit + 1):
        for prefix in itertools.product([t for t in range(tokens) if t != settings.eos_id], repeat=length):
            logprobs = tuple(rule(prefix[:place])[token] for place, token in enumerate(prefix))
            if length == limit:
                found.append(finished(settings, prefix, logprobs, sum(logprobs), "length"))
            elif length >= settings.min_new_tokens:
                assert settings.eos_id is not None
                logprobs = (*logprobs, rule(prefix)[settings.eos_id])
                found.append(finished(settings, (*prefix, settings.eos_id), logprobs, sum(logprobs), "eos"))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def slow_beam_search(
    rule: Rule,
    settings: BeamSettings,
    *,
    limit: int = 1000,
    history: Sequence[int] = (),
    suppressed: Sequence[int] = (),
    never_stop: bool = False,
) -> list[Hypothesis]:
    """One sentence, every candidate looked at, nothing batched."""
    limit = min(limit, settings.max_new_tokens)
    width = settings.beam_size
    live: list[tuple[float, Values, tuple[int, ...]]] = [(0.0, (), ())]
    pool: list[Hypothesis] = []  # in the order in which they finish
    for length in range(limit):
        candidates = _candidates(rule, settings, live, history, suppressed, length, limit)
        candidates.sort(key=lambda c: (-c[0], c[2], c[3]))  # best first, equal ones by token, then by beam
        going: list[tuple[float, Values, tuple[int, ...]]] = []
        for rank, (total, logprobs, token, beam) in enumerate(candidates[: 2 * width]):
            ids = (*live[beam][2], token)
            if token != settings.eos_id:
                if len(going) < width:
                    going.append((total, logprobs, ids))
            elif rank < width:
                pool.append(finished(settings, ids, logprobs, total, "eos"))
        live = going
        # At its limit a sentence finishes all that is live.
        if length + 1 < limit and not never_stop and _over(settings, live, pool, width, length + 1, limit):
            live = []
    pool += [finished(settings, ids, logprobs, total, "length") for total, logprobs, ids in live]
    return sorted(pool, key=lambda hypothesis: -hypothesis.score)


def _candidates(
    rule: Rule,
    settings: BeamSettings,
    live: list[tuple[float, Values, tuple[int, ...]]],
    history: Sequence[int],
    suppressed: Sequence[int],
    length: int,
    limit: int,
) -> list[tuple[float, Values, int, int]]:
    """(sum that is ranked, log-probabilities, token, beam) of every token that may follow."""
    candidates = []
    for beam, (total, logprobs, ids) in enumerate(live):
        seen = [*history, *ids]
        own = [NEVER if token in suppressed else value for token, value in enumerate(rule(ids))]
        scores = [np.float32(value) for value in own]
        if settings.repetition_penalty != 1.0:
            factor = np.float32(settings.repetition_penalty)
            repeated = {token for token in seen if token != settings.eos_id}
            scores = [value * factor if token in repeated else value for token, value in enumerate(scores)]
        if settings.no_repeat_ngram:
            banned = set(slow_repeated_ngrams(seen, settings.no_repeat_ngram)) - {settings.eos_id}
            left = [NEVER if token in banned else value for token, value in enumerate(scores)]
            scores = left if max(left) > NEVER else scores
        if settings.at_limit == "end" and length + 1 == limit:
            last = settings.eos_id if settings.forced_eos is None else settings.forced_eos
            scores = [value if token == last else NEVER for token, value in enumerate(scores)]
        elif settings.forced_eos is not None and length + 1 == limit:
            scores = [np.float32(0 if token == settings.forced_eos else NEVER) for token in range(len(own))]
        candidates += [
            (total + float(value), (*logprobs, own[token]), token, beam)
            for token, value in enumerate(scores)
            if value > NEVER
        ]
    if length < settings.min_new_tokens:
        candidates = [c for c in candidates if c[2] != settings.eos_id] or candidates
    return candidates


def _over(
    settings: BeamSettings,
    live: list[tuple[float, Values, tuple[int, ...]]],
    pool: list[Hypothesis],
    width: int,
    length: int,
    limit: int,
) -> bool:
    if len(pool) < width:
        return False
    if settings.stopping == "beam":
        return True
    worst = sorted(hypothesis.score for hypothesis in pool)[-width]
    if settings.stopping == "heuristic":
        return not any(total / penalty(settings, length) > worst for total, _, _ in live)
    attainable = range(min(length + 1, limit), limit + 1)
    return not any(total / penalty(settings, reach) > worst for total, _, _ in live for reach in attainable)
