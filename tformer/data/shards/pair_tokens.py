"""Pairs as token ids in memory: tokenized, filtered, joined and split.

    source  the text inside the special tokens of its tokenizer's template: [START] a [END], a </s>, <s> a </s>
    target  the text and the end-of-sequence token; the objective adds the decoder's start

A pair is left out if a side is empty (no text, or no tokens), if a side is longer than its limit, or if one side has
more than `max_length_ratio` times the tokens of the other. Each is counted for the first reason that applies. A pair
that is too long and kept loses the end of its text, never a special token.
"""

# Shapes: N pairs, n of one batch; t and u ids of one source and one target.

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from tformer.data.permutation import derive_key, share_of
from tformer.data.shards.template import Ragged, TextTemplate, assemble, single_template, text_room, texts_as_bytes
from tformer.data.shards.token_files import in_batches, token_dtype
from tformer.data.sources.files import total_bytes
from tformer.data.sources.tables import PairRow, RowSource
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pieces import size_for_message
from tformer.workers.work import QUIET, Work

Overlong = Literal["drop", "truncate", "refuse"]


@dataclass(frozen=True, slots=True)
class PairExample:
    """One pair: source ids [t] with their template, target ids [u] with their end, and the number of its task."""

    source: np.ndarray
    target: np.ndarray
    task: int = 0

    def __len__(self) -> int:
        return max(len(self.source), len(self.target))


@dataclass(frozen=True)
class SideTokens:
    """The sources or the targets of a set of pairs: ids, and texts in UTF-8."""

    ids: Ragged
    texts: Ragged

    def subset(self, indices: np.ndarray) -> SideTokens:
        return SideTokens(self.ids.subset(indices), self.texts.subset(indices))

    @classmethod
    def join(cls, parts: Sequence[SideTokens]) -> SideTokens:
        return cls(Ragged.concatenate([part.ids for part in parts]), Ragged.concatenate([part.texts for part in parts]))


@dataclass(frozen=True)
class PairTokens:
    """Pairs by number, the same in every epoch.

    Attributes:
        seq_len, target_seq_len: most ids of a source and of a target, with all special tokens.
        tasks: names of the tasks, numbered as in `PairExample.task`.
        notes: how many pairs were left out or cut, and why.
    """

    name: str
    fingerprint: str
    seq_len: int
    target_seq_len: int
    tasks: tuple[str, ...]
    notes: tuple[str, ...]
    sources: SideTokens
    targets: SideTokens
    task_numbers: np.ndarray  # int64 [N]

    def __len__(self) -> int:
        return len(self.task_numbers)

    @property
    def source_lengths(self) -> np.ndarray:
        """int64 [N]: ids of each source, with its template."""
        return self.sources.ids.lengths

    @property
    def target_lengths(self) -> np.ndarray:
        """int64 [N]: ids of each target, with its end."""
        return self.targets.ids.lengths

    @property
    def side_lengths(self) -> np.ndarray:
        """int64 [N, 2]: of both sides."""
        return np.stack([self.source_lengths, self.target_lengths], axis=1)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N]: of the longer side, by which batches are cut."""
        return np.maximum(self.source_lengths, self.target_lengths)

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[PairExample]:
        """The pairs with these numbers."""
        return [
            PairExample(
                self.sources.ids.row(index).astype(np.int64),
                self.targets.ids.row(index).astype(np.int64),
                int(self.task_numbers[index]),
            )
            for index in np.asarray(indices, dtype=np.int64).tolist()
        ]

    def texts(self, index: int) -> tuple[str, str]:
        """(source with its prefix, target) as they were read."""
        return self.sources.texts.text(index), self.targets.texts.text(index)

    def rows(self) -> Iterator[PairRow]:
        """The texts of every pair; where they were read is not known."""
        return (PairRow(*self.texts(index), "") for index in range(len(self)))

    @property
    def named_tasks(self) -> tuple[str, ...]:
        """The names of the tasks of these pairs; empty if there is only one."""
        named = tuple(task for task in self.tasks if task and len(self.of_task(task)))
        return named if len(named) > 1 else ()

    def of_task(self, task: str) -> np.ndarray:
        """int64 [n]: the numbers of the pairs of one of `tasks`."""
        return np.flatnonzero(self.task_numbers == self.tasks.index(task))

    def subset(self, indices: Sequence[int] | np.ndarray) -> PairTokens:
        """Some of the pairs, in this order; their ids and texts are shared, not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            fingerprint=hashlib.sha256(self.fingerprint.encode() + chosen.tobytes()).hexdigest(),
            sources=self.sources.subset(chosen),
            targets=self.targets.subset(chosen),
            task_numbers=self.task_numbers[chosen],
        )

    def share(self, *, fraction: float, seed: int) -> PairTokens:
        """Some of the pairs, fixed by the seed."""
        return self.subset(share_of(len(self), fraction=fraction, seed=seed))

    def split(self, *, fraction: float) -> tuple[PairTokens, PairTokens]:
        """(training part, held-out part), always the same, with equal sources on one side.

        Sources are ordered by a keyed hash, and the first ones up to the fraction, at least one, are held out.

        Raises InputError if there are not two different sources.
        """
        hashes_N = source_hashes(self.sources.texts.row(n).tobytes() for n in range(len(self)))
        groups, counts = np.unique(hashes_N, return_counts=True)
        if len(groups) < 2:
            raise InputError(
                f"{self.name}: {len(self):,} pairs with {len(groups)} different source are too few to keep "
                f"{fraction:g} of them for validation",
                hint="give more pairs, or separate validation data (--valid)",
            )
        wanted = int(np.searchsorted(np.cumsum(counts), round(fraction * len(self)), side="right"))
        last = groups[min(max(wanted, 1), len(groups) - 1) - 1]
        held_out = hashes_N <= last
        return self.subset(np.flatnonzero(~held_out)), self.subset(np.flatnonzero(held_out))


