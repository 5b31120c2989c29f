"""Questions whose answer is a part of a context (SQuAD)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from tformer.data.shards.marked_tokens import UNMARKED, MarkedTokens
from tformer.data.sources.questions import QuestionRow, open_questions
from tformer.data.sources.tables import LabelledRow
from tformer.evaluation.answerer import Answerer, answer_report, best_answers, tokens_of
from tformer.evaluation.reports import log_softmax
from tformer.recipe.data_defaults import Survey
from tformer.recipe.recipe import Recipe
from tformer.tasks.base import GivenExample, RowKeys, TrainingStart
from tformer.tasks.tagged import Tagged
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work


class Questions(Tagged):
    """Questions, each with windows of its context."""

    description = "a model of questions and contexts"
    options = frozenset({"invalid_utf8", "encoding", "seq_len"})
    tokenizer_texts = "questions"
    row_keys: ClassVar[RowKeys] = (("question", "context", "answers"),)
    reader: ClassVar[Any] = Answerer
    example_is: ClassVar[str] = "windows"

    def open(self, specs: Any, data: Any) -> Sequence[Any]:
        return open_questions(specs, reading=data.reading)

    def rows(self, sources: Sequence[Any]) -> Sequence[QuestionRow]:
        return [row for source in sources for row in source.rows()]

    def settled(self, start: TrainingStart, rows: Sequence[Any], work: Work) -> Recipe:
        """The recipe that says whether a question may have no answer."""
        options: Any = start.recipe.objectives[0]
        lacking = sum(not row.answers for row in rows)
        work.note(f"{len(rows):,} questions, {lacking:,} without an answer")
        if options.unanswerable is None:
            options = replace(options, unanswerable=lacking > 0)
        return start.recipe.model_copy(update={"objectives": (options,)})

    def tokens(self, recipe: Recipe, rows: Sequence[Any], tokenizer: Tokenizer, **facts: Any) -> MarkedTokens:
        options: Any = recipe.objectives[0]
        facts["fingerprint"] = f"{facts.get('fingerprint')} {options.stride} {options.max_question}"
        return tokens_of(recipe, options, rows, tokenizer, **facts)

    def report(
        self, recipe: Recipe, samples: Any, scores: Sequence[np.ndarray], *, intervals: bool = True
    ) -> dict[str, Any]:
        """SQuAD's figures over the questions, the loss and the share of right borders over the windows."""
        options: Any = recipe.objectives[0]
        may_lack = options.unanswerable
        if may_lack is None:  # of an imported model
            may_lack = any(not samples.detail(index).row.answers for index in range(len(samples)))
        found = best_answers(samples, scores, longest=options.max_answer, may_lack=may_lack)
        losses, right = [], []
        for example, logits_c2 in zip(samples.examples(0, np.arange(len(samples))), scores, strict=True):
            marks = example.label[example.label != UNMARKED]
            borders = [int((marks & bit).argmax()) for bit in (1, 2)]
            losses.append(-log_softmax(logits_c2.T)[[0, 1], borders].mean())
            right.append(logits_c2.argmax(axis=0).tolist() == borders)
        figures = answer_report(found)
        return {"examples": len(samples), **figures, "loss": float(np.mean(losses)), "accuracy": float(np.mean(right))}

    def sample(self, recipe: Recipe, tokenizer: Tokenizer, given: GivenExample) -> MarkedTokens:
        """A given question and context, without an answer."""
        given.require(needs="text", may="text2", reader=self.description)
        row = QuestionRow(given.text or "", given.text2 or "", None, "--text")
        return self.tokens(recipe, [row], tokenizer, name="--text")

    def survey(self, recipe: Recipe) -> Survey | None:
        return None

    def first_try(self, row: LabelledRow) -> tuple[str, ...]:
        return ("--text", row.text, "--text2", row.text2 or "")

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """One metric per line, in percent as SQuAD's script has them."""
        for name, value in report.items():
            if name.endswith(("exact_match", "f1")):
                yield f"{name} {value:.2f}"
        for name in ("loss", "accuracy"):
            yield f"{name} {report[name]:.4f}"
        yield f"questions {report['questions']}"
        yield f"windows {report['examples']}"
