"""The Python API: a loaded run with the commands as methods, and training from paths or rows.

>>> run = tformer.load("runs/gpt-tiny-1")
>>> run.generate("Once upon a time", max_new_tokens=20, temperature=0.8).text
>>> run = tformer.train([("a good film", "positive"), ("a bad one", "negative")], arch="bert", max_steps=60)
>>> run.classify("not bad at all").label

Every method calls what its command calls, with the same defaults. Keywords are the command's flags: `max_new_tokens=20`
for `--max-new-tokens 20`. One input gives one result, a list of inputs a list.
"""

from __future__ import annotations

import copy
import json
import os
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from tformer import loading
from tformer.data.shards.caches import ROWS
from tformer.data.sources.rows import is_path, keep_rows, rows_in_messages
from tformer.data.sources.tables import table_format
from tformer.decoding.fill_mask import Candidate, fill_mask
from tformer.decoding.inference import prepare_loaded
from tformer.decoding.lines import WINDOW_BATCHES, open_texts_or_pairs, row_blocks, text_windows
from tformer.decoding.options import GenerateOptions
from tformer.decoding.settings import Generated
from tformer.decoding.translate import Translation
from tformer.decoding.writers import (
    Reach,
    Sampler,
    candidates_of_a_mask,
    fills_masks,
    load_model,
    make_writer,
    names_of_models,
    prepare_models,
    rows_to_prepare,
)
from tformer.evaluation.answers import AnswerFormat, ClassifyOptions
from tformer.evaluation.classifier import HEADS
from tformer.evaluation.embed import embed_images, embed_texts
from tformer.evaluation.options import EvaluationOptions
from tformer.evaluation.vector_options import EmbedOptions
from tformer.inside.attribution import AttributionReport
from tformer.inside.embeddings import EmbeddingReport, embedding_report
from tformer.inside.heads import HeadReport
from tformer.inside.lens import LensReport
from tformer.inside.options import (
    AttributeOptions,
    EmbeddingOptions,
    HeadOptions,
    LensOptions,
    PatchOptions,
    TokenOptions,
)
from tformer.inside.patching import AblationReport, PatchReport
from tformer.inside.tokens import TokenReport
from tformer.loading import Loaded
from tformer.support.device import default_cache_dir, resolve_device, use_one_thread_after_fork
from tformer.support.errors import Caution, InputError
from tformer.support.formatting import shortened
from tformer.support.keywords import flags_as_keywords, from_keywords, with_keywords
from tformer.support.processes import ScratchFolder, process_lock
from tformer.tasks.evaluate import HEADS as EVALUATION_HEADS
from tformer.tasks.evaluate import evaluate_loaded, evaluation_task
from tformer.tasks.readers import reader_of
from tformer.tasks.table import task_of
from tformer.tokenizer.tokenizer import require_unicode
from tformer.training.display import Console
from tformer.training.options import TrainOptions
from tformer.training.request import find_training
from tformer.training.session import run_training
from tformer.viz.evaluation import choose_plot, draw_report
from tformer.workers.work import QUIET, Work, never
from tformer.workflows.attribution import attribute_inputs
from tformer.workflows.heads import score_heads
from tformer.workflows.lens import make_report
from tformer.workflows.patching import ablate, patch_prompts
from tformer.workflows.tokens import score_tokens

if TYPE_CHECKING:
    from tformer.workflows.folds import CrossValidation

INPUTS = (str, os.PathLike, tuple)  # of a classifier: texts, images, pairs of texts
SHOWN_CHARACTERS = 60
OF_TABLES = dict.fromkeys(
    ("text_column", "text2_column", "invalid_utf8", "encoding", "delimiter", "quotes"), "texts are given as strings"
)
"""Keywords of `classify` that are for tables."""

NOT_OF_TRAIN = dict.fromkeys(("devices", "parallel", "max_restarts"), "several processes: tformer train --devices N")
NOT_OF_TRAIN |= {"folds": "tformer.cross_validate(data, folds=5)"}
NOT_OF_FOLDS = {"resume": "the same call goes on where it stopped"}


