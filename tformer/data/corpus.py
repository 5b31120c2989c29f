"""A tokenised corpus: memory-mapped ids, where its documents begin, and how many bytes of text it stands for.

`slice` and `gather` hand out int64 ids; the files hold uint16 or uint32. A corpus may be a view of a part of another
(`subset`, `split_corpus`), without copying. Positions count tokens from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tformer.errors import InputError

BOUNDARY_TOLERANCE = 0.1  # a split moves to a document's start that is nearer than this share of the last part


@dataclass(frozen=True)
class TokenCorpus:
    """Tokens [start, stop) of the shards; every shard but the last holds exactly `shard_tokens` ids."""

    name: str
    shards: tuple[np.ndarray, ...]
    shard_tokens: int
    all_documents: np.ndarray  # int64 [documents + 1]: where each begins; the last is where the corpus ends
    marks: np.ndarray  # int64 [m, 2]: (tokens, utf-8 bytes) before a point, from (0, 0) to the whole corpus
    start: int
    stop: int
    fingerprint: str  # sha256 of the text and its document boundaries: equal text, equal fingerprint
    notes: tuple[str, ...] = ()  # what a person should be told, for example where the cache went
    decode: Callable[[list[int]], str] | None = None  # exact byte counts of parts cut between two marks
    keep: Any = field(default=None, repr=False)  # whatever must live as long as the mapped files

    @classmethod
    def from_ids(
        cls, ids: Sequence[int] | np.ndarray, *, documents: Sequence[int] = (), num_bytes: int = 0, name: str = "memory"
    ) -> TokenCorpus:
        """A corpus in memory; `documents` are the positions where documents begin (default: one document)."""
        array = np.asarray(ids, dtype=np.uint32)
        starts = np.array([*(documents or [0]), len(array)], dtype=np.int64)
        marks = np.array([[0, 0], [len(array), num_bytes]], dtype=np.int64)
        return cls(name, (array,), max(1, len(array)), starts, marks, 0, len(array), fingerprint="")

    def __len__(self) -> int:
        return self.stop - self.start

    def slice(self, start: int, stop: int) -> np.ndarray:
        """int64 ids of [start, stop), cut at the corpus's end as Python's slices are."""
        start, stop = self.start + max(0, start), min(self.start + stop, self.stop)
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        first, last = start // self.shard_tokens, (stop - 1) // self.shard_tokens
        parts = [
            self.shards[index][max(0, start - index * self.shard_tokens) : stop - index * self.shard_tokens]
            for index in range(first, last + 1)
        ]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64)

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int64 [n, length]: the tokens from each of `starts` on; all must lie inside the corpus."""
        rows = np.empty((len(starts), length), dtype=np.int64)
        index, places = np.divmod(np.asarray(starts) + self.start, self.shard_tokens)
        whole = places + length <= self.shard_tokens
        for shard in np.unique(index[whole]):
            here = whole & (index == shard)
            view = np.lib.stride_tricks.sliding_window_view(self.shards[shard], length)
            rows[here] = view[places[here]]
        for row in np.flatnonzero(~whole):
            rows[row] = self.slice(int(starts[row]), int(starts[row]) + length)
        return rows

    @cached_property
    def document_offsets(self) -> np.ndarray:
        """int64 [documents + 1]: where each document begins (a cut one begins at 0), then the number of tokens."""
        if self.start == 0 and self.stop == self.all_documents[-1]:
            return self.all_documents
        first = int(np.searchsorted(self.all_documents, self.start, side="right")) - 1
        last = int(np.searchsorted(self.all_documents, self.stop, side="left"))
        return np.clip(self.all_documents[first : last + 1] - self.start, 0, len(self))

    @property
    def num_documents(self) -> int:
        return len(self.document_offsets) - 1

    @cached_property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text (newlines counted once, no byte order mark) that these tokens stand for."""
        return self._bytes_before(self.stop) - self._bytes_before(self.start)

    def subset(self, start: int, stop: int) -> TokenCorpus:
        """A view of tokens [start, stop)."""
        if not 0 <= start < stop <= len(self):
            raise ValueError(f"subset [{start}, {stop}) of a corpus of {len(self)} tokens")
        return replace(self, start=self.start + start, stop=self.start + stop)

    def _bytes_before(self, position: int) -> int:
        mark = int(np.searchsorted(self.marks[:, 0], position, side="right")) - 1
        tokens, size = (int(value) for value in self.marks[mark])
        if tokens == position:
            return size
        next_tokens, next_size = (int(value) for value in self.marks[mark + 1])
        share = (position - tokens) / (next_tokens - tokens)
        if self.decode is not None:  # exact for a tokenizer without loss, and in proportion for the others
            ids = replace(self, start=0, stop=next_tokens).slice(tokens, next_tokens).tolist()
            whole = len(self.decode(ids).encode("utf-8", "replace"))
            share = len(self.decode(ids[: position - tokens]).encode("utf-8", "replace")) / max(1, whole)
        return size + round(share * (next_size - size))


def split_corpus(corpus: TokenCorpus, *, fraction: float) -> tuple[TokenCorpus, TokenCorpus]:
    """(training part, validation part): the last `fraction` of the corpus, always the same.

    The cut is at token int(n * (1 - fraction)), or at the nearest start of a document when one lies within a tenth of
    the validation part: documents stay whole where they are short, and one long text is cut exactly.
    """
    total = len(corpus)
    cut = int(total * (1 - fraction))
    starts = corpus.document_offsets[1:-1]
    if len(starts):
        near = int(np.searchsorted(starts, cut))
        candidates = [int(starts[index]) for index in (near - 1, near) if 0 <= index < len(starts)]
        nearest = min(candidates, key=lambda start: abs(start - cut))
        if abs(nearest - cut) <= BOUNDARY_TOLERANCE * (total - cut):
            cut = nearest
    if not 0 < cut < total:
        raise InputError(
            f"{corpus.name}: {total} tokens are too few to keep {fraction:g} of them for validation",
            hint="give more text, or a validation file of its own (--valid)",
        )
    return corpus.subset(0, cut), corpus.subset(cut, total)
