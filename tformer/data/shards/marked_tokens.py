"""Texts as token ids in memory with a label for each token: sentences of words with tags, questions about a context.

A piece belongs to the first word that ends behind the piece's first character, as `word_ids` of transformers has it:
where a space has a piece of its own, it belongs to the word that follows.
"""

# Shapes: N examples, T tokens of an example, P pieces of a text, W words.

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

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
    def source_lengths(self) -> np.ndarray:
        """int64 [N]: the tokens of all windows of each window's question: a breakdown by length keeps them together."""
        owners, totals = [(row.place, row.number) for row in self.rows], Counter[Any]()
        for owner, length in zip(owners, self.lengths.tolist(), strict=True):
            totals[owner] += length
        return np.array([totals[owner] for owner in owners], dtype=np.int64)


def piece_words(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [P]: the word of each piece; W behind the last word. offsets: of the pieces, spans: of the words."""
    return np.searchsorted([stop for _, stop in spans], [start for start, _ in offsets], side="right")


def tokenize_tagged(
    sources: Sequence[RowSource], index: LabelIndex, tokenizer: Tokenizer, *, seq_len: int, work: Work = QUIET
) -> MarkedTokens:
    """The sentences as ids, with each word's label at its first piece; 0 of rows without tags.

    Raises InputError for no sentences, an unknown tag, and for no room beside the special tokens.
    """
    template = single_template(tokenizer)
    room = text_room(seq_len, template.num_special)
    hidden_W = list[int]()  # words that were cut off, of each sentence that is too long

    def examples(row: TaggedRow) -> Iterator[Made]:
        found, offsets = tokenizer.encode_spans(row.text, most=room)
        words, firsts = np.unique(piece_words(offsets[:room], row.spans), return_index=True)
        is_word = words < len(row.spans)
        words, firsts = words[is_word], firsts[is_word]
        seen = np.isin(np.arange(len(row.spans)), words)
        if len(found) > room:
            hidden_W.append(int((~seen).sum()))
        ids = [*template.prefix, *found[:room], *template.suffix]
        marks = np.full(len(ids), UNMARKED, dtype=np.int64)
        marks[len(template.prefix) + firsts] = 0
        if row.tags:
            label_W = index.encode_all(row.tags, [row.place] * len(row.tags))
            marks[len(template.prefix) + firsts] = label_W[words]
            row = replace(row, tags=tuple(index.names[label] for label in label_W))
        yield ids, None, replace(row, seen=seen, marks=marks)

    made = _joined(sources, examples, tokenizer, seq_len=seq_len, key=str(index), work=work)
    note = f"{made.name}: {len(hidden_W):,} of {len(made):,} sentences are longer than {seq_len} tokens and were cut"
    cut = (f"{note} ({sum(hidden_W):,} words)",) if hidden_W else ()
    return replace(made, truncated=len(hidden_W), notes=(*index.notes(), *cut))


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
        step = size - min(options.stride, size // 2)
        for begin in range(0, max(1, len(found) - size + step), step):
            part = slice(begin, begin + size)
            ids = [*head, *found[part], *template.suffix]
            types = [*template.prefix_types, *[0] * len(question), *template.middle_types]
            types += [*[template.second_type] * len(found[part]), *template.suffix_types]
            marks = np.full(len(ids), UNMARKED, dtype=np.int64)
            marks[0] = marks[len(head) : len(head) + len(found[part])] = 0
            if begin <= first <= last < begin + len(found[part]):
                marks[len(head) + first - begin] += 1
                marks[len(head) + last - begin] += 2
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

    found, done, total = list[Made](), 0, sum(map(size, rows))
    for batch in in_batches(rows, size, task=f"tokenizing {name}", work=work):
        found += (example for row in batch for example in examples(row))
        done += sum(map(size, batch))
        work.report(done, total)
    ids, types, owners = zip(*found, strict=True)
    lengths, dtype = np.array(list(map(len, ids)), dtype=np.int64), token_dtype(tokenizer.vocab_size)
    key = f"{[source.fingerprint() for source in sources]} {tokenizer.sha256} {seq_len} {key}"
    return MarkedTokens(
        name=name,
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        seq_len=seq_len,
        labels=np.zeros(len(ids), dtype=np.int64),
        truncated=0,
        notes=(),
        _ids=Ragged.join([(np.concatenate(ids).astype(dtype), lengths)]),
        _types=None if types[0] is None else Ragged.join([(np.concatenate(types).astype(np.uint8), lengths)]),
        rows=owners,
    )
