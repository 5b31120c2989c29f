"""Loaded models that mark parts of a text, and the one that marks the answer of a question in its context.

The score of an answer is the sum of the logits of its start and of its end in a window of the context, of no answer
that of the first token in the window where it is lowest, as in BERT's script for SQuAD 2.0. Probabilities are a softmax
over all spans of all windows, and over no answer where it is allowed.

Shapes: L labels, n tokens with a label of an example, c tokens of a window, A maximum tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from tformer.data.batching.batch import Batch
from tformer.data.shards.marked_tokens import UNMARKED, MarkedTokens, tokenize_questions
from tformer.data.sources.questions import QuestionRow
from tformer.evaluation.classifier import Classifier, GivenRows
from tformer.evaluation.predict import predicted
from tformer.evaluation.reports import log_softmax
from tformer.loading import Loaded
from tformer.metrics.text import answer_f1, answer_match, best_of
from tformer.nn.heads import ModelOutput
from tformer.objectives.question_answering import QuestionAnsweringOptions
from tformer.recipe.recipe import Recipe
from tformer.support.errors import require_finite
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work


@dataclass(frozen=True)
class Span:
    """A labelled part of a text, from character `start` to `end`; `probability`: of tags the product over the words."""

    start: int
    end: int
    text: str
    label: str
    probability: float


@dataclass(frozen=True)
class Marked:
    """A text and its labelled spans, in order."""

    text: str
    spans: tuple[Span, ...]


def marked_scores(model: nn.Module, samples: Any, collate: Any, *, head: str, **options: Any) -> list[np.ndarray]:
    """fp32 [n, L] of each example: what `head` gives at its n tokens with a label; [] where the work was stopped.

    options: of `predicted`.
    """
    found: dict[int, np.ndarray] = {}

    def read(output: ModelOutput, batch: Batch) -> Tensor:
        assert batch.labels is not None
        return output.head(head)[batch.labels != UNMARKED]

    for indices, scores_mL in list(predicted(model, samples, collate, read, **options)):
        logits_mL = scores_mL.cpu().numpy()
        require_finite(logits_mL, "outputs")
        sizes = [np.count_nonzero(samples.rows[number].marks != UNMARKED) for number in indices]
        found |= zip(indices.tolist(), np.split(logits_mL, np.cumsum(sizes)[:-1]), strict=True)
    return [found[number] for number in range(len(samples))] if len(found) == len(samples) else []


def by_text(rows: Sequence[Any], scores: Sequence[np.ndarray]) -> list[list[tuple[Any, np.ndarray]]]:
    """The windows of each sentence or question, each with its scores; [] without scores."""
    found = dict[Any, list[tuple[Any, np.ndarray]]]()
    for row, each in zip(rows, scores, strict=False):
        found.setdefault((row.place, row.number), []).append((row, each))
    return list(found.values())


class SpanReader(Classifier):
    """Base class of loaded models that mark spans. marks: what they are, "spans" or the "answer"."""

    marks: ClassVar[str]
    thresholds = None

    def __init__(self, loaded: Loaded, **options: Any) -> None:
        super().__init__(loaded, **options)
        self.kind, self.reads_pairs = self.marks, self.marks == "answer"

    def scores(self, samples: Any, work: Work | None = None) -> Any:
        """`marked_scores` of these examples."""
        given: dict[str, Any] = {"batch_size": self._batch_size, "work": work or self._work}
        return marked_scores(self._loaded.model, samples, self._collate, head=self._head, **given)

    def probabilities(self, answers: Any) -> Any:
        """The answers, which have their probabilities."""
        return answers


# -- answers -----------------------------------------------------------------------------------------------------------


def span_scores(logits_c2: np.ndarray, longest: int) -> np.ndarray:
    """fp64 [c, A]: the score of the span from each token on, of 1 to A tokens; -inf beyond the window."""
    starts, ends = logits_c2.astype(np.float64).T
    padded = np.concatenate([ends, np.full(longest, -np.inf)])
    return starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)[: len(starts)]


def best_answers(
    rows: Sequence[Any], scores: Sequence[np.ndarray], *, longest: int, may_lack: bool
) -> list[tuple[QuestionRow, Span]]:
    """Each question with its answer, which is empty for none.

    rows: of the windows; longest: tokens of an answer; may_lack: whether no answer is one.
    """
    found = []
    for several in by_text(rows, scores):
        none = min(float(logits_c2[0].sum()) for _, logits_c2 in several)
        tables = [span_scores(logits_c2[1:], longest) for _, logits_c2 in several]
        best, number = max((table.max(initial=-np.inf), number) for number, table in enumerate(tables))
        row, start, end = several[number][0], 0, 0
        may_lack_this = may_lack or best == -np.inf
        total = np.logaddexp.reduce(np.concatenate([table.ravel() for table in tables]))
        if may_lack_this:
            total = np.logaddexp(total, none)
        if is_found := best > none or not may_lack_this:
            first, more = np.unravel_index(int(tables[number].argmax()), tables[number].shape)
            start, end = int(row.offsets[first, 0]), int(row.offsets[first + more, 1])
        text = (row.text2 or "")[start:end]
        start += len(text) - len(text.lstrip())  # a piece may hold the space before its word
        text, chosen = text.strip(), best if is_found else none
        found.append((row, Span(start, start + len(text), text, "answer", float(np.exp(chosen - total)))))
    return found


def answer_report(
    rows: Sequence[Any], scores: Sequence[np.ndarray], options: QuestionAnsweringOptions
) -> dict[str, Any]:
    """SQuAD's figures in percent, the loss of the windows in nats and the share of windows with both borders right.

    Where some questions have no answer, the figures also of those with and of those without one.
    """
    may_lack = options.unanswerable
    if may_lack is None:  # of an imported model
        may_lack = any(not row.answers for row in rows)
    found = best_answers(rows, scores, longest=options.max_answer, may_lack=may_lack)
    report: dict[str, Any] = {"examples": len(rows), "questions": len(found)}
    has_answer_N = np.array([bool(row.answers) for row, _ in found])
    parts = {"": np.ones_like(has_answer_N)}
    if not has_answer_N.all():
        parts |= {"answerable_": has_answer_N, "unanswerable_": ~has_answer_N}
    for name, measure in (("exact_match", answer_match), ("f1", answer_f1)):
        values = [best_of(measure, [text for text, _ in row.answers], span.text) for row, span in found]
        report |= {f"{part}{name}": 100 * float(np.mean(values, where=of)) for part, of in parts.items() if of.any()}
    losses, right = [], []
    for row, logits_c2 in zip(rows, scores, strict=True):
        borders = [int((row.marks[row.marks != UNMARKED] & bit).argmax()) for bit in (1, 2)]
        losses.append(-log_softmax(logits_c2.T)[[0, 1], borders].mean())
        right.append(logits_c2.argmax(axis=0).tolist() == borders)
    return {**report, "loss": float(np.mean(losses)), "accuracy": float(np.mean(right))}


class Answerer(SpanReader):
    """A loaded model that answers questions about a context."""

    marks = "answer"

    def classify(self, texts: Sequence[tuple[str, str | None]]) -> Any:
        """`Marked` of the context of each (question, context)."""
        rows = [QuestionRow(text, text2 or "", None, "--text", number) for number, (text, text2) in enumerate(texts)]
        recipe, options = self._loaded.recipe, options_of(self._loaded.recipe)
        samples = tokenized([GivenRows(rows)], recipe, self._loaded.text_tokenizer)
        given: dict[str, Any] = {"longest": options.max_answer, "may_lack": bool(options.unanswerable)}
        found = best_answers(samples.rows, self.scores(samples), **given)
        return [Marked(row.text2 or "", (span,)) for row, span in found]


def options_of(recipe: Recipe) -> QuestionAnsweringOptions:
    """The options of a recipe's objective; the defaults for an imported model."""
    given = (each for each in recipe.objectives if isinstance(each, QuestionAnsweringOptions))
    return next(given, QuestionAnsweringOptions())


def tokenized(sources: Sequence[Any], recipe: Recipe, tokenizer: Tokenizer, work: Work = QUIET) -> MarkedTokens:
    """`tokenize_questions` as the recipe says."""
    given: dict[str, Any] = {"seq_len": recipe.seq_len, "token_types": recipe.model.embedding.token_types > 1}
    return tokenize_questions(sources, options_of(recipe), tokenizer, work=work, **given)
