"""Running text for causal language models: token corpora, cut into windows.

`CorpusTask` is what this task and `tformer.tasks.masked_text` share: text is tokenized into one corpus per source, and
without validation data the last part of every corpus is held out.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from tformer.data.batching.mixture import MixedWindows, Samples
from tformer.data.batching.windows import LmWindows, document_ids
from tformer.data.encoding import encode_prompt
from tformer.data.look import look_at_text
from tformer.data.shards.corpus import Example, TokenCorpus, token_corpus
from tformer.data.sources.files import total_bytes
from tformer.data.sources.text import TextSource, open_sources
from tformer.decoding.generate import generate
from tformer.decoding.settings import GenerationSettings
from tformer.evaluation.lm import combine_validation, evaluate_lm, isolates_documents, windows
from tformer.evaluation.options import READING, EvaluationOptions
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.objectives import build_objective
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.recipe.data_defaults import CorpusSurvey, Survey
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
    Validate,
    hold_out,
    note_rows,
    require_finite_loss,
)
from tformer.tasks.baselines import baselines_on_own_data, text_baselines
from tformer.tasks.tokenizers import LEFT_OUT, Texts, obtain_tokenizer, text_context
from tformer.tokenizer import Tokenizer
from tformer.workers.work import ShouldStop, Work

Corpora = Sequence[TokenCorpus]

TEXT_OPTIONS = READING | {"text_column", "seq_len"}
NO_DATA = "no --data: training on the documentation that comes with Python (builtin:python-docs)"

VALIDATION_TOKENS = 16384  # of a batch
MAX_VALIDATION_WINDOWS = 64  # of a batch
EVALUATION_WINDOWS = 32  # of a batch
MAX_SAMPLE_TOKENS = 120
OPENING_TOKENS, OPENING_CHARACTERS = 512, 24  # of the held-out text


def validation_batch(seq_len: int) -> int:
    """Windows per batch of a validation. The corruption of a text depends on it, so an evaluation uses the same."""
    return max(1, min(MAX_VALIDATION_WINDOWS, VALIDATION_TOKENS // seq_len))


def opening_of(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Printable words that begin a line of these ids; "" where there are none."""
    text = tokenizer.decode(ids[:OPENING_TOKENS].tolist())
    first, *others = text.split("\n")  # the first one may begin in its middle
    line = next(filter(str.strip, others), first)
    line = " ".join("".join(c if c.isprintable() else " " for c in line).split())
    cut = line[: OPENING_CHARACTERS + 1]
    words = cut.rpartition(" ")[0] if len(cut) > OPENING_CHARACTERS else cut
    return words or line[:OPENING_CHARACTERS]


def open_text(specs: Sequence[SourceSpec], data: Data | ChosenData) -> list[TextSource]:
    """The sources of a training; without any, the built-in text."""
    return open_sources(specs, columns=data.columns, reading=data.reading)


def note_text(start: TrainingStart, sources: Sequence[TextSource], work: Work) -> None:
    """Note the look at the text of a new training, or that it is the built-in text."""
    if not start.recipe.data.train:
        work.note(NO_DATA)
    elif start.resumed is None:
        for line in look_at_text(chain.from_iterable(source.documents() for source in sources)).lines:
            work.note(line)


def tokenizer_documents(sources: Sequence[TextSource], data: Data) -> Texts:
    """Training texts of the tokenizer, without the held-out part."""
    left_out = 0.0 if data.valid else min(1.0, LEFT_OUT * data.valid_fraction)

    def read() -> Iterator[str]:
        for source in sources:
            room = sum(len(piece.text) for piece in source.documents()) * (1 - left_out) if left_out else math.inf
            for piece in source.documents():
                yield piece.text if len(piece.text) <= room else piece.text[: math.ceil(room)]
                room -= len(piece.text)
                if room <= 0:
                    break

    size = total_bytes(sources)
    part = f"text without {left_out:g}" if left_out else "text"
    return Texts.of(sources, read, part=part, size_bytes=None if size is None else int(size * (1 - left_out)))


