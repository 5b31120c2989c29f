"""Labelled texts and pairs of texts: classes, several labels per example, or a score.

`Labelled.evaluate` and the lines of its report serve images as well (`tformer.tasks.images`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from tformer.data.look import Look, look_at, shares_of
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
)
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import LabelledRow
from tformer.evaluation.classifier import Classifier, GivenRows, plain_objective
from tformer.evaluation.mistakes import write_mistakes
from tformer.evaluation.options import DataOptions, EvaluationOptions
from tformer.evaluation.predict import predict_scores
from tformer.evaluation.predictions import write_predictions
from tformer.evaluation.reports import REPORTS, VALIDATION_METRICS, curves_of, label_kind_of, report_lines
from tformer.evaluation.thresholds import FILE, Thresholds, choose_thresholds, decided_labels
from tformer.loading import Loaded, decoder_tokens_of
from tformer.metrics.thresholds import parse_rule
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.data_defaults import MAX_SURVEYED, Survey, TextSurvey, words_of
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Columns, Data, SourceSpec
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
    TrainingStart,
    bad_row_lines,
    choose_data,
    note_bad_rows,
    positions_of,
    require_finite_loss,
    share_of_training,
)
from tformer.tasks.baselines import baselines_of_checkpoint, constant_baselines, constant_of
from tformer.tasks.text import TEXT_OPTIONS
from tformer.tasks.tokenizers import Texts, obtain_tokenizer, text_context
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

MAX_LISTED_LABELS = 20
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
        make_report, labels = REPORTS[label_kind_of(self.recipe)], np.asarray(self.samples.labels)
        report = make_report(labels, scores, self.recipe.data.labels, intervals=False)
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
    def of(
        cls,
        labels: np.ndarray,
        data: Data,
        *,
        name: str,
        keys: np.ndarray | None = None,
        groups: np.ndarray | None = None,
    ) -> Parts:
        """Of every label a share is validated on, or the last examples are, after the fold was taken out.

        groups: named by the user; examples of a group are in one part. Without them, those with equal keys are.
        """
        has_twins = keys is not None and len(np.unique(keys)) < len(keys)
        together = keys if groups is None and has_twins else groups
        rest, fold = np.arange(len(labels)), np.zeros(0, dtype=np.int64)
        if data.folds is not None:
            left_out = fold_numbers(labels, folds=data.folds, name=name, groups=together) == data.fold - 1
            rest, fold = np.flatnonzero(~left_out), np.flatnonzero(left_out)
        if data.valid:
            return cls(rest, np.zeros(0, dtype=np.int64), fold)
        if groups is not None:
            parts = min(max(2, round(1 / data.valid_fraction)), len(np.unique(groups[rest])))
            is_valid = fold_numbers(labels[rest], folds=parts, name=name, groups=groups[rest]) == 0
            return cls(rest[~is_valid], rest[is_valid], fold)
        kept, held_out = hold_out(
            labels[rest],
            fraction=data.valid_fraction,
            how=data.valid_split,
            name=name,
            keys=None if keys is None else keys[rest],
        )
        return cls(rest[kept], rest[held_out], fold)

    @classmethod
    def of_samples(cls, samples: Any, data: Data) -> Parts:
        """Of labelled texts, of which near duplicates are on one side, or of images."""
        keys = duplicate_keys(samples.rows) if isinstance(samples, LabelledTokens) else None
        return cls.of(samples.labels, data, name=samples.name, keys=keys, groups=samples.groups)


def split_labelled(samples: Any, data: Data) -> tuple[Any, Any]:
    """(training part, held-out part) of labelled texts or images. Texts that occur more than once are on one side."""
    parts = Parts.of_samples(samples, data)
    train = samples if len(parts.train) == len(samples) else samples.subset(parts.train)
    return train, samples.subset(parts.valid)


def require_its_classes(recipe: Recipe, names: Sequence[str]) -> None:
    """Raise InputError for a best_metric of two classes where there are others."""
    if recipe.training.best_metric == "f1_binary" and len(names) != 2:
        raise InputError(
            f"training.best_metric: f1_binary is the F1 of one of two classes, found {len(names)}: "
            f"{listed(names, MAX_LISTED_LABELS)}",
            hint="--best-metric f1_macro is the mean over all classes",
        )


def labels_note(recipe: Recipe, names: Sequence[str], look: Look | None = None) -> str:
    """The labels in their order, with their shares, and of which of two classes F1 is."""
    text = f"labels ({len(names)}): {listed(names, MAX_LISTED_LABELS)}"
    if look is not None:
        text = f"{text} ({shares_of(look.labels, names, most=MAX_LISTED_LABELS)})"
    return (
        f"{text}; f1_binary is the F1 of '{names[1]}'"
        if label_kind_of(recipe) == "classes" and len(names) == 2
        else text
    )


class Labelled(Task):
    """Labelled texts and pairs of texts."""

    description = "a model of labelled examples"
    options = TEXT_OPTIONS | {"text2_column", "label_column", "mistakes", "predictions", "threshold"}
    tokenizer_texts = "labelled"
    row_keys: ClassVar[RowKeys] = (("text", "label"), ("text", "text2", "label"))

    def training_data(self, start: TrainingStart, work: Work) -> TrainingData:
        """Read and tokenize the rows. Errors: a file without labels, an unknown label, one class only."""
        recipe = start.recipe
        data, options = recipe.data, recipe.objectives[0]
        sources = open_sources(recipe, data.train, data.columns, data.reading)
        valid_sources = open_sources(recipe, data.valid, _ungrouped(data.columns), data.reading) if data.valid else []
        with_pairs = _reads_pairs([*sources, *valid_sources])
        if getattr(options, "swap_pairs", False) and not (with_pairs and recipe.model.embedding.token_types > 1):
            raise InputError(
                "objectives.0.swap_pairs: needs pairs of texts and a model that distinguishes them "
                "(embedding.token_types: 2)"
            )
        index = None
        if label_kind_of(recipe) != "score":
            names = data.labels
            if not names:  # labels that a checkpoint or the teacher has too keep their names, and so their head
                names = collect_labels(
                    (row.label or "" for source in sources for row in source.rows()),
                    multi=label_kind_of(recipe) == "labels",
                    separator=data.label_separator,
                )
                known = start.weights or start.teacher
                names = names if known is None else matching_names(known.recipe.data.labels, names)
            index = _index(recipe, names)
            require_its_classes(recipe, names)
        tokenizer = obtain_tokenizer(start, work, _tokenizer_texts(sources, data, index))
        rows = _tokenize(recipe, sources, tokenizer, index, work)
        whole = rows
        rows, valid = split_labelled(rows, data)
        if valid_sources:
            valid_sources = [source.checked(index) for source in valid_sources]
            valid = _tokenize(recipe, valid_sources, tokenizer, index, work)
        rows = share_of_training(rows, recipe)
        first, labels = sources[0], () if index is None else index.names
        columns = data.columns.model_copy(
            update={
                "text": first.text_column,
                "text2": first.text2_column if with_pairs else None,
                "label": first.label_column,
            }
        )
        resolved = recipe.data.model_copy(update={"labels": labels, "columns": columns})
        recipe = recipe.model_copy(update={"data": resolved})
        work.note_all(*sources, *valid_sources, rows, valid)
        if not data.train:
            work.note("no --data: telling apart which package of Python's library a text is from (python-packages)")
        work.note(f"data: {len(rows):,} training examples, {len(valid):,} validation examples")
        note_bad_rows([*sources, *valid_sources], work)
        look = None
        if start.resumed is None:
            kind = label_kind_of(recipe)
            look = look_at(
                whole.rows,
                whole.lengths,
                unit="tokens",
                valid=valid.rows if valid_sources else None,
                separator=data.label_separator if kind == "labels" else None,
                has_classes=kind != "score",
            )
        if index is not None:
            work.note(labels_note(recipe, index.names, look))
        for line in () if look is None else look.lines():
            work.note(line)
        assert rows.labels is not None
        counts = (
            np.bincount(rows.labels, minlength=len(index.names))
            if index and label_kind_of(recipe) == "classes"
            else None
        )
        context = text_context(
            recipe,
            tokenizer,
            label_counts=counts,
            target=None if recipe.model.decoder is None else decoder_tokens_of(recipe, tokenizer),
        )
        held_out = LabelledHeldOut(valid.name, valid, build_objective(recipe.objectives, context), recipe)
        return TrainingData(
            recipe=recipe,
            tokenizer=tokenizer,
            samples=rows,
            validate=held_out.validate,
            context=context,
            fingerprint=hashlib.sha256(f"{rows.fingerprint} {valid.fingerprint}".encode()).hexdigest()
            + "".join(source.samples() for source in (*sources, *valid_sources)),
            label_mean=float(np.mean(rows.labels)) if index is None else None,
            tokens_per_sample=recipe.seq_len,
            valid_tokens=positions_of(valid, recipe.seq_len),
            baselines=lambda _: constant_baselines(label_kind_of(recipe), labels, rows.labels, valid.labels),
            first_try=("evaluate", "--mistakes", "mistakes.tsv"),
            bad_rows=partial(bad_row_lines, [*sources, *valid_sources]) if data.reading.drops else None,
        )

    def survey(self, recipe: Recipe) -> Survey | None:
        data = recipe.data
        sources = open_sources(recipe, data.train, data.columns, data.reading)
        rows = islice((row for source in sources for row in source.rows()), MAX_SURVEYED)
        words = [words_of(row.text) + words_of(row.text2 or "") for row in rows]
        return TextSurvey(
            len(words), float(np.mean(words)), int(np.quantile(words, LONG_SHARE)), with_pairs=sources[0].has_text2
        )

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """A text or a pair of texts in its template, without a label."""
        given.require(needs="text", may="text2", reader=self.description)
        if recipe.data.columns.text2 is not None and given.text2 is None:
            raise InputError("--text: this model is trained on pairs of texts", hint="give the second with --text2")
        tokenizer, _ = tokenizers
        assert tokenizer is not None
        context = text_context(
            recipe,
            tokenizer,
            label_counts=np.ones(len(recipe.data.labels)),
            target=None if recipe.model.decoder is None else decoder_tokens_of(recipe, tokenizer),
        )
        return labelled_sample(recipe, tokenizer, given), context

    def read(self, loaded: Loaded, data: ChosenData, work: Work) -> tuple[Any, str]:
        """The examples of an evaluation, and their name."""
        recipe = loaded.recipe
        columns = data.columns if data.held_out else _ungrouped(data.columns)
        sources = open_sources(recipe, data.specs, columns, data.reading)
        work.note_all(*sources)
        index = None if label_kind_of(recipe) == "score" else _index(recipe, recipe.data.labels)
        sources = [source.checked(index) for source in sources]
        note_bad_rows(sources, work)
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
            scores_NL = classifier.scores(samples, part)
        work.raise_if_stopped("before every example was read")
        seconds = time.perf_counter() - began
        if rule is not None:
            judged_NL = scores_NL if judged is samples else classifier.scores(judged)
            work.raise_if_stopped("before every example was read")
            classifier.thresholds = _store_thresholds(rule, classifier, judged.labels, judged_NL, work)
            if judged is samples and parse_rule(rule)[0]:
                work.note("it is the best for these very examples: --data FILE measures it on others")
        thresholds = {} if classifier.thresholds is None else {"thresholds": classifier.thresholds}
        report = REPORTS[classifier.kind](samples.labels, scores_NL, classifier.labels, **thresholds)
        report |= {name: asdict(stored) for name, stored in thresholds.items()}
        require_finite_loss(report["loss"])
        if options.plot is not None and self.has_curves(loaded.recipe):
            values_NL = classifier.probabilities(scores_NL)
            report["curves"] = curves_of(classifier.kind, np.asarray(samples.labels), values_NL, classifier.labels)
        scores = baselines_of_checkpoint(loaded.path).get("constant", {}).get("scores")
        report["baseline"] = constant_of(classifier.kind, classifier.labels, scores, samples.labels)
        if options.mistakes is not None and work.worker.leads:
            written = write_mistakes(options.mistakes, classifier, samples, scores_NL)
            work.note(f"{options.mistakes}: {written:,} examples")
        if options.predictions is not None and work.worker.leads:
            write_predictions(options.predictions, classifier, samples, scores_NL)
        return {"data": name, **report, "examples_per_second": len(samples) / seconds}

    def has_curves(self, recipe: Recipe) -> bool:
        return label_kind_of(recipe) != "score"

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """The metrics, a table of the classes and the confusion matrix."""
        return report_lines(report)


def _validation_data(loaded: Loaded, rule: str) -> ChosenData:
    """The run's own validation data. Raises InputError where there is none to choose a threshold on."""
    try:
        return choose_data(loaded, DataOptions(), validation=True)
    except InputError as error:
        reason = f"--threshold {rule} is chosen on the validation data of the run: {error.message}"
        raise InputError(reason, hint="give a number, for example --threshold 0.3") from None


