"""The words of a text, their tokens with labels, and what a loaded model says of them: tags, spans and metrics.

A piece belongs to the first word that ends behind the piece's first character, as `word_ids` of transformers has it:
a space that is a piece of its own belongs to the next word.

Tags of a sentence, of all its windows, are decoded by Viterbi over the transitions that their scheme allows, so that no
entity is broken. A word without a token (the tokenizer may remove signs) counts as O.

Shapes: N sentences, P pieces of a text, W words of one, L labels, n tokens with a label of an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from tformer.data.shards.marked_tokens import UNMARKED, Made, MarkedTokens, join_windows, windows
from tformer.data.shards.template import single_template, text_room
from tformer.data.sources.labelled import LabelIndex
from tformer.data.sources.tables import RowSource, TaggedRow
from tformer.evaluation.classifier import GivenRows
from tformer.evaluation.reports import log_softmax, micro_f1_rows
from tformer.evaluation.spans import Marked, Span, SpanReader, by_text
from tformer.loading import Loaded
from tformer.metrics.classification import ClassScores
from tformer.metrics.statistics import bootstrap_interval
from tformer.metrics.tags import OUTSIDE, allowed, best_path, entities, entity_counts, scheme_of
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work

SHARED = 128  # tokens that two windows of a long sentence share; at most half of their room
NO_LABELS = LabelIndex(())  # of sentences without tags
WORDS = Split(Regex(r"[\w\u200c\u200d]+(?:[.,'’-]\w+)*|[^\w\s](?:\p{M}|\u200d[^\w\s])*"), "removed", invert=True)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Find the words of a plain text: (first character, end) of each.

    Words have signs inside, U.S or don't; every other sign is a word. Accents, vowel signs and joiners (of emoji, too)
    belong to the character before them.
    """
    whole = text.encode("utf-8", "replace").decode()  # half a surrogate pair is refused by the tokenizer
    return [span for _, span in WORDS.pre_tokenize_str(whole)]


def words_of(text: str, place: str) -> TaggedRow:
    """The words of a text, without tags."""
    return TaggedRow.of([text[start:end] for start, end in word_spans(text)], (), place)


def word_scores(rows: Sequence[Any], scores: Sequence[Any], num_labels: int) -> list[tuple[TaggedRow, np.ndarray]]:
    """Each sentence with its log-probabilities fp64 [W, L], NaN for words without a token.

    rows: of the windows; scores: as of `marked_scores`.
    """
    found = []
    for several in by_text(rows, scores):
        sentence, _ = several[0]
        logs_WL = np.full((len(sentence.spans), num_labels), np.nan)
        for row, scores_nL in several:
            if len(row.seen):
                logs_WL[row.seen] = log_softmax(scores_nL)
        found.append((sentence, logs_WL))
    return found


def decode_tags(logs_WL: np.ndarray, names: tuple[str, ...]) -> list[str | None]:
    """The best allowed tags of a sentence. A word without a token is O; None where the model has no O."""
    unseen_W = np.isnan(logs_WL).any(axis=1)
    filled_WL = np.where(unseen_W[:, None], np.where(np.array(names) == OUTSIDE, 0.0, -1e6), logs_WL)
    missing = OUTSIDE if OUTSIDE in names else None
    path_W = best_path(filled_WL, allowed(names))
    return [missing if gone else names[label] for label, gone in zip(path_W, unseen_W, strict=True)]


def tag_report(
    rows: Sequence[Any], scores: Sequence[np.ndarray], names: tuple[str, ...], *, intervals: bool = True
) -> dict[str, Any]:
    """Metrics of tagged sentences, as plain numbers. rows, scores: as in `word_scores`.

    - loss: mean negative log-likelihood of the words, in nats; accuracy: share of words with their tag;
    - f1_micro, precision_micro, recall_micro: over entities, strict (see `metrics.tags`); of plain tags over words;
    - f1_macro: mean over the types that occur; per_class: {type: {precision, recall, f1, support}}.
    """
    sentences, logs = zip(*word_scores(rows, scores, len(names)), strict=True)
    sides = [list(row.tags) for row in sentences], [decode_tags(logs_WL, names) for logs_WL in logs]
    counts_N3, of_type = entity_counts(*([entities(tags, scheme_of(names)) for tags in side] for side in sides))
    micro = ClassScores.of(*counts_N3.sum(axis=0).tolist())
    right, guessed = (np.concatenate([np.array(tags, dtype=object) for tags in side]) for side in sides)
    losses = -np.concatenate(logs)[np.arange(len(right)), [names.index(tag) for tag in right]]
    report: dict[str, Any] = {
        "examples": len(sentences),
        "words": len(right),
        "loss": float(np.nanmean(losses)),
        "accuracy": float(np.mean(right == guessed)),
        "f1_micro": micro.f1,
        "f1_macro": float(np.mean([each.f1 for each in of_type.values()] or [0.0])),
        "precision_micro": micro.precision,
        "recall_micro": micro.recall,
        "per_class": {kind: asdict(each) for kind, each in of_type.items()},
    }
    if intervals:
        hits_N, given_N = counts_N3[:, 0], counts_N3[:, 1:].sum(axis=1)
        report["intervals"] = {"f1_micro": list(bootstrap_interval(micro_f1_rows, hits_N, given_N))}
    return report


