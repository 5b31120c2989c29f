"""Labelled rows as token ids in memory, and the held-out part of labelled data."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from tformer.data.batching.windows import Example
from tformer.data.permutation import derive_key, permute
from tformer.data.shards.files import token_dtype
from tformer.data.shards.template import (
    Truncation,
    assemble,
    pair_template,
    single_template,
)
from tformer.data.shards.tokenise import (
    BATCH_CHARACTERS,
    Progress,
)
from tformer.data.sources.labelled_tables import LabelledRow
from tformer.data.sources.labels import LabelIndex
from tformer.errors import InputError, Interrupted
from tformer.tokenizer import Tokenizer

# Shapes: N examples, L labels; M ids of all examples together.


FEW_CLASSES = 20  # up to so many, every class is held out, also when that is more than the fraction


class RowSource(Protocol):
    """What is needed of a `LabelledSource`."""

    @property
    def name(self) -> str: ...
    def rows(self) -> Iterator[LabelledRow]: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class LabelledTokens:
    """Examples by number; the same in every epoch.

    Attributes:
        lengths: int64 [N], special tokens included.
        labels: int64 [N] classes, float32 [N] scores, bool [N, L] for several labels, or None.
        truncated: how many examples were cut.
    """

    name: str
    fingerprint: str
    seq_len: int
    lengths: np.ndarray
    labels: np.ndarray | None
    truncated: int
    notes: tuple[str, ...]
    _ids_M: np.ndarray
    _types_M: np.ndarray | None
    _starts: np.ndarray  # int64 [N]
    _rows: Sequence[LabelledRow]

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> LabelledRow:
        """The text behind an example."""
        return self._rows[index]

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[Example]:
        """The examples with these numbers."""
        indices = np.asarray(indices, dtype=np.int64)
        starts, stops = self._starts[indices], self._starts[indices] + self.lengths[indices]
        spans = [slice(*span) for span in zip(starts.tolist(), stops.tolist(), strict=True)]
        ids = [self._ids_M[span].astype(np.int64) for span in spans]
        no_value = [None] * len(spans)
        types = no_value if self._types_M is None else [self._types_M[span].astype(np.int64) for span in spans]
        labels = no_value
        if self.labels is not None:
            chosen = self.labels[indices]
            labels = list(chosen) if chosen.ndim > 1 else chosen.tolist()
        return [Example(row, None, kinds, label) for row, kinds, label in zip(ids, types, labels, strict=True)]

    def subset(self, indices: Sequence[int] | np.ndarray) -> LabelledTokens:
        """Some of the examples, in this order; their ids are shared, not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        return dataclasses.replace(
            self,
            fingerprint=hashlib.sha256(self.fingerprint.encode() + chosen.tobytes()).hexdigest(),
            lengths=self.lengths[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            _starts=self._starts[chosen],
            _rows=[self._rows[index] for index in chosen.tolist()],
        )


def tokenise_labelled(
    sources: Sequence[RowSource],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    index: LabelIndex | None,
    numeric: bool = False,
    truncation: Truncation = "head",
    token_types: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> LabelledTokens:
    """All rows of the sources, read and tokenised.

    Args:
        index: of the labels; None: `numeric` scores, or no labels.
        token_types: the model tells first and second texts apart: pairs get `token_type_ids`.
        progress: called with the characters done and those in all.

    Raises InputError for a wrong row, an unknown label, or no room beside the special tokens; Interrupted when
    `should_stop` says so.
    """
    rows = [row for source in sources for row in source.rows()]
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    if not rows:
        raise InputError(f"{name}: no rows")
    labels = _labels(rows, index, numeric=numeric)
    is_pair = rows[0].text2 is not None
    template = pair_template(tokenizer) if is_pair else single_template(tokenizer)
    room = seq_len - template.num_special
    if room < 1 + is_pair:
        raise InputError(
            f"data.seq_len: {seq_len} tokens leave no room for text beside {template.num_special} special tokens",
            hint=f"set it to at least {template.num_special + 1 + is_pair}",
        )
    typed = token_types and is_pair
    dtype = token_dtype(tokenizer.vocab_size)
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    truncated = done = 0
    total = sum(len(row.text) + len(row.text2 or "") for row in rows)
    for batch in _batches(rows):
        if should_stop is not None and should_stop():
            raise Interrupted(f"interrupted while tokenising {name}", signal_number=signal.SIGINT)
        texts = [text for row in batch for text in ((row.text, row.text2 or "") if is_pair else (row.text,))]
        encoded = tokenizer.encode_batch(texts)
        ids_m, types_m, lengths_n, cut = assemble(encoded, template, room=room, pairs=is_pair, truncation=truncation)
        ids.append(ids_m.astype(dtype))
        lengths.append(lengths_n)
        truncated += cut
        if typed:
            types.append(types_m.astype(np.uint8))
        done += sum(map(len, texts))
        if progress is not None:
            progress(done, total)
    lengths_N = np.concatenate(lengths)
    return LabelledTokens(
        name=name,
        fingerprint=_fingerprint(sources, tokenizer, seq_len, truncation, index),
        seq_len=seq_len,
        lengths=lengths_N,
        labels=labels,
        truncated=truncated,
        notes=_truncation_note(name, truncated, len(rows), seq_len, "pair" if is_pair else "text"),
        _ids_M=np.concatenate(ids),
        _types_M=np.concatenate(types) if typed else None,
        _starts=np.cumsum(lengths_N) - lengths_N,
        _rows=rows,
    )


def _batches(rows: Sequence[LabelledRow]) -> Iterator[Sequence[LabelledRow]]:
    first = size = 0
    for number, row in enumerate(rows, 1):
        size += len(row.text) + len(row.text2 or "") + 1
        if size >= BATCH_CHARACTERS:
            yield rows[first:number]
            first, size = number, 0
    if first < len(rows):
        yield rows[first:]


def _labels(rows: Sequence[LabelledRow], index: LabelIndex | None, *, numeric: bool) -> np.ndarray | None:
    if index is None and not numeric:
        return None
    for row in rows:
        if row.label is None:
            raise InputError(f"{row.place}: no label")
    if index is None:
        return np.array([float(row.label or 0) for row in rows], dtype=np.float32)
    return index.encode_all([row.label or "" for row in rows], [row.place for row in rows])


def _fingerprint(
    sources: Sequence[RowSource], tokenizer: Tokenizer, seq_len: int, truncation: str, index: LabelIndex | None
) -> str:
    parts = [source.fingerprint() for source in sources]
    return hashlib.sha256(f"{parts} {tokenizer.sha256} {seq_len} {truncation} {index}".encode()).hexdigest()


def _truncation_note(name: str, truncated: int, total: int, seq_len: int, what: str) -> tuple[str, ...]:
    if not truncated:
        return ()
    share = f"{truncated / total:.1%}" if truncated / total >= 0.001 else "less than 0.1%"
    return (f"{name}: {truncated:,} of {total:,} {what}s are longer than {seq_len} tokens and were cut ({share})",)


def stratified_split(labels: np.ndarray, *, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out): sorted numbers, always the same for the same labels.

    Of classes (int [N]) every one has its share on both sides, see `_shares`; scores and several labels are drawn at
    random. At least one example of two or more is held out.
    """
    if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    else:
        groups = [np.arange(len(labels))]
    chosen = []
    counts = _shares(np.array([len(group) for group in groups], dtype=np.int64), fraction=fraction, seed=seed)
    for number, (group, count) in enumerate(zip(groups, counts.tolist(), strict=True)):
        order = permute(np.arange(len(group)), size=len(group), key=derive_key("held out", seed, number))
        chosen.append(group[order[:count]])
    held_out = np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, dtype=np.int64)
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out


def _shares(sizes: np.ndarray, *, fraction: float, seed: int) -> np.ndarray:
    """How many examples of each class are held out; the last example of a class never is.

    Every class gives its share rounded down. What is then missing is given one by one: by classes that gave none yet,
    then by the others, the largest remainder first, equal ones in a drawn order. Few classes give at least one each,
    however small the fraction; of many small ones this would be half of all examples.
    """
    share = fraction * sizes
    most = np.maximum(0, sizes - 1)
    counts = np.minimum(share.astype(np.int64), most)
    missing = round(fraction * int(sizes.sum())) - int(counts.sum())
    without = (counts == 0) & (most > 0)
    if np.count_nonzero(most) <= FEW_CLASSES:
        missing = max(missing, int(without.sum()))
    drawn = permute(np.arange(len(sizes)), size=len(sizes), key=derive_key("held out classes", seed))
    order = np.lexsort((drawn, counts - share, ~without))
    counts[order[counts[order] < most[order]][: max(0, missing)]] += 1
    return counts


def hold_out(
    labels: np.ndarray, *, fraction: float, split: Literal["stratified", "last"], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """(indices to train on, indices to validate on), always the same: every label's share, or the last examples.

    Raises InputError when one of the two would be empty.
    """
    total = len(labels)
    if split == "last":
        cut = int(total * (1 - fraction))
        kept, held_out = np.arange(cut), np.arange(cut, total)
    else:
        kept, held_out = stratified_split(labels, fraction=fraction)
    if not len(kept) or not len(held_out):
        raise InputError(
            f"{name}: {total} examples are too few to keep {fraction:g} of them for validation",
            hint="give more examples, or a validation file of its own (--valid)",
        )
    return kept, held_out