def source_hashes(texts: Iterable[bytes]) -> np.ndarray:
    """Keyed hashes [N] of the sources of pairs: those with the smallest are held out."""
    key = derive_key("held out pairs", 0).to_bytes(8, "little")
    digests = (hashlib.blake2b(text, digest_size=8, key=key).digest() for text in texts)
    return np.frombuffer(b"".join(digests), dtype=">u8")


def join_pairs(sets: Sequence[PairTokens]) -> PairTokens:
    """Join sets with the same tokenizers in order; tasks with the same name become one task."""
    if len(sets) == 1:
        return sets[0]
    tasks = tuple(dict.fromkeys(task for pairs in sets for task in pairs.tasks))
    return PairTokens(
        name=", ".join(dict.fromkeys(pairs.name for pairs in sets)),
        fingerprint=hashlib.sha256(" ".join(pairs.fingerprint for pairs in sets).encode()).hexdigest(),
        seq_len=max(pairs.seq_len for pairs in sets),
        target_seq_len=max(pairs.target_seq_len for pairs in sets),
        tasks=tasks,
        notes=tuple(dict.fromkeys(note for pairs in sets for note in pairs.notes)),
        sources=SideTokens.join([pairs.sources for pairs in sets]),
        targets=SideTokens.join([pairs.targets for pairs in sets]),
        task_numbers=np.concatenate(
            [
                np.array([tasks.index(task) for task in pairs.tasks], dtype=np.int64)[pairs.task_numbers]
                for pairs in sets
            ]
        ),
    )


class SideBuilder:
    """The tokenizer, template and limit of one side of the pairs, and what was added so far."""

    def __init__(self, tokenizer: Tokenizer, template: TextTemplate, limit: int, *, key: str) -> None:
        self.tokenizer, self.template, self.limit = tokenizer, template, limit
        self.room = text_room(limit, template.num_special, key=key)
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._ids: list[tuple[np.ndarray, np.ndarray]] = []
        self._texts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, texts: Sequence[str], encoded: Sequence[Sequence[int]]) -> None:
        ids, _, lengths, _ = assemble(encoded, self.template, room=self.room, pairs=False, truncation="head")
        self._ids.append((ids.astype(self._dtype), lengths))
        self._texts.append(texts_as_bytes(texts))

    def tokens(self) -> SideTokens:
        return SideTokens(Ragged.join(self._ids), Ragged.join(self._texts))


class PairFilter:
    """Chooses the pairs to keep, batch by batch, and counts the others.

    Args:
        overlong: "drop"; "truncate": longer pairs are kept, and cut by the caller; "refuse": they are an error.
        max_length_ratio: of the longer side to the shorter one; None allows any.
        keep_all: nothing is left out, for evaluation: "drop" then means "truncate".
    """

    def __init__(
        self,
        sides: tuple[SideBuilder, SideBuilder],
        *,
        overlong: Overlong,
        max_length_ratio: float | None,
        keep_all: bool,
    ) -> None:
        self._limits, self._rooms = ([side.limit for side in sides], [side.room for side in sides])
        self._ratio = max_length_ratio
        self._overlong, self._keep_all = overlong, keep_all
        self._read = self._cut = 0
        self._out: Counter[str] = Counter()

    def keep(self, rows: Sequence[PairRow], sources: list[list[int]], targets: list[list[int]]) -> list[int]:
        """The numbers of the rows to keep; ids are without special tokens. Raises InputError for a refused row."""
        self._read += len(rows)
        source_n, target_n = (np.array([len(ids) for ids in side], dtype=np.int64) for side in (sources, targets))
        blank = [not row.source.strip() or not row.target.strip() for row in rows]
        empty = np.array(blank, dtype=bool) | (source_n == 0) | (target_n == 0)
        overlong = (source_n > self._rooms[0]) | (target_n > self._rooms[1])
        uneven = np.zeros_like(empty)
        if self._ratio is not None:
            uneven = np.maximum(source_n, target_n) > self._ratio * np.minimum(source_n, target_n)
        kept = np.ones_like(empty)
        reasons = {"empty": empty, "long": overlong & (self._overlong == "drop"), "ratio": uneven}
        for reason, out in () if self._keep_all else reasons.items():
            self._out[reason] += int((out & kept).sum())
            kept &= ~out
        if self._overlong == "refuse" and (overlong & kept).any():
            first = int(np.flatnonzero(overlong & kept)[0])
            row, lengths = rows[first], (len(sources[first]), len(targets[first]))
            side = int(lengths[0] <= self._rooms[0])
            limit = self._limits[side]
            text, tokens = (row.source, row.target)[side], lengths[side] + limit - self._rooms[side]
            raise InputError(
                f"{row.place}: the {('source', 'target')[side]} has {size_for_message(text, tokens, most=limit)}, "
                f"expected at most {limit:,}",
                hint="the model reads no more; leave the pair out",
            )
        self._cut += int((overlong & kept).sum())
        return np.flatnonzero(kept).tolist()

    def notes(self, name: str) -> tuple[str, ...]:
        """Numbers of pairs that were left out, with reasons, and cut, in words. Raises InputError if none is kept."""
        if not self._read:
            raise InputError(f"{name}: no rows")
        if self._out.total() == self._read:
            raise InputError(
                f"{name}: none of {self._read:,} pairs is left: {self._reasons()}",
                hint="cut long ones with --set data.overlong=truncate, or raise data.seq_len, data.target_seq_len or "
                "data.max_length_ratio with --set",
            )
        notes = []
        if dropped := self._out.total():
            notes.append(f"{name}: {dropped:,} of {self._read:,} pairs left out: {self._reasons()}")
        if self._cut:
            notes.append(f"{name}: {self._cut:,} of {self._read:,} pairs are {self._longer()} and were cut")
        return tuple(notes)

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