@dataclass(frozen=True)
class Answer:
    """The generated texts for one prompt or source.

    Attributes:
        prompt: as it was given.
        completions: the samples, or the results of the search, best first. Each has `text`, `ids`, `finish_reason` and
            `logprobs` (with logprobs=True) or, of a search, `score` and `logprob`.
    """

    prompt: str
    completions: tuple[Generated | Translation, ...]

    @property
    def text(self) -> str:
        """The text of the first completion, without the prompt."""
        return self.completions[0].text or ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Score:
    """The log-probability (natural logarithm) of a target, and the number of its tokens."""

    logprob: float
    tokens: int


@dataclass(frozen=True)
class Classification:
    """The label of an input, the labels above the threshold (multi-label models), the score (regressions), or spans.

    `probabilities`: of each label, the most probable first. `spans`: {start, end, text, label, probability} of each.
    """

    label: str | None = None
    labels: Sequence[str] = ()
    probabilities: Mapping[str, float] = field(default_factory=dict)
    score: float | None = None
    spans: Sequence[Mapping[str, Any]] = ()


MOST_PREPARED = 3  # for a server that writes one text and several, and embeds
_PREPARING, _LOOKING = process_lock(), process_lock()


@dataclass(repr=False)
class Run(Loaded):
    """A trained model with its tokenizer and recipe, and the commands as methods.

    `model` stays as it was loaded. Methods that generate or classify use a copy of it, prepared as the command prepares
    it (bf16 where it was trained in bf16), which is made again when the weights have changed. The last three copies
    are kept. Any number of threads may call the methods; one thread of a process prepares a copy at a time.

    Attributes:
        summary: what `tformer train --json` prints, after `tformer.train`; else empty.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    _prepared: dict[tuple[Hashable, Hashable], list[Loaded]] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:
        recipe = self.recipe
        vocabulary = "" if self.tokenizer is None else f"vocabulary {self.tokenizer.vocab_size:,}, "
        size = f"{self.model.num_parameters():,} parameters"
        return f"Run({recipe.arch}/{recipe.preset or 'custom'}, {size}, {vocabulary}step {self.step:,}, {self.path})"

    def tap_names(self) -> list[str]:
        """The names of all inner tensors that `run.model(..., taps={name, ...}).taps` returns."""
        return self.model.tap_names()

    # --- text out -----------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str = "", **options: Any) -> Answer: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[Answer]: ...
    def generate(self, prompt: str | Sequence[str] = "", **options: Any) -> Answer | list[Answer]:
        """Continue a prompt, or translate a source (`tformer generate`). The keywords are the command's flags."""
        return self._answers("generate", prompt, options)

    @overload
    def translate(self, text: str, **options: Any) -> Answer: ...
    @overload
    def translate(self, text: Sequence[str], **options: Any) -> list[Answer]: ...
    def translate(self, text: str | Sequence[str], **options: Any) -> Answer | list[Answer]:
        """The target of a source, by an encoder-decoder (`tformer generate`)."""
        if not self.model.is_encoder_decoder:
            raise InputError(
                f"{self.path} is no encoder-decoder: it cannot translate", hint="run.generate continues a text"
            )
        return self._answers("translate", text, options)

    @overload
    def fill_masks(self, text: str, **options: Any) -> list[list[Candidate]]: ...
    @overload
    def fill_masks(self, text: Sequence[str], **options: Any) -> list[list[list[Candidate]]]: ...
    def fill_masks(self, text: str | Sequence[str], **options: Any) -> Any:
        """For each [MASK] of the text the most probable tokens (`tformer generate` with a masked language model)."""
        texts, is_one = _as_list(text)
        if not fills_masks(self):
            raise InputError(f"{self.path} is no masked language model", hint="run.generate continues a text")
        require_unicode(texts)
        with flags_as_keywords():
            chosen = from_keywords(GenerateOptions, options, caller="fill_masks")
            top = candidates_of_a_mask(chosen)
            chosen.check()
            [loaded] = self._decoders(chosen)
            reach = Reach([loaded])
            filled = [
                fill_mask(loaded.model, loaded.text_tokenizer, each, top=top, on_read=reach.add) for each in texts
            ]
        _warn([*loaded.notes, *reach.notes()], stacklevel=3)
        return filled[0] if is_one else filled

    def _answers(self, caller: str, texts: str | Sequence[str], keywords: dict[str, Any]) -> Answer | list[Answer]:
        with flags_as_keywords():
            options = from_keywords(GenerateOptions, keywords, caller=caller)
            if fills_masks(self):
                raise InputError(f"{self.path} fills masks", hint='run.fill_masks("The [MASK] sat.")')
            prompts, is_one = _as_list(texts)
            require_unicode(prompts)
            if is_one:
                options = replace(options, prompt=prompts[0])
            options.check()
            models = self._decoders(options)
            writer = make_writer(options, models, on_cut=_warn_of_cut)
            found: list[Sequence[Generated | Translation]] = []
            if isinstance(writer, Sampler):
                found += writer.write(prompts)
            else:
                size = writer.batch_size * (1 if writer.reader is None else WINDOW_BATCHES)
                start = options.target_prefix
                for window in text_windows(prompts, size=size, task_prefix=writer.task_prefix, prefix=start):
                    found += writer.search(window, never)
        _warn([*(note for each in models for note in each.notes), *writer.reach.notes()], stacklevel=4)
        answers = [Answer(prompt, tuple(completions)) for prompt, completions in zip(prompts, found, strict=True)]
        return answers[0] if is_one else answers

    def _decoders(self, options: GenerateOptions) -> list[Loaded]:
        """This model, and the others of an ensemble, prepared for decoding."""
        rows = rows_to_prepare(options, self)
        languages = (options.source_language, options.target_language)
        reading = (options.special_tokens, *languages, options.ensemble)
        key = (rows, options.precision, options.quantize, options.compile, *reading)

        def prepare(own: Loaded) -> list[Loaded]:
            names = names_of_models((), options.ensemble) if options.ensemble else []
            device = next(own.model.parameters()).device
            return prepare_models([own, *(load_model(name, options, device) for name in names)], options)

        return self._ready(key, prepare)

    # --- labels, vectors, scores --------------------------------------------------------------------------------------

    @overload
    def classify(self, inputs: str | tuple[str, str] | os.PathLike[str], **options: Any) -> Classification: ...
    @overload
    def classify(self, inputs: Iterable[Any], **options: Any) -> list[Classification]: ...
    def classify(self, inputs: Any, **options: Any) -> Classification | list[Classification]:
        """The label of a text, a pair (tuple) of texts or an image's path; a list gives a list (`tformer classify`).

        Rows of a table (dicts), a data frame and the path of a table give a list, too. `text_column` names the column.
        """
        inputs, is_table = _as_table(inputs, images=self.recipe.model.patches is not None)
        with flags_as_keywords():
            each, is_one = (list[Any](), False) if is_table else _as_list(inputs, INPUTS)
            chosen = from_keywords(ClassifyOptions, options, caller="classify", without={} if is_table else OF_TABLES)
            loading.require_kind(self.path, self.recipe, HEADS)
            prepared = self._classifier(chosen.precision, chosen.quantize)
            _warn(prepared.notes, stacklevel=3)
            classifier = reader_of(prepared)(prepared, batch_size=chosen.batch_size, views=chosen.views)
            if is_table:
                each = _texts_of_table(inputs, chosen, classifier)
            defaults = {field.name: field.default for field in fields(chosen) if field.name in OF_TABLES}
            for given in _as_options(each, images=classifier.reads_images):
                replace(chosen, **given | defaults).check()
                replace(chosen, **given).check_model(classifier)
            if not each:
                return []
            if classifier.reads_images:
                scores_NL = classifier.classify_images([Path(place) for place in each])
            else:
                scores_NL = classifier.classify(_pairs(each))
                _warn_of_long(classifier.truncated, classifier.seq_len)
            form = AnswerFormat.of(classifier, chosen)
            answers = [Classification(**form.document(row_L)) for row_L in classifier.probabilities(scores_NL)]
        return answers[0] if is_one else answers

    def embed(self, inputs: Any, **options: Any) -> np.ndarray:
        """Pooled hidden states: fp32 [D] of a text, a pair (tuple) of texts or an image's path; a list gives [N, D].

        Keywords, as of `tformer embed`: `pooling` (cls, mean, max or last; default: that of the model's head, else
        mean), `normalize`, `dimensions`, `layer` (from 0; default: the model's last hidden states), `batch_size`, ...
        """
        each, is_one = _as_list(inputs, INPUTS)
        with flags_as_keywords():
            chosen = from_keywords(EmbedOptions, options, caller="embed")
            chosen.check()
            loaded = self._classifier(chosen.precision, chosen.quantize)
            _warn(loaded.notes, stacklevel=3)
            if self.recipe.model.patches is None:
                vectors_ND = embed_texts(loaded, _pairs(each), chosen, on_cut=partial(_warn_of_long, stacklevel=4))
            else:
                vectors_ND = embed_images(loaded, [Path(place) for place in each], chosen)
        return vectors_ND[0] if is_one else vectors_ND

    @overload
    def score(self, source: str, target: str, **options: Any) -> Score: ...
    @overload
    def score(self, source: Sequence[str], target: Sequence[str], **options: Any) -> list[Score]: ...
    def score(self, source: Any, target: Any, **options: Any) -> Score | list[Score]:
        """The log-probability of a target after its source, or of a continuation after its prompt, which may be empty.

        As `tformer evaluate --score`; keywords as in `evaluate`.
        """
        (sources, is_one), (targets, _) = _as_list(source), _as_list(target)
        if len(sources) != len(targets):
            raise InputError(f"score: {len(sources)} sources and {len(targets)} targets, expected one for each")
        require_unicode(zip(sources, targets, strict=True))
        if not sources:
            return []
        report = self.evaluate(list(zip(sources, targets, strict=True)), score=True, **options)
        scores = [Score(**each) for each in report["scores"]]
        return scores[0] if is_one else scores

    def evaluate(self, data: Any = None, **options: Any) -> dict[str, Any]:
        """The report of `tformer evaluate --json`.

        data: a path, rows (see `train`) or a data frame; None: the run's own validation data.
        """
        if isinstance(options.get("threshold"), float):
            options["threshold"] = str(options["threshold"])
        with flags_as_keywords(), ScratchFolder("evaluation") as scratch:
            chosen = from_keywords(EvaluationOptions, options, caller="evaluate")
            loading.require_kind(self.path, self.recipe, EVALUATION_HEADS)
            noted, names, are_rows = list[str](), {}, data is not None and not is_path(data)
            work = Work(note=noted.append)
            if are_rows:
                keys = evaluation_task(self, chosen).row_keys
                data, work = keep_rows(data, scratch, keys=keys, name="data"), replace(work, cache_dir=scratch)
                names = {data: "data"}
            chosen = replace(chosen, data=None if data is None else os.fspath(data))
            chosen.check()
            with rows_in_messages(names):
                output = choose_plot(chosen.plot)
                report = draw_report(evaluate_loaded(self._copy(), chosen, work)[1], output)
        _warn(noted, stacklevel=3)
        return report | {"data": "rows"} if are_rows else report

    # --- a look inside ------------------------------------------------------------------------------------------------

    def heads(self, **options: Any) -> HeadReport | list[HeadReport]:
        """Scores of all attention heads (`tformer heads`); over_training=True: a list, one of each checkpoint.

        `.scores["decoder"]["induction"]` is an array [layers, heads], `.best("induction")` the (layer, head) with the
        highest score.
        """
        with flags_as_keywords():
            chosen = from_keywords(HeadOptions, options, caller="heads")
            chosen.check()
            reports = score_heads(self, chosen, QUIET)
        return reports if chosen.over_training else reports[0]

    def patch(
        self, clean: str | None = None, corrupted: str | None = None, **options: Any
    ) -> PatchReport | AblationReport:
        """Activation patching between two prompts, or with ablate="zero" or "mean" an ablation (`tformer patch`).

        The `maps` of the first have arrays `exact` and `estimate` [layers, tokens or heads]; the `parts` of an ablation
        have metrics.
        """
        with flags_as_keywords():
            values = {"clean": clean, "corrupted": corrupted} | options
            chosen = from_keywords(PatchOptions, values, caller="patch")
            chosen.check()
            return (patch_prompts if chosen.ablate is None else ablate)(self, chosen, QUIET)

    def lens(self, text: str | None = None, **options: Any) -> LensReport:
        """The answer after each layer, and the parts of logits, as arrays with names (`tformer lens`).

        The keywords are the command's flags: `image`, `target`, `target_token`, `against`, `positions`, `tuned`, ...
        """
        given = options if text is None else options | {"text": text}
        with flags_as_keywords():
            chosen = from_keywords(LensOptions, given, caller="lens")
            chosen.check()
            return make_report(self._in_fp32(), chosen)

    def attribute(self, text: str | None = None, **options: Any) -> AttributionReport:
        """Attribution: scores of each token or patch for an answer, as named arrays (`tformer attribute`).

        `.scores["integrated"]["encoder"]` is an array [answers, tokens], `.targets` the answers, `.gaps` what
        integrated gradients miss. The keywords are the command's flags: `image`, `target_token`, `methods`, ...
        """
        given = options if text is None else options | {"text": text}
        with flags_as_keywords():
            chosen = from_keywords(AttributeOptions, given, caller="attribute")
            chosen.check()
            return attribute_inputs(self._in_fp32(), chosen, QUIET)

    def embedding_table(self, table: str | None = None, **options: Any) -> EmbeddingReport:
        """Vectors of the vocabulary or of labels (`tformer viz-embeddings`; `embed` reads texts).

        `names` and `vectors` [rows, width] are the whole table, `coordinates` the principal components of the rows
        `shown`, `neighbours` and `cosines` those of `token="king"`. Keywords: `token`, `tokens`, `top_k`, `centred`.
        """
        with flags_as_keywords():
            given = options | {"table": table}
            chosen = from_keywords(EmbeddingOptions, given, caller="embedding_table")
            chosen.check()
            return embedding_report(self, chosen)

    def tokens(self, text: str | None = None, **options: Any) -> TokenReport:
        """The loss of each token of a text in bits, its rank and the most probable tokens (`tformer viz-tokens`).

        Without a text of `data`, by default the run's validation data. `.bits`, `.rank`, `.summary`, `.calibration`,
        `.hardest(20)`, ...; `tformer.inside.tokens.segments` aligns the reports of two runs on one text.
        """
        with flags_as_keywords():
            chosen = from_keywords(TokenOptions, options | {"text": text}, caller="tokens")
            chosen.check()
            return score_tokens(self._in_fp32(), chosen, QUIET)

    # --- copies for inference -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without packed matrices: these cannot be copied and are built again."""
        return self.__dict__ | {"_prepared": {}}

    def _in_fp32(self) -> Loaded:
        """This model, or a copy of it that computes in fp32."""
        return self if self.model.compute_dtype == torch.float32 else self._copy()

    def _copy(self) -> Loaded:
        """This model with fp32 parameters, which every command starts from."""
        model = copy.deepcopy(self.model)
        if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
            loading.convert(model, torch.float32)
        return replace(self, model=model, notes=list(self.notes))

    def _classifier(self, precision: str, quantize: str) -> Loaded:
        """This model, prepared for whole batches of inputs."""

        def prepare(own: Loaded) -> list[Loaded]:
            prepare_loaded(own, precision, quantize)
            return [own]

        [loaded] = self._ready((precision, quantize), prepare)
        return loaded

    def _ready(self, key: Hashable, prepare: Callable[[Loaded], list[Loaded]]) -> list[Loaded]:
        """Models that `prepare` builds from a copy of this one; reuses earlier ones if the weights are unchanged."""
        tensors = chain(self.model.parameters(), self.model.buffers())
        states = tuple((each.data_ptr(), None if each.is_inference() else each._version) for each in tensors)
        if (models := self._kept(key, states)) is not None:
            return models
        with _PREPARING:
            models = self._kept(key, states)  # another thread may have prepared them meanwhile
            if models is None:
                models = prepare(self._copy())
                with _LOOKING:
                    self._prepared[key, states] = models
            return models

    def _kept(self, key: Hashable, states: Hashable) -> list[Loaded] | None:
        """The prepared models of a key, which become the last ones used; makes room for others where there are none."""
        with _LOOKING:
            prepared = self._prepared
            if prepared and next(iter(prepared))[1] != states:
                prepared.clear()
            models = prepared.pop((key, states), None)
            if models is not None:
                prepared[key, states] = models
            while models is None and len(prepared) >= MOST_PREPARED:
                del prepared[next(iter(prepared))]  # the one that was used least recently
            return models


