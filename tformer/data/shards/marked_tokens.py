"""Texts as token ids in memory with a label for each token: sentences of words with tags, questions about a context."""

# Shapes: N examples, P pieces of a text.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from tformer.data.permutation import share_of
from tformer.data.shards.corpus import Example
from tformer.data.shards.labelled_tokens import LabelledTokens
from tformer.data.shards.template import Ragged, pair_template, text_room
from tformer.data.shards.token_files import in_batches, token_dtype
from tformer.data.sources.questions import QuestionRow
from tformer.data.sources.tables import LabelledRow, RowSource, TaggedRow
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work

UNMARKED = -100  # of a token without a label, as the loss ignores it

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


def windows(length: int, size: int, *, shared: int) -> list[slice]:
    """Parts of at most `size` tokens that hold all, at least one; two neighbours share `shared` tokens."""
    return [slice(begin, begin + size) for begin in range(0, max(1, length - shared), size - shared)]


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
        context_ids, spans = encode(row.text2 or "")
        offsets_P2 = np.array(spans, dtype=np.int64).reshape(-1, 2)
        size = room - len(question)
        head = [*template.prefix, *question, *template.middle]
        first = last = -1
        if row.answers:
            text, start = row.answers[0]
            first = int(np.searchsorted(offsets_P2[:, 1], start, side="right"))
            last = int(np.searchsorted(offsets_P2[:, 0], start + len(text), side="left")) - 1
        for window in windows(len(context_ids), size, shared=min(options.stride, size // 2)):
            ids = [*head, *context_ids[window], *template.suffix]
            types = [*template.prefix_types, *[0] * len(question), *template.middle_types]
            types += [*[template.second_type] * len(context_ids[window]), *template.suffix_types]
            marks = np.full(len(ids), UNMARKED, dtype=np.int64)
            marks[0] = marks[len(head) : len(head) + len(context_ids[window])] = 0
            if window.start <= first <= last < window.stop:
                marks[len(head) + first - window.start] += 1
                marks[len(head) + last - window.start] += 2
            else:
                marks[0] = 3
            yield ids, types if token_types else None, replace(row, offsets=offsets_P2[window], marks=marks)

    key = f"{options.stride} {options.max_question}"
    return join_windows(sources, examples, tokenizer, seq_len=seq_len, key=key, work=work)


def join_windows(
    sources: Sequence[RowSource],
    examples: Callable[[Any], Iterable[Made]],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    key: str,
    work: Work,
) -> MarkedTokens:
    """The examples of every row. examples: of one row. key: of what else they depend on."""
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
