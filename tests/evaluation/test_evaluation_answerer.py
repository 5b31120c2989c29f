"""The best answer over windows against a loop over all spans; probabilities; figures of questions; spans as text."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tformer.cli.classify import _painted
from tformer.data.shards.marked_tokens import Window
from tformer.data.sources.questions import QuestionRow
from tformer.evaluation.answerer import answer_report, best_answers, span_scores
from tformer.evaluation.answers import FoundFormat, SpanFormat
from tformer.evaluation.tagger import Marked, Span

CONTEXT = "a b c d e f g h i j"


def windows_of(row: QuestionRow, begins: list[int], size: int, rng: np.random.Generator) -> list[tuple[Window, Any]]:
    offsets = np.array([[2 * number, 2 * number + 1] for number in range(10)])
    return [(Window(row, begin, offsets[begin : begin + size]), rng.normal(size=(1 + size, 2))) for begin in begins]


def answers(windows: list[tuple[Window, Any]], **options: Any) -> list[tuple[QuestionRow, Span]]:
    samples = SimpleNamespace(detail=lambda index: windows[index][0])
    return best_answers(samples, [logits for _, logits in windows], **options)


@pytest.mark.parametrize("may_lack", [False, True])
def test_the_answer_is_the_best_span_of_all_windows(may_lack: bool) -> None:
    rng, row = np.random.default_rng(6), QuestionRow("?", CONTEXT, None, "")
    for _ in range(50):
        windows = windows_of(row, [0, 3, 6], 4, rng)
        scores: dict[tuple[int, int], float] = {}
        for window, logits in windows:
            for start, stop in product(range(4), range(4)):
                if 0 <= stop - start < 3:
                    place = (window.begin + start, window.begin + stop)
                    score = float(logits[1 + start, 0] + logits[1 + stop, 1])
                    scores[place] = max(scores.get(place, -np.inf), score)
        if may_lack:
            scores[-1, -1] = min(float(logits[0].sum()) for _, logits in windows)
        best = max(scores, key=lambda place: scores[place])
        [(_, span)] = answers(windows, longest=3, may_lack=may_lack)
        assert span.text == ("" if best == (-1, -1) else CONTEXT[2 * best[0] : 2 * best[1] + 1])
        assert CONTEXT[span.start : span.end] == span.text
        total = sum(np.exp(score) for score in scores.values())
        assert span.probability == pytest.approx(np.exp(scores[best]) / total)


def test_questions_stay_in_their_order_and_a_context_without_tokens_has_no_answer() -> None:
    rng = np.random.default_rng(7)
    first, second = QuestionRow("?", CONTEXT, None, ""), QuestionRow("?", CONTEXT, None, "")
    empty = Window(second, 0, np.zeros((0, 2), dtype=np.int64))
    windows = [*windows_of(first, [0, 3], 4, rng), (empty, rng.normal(size=(1, 2)))]
    [(one, _), (other, span)] = answers(windows, longest=3, may_lack=False)
    assert one is first and other is second and (span.text, span.probability) == ("", 1.0)


def test_spans_end_inside_their_window() -> None:
    scores_cA = span_scores(np.zeros((4, 2)), 3)
    assert np.isfinite(scores_cA).sum(axis=1).tolist() == [3, 3, 2, 1]


def test_spaces_at_the_border_are_no_part_of_an_answer() -> None:
    row = QuestionRow("?", "in Rome", None, "")
    window = Window(row, 0, np.array([[0, 2], [2, 7]]))  # a piece with the space before its word
    [(_, span)] = answers([(window, np.array([[-9, -9], [-9, -9], [9.0, 9]]))], longest=3, may_lack=True)
    assert (span.text, span.start, span.end) == ("Rome", 3, 7)


def test_figures_are_means_in_percent_with_and_without_an_answer() -> None:
    def found(guess: str, *texts: str) -> tuple[QuestionRow, Span]:
        row = QuestionRow("?", CONTEXT, None, "", answers=tuple((text, 0) for text in texts))
        return row, Span(0, len(guess), guess, "answer", 1.0)

    report = answer_report([found("a b", "b", "c"), found("x y", "X y."), found("q", "r"), found("z"), found("")])
    assert report["answerable_exact_match"] == report["answerable_f1"] == pytest.approx(100 * 2 / 3)
    assert report["unanswerable_exact_match"] == report["unanswerable_f1"] == 50
    assert report["f1"] == pytest.approx(60) and report["questions"] == 5
    assert "unanswerable_f1" not in answer_report([found("a", "a")])


def test_spans_stand_in_brackets_in_colours_on_a_terminal() -> None:
    text = "Ada\x1b in\nRome"
    answer = Marked(text, (Span(0, 3, "Ada", "PER", 0.5), Span(8, 12, "Rome", "LOC", 0.5)))
    assert SpanFormat().line(answer) == "[PER Ada]\x1b in\\n[LOC Rome]"
    painted = SpanFormat(_painted).line(answer)
    assert "\\x1b in" in painted and painted.count("\x1b[0m") == 2 and painted.startswith("\x1b[3")
    assert SpanFormat().cells(answer) == [["PER Ada", "LOC Rome"]]
    assert FoundFormat().line(Marked(text, (Span(8, 12, "Rome", "answer", 0.5),))) == "Rome\t0.5000"
