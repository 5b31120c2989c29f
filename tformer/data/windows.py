"""Training examples for language modelling, cut from a token corpus: `window(epoch, index)` is a pure function.

A window holds up to T + 1 ids (T = seq_len): the first T are the inputs, the last T the labels, so neighbouring windows
share one id and no token is predicted twice in an epoch.

- concat: documents one after the other, cut every T tokens. Each epoch starts at an offset of its own in [0, T), drawn
  from (seed, epoch), so that a token meets different contexts. A corpus of N tokens gives max(1, N // T - 1) windows.
- documents: whole documents, in order, as many as fit into T + 1 ids; a longer document is split (sharing one id), and
  its rest is packed with what follows. Windows may be shorter than T + 1.
- none: one document an example; a longer document is split into several, none is truncated.

The order of samples is not decided here but by `BatchPlan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tformer.data.corpus import TokenCorpus
from tformer.data.permutation import derive_key
from tformer.errors import InputError

Packing = Literal["concat", "documents", "none"]


@dataclass(frozen=True, slots=True)
class Example:
    """One sample: ids [t], and what else is known of it.

    `document_ids` [t] tell which document of the sample each id belongs to (0, 1, ...), when that was asked for;
    `token_type_ids` [t] the first text (0) from the second (1). `label` is a class, a score, an array [L] of zeros and
    ones (several labels), or whether the second sentence is the next one.
    """

    ids: np.ndarray
    document_ids: np.ndarray | None = None
    token_type_ids: np.ndarray | None = None
    label: int | float | np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


class LmWindows:
    """The samples of a corpus. `lengths` is None when every sample has seq_len + 1 ids (concat), else one per sample.

    Raises InputError when the corpus cannot fill one window.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        seq_len: int,
        *,
        packing: Packing = "concat",
        seed: int = 0,
        document_mask: bool = False,
    ) -> None:
        needed = seq_len + 1 if packing == "concat" else 2
        if len(corpus) < needed:
            raise InputError(
                f"{corpus.name}: {len(corpus)} tokens are fewer than the {needed} that one window of "
                f"{seq_len} tokens and its label need",
                hint=f"give more text, or set data.seq_len to at most {len(corpus) - 1}" if len(corpus) > 1 else None,
            )
        self.corpus, self.seq_len, self.packing, self.seed = corpus, seq_len, packing, seed
        self.document_mask = document_mask
        self.split_documents = 0  # documents longer than one window
        self._starts: np.ndarray | None = None
        self.lengths: np.ndarray | None = None
        if packing == "concat":
            self._count = max(1, len(corpus) // seq_len - 1)
            return
        cut = pack_documents if packing == "documents" else cut_documents
        sizes = np.diff(corpus.document_offsets)
        self._starts, self.lengths = cut(corpus.document_offsets, seq_len + 1, shared=1)
        self._count = len(self._starts)
        self.split_documents = int((sizes > seq_len + 1).sum())
        if self._count == 0:
            raise InputError(f"{corpus.name}: no document has the 2 tokens that one prediction needs")

    def __len__(self) -> int:
        return self._count

    def offset(self, epoch: int) -> int:
        """Where the first window of an epoch starts (concat), in [0, seq_len)."""
        spare = len(self.corpus) - 1 - self._count * self.seq_len
        return derive_key("window offset", self.seed, epoch) % (min(spare, self.seq_len - 1) + 1)

    def windows(self, epoch: int, indices: np.ndarray | list[int]) -> np.ndarray:
        """int64 [n, seq_len + 1], the fast way for packing "concat"; the other packings have `examples`."""
        if self.packing != "concat":
            raise ValueError(f'windows() needs packing "concat", found "{self.packing}"')
        return self.corpus.gather(self._concat_starts(epoch, indices), self.seq_len + 1)

    def window(self, epoch: int, index: int) -> np.ndarray:
        """int64 [t]: the ids of one sample; t = seq_len + 1 for packing "concat", else at most that."""
        return self.examples(epoch, [index])[0].ids

    def examples(self, epoch: int, indices: np.ndarray | list[int]) -> list[Example]:
        """The samples of any packing, with document ids when `document_mask` is set."""
        indices = np.asarray(indices, dtype=np.int64)
        if self._starts is None or self.lengths is None:
            starts, rows = self._concat_starts(epoch, indices), list(self.windows(epoch, indices))
        else:
            starts = self._starts[indices]
            rows = [
                self.corpus.slice(int(start), int(start + length))
                for start, length in zip(starts, self.lengths[indices], strict=True)
            ]
        if not self.document_mask:
            return [Example(ids) for ids in rows]
        return [
            Example(ids, document_ids(self.corpus, int(start), len(ids)))
            for start, ids in zip(starts, rows, strict=True)
        ]

    def _concat_starts(self, epoch: int, indices: np.ndarray | list[int]) -> np.ndarray:
        return self.offset(epoch) + np.asarray(indices, dtype=np.int64) * self.seq_len


def document_ids(corpus: TokenCorpus, start: int, length: int) -> np.ndarray:
    """[length]: which document each token from `start` on belongs to, counted from the first one's (0)."""
    numbers = np.searchsorted(corpus.document_offsets, np.arange(start, start + length), side="right")
    return numbers - numbers[0]


def restarting_positions(document_ids: np.ndarray) -> np.ndarray:
    """[..., t] -> [..., t]: 0, 1, 2, ... from the start of each run of equal ids along the last axis."""
    places = np.broadcast_to(np.arange(document_ids.shape[-1]), document_ids.shape)
    begins = np.ones(document_ids.shape, dtype=bool)
    begins[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=-1)


def cut_documents(offsets: np.ndarray, width: int, *, shared: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of one or more pieces per document, at most `width` tokens each.

    Neighbouring pieces of a document share `shared` tokens (1 where the last one is only a label); a document of no
    more tokens than that gives no piece.
    """
    sizes, step = np.diff(offsets), width - shared
    pieces = np.maximum(0, -(-(sizes - shared) // step))
    first = np.cumsum(pieces) - pieces
    number = np.arange(int(pieces.sum())) - np.repeat(first, pieces)
    starts = np.repeat(offsets[:-1], pieces) + number * step
    return starts, np.minimum(width, np.repeat(offsets[1:], pieces) - starts)


def pack_documents(offsets: np.ndarray, width: int, *, shared: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of consecutive token ranges that end where a document ends, unless one document fills them.

    A document that is split goes on with its last `shared` tokens again; a range of no more tokens is left out.
    """
    starts: list[int] = []
    lengths: list[int] = []
    start, total = int(offsets[0]), int(offsets[-1])
    while total - start > shared:
        limit = start + width
        end = next_start = int(offsets[np.searchsorted(offsets, limit, side="right") - 1])
        if end <= start:  # no document ends in here: split it
            end, next_start = limit, limit - shared
        if end - start > shared:
            starts.append(start)
            lengths.append(end - start)
        start = next_start
    return np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
