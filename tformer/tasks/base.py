"""The interface of a task: everything about one kind of data, for training, evaluation and pruning alike.

A task opens, tokenizes and splits the data of a run, makes the context of its objective, validates during training and
writes the full evaluation report. As the same methods read the data for every command, they agree on what is held out.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tformer.checkpoint.read import Checkpoint
from tformer.data.batching.mixture import Samples
from tformer.data.permutation import spread_evenly
from tformer.data.shards.array_files import ArrayFile
from tformer.data.sources.columns import numbers_rows, parse_column
from tformer.data.sources.files import Source
from tformer.data.sources.reading import BadRows, Reading
from tformer.decoding.prompts import task_prefix
from tformer.evaluation.options import EvaluationDataOptions, EvaluationOptions
from tformer.evaluation.predict import tally_objective
from tformer.loading import Loaded
from tformer.metrics import lower_is_better
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.recipe.data_defaults import Survey
from tformer.recipe.places import moved, require_there
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Columns, Data, SourceSpec
from tformer.support.errors import InputError, NotFiniteError
from tformer.support.files import STANDARD_INPUT
from tformer.support.formatting import listed, plural
from tformer.tokenizer import Tokenizer
from tformer.workers.work import ShouldStop, Work

COLUMNS = ("text", "text2", "label", "source", "target")
"""Roles of columns that an evaluation can name; the option of each is --ROLE-column."""

COUNTED_ROWS, SHOWN_KEYS = 100_000, 10
"""Rows in which keys that are not used are counted; of these keys in a message."""

RowKeys = tuple[tuple[str, ...], ...]

Tokenizers = tuple[Tokenizer | None, Tokenizer | None]
"""(tokenizer of the source or of both sides, tokenizer of the target if it has its own). (None, None): images."""

WriteSample = Callable[[Any, ShouldStop], str | None]
"""(model, should_stop) -> a sample of the model's output as text; None when interrupted."""


Validate = Callable[[Any, Objective, Work, float], dict[str, Any]]
"""(model, objective, work, share) -> metrics of a validation on this share of the held-out data, evenly spread.

`loss` is among them. They have no meaning once work.should_stop().
"""


Baselines = dict[str, dict[str, Any]]
"""What guesses that cost nothing score, see `tformer.tasks.baselines`."""


