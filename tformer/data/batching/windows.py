"""Training windows of a token corpus, for causal and for masked language models: a pure function of (epoch, index).

`LmWindows` hold up to T + 1 ids (T = seq_len): the first T are the inputs, the last T the labels, so neighbouring
windows share one id and no token is predicted twice in an epoch. `MaskedWindows` hold at most T ids, among them the
special tokens that the tokenizer's template puts around a text ([CLS] ... [SEP]); nothing is shifted, and every token
of the corpus is in some window of every epoch.

Packing:
- concat: documents one after the other, cut into windows of one length. Each epoch has its own offset, drawn from
  (seed, epoch), so that a token is seen in different contexts. `LmWindows` leave out what does not fill a window at
  both ends; `MaskedWindows` move the first and the last window inside the corpus, where they overlap their neighbours.
  With `moves=False` (evaluation) the corpus is cut into equal windows and each token is in exactly one.
- documents: as many whole documents, in order, as fit; a longer one is split, and its rest is packed with what follows.
- none: one document an example; a longer document is split into several, none is truncated.

Where the template ends with the token that ends documents (RoBERTa's </s>), packings "documents" and "none" have it
once. The order of samples is decided by `BatchPlan`, the masks by the objective.
"""

# Shapes: n samples, t ids of one sample.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from tformer.data.permutation import derive_key
from tformer.data.shards.corpus import Example, TokenCorpus
from tformer.data.shards.template import text_room
from tformer.support.errors import InputError

Packing = Literal["concat", "documents", "none"]


