"""Labelled rows as token ids in memory: template, truncation and token types applied, labels as numbers."""

# Shapes: N examples, L labels.

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tformer.data.permutation import share_of
from tformer.data.shards.corpus import Example
from tformer.data.shards.template import Ragged, assemble, pair_template, single_template, text_room
from tformer.data.shards.token_files import in_batches, token_dtype
from tformer.data.sources.labelled import LabelIndex
from tformer.data.sources.tables import LabelledRow, RowSource, TaggedRow
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pieces import Truncation
from tformer.workers.work import QUIET, Work


@dataclass(frozen=True)
class LabelledTokens:
    """Examples by number, the same in every epoch.

    Attributes:
        labels: int64 [N] classes, float32 [N] scores, bool [N, L] for several labels, or None.
        truncated: how many examples were cut.
        rows: the texts behind the examples.
        numbers: int [N], of the examples in the whole set that these are a part of; None: they are all.
    """

    name: str
    fingerprint: str
    seq_len: int
    labels: np.ndarray | None
    truncated: int
    notes: tuple[str, ...]
    _ids: Ragged
    _types: Ragged | None
    rows: Sequence[LabelledRow]
    numbers: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], special tokens included."""
        return self._ids.lengths

    def row(self, index: int) -> LabelledRow:
        """The text behind an example."""
        return self.rows[index]

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[Example]:
        """The examples with these numbers."""
        indices = np.asarray(indices, dtype=np.int64)
        rows = indices.tolist()
        ids = [self._ids.row(index).astype(np.int64) for index in rows]
        no_value = [None] * len(rows)
        types = no_value if self._types is None else [self._types.row(index).astype(np.int64) for index in rows]
        labels = no_value
        if self.labels is not None:
            chosen = self.labels[indices]
            labels = list(chosen) if chosen.ndim > 1 else chosen.tolist()
        return [Example(*values) for values in zip(ids, no_value, types, labels, strict=True)]

    def subset(self, indices: Sequence[int] | np.ndarray) -> LabelledTokens:
        """Some of the examples, in this order; their ids are shared, not copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        return dataclasses.replace(
            self,
            fingerprint=hashlib.sha256(self.fingerprint.encode() + chosen.tobytes()).hexdigest(),
            labels=None if self.labels is None else self.labels[chosen],
            _ids=self._ids.subset(chosen),
            _types=None if self._types is None else self._types.subset(chosen),
            rows=[self.rows[index] for index in chosen.tolist()],
            numbers=chosen if self.numbers is None else self.numbers[chosen],
        )

    def share(self, *, fraction: float, seed: int) -> LabelledTokens:
        """Some of the examples, fixed by the seed, with the share of each class."""
        return self.subset(share_of(len(self), fraction=fraction, seed=seed, labels=self.labels))


def tokenize_labelled(
    sources: Sequence[RowSource],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    index: LabelIndex | None,
    numeric: bool = False,
    truncation: Truncation = "head",
    token_types: bool = False,
    work: Work = QUIET,
) -> LabelledTokens:
    """All rows of the sources, read and tokenized.

    Args:
        index: of the labels. Without it there are `numeric` scores, or no labels.
        token_types: pairs get `token_type_ids`, for a model that uses them.
        work: reports the characters done.

    Raises InputError for a wrong row, an unknown label, or no room beside the special tokens; Interrupted if
    `work` is stopped.
    """
    rows = [row for source in sources for row in source.rows()]
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    if not rows:
        raise InputError(f"{name}: no rows")
    labels = labels_of(rows, index, numeric=numeric)
    is_pair = rows[0].text2 is not None
    template = pair_template(tokenizer) if is_pair else single_template(tokenizer)
    room = text_room(seq_len, template.num_special, texts=1 + is_pair)
    dtype = token_dtype(tokenizer.vocab_size)
    ids: list[tuple[np.ndarray, np.ndarray]] = []
    types: list[tuple[np.ndarray, np.ndarray]] = []
    truncated = done = 0
    total = sum(len(row.text) + len(row.text2 or "") for row in rows)
    for batch in in_batches(
        rows, lambda row: len(row.text) + len(row.text2 or "") + 1, task=f"tokenizing {name}", work=work
    ):
        texts = [text for row in batch for text in ((row.text, row.text2 or "") if is_pair else (row.text,))]
        encoded = tokenizer.encode_batch(texts, most=room, keep=truncation)
        ids_m, types_m, lengths_n, cut = assemble(encoded, template, room=room, pairs=is_pair, truncation=truncation)
        ids.append((ids_m.astype(dtype), lengths_n))
        types.append((types_m.astype(np.uint8), lengths_n))
        truncated += cut
        done += sum(map(len, texts))
        work.report(done, total)
    notes = () if index is None else index.notes()
    if truncated:
        share = f"{truncated / len(rows):.1%}" if truncated / len(rows) >= 0.001 else "less than 0.1%"
        what = "pairs" if is_pair else "texts"
        cut_note = f"{truncated:,} of {len(rows):,} {what} are longer than {seq_len} tokens and were cut ({share})"
        notes += (f"{name}: {cut_note}",)
    parts = [source.fingerprint() for source in sources]
    key = f"{parts} {tokenizer.sha256} {seq_len} {truncation} {index}"
    return LabelledTokens(
        name=name,
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        seq_len=seq_len,
        labels=labels,
        truncated=truncated,
        notes=notes,
        _ids=Ragged.join(ids),
        _types=Ragged.join(types) if token_types and is_pair else None,
        rows=rows,
    )


def groups_of(rows: Sequence[LabelledRow]) -> np.ndarray | None:
    """int [N]: the number of each row's group; None where they have none."""
    if not rows or rows[0].group is None:
        return None
    return np.unique([row.group or "" for row in rows], return_inverse=True)[1]


def labels_of(rows: Sequence[LabelledRow], index: LabelIndex | None, *, numeric: bool) -> np.ndarray | None:
    """The labels of all rows as numbers; None where they have none (no index, not numeric).

    Of words with tags, bool [N, L]: which tags a row has.
    """
    if index is None and not numeric:
        return None
    for row in rows:
        if row.label is None:
            raise InputError(f"{row.place}: no label")
    if tags := {tag for row in rows if isinstance(row, TaggedRow) for tag in row.tags}:
        numbers = {tag: number for number, tag in enumerate(sorted(tags))}
        flags = np.zeros((len(rows), len(tags)), bool)
        for own, row in zip(flags, rows, strict=True):
            own[[numbers[tag] for tag in getattr(row, "tags", ())]] = True
        return flags
    if index is None:
        return np.array([float(row.label or 0) for row in rows], dtype=np.float32)
    return index.encode_all([row.label or "" for row in rows], [row.place for row in rows])
