"""Texts with a label for each token: `Tagged`, sentences of words with tags; also the base of `Questions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from tformer.data.shards.labelled_tokens import labels_of
from tformer.data.shards.marked_tokens import UNMARKED, MarkedTokens
from tformer.data.sources.labelled import LabelIndex, LabelledSource, collect_labels, matching_names
from tformer.data.sources.tables import LabelledRow, TaggedRow
from tformer.evaluation.classifier import GivenRows, labelled_head, plain_objective
from tformer.evaluation.options import EvaluationOptions
from tformer.evaluation.reports import VALIDATION_METRICS, report_lines
from tformer.evaluation.spans import marked_scores
from tformer.loading import Loaded
from tformer.metrics.tags import OUTSIDE, entities, scheme_of
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.data_defaults import Survey, TagSurvey
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Data, SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.base import (
    Baselines,
    ChosenData,
    GivenExample,
    HeldOut,
    RowKeys,
    Task,
    Tokenizers,
    TrainingData,
    TrainingSets,
    TrainingStart,
    note_rows,
    positions_of,
    require_finite_loss,
)
from tformer.tasks.baselines import baselines_on_own_data, constant_baselines
from tformer.tasks.labelled import Parts, note_missing, tokenizer_texts
from tformer.tasks.tags.rows import open_tagged
from tformer.tasks.tags.words import tag_report, tokenize_tagged, words_of
from tformer.tasks.tokenizers import obtain_tokenizer, text_context
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work

SCHEMES = {"bio": "BIO", "bilou": "BILOU", "plain": "plain tags"}


@dataclass(frozen=True)
class MarkedHeldOut(HeldOut):
    """Held-out examples, measured by their task's report."""

    task: Any = None

    def measure(self, model: Any, work: Work) -> dict[str, Any]:
        """The report without intervals and tables; {} when interrupted."""
        report = self.report(model, work, intervals=False)
        return {name: report[name] for name in (*VALIDATION_METRICS, "exact_match", "f1") if name in report}

    def report(self, model: Any, work: Work, *, intervals: bool = True) -> dict[str, Any]:
        """The metrics of all examples; {} when interrupted."""
        head, samples = labelled_head(self.recipe)[0], getattr(self.samples, "chosen", self.samples)
        given: dict[str, Any] = {"head": head, "batch_size": self.batch_size, "work": work}
        scores = marked_scores(model, samples, self.objective.collate, **given)
        return {} if work.should_stop() else self.task.report(self.recipe, samples, scores, intervals=intervals)


