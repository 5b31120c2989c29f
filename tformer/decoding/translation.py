"""What translating a text gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tformer.decoding.alignment import Links
from tformer.decoding.settings import FinishReason


@dataclass(frozen=True)
class Translation:
    """One translation of a text.

    Attributes:
        text: with the forced prefix, without special tokens.
        ids: what follows the start tokens: the forced prefix, the new tokens, and eos where it ends by one.
        score: what translations are ranked by: log-probability / length penalty, + coverage penalty.
        logprob: of the tokens after the forced prefix (natural logarithm).
        finish_reason: `eos`, `stop`, `length` or `interrupted`.
        alignment: for each token of the text, where its attention was highest. None unless asked for.
    """

    text: str
    ids: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: FinishReason
    alignment: Links | None = None


EMPTY = Translation("", (), 0.0, 0.0, "eos")
"""Of an empty text."""

OnText = Callable[[int, list[Translation]], None]
"""Called as (row, its translations) when a text is done; batches are decoded longest first, so rows come unsorted."""