def load(
    path: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    which: str = "best",
    runs_dir: str | Path = "runs",
    kinds: Collection[str] | None = None,
) -> Run:
    """Load a run, a checkpoint or a Hugging Face folder as a `Run`, with the arguments of `tformer.loading.load`."""
    for name, value, is_right, expected in (
        ("path", path, path is None or is_path(path), "a path"),
        ("device", device, isinstance(device, str | torch.device), "auto, cpu, cuda or a torch.device"),
        ("dtype", dtype, dtype is None or isinstance(dtype, torch.dtype), "a torch.dtype"),
        ("which", which, isinstance(which, str), "best, latest or step-N"),
    ):
        if not is_right:
            raise InputError(f"{name}: found {value!r}, expected {expected}")
    with flags_as_keywords():
        place = resolve_device(device) if isinstance(device, str) else device
        return _as_run(loading.load(path, device=place, dtype=dtype, which=which, runs_dir=runs_dir, kinds=kinds))


def train(data: Any = None, *, valid: Any = None, quiet: bool = False, **options: Any) -> Run:
    """Train a model (`tformer train`), and load its best checkpoint.

    Args:
        data: a path, `builtin:NAME`, a list of pathlib.Path, or rows: an iterable of dicts (keys as the columns of a
            table), of strings (texts), or of tuples: (text, label) or (text, text2, label) for labelled data, (source,
            target) for pairs; or a pandas or Polars data frame. None: the recipe's data, else built-in data. Rows are
            kept as a jsonl file in the cache directory, so that the run can be resumed and evaluated.
        valid: validation data; None: a tenth of the data is held out.
        quiet: show nothing; else progress goes to stderr, as the command shows it.
        options: the command's flags: `arch="bert"`, `max_steps=100`, `out="runs/mine"`; `set` may be a dict.

    Raises InputError for what the command refuses; KeyboardInterrupt leaves the last checkpoint to resume from.
    """
    began = time.monotonic()
    with flags_as_keywords():
        read = partial(from_keywords, TrainOptions, caller="train", without=NOT_OF_TRAIN)
        chosen, names = _with_data(read, options, data=data, valid=valid)
        with rows_in_messages(names):
            summary = run_training(
                chosen,
                console=Console(stderr=True, soft_wrap=True, highlight=False, quiet=quiet),
                began=began,
            )
        run = _as_run(loading.load(summary["run"], device=resolve_device(chosen.device or "auto")))
    return replace(run, summary=summary)


