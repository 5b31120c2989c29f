"""Labelled texts and pairs of texts: classes, several labels per example, or a score.

`Labelled.evaluate` and the lines of its report serve images as well (`tformer.tasks.images`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tformer.data.look import MOST_LABELS, Look, line_on_labels, look_at
from tformer.data.shards.corpus import Example
from tformer.data.shards.labelled_tokens import LabelledTokens, groups_of, labels_of, tokenize_labelled
from tformer.data.sources.folds import fold_numbers
from tformer.data.sources.labelled import (
    LabelIndex,
    LabelledSource,
    collect_labels,
    duplicate_keys,
    hold_out,
    matching_names,
    open_labelled,
    require_same_texts,
)
from tformer.data.sources.tables import LabelledRow
from tformer.evaluation.classifier import Classifier, GivenRows, plain_objective
from tformer.evaluation.mistakes import write_mistakes
from tformer.evaluation.options import EvaluationDataOptions, EvaluationOptions
from tformer.evaluation.predict import predict_scores
from tformer.evaluation.predictions import write_predictions
from tformer.evaluation.reports import VALIDATION_METRICS, label_kind_of, report_lines, report_of
from tformer.evaluation.scored import FILE, Scored, Thresholds, choose_thresholds, curves_of, decided_labels
from tformer.loading import Loaded, decoder_tokens_of
from tformer.metrics.thresholds import parse_rule
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.data_defaults import MAX_SURVEYED, Survey, TextSurvey, words_of
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Data, SourceSpec
from tformer.support.errors import InputError
from tformer.support.files import require_writable
from tformer.support.formatting import listed
from tformer.tasks.base import (
    ChosenData,
    GivenExample,
    HeldOut,
    RowKeys,
    Task,
    Tokenizers,
    TrainingData,
    TrainingSets,
    choose_data,
    note_rows,
    positions_of,
    require_finite_loss,
)
from tformer.tasks.baselines import baselines_of_checkpoint, constant_baselines, constant_of
from tformer.tasks.text import TEXT_OPTIONS
from tformer.tasks.tokenizers import Texts, obtain_tokenizer, text_context
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

LONG_SHARE = 0.95


@dataclass(frozen=True)
class LabelledHeldOut(HeldOut):
    """Held-out labelled examples, measured by their report."""

    def measure(self, model: Any, work: Work) -> dict[str, Any]:
        """The report without intervals and tables; {} when interrupted."""
        head = self.recipe.objectives[0].objective.head.kind
        scores = predict_scores(model, self.samples, self.objective.collate, head=head, work=work)
        if work.should_stop():
            return {}
        labels = np.asarray(self.samples.labels)
        scored = Scored(label_kind_of(self.recipe), self.recipe.data.labels, labels, scores)
        report = report_of(scored, intervals=False)
        return {name: report[name] for name in VALIDATION_METRICS if name in report}


@dataclass(frozen=True)
class Parts:
    """Numbers of the examples that are trained on, validated on, and in the fold that is left out.

    Without cross-validation there are no folds. A training with separate validation data validates on those alone.
    """

    train: np.ndarray
    valid: np.ndarray
    fold: np.ndarray

    @classmethod
    def of(cls, labels: np.ndarray, data: Data, *, name: str, rows: Sequence[LabelledRow] | None) -> Parts:
        """Take out the fold, then a share of every label, or the last examples, for validation.

        rows: of texts (None: of images), of which those of a group are in one part, without groups near duplicates.
        """
        groups = keys = None
        if rows is not None and (groups := groups_of(rows)) is None:
            found = duplicate_keys((row.text, row.text2) for row in rows)
            keys = found if len(np.unique(found)) < len(found) else None
        rest, fold = np.arange(len(labels)), np.zeros(0, dtype=np.int64)
        if data.folds is not None:
            together, unit = (keys, "different texts") if groups is None else (groups, "groups")
            fold_N = fold_numbers(labels, folds=data.folds, name=name, groups=together, unit=unit)
            left_out = fold_N == data.fold - 1
            rest, fold = np.flatnonzero(~left_out), np.flatnonzero(left_out)
        if data.valid:
            return cls(rest, np.zeros(0, dtype=np.int64), fold)
        if groups is not None:
            parts = min(max(2, round(1 / data.valid_fraction)), len(np.unique(groups[rest])))
            is_valid = fold_numbers(labels[rest], folds=parts, name=name, groups=groups[rest]) == 0
            if is_valid.all():  # one group
                hint = "give more groups, or a separate validation file (--valid)"
                raise InputError(f"{name}: all examples are of one group: none is left to train on", hint=hint)
            return cls(rest[~is_valid], rest[is_valid], fold)
        own = None if keys is None else keys[rest]
        kept, held_out = hold_out(labels[rest], fraction=data.valid_fraction, how=data.valid_split, name=name, keys=own)
        return cls(rest[kept], rest[held_out], fold)


def split_labelled(sets: Sequence[Any], data: Data) -> tuple[Sequence[Any], Sequence[Any]]:
    """(training part, held-out part) of labelled texts or images. Texts that occur more than once are on one side."""
    [samples] = sets
    parts = Parts.of(samples.labels, data, name=samples.name, rows=samples.rows)
    train = samples if len(parts.train) == len(samples) else samples.subset(parts.train)
    return [train], [] if data.valid else [samples.subset(parts.valid)]


def note_missing(recipe: Recipe, train: np.ndarray, valid: np.ndarray, work: Work) -> None:
    """Warn of classes that only one of training and validation has, and of scores that all lie beyond the others.

    train, valid: the labels of each: int [N], bool [N, L], or scores (float [N]).
    """
    data, found = recipe.data, list[str]()
    if np.issubdtype(train.dtype, np.floating):
        if valid.min() > train.max() or valid.max() < train.min():
            ranges = [f"{each.min():.4g} to {each.max():.4g}" for each in (valid, train)]
            found.append(f"validation has the scores {ranges[0]}, training {ranges[1]}")
    else:
        ours, theirs = (np.flatnonzero(each.any(0) if each.ndim == 2 else np.bincount(each)) for each in (train, valid))
        for part, missing in (("validation", np.setdiff1d(ours, theirs)), ("training", np.setdiff1d(theirs, ours))):
            if len(missing):
                found.append(f"{part} has no {listed([data.labels[number] for number in missing], MOST_LABELS)}")
    if found:
        is_last = data.valid_split == "last" and not data.valid
        fix = "--set data.valid_split=stratified holds out a share of every label"
        fix = fix if is_last else "give more examples, or other validation data with --valid"
        work.note(f"caution: {'; '.join(found)} ({fix})")


def require_its_classes(recipe: Recipe, names: Sequence[str]) -> None:
    """Raise InputError for a best_metric of two classes where there are others."""
    if recipe.training.best_metric == "f1_binary" and len(names) != 2:
        raise InputError(
            f"training.best_metric: f1_binary is the F1 of one of two classes, found {len(names)}: "
            f"{listed(names, MOST_LABELS)}",
            hint="--best-metric f1_macro is the mean over all classes",
        )


def labels_note(recipe: Recipe, names: Sequence[str], look: Look | None) -> str:
    """A note: the labels in order with their shares, and the class of `f1_binary`."""
    is_binary = label_kind_of(recipe) == "classes" and len(names) == 2
    second = f"; f1_binary is the F1 of '{names[1]}'" if is_binary else ""
    return line_on_labels(names, None if look is None else look.figures["labels"]) + second


def labelled_training(recipe: Recipe, train: Any, valid: Any, context: ObjectiveContext, work: Work) -> TrainingData:
    """The data of a training on labelled texts or images."""
    kind, names = label_kind_of(recipe), recipe.data.labels
    note_missing(recipe, train.labels, valid.labels, work)
    return TrainingData(
        samples=train,
        validate=LabelledHeldOut(valid.name, valid, build_objective(recipe.objectives, context), recipe).validate,
        context=context,
        fingerprint=hashlib.sha256(f"{train.fingerprint} {valid.fingerprint}".encode()).hexdigest(),
        tokens_per_sample=recipe.seq_len,
        valid_tokens=positions_of(valid, recipe.seq_len),
        baselines=lambda _: constant_baselines(kind, names, train.labels, valid.labels),
        first_try=("evaluate", "--mistakes", "mistakes.tsv"),
    )


class Labelled(Task):
    """Labelled texts and pairs of texts."""

    description = "a model of labelled examples"
    options = TEXT_OPTIONS | {"text2_column", "label_column", "mistakes", "predictions", "threshold"}
    tokenizer_texts = "labelled"
    row_keys: ClassVar[RowKeys] = (("text", "label"), ("text", "text2", "label"))

    def open(self, specs: Sequence[SourceSpec], data: Data | ChosenData, recipe: Recipe) -> Sequence[Any]:
        """Errors: a file without labels."""
        return open_sources(recipe, specs, data)

    def settled(self, sets: TrainingSets) -> TrainingSets:
        """The recipe with labels and columns, and validation sources that know the labels. Errors: one class only."""
        recipe, kind, first = sets.recipe, label_kind_of(sets.recipe), sets.sources[0]
        require_same_texts((source.name, source.has_text2) for source in sets.all_sources)
        told_apart = first.has_text2 and recipe.model.embedding.token_types > 1
        if getattr(recipe.objectives[0], "swap_pairs", False) and not told_apart:
            raise InputError(
                "objectives.0.swap_pairs: needs pairs of texts and a model that distinguishes them "
                "(embedding.token_types: 2)"
            )
        data, names = recipe.data, () if kind == "score" else recipe.data.labels
        if kind != "score":
            if not names:  # labels that a checkpoint or the teacher has too keep their names, and so their head
                names = collect_labels(
                    (row.label or "" for source in sets.sources for row in source.rows()),
                    multi=kind == "labels",
                    separator=data.label_separator,
                )
                known = sets.start.weights or sets.start.teacher
                names = names if known is None else matching_names(known.recipe.data.labels, names)
            require_its_classes(recipe, names)
        found = {"text": first.text_column, "text2": first.text2_column, "label": first.label_column}
        resolved = data.model_copy(update={"labels": names, "columns": data.columns.model_copy(update=found)})
        sets = sets.with_recipe(recipe.model_copy(update={"data": resolved}))
        return replace(sets, valid_sources=[source.checked(index_of(sets.recipe)) for source in sets.valid_sources])

    def obtain_tokenizers(self, sets: TrainingSets) -> Tokenizers:
        texts = tokenizer_texts(sets.sources, sets.recipe.data, index_of(sets.recipe))
        return obtain_tokenizer(sets.start, sets.work, texts), None

    def tokenize(self, sets: TrainingSets, sources: Sequence[Any], *, validation: bool) -> Sequence[Any]:
        """Errors: an unknown label."""
        return [_tokenize(sets.recipe, sources, sets.tokenizer, index_of(sets.recipe), sets.work)]

    def hold_out(self, parts: Sequence[Any], data: Data) -> tuple[Sequence[Any], Sequence[Any]]:
        return split_labelled(parts, data)

    def assembled(self, sets: TrainingSets) -> TrainingData:
        recipe, [rows], [valid], [whole] = sets.recipe, sets.train, sets.valid, sets.whole
        data, kind, work = recipe.data, label_kind_of(recipe), sets.work
        if not data.train:
            work.note("no --data: telling apart which package of Python's library a text is from (python-packages)")
        work.note(f"data: {len(rows):,} training examples, {len(valid):,} validation examples")
        look = None
        if sets.start.resumed is None:
            look = look_at(
                whole.rows,
                whole.lengths,
                unit="tokens",
                valid=valid.rows if sets.valid_sources else None,
                separator=data.label_separator if kind == "labels" else None,
                has_classes=kind != "score",
            )
        if kind != "score":
            work.note(labels_note(recipe, data.labels, look))
        for line in () if look is None else look.lines:
            work.note(line)
        counts = np.bincount(rows.labels, minlength=len(data.labels)) if kind == "classes" else None
        found = labelled_training(recipe, rows, valid, _context(recipe, sets.tokenizer, counts), work)
        return replace(found, label_mean=float(np.mean(rows.labels)) if kind == "score" else None)

    def survey(self, recipe: Recipe) -> Survey | None:
        data = recipe.data
        sources = open_sources(recipe, data.train, data)
        rows = islice((row for source in sources for row in source.rows()), MAX_SURVEYED)
        words = [words_of(row.text) + words_of(row.text2 or "") for row in rows]
        return TextSurvey(
            len(words), float(np.mean(words)), int(np.quantile(words, LONG_SHARE)), with_pairs=sources[0].has_text2
        )

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """A text or a pair of texts in its template, without a label."""
        is_trained_on_pairs = recipe.data.columns.text2 is not None
        given.require("text", *(["text2"] if is_trained_on_pairs else []), may="text2", reader=self.description)
        tokenizer, _ = tokenizers
        assert tokenizer is not None
        context = _context(recipe, tokenizer, np.ones(len(recipe.data.labels)))
        return labelled_sample(recipe, tokenizer, given), context

    def read(self, loaded: Loaded, data: ChosenData, work: Work) -> tuple[Any, str]:
        """The examples of an evaluation, and their name."""
        recipe = loaded.recipe
        sources = open_sources(recipe, data.specs, data, grouped=data.held_out)
        work.note_all(*sources)
        index = index_of(recipe)
        sources = [source.checked(index) for source in sources]
        note_rows(sources, work)
        trained_on_pairs = recipe.data.columns.text2 is not None
        for source in sources:
            if not loaded.imported and source.has_text2 != trained_on_pairs:
                found, trained = ("two texts", "single texts") if source.has_text2 else ("one text", "pairs of texts")
                raise InputError(
                    f"{source.name} has {found} a row, {loaded.path} was trained on {trained}",
                    hint="name the columns with --text-column and --text2-column",
                )
        tokens = _tokenize(recipe, sources, loaded.text_tokenizer, index, work)
        work.note_all(tokens)
        return chosen_part(tokens, data, recipe)

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        samples, name = self.read(loaded, data, work)
        return LabelledHeldOut(name, samples, plain_objective(loaded), loaded.recipe)

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """The report of the model's kind of labels on every example, and the file of mistakes if wanted."""
        classifier = Classifier(loaded, batch_size=options.batch_size, views=options.views, work=work)
        samples, name = self.read(loaded, data, work)
        if not len(samples):
            raise InputError(f"{name}: no examples to evaluate")
        rule, judged = options.threshold, samples
        if rule is not None:
            decided_labels(classifier.kind, classifier.labels)
            require_writable(loaded.path / FILE, option="--threshold")
            if (data.given is not None or loaded.recipe.data.folds) and parse_rule(rule)[0]:
                judged = self.read(loaded, _validation_data(loaded, rule), work)[0]
        began = time.perf_counter()
        with work.part(f"evaluating {name}", unit="examples") as part:
            scored = classifier.scored(samples, part)
        work.raise_if_stopped("before every example was read")
        seconds = time.perf_counter() - began
        if rule is not None:
            deciding = scored if judged is samples else classifier.scored(judged)
            work.raise_if_stopped("before every example was read")
            classifier.thresholds = _store_thresholds(rule, deciding, loaded.path, work)
            if judged is samples and parse_rule(rule)[0]:
                work.note("it is the best for these very examples: --data FILE measures it on others")
        scored = replace(scored, thresholds=classifier.thresholds)
        report = report_of(scored)
        require_finite_loss(report["loss"])
        if options.plot is not None and self.has_curves(loaded.recipe):
            report["curves"] = curves_of(scored)
        scores = baselines_of_checkpoint(loaded.path).get("constant", {}).get("scores")
        report["baseline"] = constant_of(scored.kind, scored.names, scores, scored.labels)
        if options.mistakes is not None and work.worker.leads:
            written = write_mistakes(options.mistakes, scored, samples)
            work.note(f"{options.mistakes}: {written:,} examples")
        if options.predictions is not None and work.worker.leads:
            write_predictions(options.predictions, classifier, samples, scored.scores)
        return {"data": name, **report, "examples_per_second": len(samples) / seconds}

    def has_curves(self, recipe: Recipe) -> bool:
        return label_kind_of(recipe) != "score"

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """The metrics, a table of the classes and the confusion matrix."""
        return report_lines(report)


