"""The best answer over windows against a loop over all spans; probabilities; figures of questions; spans as text."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tformer.cli.classify import _painted
from tformer.data.sources.questions import QuestionRow
from tformer.evaluation.answers import FoundFormat, SpanFormat
from tformer.evaluation.spans import Marked, Span, answer_report, best_answers, span_scores
from tformer.objectives.question_answering import QuestionAnsweringOptions

CONTEXT = "a b c d e f g h i j"


Windows = list[tuple[QuestionRow, Any]]


def windows_of(row: QuestionRow, begins: list[int], size: int, rng: np.random.Generator) -> Windows:
    offsets = np.array([[2 * number, 2 * number + 1] for number in range(10)])
    rows = [replace(row, offsets=offsets[begin : begin + size]) for begin in begins]
    return [(each, rng.normal(size=(1 + size, 2))) for each in rows]


def answers(windows: Windows, **options: Any) -> list[tuple[QuestionRow, Span]]:
    rows, logits = zip(*windows, strict=True)
    return best_answers(rows, logits, **options)


@pytest.mark.parametrize("may_lack", [False, True])
def test_the_answer_is_the_best_span_of_all_windows(may_lack: bool) -> None:
    rng, row = np.random.default_rng(6), QuestionRow("?", CONTEXT, None, "")
    for _ in range(50):
        windows = windows_of(row, [0, 3, 6], 4, rng)
        scores: list[tuple[float, tuple[int, int]]] = []
        for number, (_, logits) in enumerate(windows):
            for start, stop in product(range(4), range(4)):
                if 0 <= stop - start < 3:
                    place = (3 * number + start, 3 * number + stop)
                    scores.append((float(logits[1 + start, 0] + logits[1 + stop, 1]), place))
        if may_lack:
            scores.append((min(float(logits[0].sum()) for _, logits in windows), (-1, -1)))
        score, best = max(scores)
        [(_, span)] = answers(windows, longest=3, may_lack=may_lack)
        assert span.text == ("" if best == (-1, -1) else CONTEXT[2 * best[0] : 2 * best[1] + 1])
        assert CONTEXT[span.start : span.end] == span.text
        assert span.probability == pytest.approx(np.exp(score) / sum(np.exp(each) for each, _ in scores))


def test_questions_stay_in_their_order_and_a_context_without_tokens_has_no_answer() -> None:
    rng = np.random.default_rng(7)
    first, second = (QuestionRow("?", CONTEXT, None, "", number) for number in range(2))
    empty = replace(second, offsets=np.zeros((0, 2), dtype=np.int64))
    windows = [*windows_of(first, [0, 3], 4, rng), (empty, rng.normal(size=(1, 2)))]
    [(one, _), (other, span)] = answers(windows, longest=3, may_lack=False)
    assert one.number == 0 and other.number == 1 and (span.text, span.probability) == ("", 1.0)


def test_spans_end_inside_their_window() -> None:
    scores_cA = span_scores(np.zeros((4, 2)), 3)
    assert np.isfinite(scores_cA).sum(axis=1).tolist() == [3, 3, 2, 1]


def test_spaces_at_the_border_are_no_part_of_an_answer() -> None:
    offsets = np.array([[0, 2], [2, 7]])  # a piece with the space before its word
    row = QuestionRow("?", "in Rome", None, "", offsets=offsets)
    [(_, span)] = answers([(row, np.array([[-9, -9], [-9, -9], [9.0, 9]]))], longest=3, may_lack=True)
    assert (span.text, span.start, span.end) == ("Rome", 3, 7)


def test_figures_are_means_in_percent_with_and_without_an_answer() -> None:
    def report(*found: tuple[str, ...]) -> dict[str, Any]:
        """Of (the answer that the logits say, right answers ...), over contexts that are the answer and a word."""
        rows, scores = [], []
        for number, (guess, *texts) in enumerate(found):
            offsets = np.array([[0, len(guess)], [len(guess) + 1, len(guess) + 2]])
            given = {"answers": tuple((text, 0) for text in texts), "offsets": offsets, "marks": np.array([0, 3, 0])}
            rows.append(QuestionRow("?", f"{guess} x", None, "", number, **given))
            scores.append(np.array([[0.0, 0], [9, 9] if guess else [-9, -9], [-9, -9]]))
        return answer_report(rows, scores, QuestionAnsweringOptions())

    found = report(("a b", "b", "c"), ("x y", "X y."), ("q", "r"), ("z",), ("",))
    assert found["answerable_exact_match"] == found["answerable_f1"] == pytest.approx(100 * 2 / 3)
    assert found["unanswerable_exact_match"] == found["unanswerable_f1"] == 50
    assert found["f1"] == pytest.approx(60) and found["questions"] == 5
    assert "unanswerable_f1" not in report(("a", "a"))


def test_spans_stand_in_brackets_in_colours_on_a_terminal() -> None:
    text = "Ada\x1b in\nRome"
    answer = Marked(text, (Span(0, 3, "Ada", "PER", 0.5), Span(8, 12, "Rome", "LOC", 0.5)))
    assert SpanFormat().line(answer) == "[PER Ada]\x1b in\\n[LOC Rome]"
    painted = SpanFormat(_painted).line(answer)
    assert "\\x1b in" in painted and painted.count("\x1b[0m") == 2 and painted.startswith("\x1b[3")
    assert SpanFormat().cells(answer) == [["PER Ada", "LOC Rome"]]
    assert FoundFormat().line(Marked(text, (Span(8, 12, "Rome", "answer", 0.5),))) == "Rome\t0.5000"