class Windows(ABC):
    """The samples of a corpus. `lengths` are their numbers of ids; None if all have the same (concat).

    `prefix` and `suffix` are the special tokens around the text. Raises InputError for a corpus without a sample, and
    for special tokens that leave no room.
    """

    shared: ClassVar[int]
    """Tokens that neighbouring windows share."""

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
        moves: bool = True,
    ) -> None:
        self.corpus, self.seq_len, self.packing, self.seed = corpus, seq_len, packing, seed
        self.document_mask = document_mask
        self.prefix, self.suffix = np.array(prefix, dtype=np.int64), np.array(suffix, dtype=np.int64)
        self.lengths: np.ndarray | None = None
        self._room = text_room(seq_len, len(prefix) + len(suffix)) + self.shared  # tokens of text in a window
        self._starts = self._sizes = np.zeros(0, dtype=np.int64)
        needed = 1
        if self.shared:  # a token and its label, or a whole window
            needed = seq_len + 1 if packing == "concat" else 2
        if len(corpus) < needed:
            raise InputError(
                f"{corpus.name}: {len(corpus)} tokens are fewer than the {needed} that one window of "
                f"{seq_len} tokens and its label need",
                hint=f"give more text, or --set data.seq_len={len(corpus) - 1} or less" if len(corpus) > 1 else None,
            )
        if packing == "concat" and moves:
            self._room = min(self._room, len(corpus))
            if self.shared:
                self._count = max(1, len(corpus) // seq_len - 1)
            else:  # one more than needed, so that they can be moved
                self._count = 1 if len(corpus) == self._room else -(-len(corpus) // self._room) + 1
        else:
            cut = {"concat": cut_evenly, "documents": pack_documents, "none": cut_documents}[packing]
            self._starts, sizes = cut(corpus.document_offsets, self._room, shared=self.shared)
            if len(self.suffix):  # a text may end with the token that the suffix begins with
                last = corpus.gather(self._starts + sizes - 1, 1)[:, 0]
                sizes = sizes - ((last == self.suffix[0]) & (sizes > 1))
            self._sizes = sizes
            self.lengths = self._sizes + len(prefix) + len(suffix)
            self._count = len(self._starts)
        if not self._count:
            raise InputError(f"{corpus.name}: no document has the 2 tokens that one prediction needs")

    def __len__(self) -> int:
        return self._count

    def windows(self, epoch: int, indices: np.ndarray | Sequence[int]) -> np.ndarray:
        """int64 [n, t] with one t for all, the fast way for packing "concat"; the other packings have `examples`."""
        assert self.lengths is None, f'windows() needs packing "concat", found "{self.packing}"'
        text = self.corpus.gather(self._concat_starts(epoch, np.asarray(indices, dtype=np.int64)), self._room)
        begin, end = (np.broadcast_to(ids, (len(text), len(ids))) for ids in (self.prefix, self.suffix))
        return np.concatenate([begin, text, end], axis=1)

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Example]:
        """The samples of any packing, with document ids if `document_mask` is set."""
        indices = np.asarray(indices, dtype=np.int64)
        if self.lengths is None:
            starts = self._concat_starts(epoch, indices)
            texts = list(self.corpus.gather(starts, self._room))
        else:
            starts, stops = self._starts[indices], self._starts[indices] + self._sizes[indices]
            texts = [self.corpus.slice(*span) for span in zip(starts.tolist(), stops.tolist(), strict=True)]
        return [self._example(start, text) for start, text in zip(starts.tolist(), texts, strict=True)]

    @abstractmethod
    def offset(self, epoch: int) -> int:
        """Number of tokens by which the windows of an epoch are moved (concat)."""

    @abstractmethod
    def _concat_starts(self, epoch: int, indices: np.ndarray) -> np.ndarray: ...

    def _example(self, start: int, text: np.ndarray) -> Example:
        edges = (len(self.prefix), len(self.suffix))
        ids = np.concatenate([self.prefix, text, self.suffix]) if any(edges) else text
        if not self.document_mask:
            return Example(ids)
        documents = document_ids(self.corpus, start, len(text))
        if any(edges):  # special tokens belong to the documents next to them
            documents = np.pad(documents, edges, mode="edge")
        return Example(ids, documents)


class LmWindows(Windows):
    """Windows of a causal language model."""

    shared = 1

    def offset(self, epoch: int) -> int:
        """Where the first window of an epoch starts (concat), in [0, seq_len)."""
        spare = len(self.corpus) - 1 - len(self) * self.seq_len
        return derive_key("window offset", self.seed, epoch) % (min(spare, self.seq_len - 1) + 1)

    def _concat_starts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return self.offset(epoch) + indices * self.seq_len


class MaskedWindows(Windows):
    """Windows of a masked language model."""

    shared = 0

    def offset(self, epoch: int) -> int:
        """Number of tokens by which an epoch's windows start before the multiples of their length (concat)."""
        spare = len(self) * self._room - len(self.corpus)
        return derive_key("window offset", self.seed, epoch) % min(self._room, spare + 1)

    def around(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The window around each token of the corpus: its first token, its number of tokens, the token's place in it.

        The window is the one with the most context on both sides; with whole documents, the sample of the token.
        `window` gives its ids. Places count the prefix.
        """
        if self.packing == "concat":
            sizes = np.full(len(tokens), min(self._room, len(self.corpus)))
            starts = np.clip(tokens - sizes // 2, 0, len(self.corpus) - sizes)
        else:
            number = np.searchsorted(self._starts, tokens, side="right") - 1
            starts, sizes = self._starts[number], self._sizes[number]
        return starts, sizes, len(self.prefix) + tokens - starts

    def window(self, start: int, size: int) -> np.ndarray:
        """The ids of `size` tokens of the corpus from `start` on, as the model reads them."""
        return self._example(start, self.corpus.slice(start, start + size)).ids

    def _concat_starts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.clip(indices * self._room - self.offset(epoch), 0, len(self.corpus) - self._room)


def document_ids(corpus: TokenCorpus, start: int, length: int) -> np.ndarray:
    """[length]: the document of each token from `start` on, counted from the first one's (0)."""
    numbers = corpus.document_numbers(np.arange(start, start + length))
    return numbers - numbers[0]


def restarting_positions(document_ids: np.ndarray) -> np.ndarray:
    """[..., t] -> [..., t]: 0, 1, 2, ... from the start of each run of equal ids along the last axis."""
    places = np.broadcast_to(np.arange(document_ids.shape[-1]), document_ids.shape)
    begins = np.ones(document_ids.shape, dtype=bool)
    begins[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=-1)


def cut_evenly(offsets: np.ndarray, width: int, *, shared: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of the fewest ranges of at most `width` tokens that hold every token once; shared: 0."""
    first, total = int(offsets[0]), int(offsets[-1] - offsets[0])
    count = -(-total // width)
    edges = first + np.arange(count + 1) * total // count
    return edges[:-1], np.diff(edges)


def cut_documents(offsets: np.ndarray, width: int, *, shared: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of one or more pieces per document, at most `width` tokens each.

    Neighbouring pieces of a document share `shared` tokens (1 if the last one is only a label); a document of no more
    tokens than that gives no piece.
    """
    sizes, step = np.diff(offsets), width - shared
    pieces = np.maximum(0, -(-(sizes - shared) // step))
    first = np.cumsum(pieces) - pieces
    number = np.arange(int(pieces.sum())) - np.repeat(first, pieces)
    starts = np.repeat(offsets[:-1], pieces) + number * step
    return starts, np.minimum(width, np.repeat(offsets[1:], pieces) - starts)


def pack_documents(offsets: np.ndarray, width: int, *, shared: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of consecutive token ranges that end where a document ends, unless one document fills them.

    The rest of a split document begins with its last `shared` tokens again; a range of no more tokens is left out.
    """
    starts: list[int] = []
    lengths: list[int] = []
    start, total = int(offsets[0]), int(offsets[-1])
    while total - start > shared:
        limit = start + width
        end = next_start = int(offsets[np.searchsorted(offsets, limit, side="right") - 1])
        if end <= start:  # no document ends in this range: split it
            end, next_start = limit, limit - shared
        if end - start > shared:
            starts.append(start)
            lengths.append(end - start)
        start = next_start
    return np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