class Tagged(Task):
    """Sentences of words with tags."""

    description = "a model of tagged words"
    options = frozenset({"text_column", "label_column", "invalid_utf8", "encoding", "seq_len"})
    tokenizer_texts = "tagged"
    row_keys: ClassVar[RowKeys] = (("words", "tags"),)

    def open(self, specs: Sequence[SourceSpec], data: Data | ChosenData, recipe: Recipe) -> Sequence[Any]:
        return open_tagged(specs, columns=data.columns, reading=data.reading)

    def named(self, start: TrainingStart, rows: Iterator[Any], work: Work) -> Recipe:
        """The recipe with the names of the tags; a checkpoint's tags keep their order, and so their head."""
        data, examples = start.recipe.data, list(rows)
        names = data.labels
        if not names:
            names = collect_labels(tag for row in examples for tag in row.tags)
            known = start.weights or start.teacher
            names = names if known is None else matching_names(known.recipe.data.labels, names)
        scheme = scheme_of(names)
        work.note(f"{SCHEMES[scheme]}: {', '.join(names)}")
        if scheme == "bilou" and (broken := sum(map(words_of_no_entity, examples))):
            work.note(f"{broken:,} tagged words count as no entity: in BILOU one of several words ends with L- (or E-)")
        if not data.train:
            work.note("no --data: telling what each word of Python's library is, in its code (python-tokens)")
        return start.recipe.model_copy(update={"data": data.model_copy(update={"labels": names})})

    def tokens(self, recipe: Recipe, sources: Sequence[Any], tokenizer: Tokenizer, work: Work = QUIET) -> MarkedTokens:
        """The examples of these sources. Raises InputError for a tag without a name."""
        return tokenize_tagged(sources, LabelIndex(recipe.data.labels), tokenizer, seq_len=recipe.seq_len, work=work)

    def report(
        self, recipe: Recipe, samples: MarkedTokens, scores: Sequence[np.ndarray], *, intervals: bool
    ) -> dict[str, Any]:
        """The metrics of all examples."""
        rows: Any = samples.rows
        return tag_report(rows, scores, recipe.data.labels, intervals=intervals)

    def baselines(self, recipe: Recipe, train: MarkedTokens, valid: MarkedTokens) -> Baselines:
        """The most frequent tag for every word."""
        found = constant_baselines("classes", recipe.data.labels, _tags_of(train), _tags_of(valid))["constant"]
        return {"constant": {name: found[name] for name in ("guess", "scores", "loss", "accuracy")}}

    def row_of(self, given: GivenExample) -> LabelledRow:
        """A given example, without labels."""
        given.require("text", reader=self.description)
        return words_of(given.text or "", "--text")

    def survey(self, recipe: Recipe) -> Survey | None:
        return TagSurvey(sum(1 for source in self.open(recipe.data.train, recipe.data, recipe) for _ in source.rows()))

    def first_try(self, row: LabelledRow) -> tuple[str, ...]:
        """Options of `classify` for an example."""
        return ("--text", row.text)

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """The metrics, and a table of the types where there are some."""
        return report_lines(report)

    # What follows is the same for all texts with labels of tokens.

    def prepared(self, recipe: Recipe) -> Recipe:
        share = recipe.data.subword_sampling
        if share:
            raise InputError(f"data.subword_sampling: found {share:g}, expected 0 with labelled words")
        return recipe

    def settled(self, sets: TrainingSets) -> TrainingSets:
        rows = (row for source in sets.sources for row in source.rows())
        return sets.with_recipe(self.named(sets.start, rows, sets.work))

    def obtain_tokenizers(self, sets: TrainingSets) -> Tokenizers:
        return obtain_tokenizer(sets.start, sets.work, tokenizer_texts(sets.sources, sets.recipe.data, None)), None

    def tokenized(self, sets: TrainingSets) -> TrainingSets:
        """The examples of rows that were divided before. Errors: an unknown tag, one tag only."""
        kept, held_out = divided(sets.sources, sets.recipe.data)
        train, valid = (
            self._tokenized(sets.recipe, sources, sets.tokenizer, sets.work)
            for sources in ([kept], sets.valid_sources or [held_out])
        )
        return replace(sets, train=[train], valid=[valid])

    def assembled(self, sets: TrainingSets) -> TrainingData:
        recipe, [train], [valid], work = sets.recipe, sets.train, sets.valid, sets.work
        work.note(f"data: {len(train):,} training examples, {len(valid):,} validation examples")
        if recipe.data.labels:
            note_missing(recipe, _tags_of(train), _tags_of(valid), work)
        context = text_context(recipe, sets.tokenizer)
        objective = build_objective(recipe.objectives, context)
        return TrainingData(
            samples=train,
            validate=MarkedHeldOut(valid.name, valid, objective, recipe, task=self).validate,
            context=context,
            fingerprint=" ".join(each.fingerprint for each in (train, valid)),
            tokens_per_sample=recipe.seq_len,
            valid_tokens=positions_of(valid, recipe.seq_len),
            baselines=lambda _: self.baselines(recipe, train, valid),
            first_try=("classify", *self.first_try(valid.rows[0])),
        )

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        tokenizer, _ = tokenizers
        assert tokenizer is not None
        sample = self.tokens(recipe, [GivenRows([self.row_of(given)], "--text")], tokenizer).examples(0, [0])[0]
        return replace(sample, label=None), text_context(recipe, tokenizer)

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> MarkedHeldOut:
        sources, own = self.open(data.specs, data, loaded.recipe), loaded.recipe.data
        read = [divided(sources, own)[1]] if data.held_out else sources
        samples = self._tokenized(loaded.recipe, read, loaded.text_tokenizer, work)
        work.note_all(*sources, samples)
        note_rows(sources, work)
        name = f"{own.valid_fraction:.0%} of {samples.name}, held out" if data.held_out else samples.name
        return MarkedHeldOut(name, samples, plain_objective(loaded), loaded.recipe, task=self)

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """The report on every example."""
        held_out = replace(self.held_out(loaded, data, work), batch_size=options.batch_size)
        began = time.perf_counter()
        with work.part(f"evaluating {held_out.name}", unit="examples") as part:
            report = held_out.report(loaded.model, part)
        work.raise_if_stopped("before every example was read")
        require_finite_loss(report["loss"])
        seconds = time.perf_counter() - began
        report["baseline"] = baselines_on_own_data(loaded, data)
        return {"data": held_out.name, **report, "examples_per_second": report["examples"] / seconds}

    def _tokenized(self, recipe: Recipe, sources: Sequence[Any], tokenizer: Tokenizer, work: Work) -> MarkedTokens:
        with work.part(f"tokenizing {sources[0].name}", unit="characters") as part:
            return self.tokens(recipe, sources, tokenizer, part)


def _tags_of(samples: MarkedTokens) -> np.ndarray:
    """int64 [number of words]: the tags."""
    rows: Any = samples.rows
    marks = np.concatenate([row.marks for row in rows])
    return marks[marks != UNMARKED]


def words_of_no_entity(row: TaggedRow) -> int:
    """The number of words in a sentence of BILOU that are tagged but in no whole entity, as in one of BIO."""
    whole = sum(end - first for _, first, end in entities(row.tags, "bilou"))
    return sum(tag != OUTSIDE for tag in row.tags) - whole


def divided(sources: Sequence[LabelledSource], data: Data) -> tuple[GivenRows, GivenRows]:
    """(rows to train on, held-out rows), divided before they are tokenized: windows of a question stay together."""
    rows: list[Any] = [row for source in sources for row in source.rows()]
    name, key = sources[0].name, " ".join(source.fingerprint() for source in sources)
    labels = labels_of(rows, None, numeric=True)
    assert labels is not None
    parts = Parts.of(labels, data, name=name, rows=rows)
    kept, held_out = ([rows[number] for number in part.tolist()] for part in (parts.train, parts.valid))
    return GivenRows(kept, name, f"{key} {len(kept)}"), GivenRows(held_out, name, f"{key} {len(held_out)}")
