"""The finished hypotheses of beam search, by sentence and beam group, and how good the worst kept one is."""

from __future__ import annotations

from bisect import insort

import numpy as np

from tformer.decoding.beam_settings import BeamSettings, Hypothesis
from tformer.decoding.settings import FinishReason

NEVER = float("-inf")


class FinishedHypotheses:
    """Everything that finished so far.

    counts: how many per sentence and group, int [S, G].
    worst_kept: the score of the `width`-th best of each group, -inf while there are fewer, float [S, G].
    """

    def __init__(self, settings: BeamSettings, *, num_sentences: int) -> None:
        groups = settings.beam_groups
        self._settings = settings
        self._width = settings.beam_size // groups
        self._found: list[list[Hypothesis]] = [[] for _ in range(num_sentences)]
        self._scores: list[list[list[float]]] = [[[] for _ in range(groups)] for _ in range(num_sentences)]
        self.counts = np.zeros((num_sentences, groups), dtype=np.int64)
        self.worst_kept = np.full((num_sentences, groups), NEVER)

    def add(
        self,
        sentence: int,
        group: int,
        *,
        ids: tuple[int, ...],
        logprob: float,
        total: float,
        reason: FinishReason,
    ) -> None:
        """Take note of a hypothesis. `total` is the sum that is ranked: `logprob` and what penalties add to it."""
        score = total / self._settings.penalty(len(ids))
        self._found[sentence].append(Hypothesis(ids=ids, logprob=logprob, score=score, finish_reason=reason))
        scores = self._scores[sentence][group]
        insort(scores, score)
        self.counts[sentence, group] += 1
        if len(scores) >= self._width:
            self.worst_kept[sentence, group] = scores[-self._width]

    def ranked(self) -> list[list[Hypothesis]]:
        """All hypotheses of each sentence, best first; equal scores in the order in which they finished.

        Whole hypotheses come before interrupted ones, whose scores lack what was still to come. The same tokens found
        by two groups are one hypothesis.
        """
        return [_without_copies(sorted(found, key=_rank)) for found in self._found]


def _rank(hypothesis: Hypothesis) -> tuple[bool, float]:
    return hypothesis.finish_reason == "interrupted", -hypothesis.score


def _without_copies(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    first: dict[tuple[int, ...], Hypothesis] = {}
    for hypothesis in hypotheses:
        first.setdefault(hypothesis.ids, hypothesis)
    return list(first.values())
