"""Length penalties of beam search: what a sum of log-probabilities is divided by, so that short hypotheses do not win.

    score = log p(y | x) / lp(|y|)

    gnmt   lp = ((5 + length) / 6) ** alpha      arXiv 1609.08144; alpha 0.6 in "Attention Is All You Need"
    avg    lp = length ** alpha                  fairseq, CTranslate2; alpha 1: the mean log-probability per token
    none   lp = 1

The same alpha means different things in the two, hence the type beside it. `length` counts the new tokens, an
end-of-sequence token among them; a hypothesis cut off before its end has none, so none is counted. A first token that
every target is forced to have (BART) counts too: it is a label like the others, and costs nothing. What a text is asked
to begin with does not count. Alpha 0 is `none`; a negative alpha favours short hypotheses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

LengthPenaltyType = Literal["gnmt", "avg", "none"]

LENGTH_PENALTIES: dict[LengthPenaltyType, Callable[[int, float], float]] = {
    "gnmt": lambda length, alpha: ((5.0 + length) / 6.0) ** alpha,
    "avg": lambda length, alpha: float(length) ** alpha,
    "none": lambda length, alpha: 1.0,
}


def length_penalty(length: int, *, alpha: float, kind: LengthPenaltyType) -> float:
    """lp(length), above zero. A hypothesis without tokens counts as one of length 1: its sum is 0 all the same."""
    return LENGTH_PENALTIES[kind](max(length, 1), alpha)
