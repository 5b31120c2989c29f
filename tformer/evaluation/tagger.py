"""A loaded model with a label for each word: scores, the best allowed tags, spans of text, and the report.

Tags are decoded by Viterbi over the transitions that their scheme allows, so that no entity is broken. A word that was
cut off with the end of its sentence counts as O.

Shapes: N sentences, W words of one, L labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tformer.data.batching.batch import Batch
from tformer.data.shards.marked_tokens import UNMARKED, MarkedTokens, tokenize_tagged
from tformer.data.sources.tables import TaggedRow
from tformer.decoding.inference import inference
from tformer.evaluation.classifier import built_objective
from tformer.evaluation.predict import default_batch_tokens, divided, length_sorted_batches
from tformer.evaluation.reports import log_softmax, micro_f1_rows
from tformer.loading import Loaded
from tformer.metrics.classification import ClassScores
from tformer.metrics.statistics import bootstrap_interval
from tformer.metrics.tags import OUTSIDE, allowed, best_path, entities, entity_counts, scheme_of
from tformer.objectives.token_classification import TokenClassificationOptions
from tformer.support.errors import InputError, require_finite
from tformer.workers.work import QUIET, Work

WORDS = re.compile(r"\w+(?:[.,'’-]\w+)*|[^\w\s]")
"""The words of a text that is not cut into words: with signs inside, U.S or don't; every other sign is a word."""


@dataclass(frozen=True)
class Span:
    """A labelled part of a text, from character `start` to `end`; `probability`: of tags the product over the words."""

    start: int
    end: int
    text: str
    label: str
    probability: float


@dataclass(frozen=True)
class Marked:
    """A text and its labelled spans, in order."""

    text: str
    spans: tuple[Span, ...]


def marked_scores(
    model: nn.Module,
    samples: MarkedTokens,
    collate: Callable[..., Batch],
    *,
    head: str,
    batch_size: int | None = None,
    work: Work = QUIET,
) -> list[np.ndarray]:
    """fp32 [n, L] of each example: what `head` gives at its n tokens with a label; [] where work was stopped."""
    device = next(model.parameters()).device
    rng, budget = np.random.default_rng(0), default_batch_tokens(device)
    found: list[np.ndarray] = [np.zeros((0, 0))] * len(samples)
    done = 0

    def scores(indices: np.ndarray) -> Tensor:
        batch = collate(samples.examples(0, indices), rng=rng, training=False).to(device)
        assert batch.labels is not None
        scores_BTL: Tensor = model(**batch.model_inputs()).head(head)
        return scores_BTL[batch.labels.ne(UNMARKED)].float()

    batches = length_sorted_batches(samples, batch_size=batch_size, batch_tokens=budget)
    with inference(model):
        for indices, scores_mL in divided(batches, scores, work, dtype=torch.float32, device=device):
            logits_mL = scores_mL.cpu().numpy()
            require_finite(logits_mL, "outputs")
            counts = [np.count_nonzero(example.label != UNMARKED) for example in samples.examples(0, indices)]
            parts = np.split(logits_mL, np.cumsum(counts)[:-1])
            for index, part in zip(indices.tolist(), parts, strict=True):
                found[index] = part
            done += len(indices)
            work.report(done, len(samples))
    return found if done == len(samples) else []


def word_scores(samples: MarkedTokens, scores: Sequence[np.ndarray]) -> list[np.ndarray]:
    """fp64 [W, L] of each sentence: log-probabilities, NaN for words that were cut off."""
    found = []
    for number, scores_nL in enumerate(scores):
        seen_W = samples.detail(number).seen
        found.append(np.full((len(seen_W), scores_nL.shape[1]), np.nan))
        if len(scores_nL):
            found[-1][seen_W] = log_softmax(scores_nL)
    return found


def decode_tags(scores: Sequence[np.ndarray], names: Sequence[str]) -> list[list[str | None]]:
    """The best allowed tags of each sentence. A word without scores is O; None where the model has no O."""
    scheme = scheme_of(names)
    allowed_LL = allowed(names, scheme)
    unseen_L = np.where(np.array(names) == OUTSIDE, 0.0, -1e6)
    found: list[list[str | None]] = []
    for scores_WL in scores:
        unseen_W = np.isnan(scores_WL).any(axis=1)
        filled_WL = np.where(unseen_W[:, None], unseen_L, scores_WL)
        path_W = filled_WL.argmax(axis=1) if scheme == "plain" else best_path(filled_WL, allowed_LL)
        missing = None if OUTSIDE not in names else OUTSIDE
        found.append([missing if gone else names[label] for label, gone in zip(path_W, unseen_W, strict=True)])
    return found