@dataclass(frozen=True, kw_only=True)
class TrainingStart:
    """What a task needs to know of a training.

    Attributes:
        resumed: checkpoint of the run that is continued.
        weights: checkpoint whose weights a new run starts from.
        tokenizer_file: tokenizer.json of a resumed run that has no checkpoint yet.
        teacher: distillation teacher.
        dry_run: nothing is trained, and a sequence teacher translates nothing.
    """

    recipe: Recipe
    tokenizer_file: Path | None = None
    resumed: Checkpoint | None = None
    weights: Checkpoint | None = None
    teacher: Loaded | None = None
    dry_run: bool = False

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that the tokenizer comes from."""
        return self.resumed or self.weights


@dataclass(frozen=True)
class TrainingData:
    """Samples to train on, and the validation.

    Attributes:
        tokenizer: None for images.
        samples: to train on; `packed` when all are windows of one length, which `samples.windows` cuts at once.
        validate: measures a model on the held-out part.
        valid_tokens: positions of which a whole validation computes the forward pass; those of decoding count as more.
        context: of the objective.
        fingerprint: of all data that is trained and validated on.
        target_tokenizer: of the target side, where it has its own vocabulary.
        label_mean: mean of the training scores, the initial bias of a regression head.
        sample: writes sample output of the model; None: no samples.
        tokens_per_sample: largest number of positions that the model computes for one sample.
        files: token files that the samples are read from, to be checked while the model is trained.
        baselines: measures, by the training's objective, what a guess without a model scores on the held-out part.
        first_try: a command that shows what the trained model does, and its options after the run.
        bad_rows: rows that were left out, as lines of jsonl; None: none were.
    """

    samples: Samples
    validate: Validate
    context: ObjectiveContext
    fingerprint: str
    tokenizer: Tokenizer | None = None
    packed: bool = False
    label_mean: float | None = None
    target_tokenizer: Tokenizer | None = None
    sample: WriteSample | None = None
    tokens_per_sample: int = 1
    valid_tokens: float = 0.0
    files: tuple[ArrayFile, ...] = ()
    baselines: Callable[[Objective], Baselines] = lambda _: {}
    first_try: tuple[str, ...] = ("inspect",)
    bad_rows: Callable[[], Iterator[bytes]] | None = None


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples and the objective that measures a model on them.

    Attributes:
        name: what the samples are, for messages.
        batch_size: samples per batch; None: as many as fit by length.
    """

    name: str
    samples: Any
    objective: Objective
    recipe: Recipe
    batch_size: int | None = None

    def measure(self, model: Any, work: Work) -> dict[str, Any]:
        """Loss and metrics of a validation; without meaning once work.should_stop()."""
        return tally_objective(
            model, self.objective, self.samples, batch_size=self.batch_size, seed=self.recipe.seed, work=work
        ).metrics()

    def validate(self, model: Any, objective: Objective, work: Work, share: float = 1.0) -> dict[str, Any]:
        """`measure` by the objective of a training, which may have a generator beside the model."""
        samples = self.samples if share == 1.0 else EvenlySpread(self.samples, share_of(len(self.samples), share))
        with work.part("validating", total=len(samples), unit="examples") as part:
            return replace(self, objective=objective, samples=samples).measure(model, part)

    def metric(self, metrics: dict[str, float]) -> str:
        """The name of the metric that `score` compares: the run's best_metric where it was measured."""
        name = self.recipe.training.best_metric
        return name if name in metrics else "loss"

    def score(self, metrics: dict[str, float]) -> tuple[float, float]:
        """(metric, loss) of a model, signed so that lower is better."""
        name = self.metric(metrics)
        return lower_is_better(name, metrics[name]), metrics["loss"]


def share_of(count: int, share: float) -> int:
    """The number of examples that a share of them has, at least one."""
    return max(1, round(share * count))


def positions_of(samples: Any, each: int) -> float:
    """Positions that a model computes for all samples; each: of one sample, where they have one length."""
    return float(len(samples) * each if samples.lengths is None else samples.lengths.sum())


