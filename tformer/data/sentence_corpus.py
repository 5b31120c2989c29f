"""Documents as sentences, in memory: what pairs for next-sentence prediction are made of (`sentences.SentencePairs`).

A source of several documents (rows, a folder) has these; in one that is a single document, a plain text file, a blank
line ends a document, which is the format of BERT's own data (arXiv 1810.04805). The tokens stay in memory, four bytes
each, so the amount of text is limited: `MAX_TOKENS`.
"""

from __future__ import annotations

import hashlib
import signal
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np

from tformer.data.sentence_split import Sentence, sentences_of
from tformer.data.tokenise import BATCH_CHARACTERS, DOCUMENT_END, Progress, Source
from tformer.errors import InputError, Interrupted

MAX_TOKENS = 1 << 29  # 2 GB


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode_batch(self, texts: list[str], /) -> list[list[int]]: ...


@dataclass(frozen=True)
class SentenceCorpus:
    """Sentence i has the ids `ids[offsets[i] : offsets[i + 1]]`; document d the sentences `documents[d : d + 2]`.

    The ids of a sentence begin with those of the space before it, as in running text. `fingerprint` is the sha256 of
    the text with its boundaries.
    """

    name: str
    ids: np.ndarray  # uint32 [tokens]
    offsets: np.ndarray  # int64 [sentences + 1]
    documents: np.ndarray  # int64 [documents + 1], in sentences
    fingerprint: str

    @property
    def num_sentences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def tokens(self, first: int, last: int) -> np.ndarray:
        """int64: the ids of sentences [first, last)."""
        return self.ids[self.offsets[first] : self.offsets[last]].astype(np.int64)

    def split(self, *, fraction: float) -> tuple[SentenceCorpus, SentenceCorpus]:
        """(training part, validation part): the last documents, about `fraction` of the tokens; always the same.

        Both keep at least two documents. Raises InputError when there are fewer than four.
        """
        if self.num_documents < 4:
            raise InputError(
                f"{self.name}: {self.num_documents} documents cannot be split into two for training and two for "
                "validation",
                hint="a blank line ends a document; or give a validation file of its own (--valid)",
            )
        starts = self.offsets[self.documents[:-1]]
        cut = int(np.abs(starts - len(self.ids) * (1 - fraction)).argmin())
        cut = min(max(cut, 2), self.num_documents - 2)
        return self._documents(0, cut), self._documents(cut, self.num_documents)

    def _documents(self, first: int, last: int) -> SentenceCorpus:
        begin, end = (int(self.documents[number]) for number in (first, last))
        offsets = self.offsets[begin : end + 1]
        return replace(
            self,
            ids=self.ids[offsets[0] : offsets[-1]],
            offsets=offsets - offsets[0],
            documents=self.documents[first : last + 1] - begin,
            fingerprint=hashlib.sha256(f"{self.fingerprint} {first} {last}".encode()).hexdigest(),
        )


def prepare_sentences(
    sources: Sequence[Source],
    tokenizer: Encoder,
    *,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SentenceCorpus:
    """Split and tokenise all documents of the sources.

    `progress(done_bytes, total_bytes or None)` and `should_stop()` are called about once a megabyte; when the latter
    is true, Interrupted is raised. InputError for more than `MAX_TOKENS` tokens.
    """
    sizes = [source.size_bytes() for source in sources]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    name = ", ".join(source.name for source in sources)
    building = _Building(name)
    for source in sources:
        for batch in _batches(sentences_of(source.documents())):
            if should_stop is not None and should_stop():
                raise Interrupted(f"interrupted while tokenising {name}", signal_number=signal.SIGINT)
            building.add(batch, tokenizer.encode_batch([f" {sentence.text}" for sentence in batch]))
            if progress is not None:
                progress(building.num_bytes, total)
        building.end_source()
    return building.finish()


def _batches(sentences: Iterable[Sentence]) -> Iterator[list[Sentence]]:
    batch: list[Sentence] = []
    size = 0
    for sentence in sentences:
        batch.append(sentence)
        size += len(sentence.text) + 1
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Building:
    """A corpus on its way: growing arrays, and where the source that is being read has begun."""

    def __init__(self, name: str) -> None:
        self.name, self.num_bytes = name, 0
        self._ids, self._sizes = array("I"), array("q")
        self._finished: list[int] = []  # first sentences of the documents of earlier sources
        self._documents: list[int] = []  # the same of this source, and of its paragraphs
        self._paragraphs: list[int] = []
        self._begins_document = self._begins_paragraph = False  # with the next sentence that has tokens
        self._text = hashlib.sha256()

    def add(self, sentences: Sequence[Sentence], encoded: Sequence[Sequence[int]]) -> None:
        for sentence, ids in zip(sentences, encoded, strict=True):
            self._begins_document |= sentence.begins_document
            self._begins_paragraph |= sentence.begins_paragraph
            data = f"{sentence.text}\n".encode()
            self.num_bytes += len(data)
            if not ids:
                continue
            if self._begins_document:
                self._documents.append(len(self._sizes))
            if self._begins_paragraph:
                self._paragraphs.append(len(self._sizes))
                self._text.update(DOCUMENT_END)
            self._begins_document = self._begins_paragraph = False
            self._text.update(data)
            self._sizes.append(len(ids))
        self._ids.extend(chain.from_iterable(encoded))
        if len(self._ids) > MAX_TOKENS:
            raise InputError(
                f"{self.name}: more than {MAX_TOKENS:,} tokens, which next_sentence would have to keep in memory",
                hint="give less text, or leave next_sentence out: masked_lm alone reads text of any size",
            )

    def end_source(self) -> None:
        """A source of one document has one per paragraph instead."""
        self._finished += self._documents if len(self._documents) > 1 else self._paragraphs
        self._documents, self._paragraphs = [], []

    def finish(self) -> SentenceCorpus:
        sizes = np.frombuffer(self._sizes, dtype=np.int64) if self._sizes else np.zeros(0, dtype=np.int64)
        return SentenceCorpus(
            name=self.name,
            ids=np.array(self._ids, dtype=np.uint32),
            offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]),
            documents=np.array([*self._finished, len(sizes)], dtype=np.int64),
            fingerprint=self._text.hexdigest(),
        )
