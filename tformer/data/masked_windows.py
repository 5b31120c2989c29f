"""Training examples for masked language models, cut from a token corpus: a pure function of (epoch, index).

A window holds at most seq_len ids, the template's special tokens around the text included ([CLS] ... [SEP]); nothing
is shifted, and every token of the corpus is in some window of every epoch.

- concat: documents one after the other, cut into windows of one length. All but the first start at an offset of their
  own in each epoch, drawn from (seed, epoch), so that a token meets different contexts; the first and the last window
  are moved inside the corpus, and so share tokens with their neighbours. A corpus shorter than a window is one window.
- documents: whole documents, in order, as many as fit; a longer one is split, its rest is packed with what follows.
- none: one document an example; a longer document is split into several, none is truncated.

Where the template ends with the token that ends documents (RoBERTa's </s>), packings "documents" and "none" write it
once. The order of samples is not decided here but by `BatchPlan`; what is masked, by the objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tformer.data.corpus import TokenCorpus
from tformer.data.permutation import derive_key
from tformer.data.windows import Example, Packing, cut_documents, document_ids, pack_documents
from tformer.errors import InputError


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
