"""Texts as token ids in memory with a label for each token: sentences of words with tags, questions with their context.

A piece belongs to the first word that ends behind the piece's first character, as `word_ids` of transformers has it:
where a space has a piece of its own, it belongs to the word that follows.
"""

# Shapes: N examples, T tokens of an example, P pieces of its text, W words.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tformer.data.shards.corpus import Example
from tformer.data.shards.labelled_tokens import LabelledTokens
from tformer.data.shards.template import Ragged, pair_template, single_template, text_room
from tformer.data.shards.token_files import in_batches, token_dtype
from tformer.data.sources.questions import QuestionRow
from tformer.data.sources.tables import LabelledRow, TaggedRow
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work

UNMARKED = -100  # of a token without a label, as the loss ignores it


@dataclass(frozen=True)
class MarkedTokens(LabelledTokens):
    """Examples by number whose label is an array.

    Attributes:
        marks: int64 [T], the label of each token of every example of the whole set.
        details: what else is known of every example of the whole set: a `Sentence` or a `Window`.
    """

    marks: tuple[np.ndarray, ...] = ()
    details: tuple[Any, ...] = ()

    def _of_whole(self, index: int) -> int:
        """The number in the whole set of an example."""
        return index if self.numbers is None else int(self.numbers[index])

    def detail(self, index: int) -> Any:
        """The sentence or window of an example."""
        return self.details[self._of_whole(index)]

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[Example]:
        found = super().examples(epoch, indices)
        marks = (self.marks[self._of_whole(int(index))] for index in indices)
        return [replace(example, label=mark) for example, mark in zip(found, marks, strict=True)]


