"""Exact match and F1 of answers against the formula of SQuAD's script, written from its published definition."""

from __future__ import annotations

import re
import string
from collections import Counter

import numpy as np
import pytest

from tformer.metrics.text import answer_f1, answer_match, best_of, normalized_answer

WORDS = ["the", "a", "An", "Paris", "paris,", "in", "(1999)", "U.S.", "don't", "—", "Köln", ".", "  "]


def script_tokens(text: str) -> list[str]:
    """Lower case, then without punctuation, then without articles, then cut at white space."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text).split()


def script_f1(answer: str, guess: str) -> float:
    gold, given = script_tokens(answer), script_tokens(guess)
    if len(gold) == 0 or len(given) == 0:
        return float(gold == given)
    same = sum((Counter(gold) & Counter(given)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(given), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=size)) for size in rng.integers(0, 5, count)]


def test_figures_are_those_of_the_script() -> None:
    for answer, guess in zip(texts(2000, 1), texts(2000, 2), strict=True):
        assert answer_f1(answer, guess) == pytest.approx(script_f1(answer, guess)), (answer, guess)
        assert answer_match(answer, guess) == float(script_tokens(answer) == script_tokens(guess))


def test_the_best_answer_counts_and_none_is_right_where_there_is_none() -> None:
    assert best_of(answer_f1, ["Rome", "the city of Paris"], "Paris") == pytest.approx(0.5)
    assert best_of(answer_match, ["Rome", "Paris"], "paris.") == 1
    assert best_of(answer_match, [], "") == best_of(answer_f1, [], "") == 1
    assert best_of(answer_match, [], "Paris") == best_of(answer_f1, [], "Paris") == 0
    assert best_of(answer_match, ["Paris"], "") == 0
    assert best_of(answer_match, ["the"], "") == 1  # nothing is left of it: as in the script, no answer


def test_a_text_is_compared_without_case_punctuation_articles_and_spaces() -> None:
    assert normalized_answer(" The  U.S., an  Island! ") == "us island"