def piece_words(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [P]: the word of each piece; W behind the last word. offsets: of the pieces, spans: of the words."""
    return np.searchsorted([stop for _, stop in spans], [start for start, _ in offsets], side="right")


def tokenize_tagged(
    sources: Sequence[RowSource], index: LabelIndex, tokenizer: Tokenizer, *, seq_len: int, work: Work = QUIET
) -> MarkedTokens:
    """The sentences as ids, with each word's label at its first piece; 0 of rows without tags.

    A sentence that is too long is read in windows. A word has its label in one of them, where it is farthest from an
    edge at which the sentence was cut.

    Raises InputError for no sentences, an unknown tag, and for no room beside the special tokens.
    """
    template = single_template(tokenizer)
    room = text_room(seq_len, template.num_special)
    shared = min(SHARED, room // 2)

    def examples(row: TaggedRow) -> Iterator[Made]:
        found, offsets = tokenizer.encode_spans(row.text)
        words, firsts = np.unique(piece_words(offsets, row.spans), return_index=True)
        is_word = words < len(row.spans)
        words, firsts, label_W = words[is_word], firsts[is_word], np.zeros(len(row.spans), dtype=np.int64)
        if row.tags:
            label_W = index.encode_all(row.tags, [row.place] * len(row.tags))
            row = replace(row, tags=tuple(index.names[label] for label in label_W))
        parts = windows(len(found), room, shared=shared)
        borders = [0, *(part.start + shared // 2 for part in parts[1:]), len(found)]  # the middles of what is shared
        for part, (start, stop) in zip(parts, pairwise(borders), strict=True):
            own = (firsts >= start) & (firsts < stop)
            ids = [*template.prefix, *found[part], *template.suffix]
            marks = np.full(len(ids), UNMARKED, dtype=np.int64)
            marks[len(template.prefix) + firsts[own] - part.start] = label_W[words[own]]
            yield ids, None, replace(row, seen=words[own], marks=marks)

    made = join_windows(sources, examples, tokenizer, seq_len=seq_len, key=str(index), work=work)
    return replace(made, notes=(*index.notes(), *made.notes))


class Tagger(SpanReader):
    """A loaded model that labels words. Raises InputError for one without names of its labels."""

    marks = "spans"

    def __init__(self, loaded: Loaded, **options: Any) -> None:
        super().__init__(loaded, **options)
        if not self.labels:
            raise InputError(f"{self.path}: its labels have no names", hint="train it: tformer train --init-from MODEL")

    def classify(self, texts: Sequence[tuple[str, str | None]]) -> Any:
        """`Marked` of each text."""
        given = GivenRows([words_of(text, f"--text {number}") for number, (text, _) in enumerate(texts)])
        samples = tokenize_tagged([given], NO_LABELS, self._loaded.text_tokenizer, seq_len=self.seq_len)
        found = word_scores(samples.rows, self.scores(samples), len(self.labels))
        return [self._mark(text, logs_WL) for (text, _), (_, logs_WL) in zip(texts, found, strict=False)]

    def _mark(self, text: str, logs_WL: np.ndarray) -> Marked:
        tags, spans, found = decode_tags(logs_WL, self.labels), word_spans(text), list[Span]()
        for kind, first, end in entities(tags, scheme_of(self.labels)):
            if kind == OUTSIDE:
                continue
            logs = [logs_WL[word, self.labels.index(tags[word] or "")] for word in range(first, end)]
            start, stop = spans[first][0], spans[end - 1][1]
            found.append(Span(start, stop, text[start:stop], kind, float(np.exp(np.nansum(logs)))))
        return Marked(text, tuple(found))
