"""Pairs as token ids in memory: sources inside their template, targets with their end, and which pairs were left out.

    source  the text inside the special tokens of its tokenizer's template: [START] a [END], a </s>, <s> a </s>
    target  the text and the end-of-sequence token; what the decoder starts from is the objective's

Which pairs are left out is `pair_filter`'s. Those that are too long and stay lose the end of their text, never a
special token.
"""

# Shapes: N pairs.

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from tformer.data.pair_filter import Overlong, PairFilter
from tformer.data.pair_ragged import Ragged, texts_as_bytes
from tformer.data.pair_set import PairExample, PairTokens, join_pairs, split_pairs
from tformer.data.pair_tables import PairRow
from tformer.data.shards import token_dtype
from tformer.data.template import TextTemplate, assemble, single_template
from tformer.data.tokenise import BATCH_CHARACTERS, Progress
from tformer.errors import InputError, Interrupted
from tformer.tokenizer import Tokenizer

__all__ = ["PairExample", "PairTokens", "join_pairs", "split_pairs", "tokenise_pairs"]


class RowSource(Protocol):
    """What is needed of a `PairSource`."""

    @property
    def name(self) -> str: ...
    def rows(self) -> Iterator[PairRow]: ...
    def fingerprint(self) -> str: ...
    def size_bytes(self) -> int | None: ...


def tokenise_pairs(
    sources: Sequence[RowSource],
    tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    *,
    seq_len: int,
    target_seq_len: int,
    eos: int,
    overlong: Overlong = "drop",
    max_length_ratio: float | None = None,
    keep_all: bool = False,
    tasks: Sequence[str] = (),
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> PairTokens:
    """All rows of the sources, read and tokenised.

    Args:
        seq_len, target_seq_len: the most ids of a source and of a target (`eos` included; a forced first token is not).
        eos: what ends a target, in its own vocabulary.
        overlong: what becomes of longer pairs: left out, cut, or an error.
        max_length_ratio: of the token counts of both sides, without special tokens and before any cutting.
        keep_all: for evaluation: no pair is left out, too long ones are cut (or an error).
        tasks: names that are numbered first, so that sets tokenised one by one agree; others follow as they come.
        progress: called with the bytes done and those in all.

    Raises InputError: a wrong row, no room beside the special tokens, no pair left, a pair that is refused for its
    length; Interrupted when `should_stop` says so.
    """
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    template = single_template(tokenizer)
    ending = TextTemplate((), (), (eos,), (), (), (0,), second_type=0)
    room = _room(seq_len, template, key="data.seq_len")
    target_room = _room(target_seq_len, ending, key="data.target_seq_len")
    chosen = PairFilter(
        (seq_len, target_seq_len),
        rooms=(room, target_room),
        overlong=overlong,
        max_length_ratio=max_length_ratio,
        keep_all=keep_all,
    )
    task_ids = {task: number for number, task in enumerate(dict.fromkeys(tasks))}
    sides: tuple[list[tuple[np.ndarray, np.ndarray]], ...] = ([], [], [], [])
    numbers: list[int] = []
    sizes = [source.size_bytes() for source in sources]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    done = 0
    for batch in _batches(sources):
        if should_stop is not None and should_stop():
            raise Interrupted(f"interrupted while tokenising {name}", signal_number=signal.SIGINT)
        texts = [[row.source for row in batch], [row.target for row in batch]]
        encoded = [tokenizer.encode_batch(texts[0]), target_tokenizer.encode_batch(texts[1])]
        kept = chosen.keep(batch, *encoded)
        texts, encoded = [[side[n] for n in kept] for side in texts], [[side[n] for n in kept] for side in encoded]
        encoded[0] = [ids or _nothing(tokenizer, template) for ids in encoded[0]]
        for side, ids, frame, most, vocabulary in (
            (sides[0], encoded[0], template, room, tokenizer),
            (sides[1], encoded[1], ending, target_room, target_tokenizer),
        ):
            flat, _, lengths, _ = assemble(ids, frame, room=most, pairs=False, truncation="head")
            side.append((flat.astype(token_dtype(vocabulary.vocab_size)), lengths))
        for side, strings in zip(sides[2:], texts, strict=True):
            side.append(texts_as_bytes(strings))
        numbers += [task_ids.setdefault(batch[n].task, len(task_ids)) for n in kept]
        done += sum(len(row.source.encode()) + len(row.target.encode()) + 2 for row in batch)
        if progress is not None:
            progress(done if total is None else min(done, total), total)
    if not numbers:
        raise chosen.nothing_left(name)
    settings = (seq_len, target_seq_len, eos, overlong, max_length_ratio, keep_all, tuple(task_ids))
    parts = [source.fingerprint() for source in sources]
    key = f"{parts} {tokenizer.sha256} {target_tokenizer.sha256} {settings}"
    return PairTokens(
        name=name,
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        seq_len=seq_len,
        target_seq_len=target_seq_len,
        tasks=tuple(task_ids),
        notes=chosen.notes(name),
        _sources=Ragged.join(sides[0]),
        _targets=Ragged.join(sides[1]),
        _source_texts=Ragged.join(sides[2]),
        _target_texts=Ragged.join(sides[3]),
        _tasks=np.array(numbers, dtype=np.int64),
    )


def _room(seq_len: int, template: TextTemplate, *, key: str) -> int:
    room = seq_len - template.num_special
    if room < 1:
        raise InputError(
            f"{key}: {seq_len} tokens leave no room for text beside {template.num_special} special tokens",
            hint=f"set it to at least {template.num_special + 1}",
        )
    return room


def _nothing(tokenizer: Tokenizer, template: TextTemplate) -> list[int]:
    """An encoder needs one id to read, also of an empty text without a template."""
    special = tokenizer.special
    return [] if template.num_special else [next(i for i in (special.unk, special.pad, 0) if i is not None)]


def _batches(sources: Sequence[RowSource]) -> Iterator[list[PairRow]]:
    batch: list[PairRow] = []
    size = 0
    for source in sources:
        for row in source.rows():
            batch.append(row)
            size += len(row.source) + len(row.target) + 2  # empty ones count too: a batch of them must end
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
