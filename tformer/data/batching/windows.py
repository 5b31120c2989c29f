"""Training windows of a token corpus, for causal and for masked language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tformer.data.permutation import derive_key
from tformer.data.shards.corpus import Example, TokenCorpus
from tformer.errors import InputError

Packing = Literal["concat", "documents", "none"]


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


class MaskedWindows:
    """The samples of a corpus. `lengths` is None when all have the same (concat), else one per sample, in ids.

    `prefix` and `suffix` are the special tokens before and after the text. Raises InputError when they leave no room.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        seq_len: int,
        *,
        prefix: Sequence[int] | np.ndarray = (),
        suffix: Sequence[int] | np.ndarray = (),
        packing: Packing = "concat",
        seed: int = 0,
        document_mask: bool = False,
    ) -> None:
        self.corpus, self.seq_len, self.packing, self.seed = corpus, seq_len, packing, seed
        self.prefix, self.suffix = np.array(prefix, dtype=np.int64), np.array(suffix, dtype=np.int64)
        self.document_mask = document_mask
        num_special = len(self.prefix) + len(self.suffix)
        room = seq_len - num_special
        if room < 1:
            raise InputError(
                f"data.seq_len: {seq_len} tokens leave no room for text beside the template's {num_special} special "
                f"tokens",
                hint=f"set it to at least {num_special + 1}",
            )
        self.split_documents = 0  # documents longer than one window
        self._starts: np.ndarray | None = None
        self._sizes: np.ndarray | None = None  # of the text alone
        self.lengths: np.ndarray | None = None
        if packing == "concat":
            self._room = min(room, len(corpus))
            # One window more than needed: that is what leaves the offsets room to move.
            self._count = 1 if len(corpus) <= room else -(-len(corpus) // room) + 1
            return
        cut = pack_documents if packing == "documents" else cut_documents
        self._starts, sizes = cut(corpus.document_offsets, room, shared=0)
        self._sizes = sizes - self._ends_twice(self._starts, sizes)
        self.lengths = self._sizes + num_special
        self._count = len(self._starts)
        self.split_documents = int((np.diff(corpus.document_offsets) > room).sum())

    def __len__(self) -> int:
        return self._count

    def offset(self, epoch: int) -> int:
        """How many tokens earlier than at multiples of their length an epoch's windows start (concat)."""
        spare = self._count * self._room - len(self.corpus)
        return derive_key("window offset", self.seed, epoch) % min(self._room, spare + 1)

    def windows(self, epoch: int, indices: np.ndarray | Sequence[int]) -> np.ndarray:
        """int64 [n, t] with one t for all, the fast way for packing "concat"; the other packings have `examples`."""
        if self.packing != "concat":
            raise ValueError(f'windows() needs packing "concat", found "{self.packing}"')
        text = self.corpus.gather(self._concat_starts(epoch, indices), self._room)
        begin, end = (np.broadcast_to(ids, (len(text), len(ids))) for ids in (self.prefix, self.suffix))
        return np.concatenate([begin, text, end], axis=1)

    def window(self, epoch: int, index: int) -> np.ndarray:
        """int64 [t]: the ids of one sample."""
        return self.examples(epoch, [index])[0].ids

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Example]:
        """The samples of any packing, with document ids when `document_mask` is set."""
        indices = np.asarray(indices, dtype=np.int64)
        if self._starts is None or self._sizes is None:
            starts, sizes = self._concat_starts(epoch, indices), np.full(len(indices), self._room)
        else:
            starts, sizes = self._starts[indices], self._sizes[indices]
        return [self._example(int(start), int(size)) for start, size in zip(starts, sizes, strict=True)]

    def _example(self, start: int, size: int) -> Example:
        ids = np.concatenate([self.prefix, self.corpus.slice(start, start + size), self.suffix])
        if not self.document_mask:
            return Example(ids)
        # The special tokens belong to the documents that they stand beside.
        documents = np.pad(document_ids(self.corpus, start, size), (len(self.prefix), len(self.suffix)), mode="edge")
        return Example(ids, documents)

    def _concat_starts(self, epoch: int, indices: np.ndarray | Sequence[int]) -> np.ndarray:
        starts = np.asarray(indices, dtype=np.int64) * self._room - self.offset(epoch)
        return np.clip(starts, 0, len(self.corpus) - self._room)

    def _ends_twice(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """bool [n]: the text's last token is the one that the suffix begins with."""
        if not len(self.suffix):
            return np.zeros(len(starts), dtype=bool)
        last = self.corpus.gather(starts + sizes - 1, 1)[:, 0]
        return (last == self.suffix[0]) & (sizes > 1)
