"""Pairs as token ids in memory: filter, tokenise, join, split."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from tformer.data.permutation import derive_key
from tformer.data.shards.template import (
    Ragged,
    TextTemplate,
    assemble,
    single_template,
    texts_as_bytes,
)
from tformer.data.shards.token_files import in_batches, token_dtype
from tformer.data.sources.files import Progress, ShouldStop, total_bytes
from tformer.data.sources.tables import PairRow
from tformer.errors import InputError
from tformer.tokenizer import Tokenizer

# Shapes: N rows, M values of all of them together.


# Shapes: N pairs; t and u ids of one source and one target.


@dataclass(frozen=True, slots=True)
class PairExample:
    """One pair: source ids [t] inside their template, target ids [u] up to and with their end; the task's number."""

    source: np.ndarray
    target: np.ndarray
    task: int = 0

    def __len__(self) -> int:
        return max(len(self.source), len(self.target))


@dataclass(frozen=True)
class PairTokens:
    """Pairs by number; the same in every epoch.

    Attributes:
        seq_len, target_seq_len: the most ids of a source and of a target, all special tokens included.
        tasks: names of the tasks; `PairExample.task` is a number in here.
        notes: how many pairs were left out or cut, and why.
    """

    name: str
    fingerprint: str
    seq_len: int
    target_seq_len: int
    tasks: tuple[str, ...]
    notes: tuple[str, ...]
    _sources: Ragged
    _targets: Ragged
    _source_texts: Ragged
    _target_texts: Ragged
    _tasks: np.ndarray  # int64 [N]

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def source_lengths(self) -> np.ndarray:
        """int64 [N]: ids of each source, template included."""
        return self._sources.lengths

    @property
    def target_lengths(self) -> np.ndarray:
        """int64 [N]: ids of each target, its end included."""
        return self._targets.lengths

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N]: of the longer side, by which batches are cut."""
        return np.maximum(self.source_lengths, self.target_lengths)

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[PairExample]:
        """The pairs with these numbers."""
        return [
            PairExample(
                self._sources.row(index).astype(np.int64),
                self._targets.row(index).astype(np.int64),
                int(self._tasks[index]),
            )
            for index in np.asarray(indices, dtype=np.int64).tolist()
        ]

    def texts(self, index: int) -> tuple[str, str]:
        """(source with its prefix, target) as they were read."""
        return self._source_texts.text(index), self._target_texts.text(index)

    @property
    def named_tasks(self) -> tuple[str, ...]:
        """The names of the tasks that pairs in here have, when there are several."""
        named = tuple(task for task in self.tasks if task and len(self.of_task(task)))
        return named if len(named) > 1 else ()

    def of_task(self, task: str) -> np.ndarray:
        """int64 [n]: the numbers of the pairs of one of `tasks`."""
        return np.flatnonzero(self._tasks == self.tasks.index(task))

    def source_bytes(self, index: int) -> bytes:
        """The source text in UTF-8."""
        return self._source_texts.row(index).tobytes()

    def subset(self, indices: Sequence[int] | np.ndarray) -> PairTokens:
        """Some of the pairs, in this order; their ids and texts are shared, not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            fingerprint=hashlib.sha256(self.fingerprint.encode() + chosen.tobytes()).hexdigest(),
            _sources=self._sources.subset(chosen),
            _targets=self._targets.subset(chosen),
            _source_texts=self._source_texts.subset(chosen),
            _target_texts=self._target_texts.subset(chosen),
            _tasks=self._tasks[chosen],
        )

    def split(self, *, fraction: float) -> tuple[PairTokens, PairTokens]:
        """(training part, held-out part), always the same, with equal sources on one side.

        Sources are ordered by a keyed hash, and the first ones up to the fraction, at least one, are held out.

        Raises InputError if there are not two different sources.
        """
        key = derive_key("held out pairs", 0).to_bytes(8, "little")
        digests = [hashlib.blake2b(self.source_bytes(n), digest_size=8, key=key).digest() for n in range(len(self))]
        hashes_N = np.frombuffer(b"".join(digests), dtype=">u8")
        groups, counts = np.unique(hashes_N, return_counts=True)
        if len(groups) < 2:
            raise InputError(
                f"{self.name}: {len(self):,} pairs with {len(groups)} different source are too few to keep "
                f"{fraction:g} of them for validation",
                hint="give more pairs, or validation data of its own (--valid)",
            )
        wanted = int(np.searchsorted(np.cumsum(counts), round(fraction * len(self)), side="right"))
        last = groups[min(max(wanted, 1), len(groups) - 1) - 1]
        held_out = hashes_N <= last
        return self.subset(np.flatnonzero(~held_out)), self.subset(np.flatnonzero(held_out))