def cross_validate(
    data: Any = None, *, folds: int = 5, valid: Any = None, quiet: bool = False, **options: Any
) -> CrossValidation:
    """Train a model for each fold of labelled data without it, and measure it there (`tformer train --folds`).

    Arguments as of `train`; `devices` says how many train at the same time. The same call goes on with what was
    interrupted, in `out` or by default in the first folder runs/folds-N that is free or holds these trainings.

    Raises InputError for what the command refuses, TformerError where a training failed.
    """
    from tformer.workflows.folds import train_folds  # which draws

    with flags_as_keywords():
        read = partial(from_keywords, TrainOptions, caller="cross_validate", without=NOT_OF_FOLDS)
        chosen, names = _with_data(read, options | {"folds": folds}, data=data, valid=valid)
        console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=quiet)
        with rows_in_messages(names):
            return train_folds(chosen, say=partial(console.print, markup=False))


def _with_data(
    read: Callable[[dict[str, Any]], TrainOptions], options: dict[str, Any], **given: Any
) -> tuple[TrainOptions, dict[Path, str]]:
    """Options of a training with the given data, and the names of the data given as rows, by file."""
    if isinstance(options.get("set"), Mapping):
        options["set"] = [f"{key}={json.dumps(value, default=str)}" for key, value in options["set"].items()]
    paths, names = {name: _paths(value) for name, value in given.items()}, {}
    if None in paths.values():
        known = {name: "-" if path is None else path for name, path in paths.items()}
        keys = task_of(find_training(read(options | known), with_teacher=False).recipe).row_keys
        folder = default_cache_dir() / ROWS
        for name in [name for name, path in paths.items() if path is None]:
            kept = keep_rows(given[name], folder, keys=keys, name=name)
            paths[name], names[kept] = [kept], name
    return read(options | paths), names


