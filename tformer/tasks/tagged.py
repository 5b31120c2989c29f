"""Texts with a label for each token: `Tagged`, sentences of words with tags; its subclass in `questions.py`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from tformer.data.shards.labelled_tokens import LabelledTokens
from tformer.data.shards.marked_tokens import tokenize_tagged
from tformer.data.sources.labelled import LabelIndex, LabelledSource, collect_labels, matching_names
from tformer.data.sources.tables import LabelledRow, TaggedRow
from tformer.data.sources.tagged import open_tagged
from tformer.evaluation.classifier import labelled_head, plain_objective
from tformer.evaluation.options import EvaluationOptions
from tformer.evaluation.reports import VALIDATION_METRICS, report_lines
from tformer.evaluation.spans import WORDS, marked_scores, reader_of, tag_report
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
        given: dict[str, Any] = {"head": labelled_head(self.recipe)[0], "batch_size": self.batch_size, "work": work}
        samples = getattr(self.samples, "chosen", self.samples)
        scores = marked_scores(model, samples, self.objective.collate, **given)
        if work.should_stop():
            return {}
        report = self.task.report(self.recipe, samples, scores, intervals=False)
        return {name: report[name] for name in (*VALIDATION_METRICS, "exact_match", "f1") if name in report}


class Tagged(Task):
    """Sentences of words with tags."""

    description = "a model of tagged words"
    options = frozenset({"text_column", "label_column", "invalid_utf8", "encoding", "seq_len"})
    tokenizer_texts = "tagged"
    row_keys: ClassVar[RowKeys] = (("words", "tags"),)
    example_is: ClassVar[str] = "sentences"

    def open(self, specs: Any, data: Any) -> list[LabelledSource]:
        """The sources of these specs."""
        return open_tagged(specs, columns=data.columns, reading=data.reading)

    def rows(self, sources: Sequence[LabelledSource]) -> list[Any]:
        """All sentences; tags of IOB1 as BIO."""
        rows: list[Any] = [row for source in sources for row in source.rows()]
        if scheme_of({tag for row in rows for tag in row.tags}) != "bio":
            return rows
        return [replace(row, tags=as_bio(row.tags)) for row in rows]

    def settled(self, start: TrainingStart, rows: Sequence[Any], work: Work) -> Recipe:
        """The recipe with the names of the tags; those of a checkpoint keep their order, and so their head."""
        data = start.recipe.data
        names = data.labels
        if not names:
            names = collect_labels(tag for row in rows for tag in row.tags)
            known = start.weights or start.teacher
            names = names if known is None else matching_names(known.recipe.data.labels, names)
        work.note(f"{SCHEMES[scheme_of(names)]}: {', '.join(names)}")
        if not data.train:
            work.note("no --data: telling what each word of Python's library is, in its code (python-tokens)")
        return start.recipe.model_copy(update={"data": data.model_copy(update={"labels": names})})

    def tokens(self, recipe: Recipe, rows: Sequence[Any], tokenizer: Tokenizer, **facts: Any) -> LabelledTokens:
        """The examples of these rows. Raises InputError for a tag without a name."""
        return tokenize_tagged(rows, LabelIndex(recipe.data.labels), tokenizer, seq_len=recipe.seq_len, **facts)

    def report(
        self, recipe: Recipe, samples: LabelledTokens, scores: Sequence[np.ndarray], *, intervals: bool = True
    ) -> dict[str, Any]:
        """The metrics of all examples."""
        rows: Any = samples.rows
        return tag_report(rows, scores, recipe.data.labels, intervals=intervals)

    def sample(self, recipe: Recipe, tokenizer: Tokenizer, given: GivenExample) -> LabelledTokens:
        """A given example, without labels."""
        given.require(needs="text", reader=self.description)
        row = TaggedRow.of(WORDS.findall(given.text or ""), (), "--text")
        return tokenize_tagged([row], None, tokenizer, seq_len=recipe.seq_len, name="--text")

    def survey(self, recipe: Recipe) -> Survey | None:
        return TagSurvey(sum(1 for source in self.open(recipe.data.train, recipe.data) for _ in source.rows()))

    def first_try(self, row: LabelledRow) -> tuple[str, ...]:
        """Options of `classify` for an example."""
        return ("--text", row.text)

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """The metrics, and a table of the types where there are some."""
        return report_lines(report)

    # What follows is the same for all texts with labels of tokens.

    def training_data(self, start: TrainingStart, work: Work) -> TrainingData:
        """Read and tokenize the data. Errors: what cannot be read, an unknown tag, one tag only."""
        data = start.recipe.data
        if data.subword_sampling:
            raise InputError(f"data.subword_sampling: found {data.subword_sampling:g}, expected 0 with labelled words")
        sources, valid_sources = self.open(data.train, data), self.open(data.valid, data) if data.valid else []
        rows = self.rows(sources)
        recipe = self.settled(start, rows, work)
        kept, held_out = _divided(rows, data, _name(sources))

        def texts() -> Iterator[str]:
            return iter(dict.fromkeys(text for row in kept for text in (row.text, row.text2) if text is not None))

        part = self.tokenizer_texts + ("" if data.valid else f" without {data.valid_fraction:g} {data.valid_split}")
        tokenizer = obtain_tokenizer(start, work, Texts.of(sources, texts, part=part))
        train = self._tokenized(recipe, sources, kept, tokenizer, work)
        held_out = self.rows(valid_sources) if valid_sources else held_out
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
        return replace(sample, label=None), text_context(recipe, tokenizer)

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        samples, name = self._read(loaded, data, work)
        return MarkedHeldOut(name, samples, plain_objective(loaded), loaded.recipe, task=self)

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """The report on every example."""
        reader = reader_of(loaded)(loaded, batch_size=options.batch_size, work=work)
        samples, name = self._read(loaded, data, work)
        began = time.perf_counter()
        with work.part(f"evaluating {name}", unit="examples") as part:
            scores: Any = reader.scores(samples, part)
        work.raise_if_stopped("before every example was read")
        seconds = time.perf_counter() - began
        report = self.report(loaded.recipe, samples, scores)
        require_finite_loss(report["loss"])
        return {"data": name, **report, "examples_per_second": len(samples) / seconds}

    def _read(self, loaded: Loaded, data: ChosenData, work: Work) -> tuple[LabelledTokens, str]:
        """The examples of an evaluation, and their name."""
        sources, own = self.open(data.specs, data), loaded.recipe.data
        rows, name = self.rows(sources), _name(sources)
        if data.held_out:
            rows, name = _divided(rows, own, name)[1], f"{own.valid_fraction:.0%} of {name}, held out"
        tokens = self._tokenized(loaded.recipe, sources, rows, loaded.text_tokenizer, work)
        work.note_all(*sources, tokens)
        return tokens, name

    def _tokenized(
        self, recipe: Recipe, sources: Sequence[LabelledSource], rows: Sequence[Any], tokenizer: Tokenizer, work: Work
    ) -> LabelledTokens:
        name, key = _name(sources), f"{[source.fingerprint() for source in sources]} {len(rows)}"
        with work.part(f"tokenizing {name}", unit="characters") as part:
            return self.tokens(recipe, rows, tokenizer, name=name, fingerprint=key, work=part)


def _name(sources: Sequence[LabelledSource]) -> str:
    return ", ".join(dict.fromkeys(source.name for source in sources))


def _divided(rows: Sequence[Any], data: Data, name: str) -> tuple[list[Any], list[Any]]:
    """(rows to train on, held-out rows). Raises InputError where one of them would be empty."""
    parts = Parts.of(np.zeros(len(rows), dtype=np.int64), data, name=name, rows=rows)
    if not len(parts.train):  # of one group
        hint = "give more, or a separate validation file (--valid)"
        raise InputError(f"{name}: too little to hold out a part for validation", hint=hint)
    return [rows[number] for number in parts.train.tolist()], [rows[number] for number in parts.valid.tolist()]
