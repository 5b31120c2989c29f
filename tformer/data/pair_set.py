"""Pairs of ids in memory, by number; joined, cut into parts, and split by their sources."""

# Shapes: N pairs; t and u ids of one source and one target.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tformer.data.pair_ragged import Ragged
from tformer.data.permutation import derive_key
from tformer.errors import InputError


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


def split_pairs(pairs: PairTokens, *, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(indices to train on, indices to validate on): sorted, always the same, and equal sources on one side.

    Sources stand in the order of a keyed hash, and the first ones up to the fraction, at least one, are held out.

    Raises InputError when there are not two different sources.
    """
    key = derive_key("held out pairs", seed).to_bytes(8, "little")
    digests = [hashlib.blake2b(pairs.source_bytes(n), digest_size=8, key=key).digest() for n in range(len(pairs))]
    hashes_N = np.frombuffer(b"".join(digests), dtype=">u8")
    groups, counts = np.unique(hashes_N, return_counts=True)
    if len(groups) < 2:
        raise InputError(
            f"{pairs.name}: {len(pairs):,} pairs with {len(groups)} different source are too few to keep {fraction:g} "
            "of them for validation",
            hint="give more pairs, or validation data of its own (--valid)",
        )
    wanted = int(np.searchsorted(np.cumsum(counts), round(fraction * len(pairs)), side="right"))
    last = groups[min(max(wanted, 1), len(groups) - 1) - 1]
    held_out = hashes_N <= last
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
