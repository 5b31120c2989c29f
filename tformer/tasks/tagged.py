"""Texts with a label for each token: `Tagged`, sentences of words with tags; its subclass in `questions.py`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from tformer.data.shards.marked_tokens import UNMARKED, MarkedTokens, tokenize_tagged
from tformer.data.sources.labelled import LabelIndex, collect_labels, matching_names
from tformer.data.sources.tables import LabelledRow, TaggedRow
from tformer.data.sources.tagged import open_tagged
from tformer.evaluation.classifier import built_objective
from tformer.evaluation.options import EvaluationOptions
from tformer.evaluation.reports import VALIDATION_METRICS, report_lines
from tformer.evaluation.tagger import WORDS, Tagger, marked_scores, tag_report, word_scores
from tformer.loading import Loaded
from tformer.metrics.tags import as_bio, scheme_of
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.data_defaults import Survey, TagSurvey
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Data
from tformer.support.errors import InputError
from tformer.tasks.base import (
    ChosenData,
    GivenExample,
    HeldOut,
    RowKeys,
    Task,
    Tokenizers,
    TrainingData,
    TrainingStart,
    positions_of,
    require_finite_loss,
    share_of_training,
)
from tformer.tasks.labelled import Parts
from tformer.tasks.tokenizers import Texts, obtain_tokenizer, text_context
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

SCHEMES = {"bio": "BIO", "bilou": "BILOU", "plain": "plain tags"}


@dataclass(frozen=True)
class MarkedHeldOut(HeldOut):
    """Held-out examples, measured by their task's report."""

    task: Any = None

    def measure(self, model: Any, work: Work) -> dict[str, Any]:
        """The report without intervals and tables; {} when interrupted."""
        given: dict[str, Any] = {"head": self.task.reader.head, "batch_size": self.batch_size, "work": work}
        scores = marked_scores(model, self.samples, self.objective.collate, **given)
        if work.should_stop():
            return {}
        report = self.task.report(self.recipe, self.samples, scores, intervals=False)
        return {name: report[name] for name in (*VALIDATION_METRICS, "exact_match", "f1") if name in report}