def _paths(data: Any) -> list[Any] | None:
    """Data that is named by paths; None: it is given as rows."""
    if data is None:
        return []
    if is_path(data):
        return [data]
    are_paths = isinstance(data, list | tuple) and data and all(isinstance(item, os.PathLike) for item in data)
    return list(data) if are_paths else None


def _as_run(loaded: Loaded) -> Run:
    use_one_thread_after_fork()
    return Run(**{each.name: getattr(loaded, each.name) for each in fields(Loaded)})


def _as_list(inputs: Any, one: tuple[type, ...] = (str,)) -> tuple[list[Any], bool]:
    """(inputs as a list, whether it was one). `one`: types of an input; a tuple is a pair of texts.

    Raises InputError for an input of another type.
    """
    # Iterating over bytes gives numbers, over a dict or a data frame the names of columns.
    is_no_list = isinstance(inputs, bytes | Mapping) or hasattr(inputs, "columns") or not isinstance(inputs, Iterable)
    is_one = isinstance(inputs, one) or is_no_list
    each = [inputs] if is_one else list(inputs)
    for number, item in enumerate(each):
        is_pair = isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item)
        if not isinstance(item, one) or (isinstance(item, tuple) and not is_pair):
            expected = "a text" if one == (str,) else "a text, a pair of texts or the path of an image"
            found = shortened(" ".join(repr(item).split()), SHOWN_CHARACTERS)
            raise InputError(f"{'the input' if is_one else f'input {number}'}: found {found}, expected {expected}")
    return each, is_one


