"""Pairs of texts whose vectors are compared: with a score, or texts that belong together, with or without negatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from tformer.data.shards.labelled_tokens import LabelledTokens, tokenize_labelled
from tformer.data.sources.labelled import LabelledSource, open_labelled
from tformer.data.sources.tables import LabelledRow
from tformer.evaluation.classifier import GivenRows
from tformer.evaluation.embed import pooling_named
from tformer.evaluation.options import EvaluationOptions
from tformer.evaluation.predict import predict_scores
from tformer.loading import Loaded
from tformer.metrics.retrieval import relevant_ranks, retrieval_metrics
from tformer.metrics.statistics import distinct_places, pearson, spearman
from tformer.nn.classification_heads import EmbeddingHeadOptions, HeadContext
from tformer.nn.norm import NormOptions
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.collate import pad_examples
from tformer.objectives.contrastive import ContrastiveOptions
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Data, SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.base import (
    ChosenData,
    GivenExample,
    HeldOut,
    RowKeys,
    Task,
    Tokenizers,
    TrainingData,
    TrainingSets,
    note_rows,
    positions_of,
)
from tformer.tasks.labelled import chosen_part, labelled_sample, split_labelled
from tformer.tasks.text import TEXT_OPTIONS
from tformer.tasks.tokenizers import Texts, obtain_tokenizer, text_context
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

QUERIES = 256  # compared with all documents at a time


@dataclass(frozen=True)
class PairedTexts(LabelledTokens):
    """The first texts of pairs, with their scores (zeros where there are none), the second texts, and negatives."""

    second: LabelledTokens | None = None
    negatives: LabelledTokens | None = None

    @property
    def sides(self) -> tuple[LabelledTokens, LabelledTokens]:
        """The first and the second texts, each alone."""
        assert self.second is not None
        own = {each.name: getattr(self, each.name) for each in fields(LabelledTokens)}
        return LabelledTokens(**own), self.second

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]: tokens of the longer text of each pair."""
        return np.maximum(*(side.lengths for side in self.sides))

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[Any]:
        """(first text, second text, negatives) with these numbers, each an `Example`."""
        pairs = list(zip(*(side.examples(epoch, indices) for side in self.sides), strict=True))
        if self.negatives is None:
            return pairs
        found = [self.negatives.examples(epoch, self._places([index])) for index in indices]
        return [(*pair, *negatives) for pair, negatives in zip(pairs, found, strict=True)]

    def subset(self, indices: Sequence[int] | np.ndarray) -> PairedTexts:
        """Some of the pairs, in this order."""
        first, second = (side.subset(indices) for side in self.sides)
        negatives = None if self.negatives is None else self.negatives.subset(self._places(indices))
        return PairedTexts(**vars(first), second=second, negatives=negatives)

    @cached_property
    def _starts(self) -> list[int]:
        """The number of negatives before each pair, and of all."""
        return list(accumulate((len(row.negatives) for row in self.rows), initial=0))

    def _places(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The numbers of the negatives of these pairs."""
        return np.concatenate([np.arange(*self._starts[index : index + 2]) for index in indices])


def read_pairs(
    sources: Sequence[LabelledSource], recipe: Recipe, tokenizer: Tokenizer, *, scores: bool, work: Work
) -> PairedTexts:
    """The rows of sources. Raises InputError for rows of one text, and with `scores` for a row without one."""
    rows, name = [row for source in sources for row in source.rows()], sources[0].name
    if not sources[0].has_text2:
        hint = "name the second column with --text2-column"
        raise InputError(f"{name}: found one text a row, expected pairs of texts", hint=hint)

    def tokens(texts: Iterable[tuple[LabelledRow, str | None]], numeric: bool = False) -> LabelledTokens:
        alone = GivenRows([replace(row, text=text or "", text2=None) for row, text in texts], name)
        facts: dict[str, Any] = {"seq_len": recipe.seq_len, "truncation": recipe.data.truncation, "work": work}
        return tokenize_labelled([alone], tokenizer, index=None, numeric=numeric, **facts)

    first, second = tokens(((row, row.text) for row in rows), scores), tokens((row, row.text2) for row in rows)
    fingerprint = " ".join([first.fingerprint, *(source.fingerprint() for source in sources)])
    labels = first.labels if scores else np.zeros(len(rows), dtype=np.float32)
    own = vars(first) | {"fingerprint": fingerprint, "labels": labels, "rows": rows, "second": second}
    if any(row.negatives for row in rows):
        own["negatives"] = tokens((row, text) for row in rows for text in row.negatives)
    return PairedTexts(**own)


def report_of_vectors(samples: PairedTexts, a_ND: np.ndarray, *others: np.ndarray, scores: bool) -> dict[str, Any]:
    """Correlations of the cosines with the scores, or retrieval metrics of first texts that look for their second ones.

    Equal second texts are one document, and the second texts of equal first texts are relevant to all of these.
    Negatives are further documents.

    others: the vectors of the second texts, and of all negatives.
    """
    sides = a_ND, np.concatenate(others)
    a_ND, b_ND = (side / np.maximum(np.linalg.norm(side, axis=1, keepdims=True), 1e-12) for side in sides)
    if scores:
        if len(samples) < 2:
            raise InputError(f"a correlation needs at least 2 pairs, found {len(samples)}")
        cosines_N, labels_N = (a_ND * b_ND).sum(axis=1), np.asarray(samples.labels)
        places = distinct_places(cosines_N), distinct_places(labels_N)
        return {"pearson": float(pearson(cosines_N, labels_N)), "spearman": float(spearman(*places))}
    queries, first_of_query, query_N = np.unique(
        [row.text for row in samples.rows], return_index=True, return_inverse=True
    )
    texts = [row.text2 or "" for row in samples.rows] + [text for row in samples.rows for text in row.negatives]
    documents, first_of_document, document_N = np.unique(texts, return_index=True, return_inverse=True)
    order = np.argsort(query_N, kind="stable")
    relevant = np.split(document_N[order], np.searchsorted(query_N[order], np.arange(1, len(queries))))
    ranks = []
    for start in range(0, len(queries), QUERIES):
        scores_QN = a_ND[first_of_query[start : start + QUERIES]] @ b_ND[first_of_document].T
        ranks += relevant_ranks(scores_QN, [np.unique(each) for each in relevant[start : start + QUERIES]])
    return {"queries": len(queries), "documents": len(documents), **retrieval_metrics(ranks)}


@dataclass(frozen=True)
class PairsHeldOut(HeldOut):
    """Held-out pairs: the objective's loss, and the report of their vectors. scores: their labels are scores."""

    scores: bool = False

    def measure(self, model: Any, work: Work) -> dict[str, Any]:
        """Without meaning when interrupted."""
        metrics = super().measure(model, work)
        return metrics | ({} if work.should_stop() else self.report(model, work))

    def report(self, model: Any, work: Work, **options: Any) -> dict[str, Any]:
        """Metrics of whole vectors, and in `dimensions` of the shorter vectors that the objective trains."""
        samples = self.samples if isinstance(self.samples, PairedTexts) else self.samples.chosen
        context = self.objective.context

        def collate(examples: Sequence[Any], *, rng: np.random.Generator, training: bool) -> Any:
            return pad_examples(examples, context, rng=rng)

        sides = [
            predict_scores(model, side, collate, head=self.objective.head.kind, work=work, **options)
            for side in (*samples.sides, samples.negatives)
            if side is not None and len(side)
        ]
        if work.should_stop():
            return {}
        report = report_of_vectors(samples, *sides, scores=self.scores)
        sizes = getattr(self.objective.options, "sizes", ())
        parts = {
            size: report_of_vectors(samples, *(side[:, :size] for side in sides), scores=self.scores) for size in sizes
        }
        return report | ({"dimensions": parts} if parts else {})


class TextPairs(Task):
    """Pairs of texts, with or without a score."""

    description = "a model of vectors of texts"
    options = TEXT_OPTIONS | {"text2_column", "label_column", "pooling"}
    tokenizer_texts = "text_pairs"
    row_keys: ClassVar[RowKeys] = (("text", "text2"), ("text", "text2", "label"))

    def open(self, specs: Sequence[SourceSpec], data: Data | ChosenData, recipe: Recipe) -> Sequence[Any]:
        if not specs:
            kind = recipe.objectives[0].kind
            raise InputError(f"{kind} has no built-in data", hint="give pairs of texts: --data FILE.tsv")
        return _open(specs, data, scores=recipe.objectives[0].objective.reads_scores, columns=data.columns)

    def settled(self, sets: TrainingSets) -> TrainingSets:
        """The recipe with the columns."""
        recipe, first = sets.recipe, sets.sources[0]
        found = {"text": first.text_column, "text2": first.text2_column}
        found |= {"label": first.label_column} if recipe.objectives[0].objective.reads_scores else {}
        resolved = recipe.data.model_copy(update={"columns": recipe.data.columns.model_copy(update=found)})
        return sets.with_recipe(recipe.model_copy(update={"data": resolved}))

    def obtain_tokenizers(self, sets: TrainingSets) -> Tokenizers:
        texts = Texts.of(sets.sources, partial(_texts, sets.sources), part="text pairs")
        return obtain_tokenizer(sets.start, sets.work, texts), None

    def tokenize(self, sets: TrainingSets, sources: Sequence[Any], *, validation: bool) -> Sequence[Any]:
        """Errors: rows of one text, rows without a score where one is needed."""
        scores = sets.recipe.objectives[0].objective.reads_scores
        return [read_pairs(sources, sets.recipe, sets.tokenizer, scores=scores, work=sets.work)]

    def hold_out(self, parts: Sequence[Any], data: Data) -> tuple[Sequence[Any], Sequence[Any]]:
        return split_labelled(parts, data)

    def assembled(self, sets: TrainingSets) -> TrainingData:
        recipe, [train], [valid] = sets.recipe, sets.train, sets.valid
        sets.work.note(f"data: {len(train):,} training pairs, {len(valid):,} validation pairs")
        context, scores = text_context(recipe, sets.tokenizer), recipe.objectives[0].objective.reads_scores
        objective = build_objective(recipe.objectives, context)
        held_out = PairsHeldOut(valid.name, valid, objective, recipe, recipe.training.batch_size, scores=scores)
        return TrainingData(
            samples=train,
            validate=held_out.validate,
            context=context,
            fingerprint=f"{train.fingerprint} {valid.fingerprint}",
            tokens_per_sample=2 * recipe.seq_len,
            valid_tokens=4 * positions_of(valid, recipe.seq_len),  # both sides, for the loss and for the vectors
            first_try=("evaluate",),
        )

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """Two texts, each in its template; the second is the first where it is not given."""
        given.require("text", may="text2", reader=self.description)
        tokenizer, _ = tokenizers
        assert tokenizer is not None
        texts = given.text, given.text if given.text2 is None else given.text2
        sides = tuple(labelled_sample(recipe, tokenizer, GivenExample(text)) for text in texts)
        return sides, text_context(recipe, tokenizer)

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> PairsHeldOut:
        """The pairs: with scores where a column of them was named or trained on, and the data has it."""
        recipe, named = loaded.recipe, data.given is not None and data.given.label is not None
        scores = named or recipe.objectives[0].objective.reads_scores
        columns = {"columns": data.columns if data.given is None else data.given, "preferred": data.columns}
        sources = _open(data.specs, data, scores=scores, needed=named or data.given is None, **columns)
        scores = scores and sources[0].label_column is not None
        samples = read_pairs(sources, recipe, loaded.text_tokenizer, scores=scores, work=work)
        work.note_all(*sources, samples)
        note_rows(sources, work)
        objective = build_objective(recipe.objectives, text_context(recipe, loaded.text_tokenizer))
        samples, name = chosen_part(samples, data, recipe)
        return PairsHeldOut(name, samples, objective, recipe, recipe.training.batch_size, scores=scores)

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """Correlations of cosines with scores, or of pairs without scores the retrieval of second texts."""
        held_out = self.held_out(loaded, data, work)
        with work.part(f"embedding {held_out.name}", unit="texts") as part:
            report = held_out.report(loaded.model, part, batch_size=options.batch_size)
        work.raise_if_stopped("before every text was read")
        return {"data": held_out.name, "examples": len(held_out.samples), **report}

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """One metric per line, and a line for each number of dimensions."""
        for name, value in report.items():
            if isinstance(value, float | int) and name != "step":
                yield f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
        for size, metrics in report.get("dimensions", {}).items():
            found = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
            yield f"first {size} dimensions: {found}"


def with_vectors(loaded: Loaded, pooling: str) -> Loaded:
    """The model with a head that gives vectors. Raises InputError for one that is no encoder of texts."""
    model = loaded.recipe.model
    if model.encoder is None or model.decoder is not None or model.patches is not None:
        raise InputError(f"--pooling: {loaded.path} is no encoder of texts")
    head = EmbeddingHeadOptions(pooling=pooling_named(pooling))
    sections = {"model": model.model_copy(update={"heads": (head,)}), "objectives": (ContrastiveOptions(),)}
    loaded.model.heads[head.kind] = head.build(HeadContext(model.d_model, None, NormOptions()))
    return replace(loaded, recipe=loaded.recipe.model_copy(update=sections))


def _open(specs: Any, data: Any, *, scores: bool, needed: bool = True, **columns: Any) -> list[LabelledSource]:
    facts: dict[str, Any] = {"needs_label": scores and needed, "numeric_label": scores, "matches": not scores}
    facts["reading"] = data.reading
    columns = {role: each.model_copy(update={} if scores else {"label": None}) for role, each in columns.items()}
    return open_labelled(specs, **columns, **facts)


def _texts(sources: Sequence[LabelledSource]) -> Iterator[str]:
    for source in sources:
        for row in source.rows():
            yield from (row.text, row.text2 or "", *row.negatives)