def _store_thresholds(
    rule: str, classifier: Classifier, labels: np.ndarray, scores_NL: np.ndarray, work: Work
) -> Thresholds:
    """The thresholds of a rule on these examples, which the leader stores with the checkpoint."""
    values_NL = classifier.probabilities(scores_NL)
    chosen, kept = choose_thresholds(rule, classifier.kind, classifier.labels, labels, values_NL)
    if kept:
        work.note(f"no threshold gives {rule} on the validation data, 0.5 is kept: {listed(kept, MAX_LISTED_LABELS)}")
    if work.worker.leads:
        work.note(f"{chosen.save(classifier.path)}: {chosen.describe()}, from now on used by evaluate and classify")
    return chosen


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
    """The held-out part where the run's training data was read, and what the examples are called."""
    if not data.held_out:
        return samples, samples.name
    own, parts = recipe.data, Parts.of_samples(samples, recipe.data)
    if own.folds is None or data.validation:
        return samples.subset(parts.valid), f"{own.valid_fraction:.0%} of {samples.name}, held out"
    return samples.subset(parts.fold), f"fold {own.fold} of {own.folds} of {samples.name}, left out"


def _ungrouped(columns: Columns) -> Columns:
    """The columns of data that are not divided."""
    return columns.model_copy(update={"group": None})