class Tagged(Task):
    """Sentences of words with tags."""

    description = "a model of tagged words"
    options = frozenset({"text_column", "label_column", "invalid_utf8", "encoding", "seq_len"})
    tokenizer_texts = "tagged"
    row_keys: ClassVar[RowKeys] = (("words", "tags"),)
    reader: ClassVar[Any] = Tagger
    example_is: ClassVar[str] = "sentences"

    def open(self, specs: Any, data: Any) -> Sequence[Any]:
        """The sources of these specs."""
        return open_tagged(specs, columns=data.columns, reading=data.reading)

    def rows(self, sources: Sequence[Any]) -> Sequence[Any]:
        """All sentences; tags of IOB1 as BIO."""
        rows = [row for source in sources for row in source.rows()]
        if scheme_of({tag for row in rows for tag in row.tags or ()}) != "bio":
            return rows
        return [replace(row, tags=tuple(as_bio(row.tags or ()))) for row in rows]

    def settled(self, start: TrainingStart, rows: Sequence[Any], work: Work) -> Recipe:
        """The recipe with the names of the tags; those of a checkpoint keep their order, and so their head."""
        data = start.recipe.data
        names = data.labels
        if not names:
            names = collect_labels(tag for row in rows for tag in row.tags)
            names = names if start.weights is None else matching_names(start.weights.recipe.data.labels, names)
        work.note(f"{SCHEMES[scheme_of(names)]}: {', '.join(names)}")
        if not data.train:
            work.note("no --data: telling what each word of Python's library is, in its code (python-tokens)")
        return start.recipe.model_copy(update={"data": data.model_copy(update={"labels": names})})

    def tokens(self, recipe: Recipe, rows: Sequence[Any], tokenizer: Tokenizer, **facts: Any) -> MarkedTokens:
        """The examples of these rows. Raises InputError for a tag without a name."""
        index = LabelIndex(recipe.data.labels)
        tags = [index.encode_all(row.tags, [row.place] * len(row.tags)) for row in rows]
        facts["fingerprint"] += f" {index.names}"
        found = tokenize_tagged(rows, tags, tokenizer, seq_len=recipe.seq_len, **facts)
        return replace(found, notes=(*index.notes(), *found.notes))

    def report(
        self, recipe: Recipe, samples: MarkedTokens, scores: Sequence[np.ndarray], *, intervals: bool = True
    ) -> dict[str, Any]:
        """The metrics of all examples."""
        labels = [samples.detail(number).labels for number in range(len(samples))]
        return tag_report(labels, word_scores(samples, scores), recipe.data.labels, intervals=intervals)

    def sample(self, recipe: Recipe, tokenizer: Tokenizer, given: GivenExample) -> MarkedTokens:
        """A given example."""
        given.require(needs="text", reader=self.description)
        row = TaggedRow.of(WORDS.findall(given.text or ""), None, "--text")
        none = [np.full(len(row.spans), UNMARKED)]
        return tokenize_tagged([row], none, tokenizer, seq_len=recipe.seq_len, name="--text")

    def survey(self, recipe: Recipe) -> Survey | None:
        return TagSurvey(sum(1 for source in self.open(recipe.data.train, recipe.data) for _ in source.rows()))

    def first_try(self, row: LabelledRow) -> tuple[str, ...]:
        """Options of `classify` for an example."""
        return ("--text", row.text)

    # What follows is the same for all texts with labels of tokens.

    def training_data(self, start: TrainingStart, work: Work) -> TrainingData:
        """Read and tokenize the data. Errors: what cannot be read, an unknown tag, one tag only."""
        data = start.recipe.data
        if data.subword_sampling:
            raise InputError(f"data.subword_sampling: found {data.subword_sampling:g}, expected 0 with labelled words")
        sources, valid_sources = self.open(data.train, data), self.open(data.valid, data) if data.valid else []
        rows = self.rows(sources)
        recipe = self.settled(start, rows, work)
        tokenizer = obtain_tokenizer(start, work, self._texts(sources, data))
        kept, held_out = _divided(rows, data, _name(sources))
        train = self._tokenized(recipe, sources, kept, tokenizer, work)
        if valid_sources:
            held_out = self.rows(valid_sources)
        valid = self._tokenized(recipe, valid_sources or sources, held_out, tokenizer, work)
        work.note_all(*sources, *valid_sources, train, valid)
        work.note(f"data: {len(train):,} training {self.example_is}, {len(valid):,} validation {self.example_is}")
        context = text_context(recipe, tokenizer)
        objective = build_objective(recipe.objectives, context)
        fingerprint = hashlib.sha256(f"{train.fingerprint} {valid.fingerprint}".encode()).hexdigest()
        return TrainingData(
            recipe=recipe,
            tokenizer=tokenizer,
            samples=share_of_training(train, recipe),
            validate=MarkedHeldOut(valid.name, valid, objective, recipe, task=self).validate,
            context=context,
            fingerprint=fingerprint + "".join(source.samples() for source in (*sources, *valid_sources)),
            tokens_per_sample=recipe.seq_len,
            valid_tokens=positions_of(valid, recipe.seq_len),
            first_try=("classify", *self.first_try(valid.rows[0])),
        )

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        tokenizer, _ = tokenizers
        assert tokenizer is not None
        [sample] = self.sample(recipe, tokenizer, given).examples(0, [0])
        return sample, text_context(recipe, tokenizer)

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        samples, name = self._read(loaded, data, work)
        objective = built_objective(loaded, self.reader.objective())
        return MarkedHeldOut(name, samples, objective, loaded.recipe, task=self)

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """The report on every example."""
        reader = self.reader(loaded, batch_size=options.batch_size, work=work)
        samples, name = self._read(loaded, data, work)
        began = time.perf_counter()
        with work.part(f"evaluating {name}", unit="examples") as part:
            scores = reader.scores(samples, part)
        work.raise_if_stopped("before every example was read")
        seconds = time.perf_counter() - began
        report = self.report(loaded.recipe, samples, scores)
        require_finite_loss(report["loss"])
        return {"data": name, **report, "examples_per_second": len(samples) / seconds}

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """The metrics, and a table of the types where there are some."""
        return report_lines(report)

    def _read(self, loaded: Loaded, data: ChosenData, work: Work) -> tuple[MarkedTokens, str]:
        """The examples of an evaluation, and their name."""
        sources, own = self.open(data.specs, data), loaded.recipe.data
        rows, name = self.rows(sources), _name(sources)
        if data.held_out:
            rows, name = _divided(rows, own, name)[1], f"{own.valid_fraction:.0%} of {name}, held out"
        tokens = self._tokenized(loaded.recipe, sources, rows, loaded.text_tokenizer, work)
        work.note_all(*sources, tokens)
        return tokens, name

    def _tokenized(
        self, recipe: Recipe, sources: Sequence[Any], rows: Sequence[Any], tokenizer: Tokenizer, work: Work
    ) -> MarkedTokens:
        name, key = _name(sources), f"{[source.fingerprint() for source in sources]} {len(rows)}"
        with work.part(f"tokenizing {name}", unit="characters") as part:
            return self.tokens(recipe, rows, tokenizer, name=name, fingerprint=key, work=part)

    def _texts(self, sources: Sequence[Any], data: Data) -> Texts:
        """Training texts of the tokenizer, each once, without the held-out part."""

        def read() -> Iterator[str]:
            rows = [row for source in sources for row in source.rows()]
            texts = (text for row in _divided(rows, data, _name(sources))[0] for text in (row.text, row.text2))
            return iter(dict.fromkeys(text for text in texts if text is not None))

        held_out = "" if data.valid else f" without {data.valid_fraction:g} {data.valid_split}"
        return Texts.of(sources, read, part=f"{self.tokenizer_texts}{held_out}")


def _name(sources: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(source.name for source in sources))


def _divided(rows: Sequence[Any], data: Data, name: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """(rows to train on, held-out rows). Raises InputError where one of them would be empty."""
    parts = Parts.of(np.zeros(len(rows), dtype=np.int64), data, name=name, rows=rows)
    if not len(parts.train):  # of one group
        hint = "give more, or a separate validation file (--valid)"
        raise InputError(f"{name}: too little to hold out a part for validation", hint=hint)
    return [rows[number] for number in parts.train.tolist()], [rows[number] for number in parts.valid.tolist()]
