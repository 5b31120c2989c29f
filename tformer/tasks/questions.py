"""Questions whose answer is a part of a context (SQuAD)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from tformer.data.shards.marked_tokens import MarkedTokens
from tformer.data.sources.questions import QuestionRow, open_questions
from tformer.data.sources.tables import LabelledRow
from tformer.evaluation.spans import answer_report, options_of, tokenized
from tformer.recipe.data_defaults import Survey
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Data, SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.base import Baselines, ChosenData, GivenExample, RowKeys, TrainingStart
from tformer.tasks.tags.task import Tagged
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work


class Questions(Tagged):
    """Questions, each with windows of its context."""

    description = "a model of questions and contexts"
    options = frozenset({"invalid_utf8", "encoding", "seq_len"})
    tokenizer_texts = "questions"
    row_keys: ClassVar[RowKeys] = (("question", "context", "answers"),)

    def open(self, specs: Sequence[SourceSpec], data: Data | ChosenData, recipe: Recipe) -> Sequence[Any]:
        return open_questions(specs, reading=data.reading)

    def named(self, start: TrainingStart, rows: Iterator[Any], work: Work) -> Recipe:
        """The recipe that says whether a question may have no answer."""
        options, lacks = options_of(start.recipe), [not row.answers for row in rows]
        work.note(f"{len(lacks):,} questions, {sum(lacks):,} without an answer")
        if all(lacks):
            raise InputError("no question of the training data has an answer", hint="each needs 'answers'")
        if options.unanswerable is None:
            options = replace(options, unanswerable=any(lacks))
        return start.recipe.model_copy(update={"objectives": (options,)})

    def tokens(self, recipe: Recipe, sources: Sequence[Any], tokenizer: Tokenizer, work: Work = QUIET) -> MarkedTokens:
        return tokenized(sources, recipe, tokenizer, work)

    def report(
        self, recipe: Recipe, samples: MarkedTokens, scores: Sequence[np.ndarray], *, intervals: bool
    ) -> dict[str, Any]:
        return answer_report(samples.rows, scores, options_of(recipe))

    def baselines(self, recipe: Recipe, train: MarkedTokens, valid: MarkedTokens) -> Baselines:
        return {}

    def row_of(self, given: GivenExample) -> LabelledRow:
        given.require("text", may="text2", reader=self.description)
        return QuestionRow(given.text or "", given.text2 or "", None, "--text")

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