def tag_report(
    labels: Sequence[np.ndarray], scores: Sequence[np.ndarray], names: Sequence[str], *, intervals: bool = True
) -> dict[str, Any]:
    """The metrics of tagged sentences, as plain numbers.

    - loss: mean negative log-likelihood of the words that were read, in nats; accuracy: share of words with their tag;
    - f1_micro, precision_micro, recall_micro: over entities, strict (see `metrics.tags`); of plain tags over words;
    - f1_macro: mean over the types that occur; per_class: {type: {precision, recall, f1, support}}.
    """
    right = [[names[number] for number in label_W] for label_W in labels]
    guessed = decode_tags(scores, names)
    scheme = scheme_of(names)
    spans = [[entities(tags, scheme) for tags in side] for side in (right, guessed)]
    hits_N, given_N, of_type = entity_counts(*spans)
    found = sum(map(len, spans[1]))
    micro = ClassScores.of(int(hits_N.sum()), found, int(given_N.sum()) - found)
    losses = np.concatenate([-each[np.arange(len(each)), row] for each, row in zip(scores, labels, strict=True)])
    pairs = [(one, other) for both in zip(right, guessed, strict=True) for one, other in zip(*both, strict=True)]
    report: dict[str, Any] = {
        "examples": len(labels),
        "words": len(pairs),
        "loss": float(np.nanmean(losses)),
        "accuracy": float(np.mean([one == other for one, other in pairs])),
        "f1_micro": micro.f1,
        "f1_macro": float(np.mean([each.f1 for each in of_type.values()])) if of_type else 0.0,
        "precision_micro": micro.precision,
        "recall_micro": micro.recall,
        "per_class": {kind: asdict(each) for kind, each in of_type.items()},
    }
    if intervals:
        report["intervals"] = {"f1_micro": list(bootstrap_interval(micro_f1_rows, hits_N, given_N))}
    return report


class TokenReader:
    """Base class of loaded models that label tokens, with the attributes of a `Classifier` of texts."""

    kind: ClassVar[str]
    head: ClassVar[str]
    objective: ClassVar[type[Any]]
    reads_pairs: ClassVar[bool]
    reads_images = False
    thresholds = None

    def __init__(self, loaded: Loaded, *, batch_size: int | None = None, views: int = 1, work: Work = QUIET) -> None:
        """As of `Classifier`. Raises InputError for views."""
        self._loaded, self._batch_size, self._work = loaded, batch_size, work
        recipe = loaded.recipe
        self.path, self.columns, self.seq_len = loaded.path, recipe.data.columns, recipe.seq_len
        self.labels, self.label_separator = recipe.data.labels, recipe.data.label_separator
        self.truncated = 0  # number of texts so far that were longer than seq_len
        self.options = next(each for each in (*recipe.objectives, self.objective()) if isinstance(each, self.objective))
        if views != 1:
            raise InputError(f"--views: {self.path} labels words, expected a model of images")
        self._collate = built_objective(loaded, self.objective()).collate

    def scores(self, samples: MarkedTokens, work: Work | None = None) -> list[np.ndarray]:
        """`marked_scores` of these examples."""
        given: dict[str, Any] = {"head": self.head, "batch_size": self._batch_size, "work": work or self._work}
        return marked_scores(self._loaded.model, samples, self._collate, **given)

    def probabilities(self, answers: list[Marked]) -> list[Marked]:
        """The answers, which have their probabilities."""
        return answers


class Tagger(TokenReader):
    """A loaded model that labels words. Raises InputError for one without names of its labels."""

    kind, head, objective, reads_pairs = "spans", "token_classifier", TokenClassificationOptions, False

    def __init__(self, loaded: Loaded, **options: Any) -> None:
        super().__init__(loaded, **options)
        if not self.labels:
            raise InputError(f"{self.path}: its labels have no names", hint="train it: tformer train --init-from MODEL")

    def classify(self, texts: Sequence[tuple[str, str | None]]) -> list[Marked]:
        """The labelled spans of each text."""
        spans = [[found.span() for found in WORDS.finditer(text)] for text, _ in texts]
        rows = [
            TaggedRow.of([text[start:end] for start, end in each], None, "--text")
            for (text, _), each in zip(texts, spans, strict=True)
        ]
        none = [np.zeros(len(row.spans), dtype=np.int64) for row in rows]
        samples = tokenize_tagged(rows, none, self._loaded.text_tokenizer, seq_len=self.seq_len, name="the given texts")
        self.truncated += samples.truncated
        scores = word_scores(samples, self.scores(samples))
        given = zip(texts, spans, scores, strict=False)
        return [self._mark(text, each, scores_WL) for (text, _), each, scores_WL in given]

    def _mark(self, text: str, spans: Sequence[tuple[int, int]], scores_WL: np.ndarray) -> Marked:
        [tags] = decode_tags([scores_WL], self.labels)
        found = []
        for kind, first, end in entities(tags, scheme_of(self.labels)):
            numbers = [self.labels.index(tag) for tag in tags[first:end] if tag is not None]
            logs_W = np.nan_to_num(scores_WL[np.arange(first, end), numbers])
            start, stop = spans[first][0], spans[end - 1][1]
            found.append(Span(start, stop, text[start:stop], kind, float(np.exp(logs_W.sum()))))
        return Marked(text, tuple(span for span in found if span.label != OUTSIDE))
