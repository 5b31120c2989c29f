"""Exact match and F1 of answers, as the evaluation script of SQuAD 2.0 computes them (arXiv 1806.03822).

Texts are compared in lower case, without punctuation, articles and superfluous white space. F1 is that of the words, as
a bag. A question without an answer is right, by both measures, if none is given. Of several answers the best counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized_answer(text: str) -> str:
    """The text as it is compared."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def answer_match(answer: str, guess: str) -> float:
    """1 for equal texts, else 0."""
    return float(normalized_answer(answer) == normalized_answer(guess))


def answer_f1(answer: str, guess: str) -> float:
    """F1 of the words."""
    words, given = normalized_answer(answer).split(), normalized_answer(guess).split()
    if not words or not given:
        return float(words == given)
    same = sum((Counter(words) & Counter(given)).values())
    return 2 * same / (len(words) + len(given))


def best_of(measure: Callable[[str, str], float], answers: Sequence[str], guess: str) -> float:
    """The best over the answers that are not empty once they are normalized; without any, the guess should be empty."""
    return max(measure(answer, guess) for answer in [each for each in answers if normalized_answer(each)] or [""])