def _as_table(inputs: Any, *, images: bool) -> tuple[Any, bool]:
    """(inputs, whether they are rows, a data frame or the path of a table); an iterator becomes a list."""
    if images or isinstance(inputs, str | bytes | tuple | Mapping):
        return inputs, False
    if hasattr(inputs, "columns") or (isinstance(inputs, os.PathLike) and table_format(Path(inputs)) is not None):
        return inputs, True
    inputs = list(inputs) if isinstance(inputs, Iterable) else inputs
    return inputs, isinstance(inputs, list) and bool(inputs) and all(isinstance(row, Mapping) for row in inputs)


def _texts_of_table(table: Any, options: ClassifyOptions, classifier: Any) -> list[str | tuple[str, str]]:
    """The texts, or pairs of texts, of every row."""
    with ScratchFolder("classification") as scratch:
        path = Path(table) if is_path(table) else keep_rows(table, scratch, keys=(), name="data")
        with rows_in_messages({} if is_path(table) else {path: "data"}):
            pairs = True if options.text2_column is not None else classifier.reads_pairs
            columns = options.columns(classifier.columns)
            source = open_texts_or_pairs(str(path), pairs=pairs, columns=columns, reading=options.reading)
            blocks = row_blocks(source.rows())
            return [text if text2 is None else (text, text2) for block in blocks for text, text2 in block]