class EvenlySpread:
    """About `count` samples, evenly spread over all; windows of a text are kept together."""

    def __init__(self, samples: Any, count: int) -> None:
        self._samples = samples
        self._indices, texts = spread_evenly(len(samples), count), getattr(samples, "text_numbers", None)
        if texts is not None and len(texts):
            total = int(texts.max()) + 1
            chosen = spread_evenly(total, max(1, round(count * total / len(texts))))
            self._indices = np.flatnonzero(np.isin(texts, chosen))
        self.seq_len: int = samples.seq_len
        self.lengths: np.ndarray | None = None if samples.lengths is None else samples.lengths[self._indices]

    @property
    def labels(self) -> np.ndarray:
        return np.asarray(self._samples.labels)[self._indices]

    @property
    def chosen(self) -> Any:
        """The chosen samples, as a part of all."""
        return self._samples.subset(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> Sequence[Any]:
        """The chosen samples with these numbers."""
        found: Sequence[Any] = self._samples.examples(epoch, self._indices[np.asarray(indices, dtype=np.int64)])
        return found


@dataclass(frozen=True)
class ChosenData:
    """The data that an evaluation reads, and how.

    Attributes:
        columns: of the run, under those given on the command line.
        given: columns given on the command line for data that was named there; None: the run's own data is read.
        held_out: whether this is the training data of a run without validation data, of which only the held-out part is
            evaluated; of cross-validation the fold that was left out.
        validation: of cross-validation, the part that chose the best checkpoint in place of the fold.
    """

    specs: tuple[SourceSpec, ...]
    columns: Columns
    given: Columns | None
    reading: Reading
    held_out: bool
    validation: bool = False


NO_DATA = ChosenData((), Columns(), None, Reading(), held_out=False)
"""Of a task that names its data itself."""


def named_columns(options: Any) -> Columns:
    """The columns that the options --ROLE-column name."""
    return Columns(**{role: parse_column(getattr(options, f"{role}_column")) for role in COLUMNS})


def choose_data(loaded: Loaded, options: EvaluationDataOptions, *, validation: bool = False) -> ChosenData:
    """The data that was named, else the run's validation data, else the held-out part of its training data.

    Of a run of cross-validation it is the fold that was left out, with `validation` its validation data all the same.
    Raises InputError for an imported model, which has no data, a run that was trained on standard input, and a prefix
    that would change which pairs are held out.
    """
    data, named = loaded.recipe.data, options.data is not None or options.source is not None
    given = named_columns(options)
    updates = {name: column for name in COLUMNS if (column := getattr(given, name)) is not None}
    columns = data.columns.model_copy(update=updates)
    own = Reading() if named else data.reading
    reading = Reading(
        options.invalid_utf8 or own.errors,
        options.encoding or own.encoding,
        options.delimiter or own.delimiter,
        options.bad_rows or own.bad_rows,
        options.quotes or own.quotes,
    )
    prefix, _ = task_prefix(loaded.recipe, options.prefix)
    if named:
        path = options.data or options.source
        assert path is not None
        spec = SourceSpec(path=path, target_path=options.target, prefix=prefix)
        return ChosenData((spec,), columns, given, reading, held_out=False)
    if loaded.imported:
        raise InputError(
            f"{loaded.path} was imported: it has no training data",
            hint="name what to evaluate on with --data, or --source and --target",
        )
    left_out = data.folds is not None and not validation
    specs = data.train if left_out else data.valid or data.train
    if options.data_folder is not None:
        specs = moved(specs, options.data_folder)
    require_there(specs, loaded.path, "--data-folder names the folder in which it is now")
    if any(spec.path == STANDARD_INPUT for spec in specs):
        raise InputError(
            f"{loaded.path} was trained on standard input, which cannot be read again",
            hint="name what to evaluate on with --data",
        )
    held_out = left_out or not data.valid
    prefixed = []
    for spec in specs:
        chosen = prefix if options.prefix is not None else spec.prefix or prefix
        if chosen != spec.prefix and held_out:
            raise InputError(
                f"--prefix '{chosen}' would change which pairs of {spec.path} are held out: they were split with the "
                f"prefix '{spec.prefix}'",
                hint="name what to evaluate on with --data or --source",
            )
        prefixed.append(spec.model_copy(update={"prefix": chosen}))
    return ChosenData(tuple(prefixed), columns, None, reading, held_out, validation)


@dataclass(frozen=True)
class GivenExample:
    """One example of training, given on the command line."""

    text: str | None = None
    text2: str | None = None
    target: str | None = None
    image: Path | None = None

    def require(self, *needs: str, may: str | None = None, reader: str) -> None:
        """Raise InputError unless the parts `needs` are there, and no others but `may`. reader: what reads them."""
        given = [part for part in ("text", "text2", "target", "image") if getattr(self, part) is not None]
        for part in given:
            if part not in (*needs, may):
                options = " and ".join(f"--{name}" for name in (*needs, may) if name)
                raise InputError(f"--{part}: not read by {reader}", hint=f"its examples are given by {options}")
        for part in needs:
            if part not in given:
                raise InputError(
                    f"--{given[0] if given else part}: --{part} is missing", hint=f"it is read by {reader}"
                )


@dataclass(frozen=True)
class TrainingSets:
    """What a training reads, replaced stage by stage: its recipe, sources, tokenizers and sets of examples.

    Attributes:
        start: with the recipe as far as it is known.
        valid_sources: () where some of the training data is held out.
        train, valid: one set of examples, or one for each source.
        whole: the training sources' before some was held out.
    """

    start: TrainingStart
    work: Work
    sources: Sequence[Any] = ()
    valid_sources: Sequence[Any] = ()
    tokenizers: Tokenizers = (None, None)
    train: Sequence[Any] = ()
    valid: Sequence[Any] = ()
    whole: Sequence[Any] = ()

    @property
    def recipe(self) -> Recipe:
        return self.start.recipe

    @property
    def all_sources(self) -> list[Any]:
        return [*self.sources, *self.valid_sources]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of texts: of the source, or of both sides."""
        tokenizer, _ = self.tokenizers
        assert tokenizer is not None
        return tokenizer

    def with_recipe(self, recipe: Recipe) -> TrainingSets:
        return replace(self, start=replace(self.start, recipe=recipe))


class Task(ABC):
    """One kind of data. `training_data` reads it by the hooks that stand behind it, in their order.

    Attributes:
        description: of its models, for error messages.
        options: names of the fields of `EvaluationOptions` that it accepts.
        tokenizer_texts: equal for tasks that train a tokenizer on the same texts.
        row_keys: keys of the values of a row that is given as a tuple, one entry for each number of values; (): the
            data are not rows.
    """

    description: ClassVar[str]
    options: ClassVar[frozenset[str]]
    tokenizer_texts: ClassVar[str]
    row_keys: ClassVar[RowKeys] = ()

    def training_data(self, start: TrainingStart, work: Work) -> tuple[Recipe, TrainingData]:
        """Read the data of a training, and hold out a part of it where the recipe names no validation data.

        Returns the recipe with the values that follow from the data, such as labels and columns, and the data.
        """
        recipe = self.prepared(start.recipe)
        data = recipe.data
        ungrouped = data.model_copy(update={"columns": data.columns.model_copy(update={"group": None})})
        valid_sources = self.open(data.valid, ungrouped, recipe) if data.valid else ()
        sets = TrainingSets(replace(start, recipe=recipe), work, self.open(data.train, data, recipe), valid_sources)
        sets = self.settled(sets)
        sets = replace(sets, tokenizers=self.obtain_tokenizers(sets))
        sets = self.tokenized(sets.with_recipe(self.fitted(sets)))
        sets = replace(sets, train=self.chosen(sets))
        work.note_all(*sets.all_sources, *sets.train, *sets.valid)
        note_rows(sets.all_sources, work)
        found, (tokenizer, target_tokenizer) = self.assembled(sets), sets.tokenizers
        return sets.recipe, replace(
            found,
            tokenizer=tokenizer,
            target_tokenizer=target_tokenizer,
            fingerprint=found.fingerprint + "".join(source.samples() for source in sets.all_sources),
            bad_rows=partial(bad_row_lines, sets.all_sources) if data.reading.drops else None,
        )

    def prepared(self, recipe: Recipe) -> Recipe:
        """The recipe before any data is read. Errors: settings that this kind of data does not have."""
        return recipe

    def open(self, specs: Sequence[SourceSpec], data: Data | ChosenData, recipe: Recipe) -> Sequence[Any]:
        """The sources of a training or an evaluation; without any specs the built-in one. Errors: there is none."""
        raise NotImplementedError

    def settled(self, sets: TrainingSets) -> TrainingSets:
        """With the recipe that follows from the rows, such as labels."""
        return sets

    def obtain_tokenizers(self, sets: TrainingSets) -> Tokenizers:
        """The tokenizers of the training; new ones are trained on its sources."""
        raise NotImplementedError

    def fitted(self, sets: TrainingSets) -> Recipe:
        """The recipe that follows from the tokenizers. Errors: tokenizers that do not fit it."""
        return sets.recipe

    def tokenized(self, sets: TrainingSets) -> TrainingSets:
        """With the examples of all sources, of which some are held out where there is no validation data."""
        whole = self.tokenize(sets, sets.sources, validation=False)
        valid = self.tokenize(sets, sets.valid_sources, validation=True) if sets.valid_sources else []
        train, held_out = self.hold_out(whole, sets.recipe.data)
        return replace(sets, train=train, valid=valid or held_out, whole=whole)

    def tokenize(self, sets: TrainingSets, sources: Sequence[Any], *, validation: bool) -> Sequence[Any]:
        """The examples of the training or of the validation sources."""
        raise NotImplementedError

    def hold_out(self, parts: Sequence[Any], data: Data) -> tuple[Sequence[Any], Sequence[Any]]:
        """(training part, held-out part) of the training data. With validation data nothing is held out for that."""
        return (parts, []) if data.valid else hold_out(parts, data)

    def chosen(self, sets: TrainingSets) -> Sequence[Any]:
        """The examples to train on: the share `data.fraction` of them."""
        return [share_of_training(each, sets.recipe) for each in sets.train]

    def assembled(self, sets: TrainingSets) -> TrainingData:
        """The data of the training, with notes. `training_data` adds tokenizers, samples of files and bad rows."""
        raise NotImplementedError

    def survey(self, recipe: Recipe) -> Survey | None:
        """Number and length of the training examples, for defaults that follow them; None: there are none.

        Raises InputError for data that cannot be read.
        """
        return None

    @abstractmethod
    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """A given example as training reads it, for `Objective.collate`, with the context of the objective.

        Raises InputError for parts that this task does not read, and for texts that are too long.
        """

    @abstractmethod
    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        """The chosen data as samples with the objective that measures the model on them."""

    @abstractmethod
    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """Metrics of the full evaluation report."""

    def has_curves(self, recipe: Recipe) -> bool:
        """Whether `evaluate` draws precision-recall and calibration curves of the model."""
        return False

    @abstractmethod
    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """The report as lines of text."""


def note_rows(sources: Sequence[Source], work: Work) -> None:
    """Say how many rows of each source were left out, and why, and which keys and columns were not used."""
    for source in sources:
        parts = (part for part in source.parts if hasattr(part, "records"))
        rows = chain.from_iterable(part.records() for part in parts)
        unused = Counter(
            key
            for record, used in islice(rows, COUNTED_ROWS)
            for key, value in record.items()
            if value not in (None, "") and key not in used and not numbers_rows(key)
        )
        if unused:
            named = listed([f"'{key}' ({plural(count, 'row')})" for key, count in unused.most_common()], SHOWN_KEYS)
            first = "" if next(rows, None) is None else f" in the first {COUNTED_ROWS:,} rows"
            work.note(f"{source.name}: not used{first}: {named}")
        if (bad := BadRows(source.bad_rows())).total:
            work.note(f"{source.name}: {bad.total:,} rows left out: {bad}")


def bad_row_lines(sources: Sequence[Source]) -> Iterator[bytes]:
    """The rows that were left out, as lines of jsonl: place, reason, and what was read."""
    for source in sources:
        for place, raw, error in source.bad_rows():
            found = {"place": place, "reason": error.message.removeprefix(f"{place}: "), "row": raw}
            yield json.dumps(found, ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n"


def hold_out(parts: Sequence[Any], data: Data) -> tuple[list[Any], list[Any]]:
    """(training parts, held-out parts): every set of texts or pairs is split by `data.valid_fraction`."""
    cuts = [part.split(fraction=data.valid_fraction) for part in parts]
    return [train for train, _ in cuts], [valid for _, valid in cuts]


def share_of_training(part: Any, recipe: Recipe) -> Any:
    """The share `data.fraction` of a training set, by the recipe's seed: a smaller one is a part of a larger one.

    Tokenizer and labels are those of the whole set, so that trainings on different shares can be compared.
    """
    fraction = recipe.data.fraction
    return part if fraction == 1 else part.share(fraction=fraction, seed=recipe.seed)


def require_finite_loss(loss: float) -> None:
    """Raise NotFiniteError (exit code 4) for a loss that is no number."""
    if not math.isfinite(loss):
        raise NotFiniteError(f"the loss is {loss}", hint="the weights are damaged, or --precision fp32 is needed")
