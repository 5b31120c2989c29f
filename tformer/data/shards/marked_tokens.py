"""Texts as token ids in memory with a label for each token: sentences of words with tags, questions about a context.

A piece belongs to the first word that ends behind the piece's first character, as `word_ids` of transformers has it:
where a space has a piece of its own, it belongs to the word that follows.
"""

# Shapes: N examples, T tokens of an example, P pieces of a text, W words.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np

from tformer.data.permutation import share_of
from tformer.data.shards.corpus import Example
from tformer.data.shards.labelled_tokens import LabelledTokens
from tformer.data.shards.template import Ragged, pair_template, single_template, text_room
from tformer.data.shards.token_files import in_batches, token_dtype
from tformer.data.sources.labelled import LabelIndex
from tformer.data.sources.questions import QuestionRow
from tformer.data.sources.tables import LabelledRow, RowSource, TaggedRow
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work

UNMARKED = -100  # of a token without a label, as the loss ignores it
SHARED = 128  # tokens that two windows of a long sentence share; at most half of their room
NO_LABELS = LabelIndex(())  # of sentences without tags

Made = tuple[list[int], list[int] | None, TaggedRow | QuestionRow]
"""Ids, token types, and the row with its `marks`."""


@dataclass(frozen=True)
class MarkedTokens(LabelledTokens):
    """Examples by number, each with the `marks` of its row as label; `labels` are zeros."""

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[Example]:
        found: Any = zip(super().examples(epoch, indices), (self.rows[int(index)] for index in indices), strict=True)
        return [replace(example, label=row.marks) for example, row in found]

    @property
    def text_numbers(self) -> np.ndarray:
        """int64 [N]: the number of the text that each window is from, by their order."""
        numbers = dict[Any, int]()
        owners = ((row.place, row.number) for row in self.rows)
        return np.array([numbers.setdefault(owner, len(numbers)) for owner in owners], dtype=np.int64)

    @property
    def source_lengths(self) -> np.ndarray:
        """int64 [N]: the tokens of all windows of each window's text: a breakdown by length keeps them together."""
        numbers_N = self.text_numbers
        return np.bincount(numbers_N, weights=self.lengths).astype(np.int64)[numbers_N]

    def share(self, *, fraction: float, seed: int) -> LabelledTokens:
        """Some of the texts with all their windows, fixed by the seed."""
        numbers_N = self.text_numbers
        chosen = share_of(int(numbers_N.max()) + 1, fraction=fraction, seed=seed)
        return self.subset(np.flatnonzero(np.isin(numbers_N, chosen)))


def piece_words(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [P]: the word of each piece; W behind the last word. offsets: of the pieces, spans: of the words."""
    return np.searchsorted([stop for _, stop in spans], [start for start, _ in offsets], side="right")


def windows(length: int, size: int, *, shared: int) -> list[slice]:
    """Parts of at most `size` tokens that hold all, at least one; two neighbours share `shared` tokens."""
    return [slice(begin, begin + size) for begin in range(0, max(1, length - shared), size - shared)]


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

    made = _joined(sources, examples, tokenizer, seq_len=seq_len, key=str(index), work=work)
    return replace(made, notes=(*index.notes(), *made.notes))


def tokenize_questions(
    sources: Sequence[RowSource],
    options: Any,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    token_types: bool,
    work: Work = QUIET,
) -> MarkedTokens:
    """The questions, each with windows of its context. options: of the objective.

    Labels: 0 where an answer may start or end, which is the context and the first token; 1 where the first answer
    starts, plus 2 where it ends. A window without it has both on the first token. A question has at most half of the
    room, and windows share at most half of theirs.

    Raises InputError for no questions, and for no room beside the special tokens.
    """
    template = pair_template(tokenizer)
    room = text_room(seq_len, template.num_special, texts=2)
    encode = lru_cache(maxsize=1)(tokenizer.encode_spans)  # the questions about a context follow each other

    def examples(row: QuestionRow) -> Iterator[Made]:
        question = tokenizer.encode(row.text)[: min(options.max_question, room // 2)]
        found, spans = encode(row.text2 or "")
        offsets_P2 = np.array(spans, dtype=np.int64).reshape(-1, 2)
        size = room - len(question)
        head = [*template.prefix, *question, *template.middle]
        first = last = -1
        if row.answers:
            text, start = row.answers[0]
            first = int(np.searchsorted(offsets_P2[:, 1], start, side="right"))
            last = int(np.searchsorted(offsets_P2[:, 0], start + len(text), side="left")) - 1
        for part in windows(len(found), size, shared=min(options.stride, size // 2)):
            ids = [*head, *found[part], *template.suffix]
            types = [*template.prefix_types, *[0] * len(question), *template.middle_types]
            types += [*[template.second_type] * len(found[part]), *template.suffix_types]
            marks = np.full(len(ids), UNMARKED, dtype=np.int64)
            marks[0] = marks[len(head) : len(head) + len(found[part])] = 0
            if part.start <= first <= last < part.stop:
                marks[len(head) + first - part.start] += 1
                marks[len(head) + last - part.start] += 2
            else:
                marks[0] = 3
            yield ids, types if token_types else None, replace(row, offsets=offsets_P2[part], marks=marks)

    key = f"{options.stride} {options.max_question}"
    return _joined(sources, examples, tokenizer, seq_len=seq_len, key=key, work=work)


def _joined(
    sources: Sequence[RowSource],
    examples: Callable[[Any], Iterable[Made]],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    key: str,
    work: Work,
) -> MarkedTokens:
    """The examples of every row. key: of what else they depend on."""
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    rows = [row for source in sources for row in source.rows()]
    if not rows:
        raise InputError(f"{name}: no rows")

    def size(row: LabelledRow) -> int:
        return len(row.text) + len(row.text2 or "") + 1

    made, done, total = list[list[Made]](), 0, sum(map(size, rows))
    for batch in in_batches(rows, size, task=f"tokenizing {name}", work=work):
        made += (list(examples(row)) for row in batch)
        done += sum(map(size, batch))
        work.report(done, total)
    ids, types, owners = zip(*chain.from_iterable(made), strict=True)
    long = sum(len(each) > 1 for each in made)
    note = f"{name}: {long:,} of {len(rows):,} texts are longer than {seq_len} tokens and are read in windows"
    lengths, dtype = np.array(list(map(len, ids)), dtype=np.int64), token_dtype(tokenizer.vocab_size)
    key = f"{[source.fingerprint() for source in sources]} {tokenizer.sha256} {seq_len} {key}"
    return MarkedTokens(
        name=name,
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        seq_len=seq_len,
        labels=np.zeros(len(ids), dtype=np.int64),
        truncated=0,
        notes=(note,) if long else (),
        _ids=Ragged.join([(np.concatenate(ids).astype(dtype), lengths)]),
        _types=None if types[0] is None else Ragged.join([(np.concatenate(types).astype(np.uint8), lengths)]),
        rows=owners,
    )