def open_sources(
    recipe: Recipe, specs: Sequence[SourceSpec], columns: Columns, reading: Reading
) -> list[LabelledSource]:
    """The labelled sources of these specs, read as the recipe's objective needs them."""
    return open_labelled(
        specs,
        columns=columns,
        reading=reading,
        needs_label=True,
        numeric_label=label_kind_of(recipe) == "score",
        multi_label=label_kind_of(recipe) == "labels",
        separator=recipe.data.label_separator,
    )


def _tokenizer_texts(sources: Sequence[LabelledSource], data: Data, index: LabelIndex | None) -> Texts:
    """Training texts of the tokenizer, without the held-out part."""

    def read() -> Iterator[str]:
        rows: Iterable[LabelledRow] = (row for source in sources for row in source.rows())
        if (data.folds or not data.valid) and (all_rows := list(rows)):
            labels = labels_of(all_rows, index, numeric=index is None)
            assert labels is not None
            keys, groups = duplicate_keys(all_rows), groups_of(all_rows)
            kept = Parts.of(labels, data, name=all_rows[0].place, keys=keys, groups=groups).train
            rows = [all_rows[number] for number in kept.tolist()]
        for row in rows:
            yield row.text
            if row.text2 is not None:
                yield row.text2

    held_out = "" if data.valid else f" without {data.valid_fraction:g} {data.valid_split} {index}"
    held_out += f" without fold {data.fold} of {data.folds} {index}" if data.folds else ""
    return Texts.of(sources, read, part=f"labelled{held_out}")


def _reads_pairs(sources: Sequence[LabelledSource]) -> bool:
    """Whether the rows are pairs of texts. Raises InputError when only some are."""
    found = {source.has_text2 for source in sources}
    if len(found) > 1:
        pair = next(source.name for source in sources if source.has_text2)
        single = next(source.name for source in sources if not source.has_text2)
        raise InputError(
            f"{single} has one text a row, {pair} has two",
            hint="name the columns with --text-column and --text2-column",
        )
    return found.pop()


def _index(recipe: Recipe, names: tuple[str, ...]) -> LabelIndex:
    return LabelIndex(names, multi=label_kind_of(recipe) == "labels", separator=recipe.data.label_separator)


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
