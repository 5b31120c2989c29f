"""What translating a text gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tformer.decoding.alignment import Links
from tformer.decoding.settings import FinishReason


@dataclass(frozen=True)
class Translation:
    """One translation of a text, or one continuation of a prompt.

    Attributes:
        text: with the forced prefix, without special tokens.
        ids: what follows the start tokens: the forced prefix, the new tokens, and eos where it ends by one.
        score: what translations are ranked by: log-probability / length penalty, + coverage penalty.
        logprob: of the tokens after the forced prefix (natural logarithm).
        finish_reason: `eos`, `stop`, `length` or `interrupted`.
        alignment: for each token of the text, where its attention was highest. None unless asked for.
        num_forced: how many of the ids are the forced prefix, which has no part in `logprob`.
    """

    text: str
    ids: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: FinishReason
    alignment: Links | None = None
    num_forced: int = 0

    @property
    def num_scored(self) -> int:
        """How many tokens `logprob` is the sum of."""
        return len(self.ids) - self.num_forced


EMPTY = Translation("", (), 0.0, 0.0, "eos")
"""Of an empty text."""

OnText = Callable[[int, list[Translation]], None]
"""Called as (row, its translations) when a text is done; batches are decoded longest first, so rows come unsorted."""


def best_of_each_text(ranked: Iterable[Translation], count: int) -> list[Translation]:
    """The first `count` of different texts: segmentations of one text are one answer, that of the best of them."""
    answers: dict[str, Translation] = {}
    for translation in ranked:
        answers.setdefault(translation.text, translation)
    return list(answers.values())[:count]
