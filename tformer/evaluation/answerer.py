"""A loaded model that finds the answer of a question in its context, over the windows of long contexts.

The score of a span is the sum of the logits of its start and of its end in the window where it is highest, of no answer
that of the first token in the window where it is lowest, as in BERT's script for SQuAD 2.0. Probabilities are a softmax
over all spans, and over no answer where it is allowed.

Shapes: P tokens of a context, c of them in a window, A maximum tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer.data.shards.marked_tokens import MarkedTokens, Window, tokenize_questions
from tformer.data.sources.questions import QuestionRow
from tformer.evaluation.tagger import Marked, Span, TokenReader
from tformer.metrics.questions import answer_f1, answer_match, best_of
from tformer.objectives.question_answering import QuestionAnsweringOptions

LABEL = "answer"


def span_scores(logits_c2: np.ndarray, longest: int) -> np.ndarray:
    """fp64 [c, A]: the score of the span from each token on, of 1 to A tokens; -inf beyond the window."""
    starts, ends = logits_c2.astype(np.float64).T
    padded = np.concatenate([ends, np.full(longest, -np.inf)])
    return starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)[: len(starts)]


def best_answers(
    samples: Any, scores: Sequence[np.ndarray], *, longest: int, may_lack: bool
) -> list[tuple[QuestionRow, Span]]:
    """Each question with its answer, which is empty for none.

    samples: windows of the questions; longest: tokens of an answer; may_lack: whether no answer is one.
    """
    windows: dict[int, list[tuple[Window, np.ndarray]]] = {}
    for index, logits_c2 in enumerate(scores):
        window = samples.detail(index)
        windows.setdefault(id(window.row), []).append((window, logits_c2))
    found = []
    for several in windows.values():
        length = max(window.begin + len(window.offsets) for window, _ in several)
        scores_PA, offsets_P2 = np.full((length, longest), -np.inf), np.zeros((length, 2), dtype=np.int64)
        for window, logits_c2 in several:
            part = slice(window.begin, window.begin + len(window.offsets))
            scores_PA[part] = np.maximum(scores_PA[part], span_scores(logits_c2[1:], longest))
            offsets_P2[part] = window.offsets
        none = min(float(logits_c2[0].sum()) for _, logits_c2 in several)
        may_lack_this = may_lack or not length
        total = float(np.logaddexp.reduce(scores_PA.ravel(), initial=none if may_lack_this else -np.inf))
        row, start, end, best = several[0][0].row, 0, 0, float(scores_PA.max(initial=-np.inf))
        if best > none or not may_lack_this:
            first, more = np.unravel_index(int(scores_PA.argmax()), scores_PA.shape)
            start, end = int(offsets_P2[first, 0]), int(offsets_P2[first + more, 1])
        text = (row.text2 or "")[start:end]
        start += len(text) - len(text.lstrip())  # a piece may hold the space before its word
        text, chosen = text.strip(), best if end else none
        found.append((row, Span(start, start + len(text), text, LABEL, float(np.exp(chosen - total)))))
    return found


def answer_report(found: Sequence[tuple[QuestionRow, Span]]) -> dict[str, Any]:
    """exact_match and f1 in percent as SQuAD's script has them, also of questions with and without an answer."""
    figures: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for row, span in found:
        answers = [text for text, _ in row.answers]
        exact, f1 = (best_of(measure, answers, span.text) for measure in (answer_match, answer_f1))
        figures[bool(answers)].append((exact, f1))
    report: dict[str, Any] = {"questions": len(found)}
    parts = [("", [*figures[True], *figures[False]])]
    if figures[False]:
        parts += [("answerable_", figures[True]), ("unanswerable_", figures[False])]
    for prefix, values in parts:
        if values:
            exact, f1 = (100 * np.mean(values, axis=0)).tolist()
            report |= {f"{prefix}exact_match": exact, f"{prefix}f1": f1}
    return report


class Answerer(TokenReader):
    """A loaded model that answers questions about a context."""

    kind, head, objective, reads_pairs = LABEL, "span", QuestionAnsweringOptions, True

    def classify(self, texts: Sequence[tuple[str, str | None]]) -> list[Marked]:
        """The answer of each (question, context)."""
        rows = [QuestionRow(text, context or "", None, "--text") for text, context in texts]
        loaded = self._loaded
        samples = tokens_of(loaded.recipe, self.options, rows, loaded.text_tokenizer, name="the given texts")
        scores = self.scores(samples)
        if len(scores) < len(samples):  # interrupted
            return []
        may_lack = bool(self.options.unanswerable)
        found = best_answers(samples, scores, longest=self.options.max_answer, may_lack=may_lack)
        return [Marked(row.text2 or "", (span,)) for row, span in found]


def tokens_of(recipe: Any, options: Any, rows: Sequence[QuestionRow], tokenizer: Any, **facts: Any) -> MarkedTokens:
    """`tokenize_questions` with the options of an objective."""
    return tokenize_questions(
        rows,
        tokenizer,
        seq_len=recipe.seq_len,
        stride=options.stride,
        max_question=options.max_question,
        token_types=recipe.model.embedding.token_types > 1,
        **facts,
    )