class CorpusTask(Task):
    """Running text as token corpora; a subclass defines the windows and how a model is measured on them."""

    tokenizer_texts = "text"
    row_keys: ClassVar[RowKeys] = (("text",),)

    def open(self, specs: Sequence[SourceSpec], data: Data | ChosenData, recipe: Recipe) -> Sequence[Any]:
        return open_text(specs, data)

    def obtain_tokenizers(self, sets: TrainingSets) -> Tokenizers:
        return obtain_tokenizer(sets.start, sets.work, tokenizer_documents(sets.sources, sets.recipe.data)), None

    def fitted(self, sets: TrainingSets) -> Recipe:
        """Errors: a tokenizer without the special tokens that the objective needs."""
        self.context(sets.recipe, sets.tokenizer)
        return sets.recipe

    def tokenize(self, sets: TrainingSets, sources: Sequence[Any], *, validation: bool) -> Sequence[Any]:
        return [self.corpus(source, sets.tokenizer, sets.recipe, sets.work) for source in sources]

    def corpus(self, source: Any, tokenizer: Tokenizer, recipe: Recipe, work: Work) -> TokenCorpus:
        """The tokens of a source, from the cache or made now."""
        with work.part(f"tokenizing {source.name}", total=source.size_bytes(), unit="B") as part:
            return token_corpus(source, tokenizer, part)

    def context(self, recipe: Recipe, tokenizer: Tokenizer) -> ObjectiveContext:
        """The context of the objective. Errors: a tokenizer without the special tokens that the objective needs."""
        return text_context(recipe, tokenizer)

    @abstractmethod
    def windows(
        self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, context: ObjectiveContext
    ) -> Sequence[Samples]:
        """Training windows of each corpus. Errors: a corpus shorter than one window."""

    @abstractmethod
    def validation(self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer) -> Validate:
        """A function that measures a model in training on the validation corpora."""

    def sample(self, recipe: Recipe, tokenizer: Tokenizer, model: Transformer, should_stop: ShouldStop) -> str | None:
        """Sample output during training; "": this kind of model writes none. None: interrupted."""
        return ""

    @abstractmethod
    def baselines(
        self, recipe: Recipe, train: Corpora, held_out: Corpora, tokenizer: Tokenizer, objective: Objective
    ) -> Baselines:
        """Scores of guesses on the validation corpora by the frequencies of tokens in the training corpora."""

    @abstractmethod
    def first_try(self, recipe: Recipe, opening: str) -> tuple[str, ...]:
        """The first command to try, see `TrainingData`. opening: see `opening_of`."""

    def assembled(self, sets: TrainingSets) -> TrainingData:
        """Errors: too little text."""
        recipe, tokenizer, train, valid, work = sets.recipe, sets.tokenizer, sets.train, sets.valid, sets.work
        data, context = recipe.data, self.context(recipe, tokenizer)
        # By default a mixture has the shares of the tokens; once one source has a weight, the others count as 1.
        weights = tuple(1.0 if spec.weight is None else spec.weight for spec in data.train)
        if all(spec.weight is None for spec in data.train):
            weights = tuple(float(len(corpus)) for corpus in train)
        windows = self.windows(recipe, train, tokenizer, context)
        for corpus in valid:
            if len(corpus) < 2:
                raise InputError(
                    f"{corpus.name}: {len(corpus)} tokens are too few to validate on, at least 2 are needed"
                )
        note_text(sets.start, sets.sources, work)
        if len(train) > 1:
            shares = (f"{part.name} {weight / sum(weights):.1%}" for part, weight in zip(train, weights, strict=True))
            work.note(f"mixture: {', '.join(shares)}")
        fingerprint = hashlib.sha256()
        for corpus in [*train, *valid]:
            fingerprint.update(f"{corpus.fingerprint} {corpus.start} {corpus.stop}\n".encode())
        tokens, held_out = (sum(map(len, part)) for part in (train, valid))
        work.note(f"data: {tokens:,} training tokens, {held_out:,} validation tokens")
        return TrainingData(
            samples=windows[0] if len(windows) == 1 else MixedWindows(windows, weights, seed=recipe.seed),
            validate=self.validation(recipe, valid, tokenizer),
            context=context,
            fingerprint=fingerprint.hexdigest(),
            packed=all(part.lengths is None for part in windows) and not data.document_mask,
            sample=partial(self.sample, recipe, tokenizer),
            tokens_per_sample=recipe.seq_len,
            valid_tokens=held_out,
            files=tuple(dict.fromkeys(file for corpus in [*train, *valid] for file in corpus.files)),
            baselines=partial(self.baselines, recipe, train, valid, tokenizer),
            first_try=self.first_try(recipe, opening_of(valid[0].slice(0, OPENING_TOKENS), tokenizer)),
        )

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """A window that holds the text as one document, with the token that ends documents."""
        given.require("text", reader=self.description)
        tokenizer, _ = tokenizers
        assert tokenizer is not None and given.text is not None
        ids, end = tokenizer.encode(given.text), tokenizer.special.eos
        if not ids:
            raise InputError("--text: found no tokens in the text")
        corpus = TokenCorpus.from_ids([*tokenizer.opening, *ids, *([] if end is None else [end])], name="--text")
        context = self.context(recipe, tokenizer)
        whole = recipe.model_copy(update={"data": recipe.data.model_copy(update={"packing": "none"})})
        [windows] = self.windows(whole, [corpus], tokenizer, context)
        if len(windows) > 1:
            raise InputError(f"--text has {len(ids)} tokens, the model reads {recipe.seq_len}")
        [sample] = windows.examples(0, np.arange(1))
        return sample, context

    def read(self, loaded: Loaded, data: ChosenData, work: Work) -> tuple[list[TokenCorpus], str]:
        """The corpora of an evaluation, and their name."""
        sources = self.open(data.specs, data, loaded.recipe)
        corpora = [self.corpus(source, loaded.text_tokenizer, loaded.recipe, work) for source in sources]
        work.note_all(*sources, *corpora)
        note_rows(sources, work)
        name = ", ".join(source.name for source in sources)
        if data.held_out:
            _, corpora = hold_out(corpora, loaded.recipe.data)
            last = f"the last {loaded.recipe.data.valid_fraction:.0%} of "
            name = ", ".join(last + source.name for source in sources)
        return corpora, name