def _validation_data(loaded: Loaded, rule: str) -> ChosenData:
    """The run's own validation data. Raises InputError where there is none to choose a threshold on."""
    try:
        return choose_data(loaded, EvaluationDataOptions(), validation=True)
    except InputError as error:
        reason = f"--threshold {rule} is chosen on the validation data of the run: {error.message}"
        raise InputError(reason, hint="give a number, for example --threshold 0.3") from None


def _store_thresholds(rule: str, scored: Scored, checkpoint: Path, work: Work) -> Thresholds:
    """The thresholds of a rule on these examples, which the leader stores with the checkpoint."""
    chosen, kept = choose_thresholds(rule, scored)
    if kept:
        work.note(f"no threshold gives {rule} on the validation data, 0.5 is kept: {listed(kept, MOST_LABELS)}")
    if work.worker.leads:
        work.note(f"{chosen.save(checkpoint)}: {chosen.describe()}, from now on used by evaluate and classify")
    return chosen


def _context(recipe: Recipe, tokenizer: Tokenizer, label_counts: np.ndarray | None) -> ObjectiveContext:
    target = None if recipe.model.decoder is None else decoder_tokens_of(recipe, tokenizer)
    return text_context(recipe, tokenizer, label_counts=label_counts, target=target)


def labelled_sample(recipe: Recipe, tokenizer: Tokenizer, given: GivenExample) -> Example:
    """The given text, or pair of texts, in its template, cut as in training."""
    tokens = tokenize_labelled(
        [GivenRows([LabelledRow(given.text or "", given.text2, None, "--text")])],
        tokenizer,
        seq_len=recipe.seq_len,
        index=None,
        truncation=recipe.data.truncation,
        token_types=recipe.model.embedding.token_types > 1,
    )
    [sample] = tokens.examples(0, [0])
    return sample