def _pairs(texts: Iterable[Any]) -> list[tuple[str, str | None]]:
    """(text, second text or None) of texts and pairs of texts. Raises InputError for a path."""
    for text in texts:
        if isinstance(text, os.PathLike):
            raise InputError(f"found the path {text}: the model reads texts, not images")
    pairs = [(text, None) if isinstance(text, str) else text for text in texts]
    require_unicode(pairs)
    return pairs


def _as_options(inputs: Iterable[Any], *, images: bool) -> Iterator[dict[str, Any]]:
    """Options of `tformer classify` for each form of the inputs: images, single texts, pairs."""
    if images:
        yield {"image": tuple(map(Path, inputs))}
        return
    one_of_each = {second is None: (first, second) for first, second in _pairs(inputs)}
    yield from ({"text": text, "text2": text2} for text, text2 in one_of_each.values())


def _warn(notes: Iterable[str], *, stacklevel: int) -> None:
    """Warn of what commands say of options that do not pay and of positions that were not trained, each text once."""
    for note in dict.fromkeys(notes):
        if isinstance(note, Caution):
            warnings.warn(with_keywords(note), stacklevel=stacklevel)


def _warn_of_long(count: int, length: int, *, stacklevel: int = 3) -> None:
    if count:
        warnings.warn(f"{count:,} texts are longer than {length} tokens and were cut", stacklevel=stacklevel)


def _warn_of_cut(number: int, size: str, limit: int) -> None:
    warnings.warn(f"prompt {number} has {size}, the model's context holds {limit}: only its end is read", stacklevel=5)