def piece_words(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [P]: the word of each piece; W behind the last word. offsets: of the pieces, spans: of the words."""
    return np.searchsorted([stop for _, stop in spans], [start for start, _ in offsets], side="right")


def first_pieces(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [W]: the first piece of each word; -1 for a word without one."""
    found = np.full(len(spans) + 1, -1, dtype=np.int64)
    words, pieces = np.unique(piece_words(offsets, spans), return_index=True)
    found[words] = pieces
    return found[:-1]


def tokenize_tagged(
    rows: Sequence[TaggedRow], labels: Sequence[np.ndarray], tokenizer: Tokenizer, *, seq_len: int, **facts: Any
) -> MarkedTokens:
    """The sentences as ids; `labels` [W] of each, at the first piece of each word. facts: of `_joined`.

    Raises InputError for no sentences, and for no room beside the special tokens.
    """
    template = single_template(tokenizer)
    room = text_room(seq_len, template.num_special)

    def examples(row: TaggedRow, number: int) -> Iterator[tuple[np.ndarray, None, np.ndarray, Sentence]]:
        found, offsets = tokenizer.encode_spans(row.text, most=room)
        first_W = first_pieces(offsets[:room], row.spans)
        seen_W = first_W >= 0
        ids = np.array([*template.prefix, *found[:room], *template.suffix], dtype=np.int64)
        marks = np.full(len(ids), UNMARKED, dtype=np.int64)
        marks[len(template.prefix) + first_W[seen_W]] = labels[number][seen_W]
        yield ids, None, marks, Sentence(labels[number], seen_W, is_cut=len(found) > room)

    made = _joined(rows, examples, tokenizer, seq_len=seq_len, **facts)
    cut = [each for each in made.details if each.is_cut]
    hidden = sum(int((~each.seen).sum()) for each in cut)
    note = f"{made.name}: {len(cut):,} of {len(rows):,} sentences are longer than {seq_len} tokens and were cut"
    return replace(made, truncated=len(cut), notes=(f"{note} ({hidden:,} words)",) if cut else ())


def tokenize_questions(
    rows: Sequence[QuestionRow],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    stride: int,
    max_question: int,
    token_types: bool,
    **facts: Any,
) -> MarkedTokens:
    """The questions, each with windows of its context that share `stride` tokens. facts: of `_joined`.

    Labels: 0 where an answer may start or end, which is the context and the first token; 1 where the first answer
    starts, plus 2 where it ends. A window without it has both on the first token. A question has at most half of the
    room, and windows share at most half of theirs.

    Raises InputError for no questions, and for no room beside the special tokens.
    """
    template = pair_template(tokenizer)
    room = text_room(seq_len, template.num_special, texts=2)
    encode = lru_cache(maxsize=1)(tokenizer.encode_spans)  # the questions about a context follow each other

    def examples(row: QuestionRow, _: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, Window]]:
        question = tokenizer.encode(row.text)[: min(max_question, room // 2)]
        found, spans = encode(row.text2 or "")
        offsets_P2 = np.array(spans, dtype=np.int64).reshape(-1, 2)
        size, before = room - len(question), len(template.prefix) + len(question) + len(template.middle)
        first = last = -1
        if row.answers:
            text, start = row.answers[0]
            first = int(np.searchsorted(offsets_P2[:, 1], start, side="right"))
            last = int(np.searchsorted(offsets_P2[:, 0], start + len(text), side="left")) - 1
        begin = 0
        while True:
            part = found[begin : begin + size]
            ids = [*template.prefix, *question, *template.middle, *part, *template.suffix]
            types = [*template.prefix_types, *[0] * len(question), *template.middle_types]
            types += [*[template.second_type] * len(part), *template.suffix_types]
            marks = np.full(len(ids), UNMARKED, dtype=np.int64)
            marks[0] = marks[before : before + len(part)] = 0
            if begin <= first <= last < begin + len(part):
                marks[before + first - begin] += 1
                marks[before + last - begin] += 2
            else:
                marks[0] = 3
            window = Window(row, begin, offsets_P2[begin : begin + len(part)])
            yield np.array(ids, dtype=np.int64), np.array(types, dtype=np.int64), marks, window
            if begin + size >= len(found):
                return
            begin += size - min(stride, size // 2)

    made = _joined(rows, examples, tokenizer, seq_len=seq_len, **facts)
    note = f"{made.name}: {len(rows):,} questions in {len(made):,} windows of up to {seq_len} tokens"
    return replace(made, notes=(note,), _types=made._types if token_types else None)


@dataclass(frozen=True)
class Sentence:
    """labels: int64 [W]; seen: bool [W], the words whose first piece was not cut off."""

    labels: np.ndarray
    seen: np.ndarray
    is_cut: bool


@dataclass(frozen=True)
class Window:
    """row: its question; begin: its first token of the context; offsets: int64 [c, 2], the characters of each."""

    row: QuestionRow
    begin: int
    offsets: np.ndarray


def _joined(
    rows: Sequence[LabelledRow],
    examples: Callable[[Any, int], Iterator[tuple[np.ndarray, np.ndarray | None, np.ndarray, Any]]],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    name: str,
    fingerprint: str = "",
    work: Work = QUIET,
) -> MarkedTokens:
    """The examples (ids, types, marks, details) of every row, given with its number."""
    if not rows:
        raise InputError(f"{name}: no rows")
    sizes = [len(row.text) + len(row.text2 or "") + 1 for row in rows]
    found, owners, done = list[tuple[Any, Any, Any, Any]](), list[LabelledRow](), 0
    for batch in in_batches(range(len(rows)), sizes.__getitem__, task=f"tokenizing {name}", work=work):
        for number in batch:
            own = list(examples(rows[number], number))
            found += own
            owners += [rows[number]] * len(own)
            done += sizes[number]
        work.report(done, sum(sizes))
    ids, types, marks, details = zip(*found, strict=True)
    lengths = np.array([len(each) for each in ids], dtype=np.int64)
    dtype = token_dtype(tokenizer.vocab_size)
    return MarkedTokens(
        name=name,
        fingerprint=hashlib.sha256(f"{fingerprint} {tokenizer.sha256} {seq_len}".encode()).hexdigest(),
        seq_len=seq_len,
        labels=np.zeros(len(ids), dtype=np.int64),
        truncated=0,
        notes=(),
        _ids=Ragged.join([(np.concatenate(ids).astype(dtype), lengths)]),
        _types=None if types[0] is None else Ragged.join([(np.concatenate(types).astype(np.uint8), lengths)]),
        rows=owners,
        marks=marks,
        details=details,
    )