def chosen_part(samples: Any, data: ChosenData, recipe: Recipe) -> tuple[Any, str]:
    """The examples to evaluate (the held-out part of the run's training data, else all) and their name."""
    if not data.held_out:
        return samples, samples.name
    own = recipe.data
    parts = Parts.of(samples.labels, own, name=samples.name, rows=samples.rows)
    if own.folds is None or data.validation:
        return samples.subset(parts.valid), f"{own.valid_fraction:.0%} of {samples.name}, held out"
    return samples.subset(parts.fold), f"fold {own.fold} of {own.folds} of {samples.name}, left out"


def open_sources(
    recipe: Recipe, specs: Sequence[SourceSpec], data: Data | ChosenData, *, grouped: bool = True
) -> list[LabelledSource]:
    """The sources of these specs. grouped: also read the column of groups, for data that is divided."""
    columns = data.columns if grouped else data.columns.model_copy(update={"group": None})
    kind, separator = label_kind_of(recipe), recipe.data.label_separator
    labels: dict[str, Any] = {"numeric_label": kind == "score", "multi_label": kind == "labels", "separator": separator}
    return open_labelled(specs, columns=columns, reading=data.reading, **labels)


def tokenizer_texts(sources: Sequence[LabelledSource], data: Data, index: LabelIndex | None) -> Texts:
    """Training texts of the tokenizer, without the held-out part."""

    def read() -> Iterator[str]:
        rows: Iterable[LabelledRow] = (row for source in sources for row in source.rows())
        if (data.folds or not data.valid) and (all_rows := list(rows)):
            labels = labels_of(all_rows, index, numeric=index is None)
            assert labels is not None
            kept = Parts.of(labels, data, name=all_rows[0].place, rows=all_rows).train
            rows = [all_rows[number] for number in kept.tolist()]
        for row in rows:
            yield row.text
            if row.text2 is not None:
                yield row.text2

    held_out = "" if data.valid else f" without {data.valid_fraction:g} {data.valid_split} {index}"
    held_out += f" without fold {data.fold} of {data.folds} {index}" if data.folds else ""
    return Texts.of(sources, read, part=f"labelled{held_out}")


def index_of(recipe: Recipe) -> LabelIndex | None:
    """The labels of a recipe by number; None for scores."""
    kind, data = label_kind_of(recipe), recipe.data
    return None if kind == "score" else LabelIndex(data.labels, multi=kind == "labels", separator=data.label_separator)


def _tokenize(
    recipe: Recipe, sources: Sequence[LabelledSource], tokenizer: Tokenizer, index: LabelIndex | None, work: Work
) -> LabelledTokens:
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    with work.part(f"tokenizing {name}", unit="characters") as part:
        return tokenize_labelled(
            sources,
            tokenizer,
            seq_len=recipe.seq_len,
            index=index,
            numeric=index is None,
            truncation=recipe.data.truncation,
            token_types=recipe.model.embedding.token_types > 1,
            work=part,
        )