class Text(CorpusTask):
    """Running text for causal language models."""

    description = "a causal language model"
    options = TEXT_OPTIONS | {"stride"}

    def survey(self, recipe: Recipe) -> Survey | None:
        size = total_bytes(open_text(recipe.data.train, recipe.data))
        return None if size is None else CorpusSurvey(size / 1e6)

    def windows(
        self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, context: ObjectiveContext
    ) -> Sequence[Samples]:
        data = recipe.data
        return [
            LmWindows(corpus, recipe.seq_len, packing=data.packing, seed=recipe.seed, document_mask=data.document_mask)
            for corpus in corpora
        ]

    def validation(self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer) -> Validate:
        def validate(model: Transformer, objective: Objective, work: Work, share: float) -> dict[str, Any]:
            parts: list[dict[str, Any]] = []
            total = round(share * sum(len(corpus) - 1 for corpus in corpora))
            with work.part("validating", total=total, unit="tokens") as part:
                for corpus in corpora:
                    parts.append(
                        evaluate_lm(
                            model,
                            corpus,
                            objective,
                            seq_len=recipe.seq_len,
                            batch_size=validation_batch(recipe.seq_len),
                            document_mask=isolates_documents(recipe.data),
                            share=share,
                            work=part.piece(sum(each["tokens"] for each in parts), total),
                        )
                    )
            metrics = combine_validation(parts)
            del metrics["tokens_per_second"]
            return metrics

        return validate

    def sample(self, recipe: Recipe, tokenizer: Tokenizer, model: Transformer, should_stop: ShouldStop) -> str | None:
        """A text that the model writes from its start."""
        generation = recipe.generation
        settings = GenerationSettings.from_recipe(
            generation,
            max_new_tokens=min(MAX_SAMPLE_TOKENS, generation.max_new_tokens),
            seed=recipe.seed,
            eos_id=tokenizer.special.eos,
        )
        [[completion]] = generate(
            model, [encode_prompt(tokenizer, "")], settings, tokenizer=tokenizer, should_stop=should_stop
        )
        return None if completion.finish_reason == "interrupted" else completion.text or ""

    def baselines(
        self, recipe: Recipe, train: Corpora, held_out: Corpora, tokenizer: Tokenizer, objective: Objective
    ) -> Baselines:
        return text_baselines(train, held_out, num_ids=tokenizer.vocab_size)

    def first_try(self, recipe: Recipe, opening: str) -> tuple[str, ...]:
        return ("generate", "--prompt", opening or "The ")

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        corpora, name = self.read(loaded, data, work)
        recipe = loaded.recipe
        samples = LmText(corpora, recipe.seq_len, document_mask=isolates_documents(recipe.data))
        return HeldOut(name, samples, self.objective(loaded), recipe)

    def objective(self, loaded: Loaded) -> Objective:
        """The objective of a loaded model."""
        return build_objective(loaded.recipe.objectives, text_context(loaded.recipe, loaded.text_tokenizer))

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """Every token of the text once: in windows of the recipe's length, or overlapping ones with `stride`."""
        if loaded.model.decoder is None or loaded.model.encoder is not None:
            raise InputError(f"{loaded.path}: evaluation of a text needs a decoder-only model")
        recipe, stride = loaded.recipe, options.stride
        if stride is not None and not 1 <= stride <= recipe.seq_len:
            raise InputError(f"--stride must be between 1 and the window of {recipe.seq_len} tokens, found {stride}")
        (corpora, name), objective = self.read(loaded, data, work), self.objective(loaded)
        parts = []
        for corpus in corpora:
            with work.part(f"evaluating {corpus.name}", unit="tokens") as part:
                metrics = evaluate_lm(
                    loaded.model,
                    corpus,
                    objective,
                    seq_len=recipe.seq_len,
                    batch_size=options.batch_size or EVALUATION_WINDOWS,
                    stride=stride,
                    document_mask=isolates_documents(recipe.data),
                    work=part,
                )
            work.raise_if_stopped("before the whole text was read")
            parts.append(metrics)
        metrics = combine_validation(parts)
        require_finite_loss(metrics["loss"])
        report = {"data": name, **metrics, "seq_len": recipe.seq_len, "stride": stride or recipe.seq_len}
        return report | {"baseline": baselines_on_own_data(loaded, data)}

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """One metric per line; a perplexity too large for a float is inf."""
        for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
            yield f"{name} {report[name]:.4f}"
        yield f"tokens {report['tokens']}"
        yield f"tokens_per_second {report['tokens_per_second']:.0f}"


class LmText:
    """Texts as windows that predict every token once, as `evaluate_lm` cuts them; the last window may be short."""

    def __init__(self, corpora: Corpora, seq_len: int, *, document_mask: bool) -> None:
        self.seq_len, self.document_mask = seq_len, document_mask
        self._windows = [
            (corpus, window.start, window.stop)
            for corpus in corpora
            for window in windows(len(corpus), seq_len, seq_len)
        ]
        self.lengths: np.ndarray | None = np.array([stop - start for _, start, stop in self._windows])

    def __len__(self) -> int:
        return len(self._windows)

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Example]:
        """Windows with the label of their last token, and the document of each token where documents are isolated."""
        found = []
        for corpus, start, stop in (self._windows[index] for index in indices):
            ids = corpus.slice(start, stop + 1)
            found.append(Example(ids, document_ids(corpus, start, len(ids)) if self.document_mask else None))
        return found