class PairRowSource(RowSource, Protocol):
    """Pairs to tokenize: a `PairSource`, or pairs in memory."""

    def size_bytes(self) -> int | None: ...


def tokenize_pairs(
    sources: Sequence[PairRowSource],
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
    work: Work = QUIET,
) -> PairTokens:
    """All rows of the sources, read and tokenized.

    Args:
        seq_len, target_seq_len: most ids of a source and of a target, with `eos` but without a forced first token.
        eos: the id that ends a target.
        overlong: longer pairs are left out, cut, or an error.
        max_length_ratio: of the token counts of both sides, without special tokens and before cutting.
        keep_all: for evaluation: no pair is left out, longer ones are cut (or an error).
        tasks: names that are numbered first, so that sets tokenized one by one agree; others follow in order.
        work: reports the bytes done.

    Raises InputError: a wrong row, no room beside the special tokens, no pair left, a pair that is refused for its
    length; Interrupted if `work` is stopped.
    """
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    template = single_template(tokenizer)
    ending = TextTemplate((), (), (eos,), (), (), (0,), second_type=0)
    sides = (
        SideBuilder(tokenizer, template, seq_len, key="data.seq_len"),
        SideBuilder(target_tokenizer, ending, target_seq_len, key="data.target_seq_len"),
    )
    pair_filter = PairFilter(sides, overlong=overlong, max_length_ratio=max_length_ratio, keep_all=keep_all)
    task_ids = {task: number for number, task in enumerate(dict.fromkeys(tasks))}
    counts_all = max_length_ratio is not None and overlong != "drop"  # the ratio is of all tokens
    numbers: list[int] = []
    total, done = total_bytes(sources), 0
    rows = (row for source in sources for row in source.rows())
    for batch in in_batches(
        rows, lambda row: len(row.source) + len(row.target) + 2, task=f"tokenizing {name}", work=work
    ):
        texts = [[row.source for row in batch], [row.target for row in batch]]
        encoded = [
            side.tokenizer.encode_batch(strings, most=None if counts_all else side.room)
            for side, strings in zip(sides, texts, strict=True)
        ]
        kept = pair_filter.keep(batch, *encoded)
        if not template.num_special:  # an encoder needs at least one id
            blank = next(i for i in (tokenizer.special.unk, tokenizer.special.pad, 0) if i is not None)
            encoded[0] = [ids or [blank] for ids in encoded[0]]
        for side, strings, ids in zip(sides, texts, encoded, strict=True):
            side.add([strings[n] for n in kept], [ids[n] for n in kept])
        numbers += [task_ids.setdefault(batch[n].task, len(task_ids)) for n in kept]
        done += sum(len(row.source.encode()) + len(row.target.encode()) + 2 for row in batch)
        work.report(done if total is None else min(done, total), total)
    notes = pair_filter.notes(name)
    settings = (seq_len, target_seq_len, eos, overlong, max_length_ratio, keep_all, tuple(task_ids))
    parts = [source.fingerprint() for source in sources]
    key = f"{parts} {tokenizer.sha256} {target_tokenizer.sha256} {settings}"
    return PairTokens(
        name=name,
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        seq_len=seq_len,
        target_seq_len=target_seq_len,
        tasks=tuple(task_ids),
        notes=notes,
        sources=sides[0].tokens(),
        targets=sides[1].tokens(),
        task_numbers=np.array(numbers, dtype=np.int64),
    )