def join_pairs(parts: Sequence[PairTokens]) -> PairTokens:
    """Several sets as one, in order; tasks of one name are one task. Tokenised with the same tokenizers."""
    if len(parts) == 1:
        return parts[0]
    tasks = tuple(dict.fromkeys(task for part in parts for task in part.tasks))
    numbers = [np.array([tasks.index(task) for task in part.tasks], dtype=np.int64)[part._tasks] for part in parts]
    return PairTokens(
        name=", ".join(dict.fromkeys(part.name for part in parts)),
        fingerprint=hashlib.sha256(" ".join(part.fingerprint for part in parts).encode()).hexdigest(),
        seq_len=max(part.seq_len for part in parts),
        target_seq_len=max(part.target_seq_len for part in parts),
        tasks=tasks,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        _sources=Ragged.concatenate([part._sources for part in parts]),
        _targets=Ragged.concatenate([part._targets for part in parts]),
        _source_texts=Ragged.concatenate([part._source_texts for part in parts]),
        _target_texts=Ragged.concatenate([part._target_texts for part in parts]),
        _tasks=np.concatenate(numbers),
    )


# Shapes: n pairs of one batch.


Overlong = Literal["drop", "truncate", "refuse"]


class PairFilter:
    """Chooses batch by batch, and counts.

    Args:
        limits: the most ids of a source and of a target, special tokens included, as messages name them.
        rooms: the same without special tokens.
        overlong: "drop"; "truncate": longer ones stay, and are cut by the caller; "refuse": they are an error.
        max_length_ratio: None: any.
        keep_all: nothing is left out, for evaluation: "drop" is then as "truncate".
    """

    def __init__(
        self,
        limits: tuple[int, int],
        *,
        rooms: tuple[int, int],
        overlong: Overlong,
        max_length_ratio: float | None,
        keep_all: bool,
    ) -> None:
        self._limits, self._rooms, self._ratio = limits, rooms, max_length_ratio
        self._overlong, self._keep_all = overlong, keep_all
        self._read = self._cut = 0
        self._out: Counter[str] = Counter()

    def keep(self, rows: Sequence[PairRow], sources: list[list[int]], targets: list[list[int]]) -> list[int]:
        """The numbers of the rows that stay; ids without special tokens. Raises InputError for what is refused."""
        self._read += len(rows)
        source_n, target_n = (np.array([len(ids) for ids in side], dtype=np.int64) for side in (sources, targets))
        blank = [not row.source.strip() or not row.target.strip() for row in rows]
        empty = np.array(blank, dtype=bool) | (source_n == 0) | (target_n == 0)
        overlong = (source_n > self._rooms[0]) | (target_n > self._rooms[1])
        uneven = np.zeros_like(empty)
        if self._ratio is not None:
            uneven = np.maximum(source_n, target_n) > self._ratio * np.minimum(source_n, target_n)
        left = np.ones_like(empty)
        reasons = {"empty": empty, "long": overlong & (self._overlong == "drop"), "ratio": uneven}
        for reason, out in () if self._keep_all else reasons.items():
            self._out[reason] += int((out & left).sum())
            left &= ~out
        if self._overlong == "refuse" and (overlong & left).any():
            first = int(np.flatnonzero(overlong & left)[0])
            raise self._too_long(rows[first], (len(sources[first]), len(targets[first])))
        self._cut += int((overlong & left).sum())
        return np.flatnonzero(left).tolist()

    def notes(self, name: str) -> tuple[str, ...]:
        """How many pairs were left out and why, and how many were cut."""
        notes = []
        if dropped := self._out.total():
            notes.append(f"{name}: {dropped:,} of {self._read:,} pairs left out: {self._reasons()}")
        if self._cut:
            notes.append(f"{name}: {self._cut:,} of {self._read:,} pairs are {self._longer()} and were cut")
        return tuple(notes)

    def nothing_left(self, name: str) -> InputError:
        """What is wrong when no pair stays."""
        if not self._read:
            return InputError(f"{name}: no rows")
        return InputError(
            f"{name}: none of {self._read:,} pairs is left: {self._reasons()}",
            hint="see data.seq_len, data.target_seq_len, data.overlong and data.max_length_ratio",
        )

    def _too_long(self, row: PairRow, lengths: tuple[int, int]) -> InputError:
        side = int(lengths[0] <= self._rooms[0])
        special = self._limits[side] - self._rooms[side]
        return InputError(
            f"{row.place}: the {('source', 'target')[side]} has {lengths[side] + special:,} tokens, "
            f"expected at most {self._limits[side]:,}",
            hint="that is what the model reads; leave the pair out",
        )

    def _reasons(self) -> str:
        words = {
            "empty": "with an empty side",
            "long": self._longer(),
            "ratio": f"with a length ratio above {self._ratio or 0:g}",
        }
        return ", ".join(f"{self._out[reason]:,} {text}" for reason, text in words.items() if self._out[reason])

    def _longer(self) -> str:
        source, target = self._limits
        return f"longer than {source:,} tokens" + ("" if source == target else f" (targets: {target:,})")


# Shapes: N pairs.


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
    should_stop: ShouldStop | None = None,
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
    total = total_bytes(sources)
    done = 0
    rows = (row for source in sources for row in source.rows())
    for batch in in_batches(
        rows, lambda row: len(row.source) + len(row.target) + 2, task=f"tokenising {name}", should_stop=should_stop
    ):
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
