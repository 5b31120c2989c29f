"""Pairs of texts for next-sentence prediction (BERT, arXiv 1810.04805, section 3.1): a pure function of (epoch, index).

    [CLS] a [SEP] b [SEP]     label 0: b follows a in its document; 1: b is drawn at random from another document

Text is split into sentences by rules: a sentence ends at the end of a line, and at . ! ? before white space and no
small letter. The rules know no abbreviations but initials ("J. Smith"); for pairs of neighbouring texts a cut too many
does no harm. A source of several documents (rows, a folder) has these; in a single plain text file a blank line ends a
document, as in BERT's own data. Tokens stay in memory, four bytes each, so their number is limited to `MAX_TOKENS`.

Every document is cut into spans of neighbouring sentences, as many as fit into seq_len, at least two. Each epoch
divides a span again: its first sentences are a; b is the rest or, for exactly half of the samples, as many sentences as
fit from a random place of another document. Nearly all spans fill seq_len; some are shorter, because fine-tuning sees
short texts (section A.2). A pair that is too long loses tokens of its longer text, a at its front, b at its end. A
document of one sentence has no pair; it is only drawn as a random second text.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from tformer.data.permutation import derive_key, permute, span_of
from tformer.data.shards.corpus import Example
from tformer.data.shards.template import fitting_sizes, pair_template, text_room
from tformer.data.shards.token_files import DOCUMENT_END, in_batches
from tformer.data.sources.files import DocumentChunk, total_bytes
from tformer.data.sources.text import TextSource
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work

MAX_TOKENS = 1 << 29  # 2 GB
SHORT_SHARE = 0.1  # of the spans have a random length instead of the greatest
LINE_LIMIT = 1 << 20  # characters, where a longer line is cut

_BOUNDARY = re.compile(
    r"(?<=[.!?…])(?<!\b[A-Z]\.)\s+(?=[^\sa-z])"
    r"|(?<=[.!?…][\"'”’)\]])\s+(?=[^\sa-z])"
    r"|(?<=[。！？])(?=.)"  # scripts without spaces
)


class Sentence(NamedTuple):
    """A sentence without the white space around it, and whether a paragraph or a document begins with it."""

    text: str
    begins_paragraph: bool
    begins_document: bool


def sentences_of(pieces: Iterable[DocumentChunk]) -> Iterator[Sentence]:
    """Every sentence of the documents, in order; a blank line ends a paragraph."""
    rest, new_paragraph, new_document = "", True, True
    for piece in pieces:
        *lines, rest = (rest + piece.text).split("\n")
        if piece.ends_document or len(rest) > LINE_LIMIT:
            lines, rest = [*lines, rest], ""
        for line in lines:
            sentences = [text for part in _BOUNDARY.split(line) if (text := part.strip())]
            for text in sentences:
                yield Sentence(text, new_paragraph, new_document)
                new_paragraph = new_document = False
            new_paragraph = new_paragraph or not sentences
        if piece.ends_document:
            new_paragraph = new_document = True


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
    notes: tuple[str, ...] = ()

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

        Both have at least two documents. Raises InputError for fewer than four.
        """
        if self.num_documents < 4:
            raise InputError(
                f"{self.name}: {self.num_documents} documents cannot be split into two for training and two for "
                "validation",
                hint="a blank line ends a document; or give a separate validation file (--valid)",
            )
        starts = self.offsets[self.documents[:-1]]
        cut = int(np.abs(starts - len(self.ids) * (1 - fraction)).argmin())
        cut = min(max(cut, 2), self.num_documents - 2)
        return self._documents(0, cut), self._documents(cut, self.num_documents)

    def share(self, *, fraction: float, seed: int) -> SentenceCorpus:
        """Neighbouring documents, two at least, at a place fixed by the seed."""
        return self._documents(*span_of(self.num_documents, fraction=fraction, seed=seed, least=2))

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
    sources: Sequence[TextSource],
    tokenizer: Tokenizer,
    *,
    work: Work = QUIET,
) -> SentenceCorpus:
    """Split and tokenize all documents of the sources.

    `work` reports the bytes done and is polled about once a megabyte. Raises Interrupted if it is stopped; InputError
    for more than `MAX_TOKENS` tokens.
    """
    total, done = total_bytes(sources), 0
    name = ", ".join(source.name for source in sources)
    ids, sizes, digest = array("I"), array("q"), hashlib.sha256()
    starts: list[int] = []  # first sentences of the documents
    begins_document = begins_paragraph = False  # with the next sentence that has tokens
    for source in sources:
        documents: list[int] = []  # first sentences of the documents of this source, and of its paragraphs
        paragraphs: list[int] = []
        for batch in in_batches(
            sentences_of(source.documents()),
            lambda sentence: len(sentence.text) + 1,
            task=f"tokenizing {name}",
            work=work,
        ):
            encoded = tokenizer.encode_batch([f" {sentence.text}" for sentence in batch])
            for sentence, found in zip(batch, encoded, strict=True):
                begins_document |= sentence.begins_document
                begins_paragraph |= sentence.begins_paragraph
                data = f"{sentence.text}\n".encode()
                done += len(data)
                if not found:
                    continue
                if begins_document:
                    documents.append(len(sizes))
                if begins_paragraph:
                    paragraphs.append(len(sizes))
                    digest.update(DOCUMENT_END)
                begins_document = begins_paragraph = False
                digest.update(data)
                sizes.append(len(found))
            ids.extend(chain.from_iterable(encoded))
            if len(ids) > MAX_TOKENS:
                raise InputError(
                    f"{name}: more than {MAX_TOKENS:,} tokens, which next_sentence would have to keep in memory",
                    hint="give less text, or --objective masked_lm, which reads text of any size",
                )
            work.report(done, total)
        starts += documents if len(documents) > 1 else paragraphs  # a paragraph of a single document is a document
    return SentenceCorpus(
        name=name,
        ids=np.array(ids, dtype=np.uint32),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.array(sizes, dtype=np.int64))]),
        documents=np.array([*starts, len(sizes)], dtype=np.int64),
        fingerprint=digest.hexdigest(),
    )


class SentencePairs:
    """The samples of a corpus. `lengths` are the lengths of real pairs; a random second text may have another length.

    `token_types=False` is for models without them; a template with equal types for both texts (RoBERTa) has none.
    Raises InputError for a corpus with fewer than two documents, or none of two sentences, and for a template that
    leaves no room.
    """

    def __init__(
        self,
        corpus: SentenceCorpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        seed: int = 0,
        token_types: bool = True,
    ) -> None:
        template = pair_template(tokenizer)
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.template, self.has_types = template, token_types and template.second_type != 0
        self.room = text_room(seq_len, template.num_special, texts=2)
        if corpus.num_documents < 2:
            raise InputError(
                f"{corpus.name}: next_sentence needs at least two documents, found {corpus.num_documents}",
                hint="in a text file a blank line ends a document",
            )
        self._first, self._last = _spans(corpus, self.room, seed=derive_key("short spans", seed))
        if not len(self._first):
            raise InputError(
                f"{corpus.name}: no document has the two sentences that a pair needs",
                hint="sentences end at the end of a line, or with . ! ? before a space; a blank line ends a document",
            )
        self._document = np.searchsorted(corpus.documents, self._first, side="right") - 1
        totals = corpus.offsets[self._last] - corpus.offsets[self._first]
        self.lengths: np.ndarray = np.minimum(totals, self.room) + template.num_special

    def __len__(self) -> int:
        return len(self._first)

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Example]:
        """The pairs at these indices; exactly half of an epoch's (or one less) have label 1."""
        indices = np.asarray(indices, dtype=np.int64)
        is_random = permute(indices, size=len(self), key=derive_key("next sentence", self.seed, epoch)) % 2
        return [
            self._example(int(index), bool(random), np.random.default_rng(derive_key("pair", self.seed, epoch, index)))
            for index, random in zip(indices.tolist(), is_random, strict=True)
        ]

    def _example(self, index: int, is_random: bool, rng: np.random.Generator) -> Example:
        first, last = int(self._first[index]), int(self._last[index])
        middle = int(rng.integers(first + 1, last))
        a, b = self.corpus.tokens(first, middle), self.corpus.tokens(middle, last)
        if is_random:
            b = self._random_text(int(self._document[index]), len(a), rng)
        kept_a, kept_b = fitting_sizes(len(a), len(b), self.room)
        a, b = a[len(a) - kept_a :], b[:kept_b]
        frame = self.template
        ids = np.concatenate([frame.prefix, a, frame.middle, b, frame.suffix]).astype(np.int64)
        types = None
        if self.has_types:
            types_a, types_b = (0,) * len(a), (frame.second_type,) * len(b)
            types = np.array([*frame.prefix_types, *types_a, *frame.middle_types, *types_b, *frame.suffix_types])
        return Example(ids, token_type_ids=types, label=int(is_random))

    def _random_text(self, document: int, taken: int, rng: np.random.Generator) -> np.ndarray:
        """Whole sentences from outside `document` that fit beside `taken` tokens, at least one."""
        offsets, documents = self.corpus.offsets, self.corpus.documents
        begin, end = documents[document], documents[document + 1]
        start = int(rng.integers(0, self.corpus.num_sentences - (end - begin)))
        start += int(end - begin) if start >= begin else 0
        stop = documents[np.searchsorted(documents, start, side="right")]
        fitting = int(np.searchsorted(offsets, offsets[start] + self.room - taken, side="right")) - 1
        return self.corpus.tokens(start, min(int(stop), max(start + 1, fitting)))


def _spans(corpus: SentenceCorpus, room: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(first, last) sentences of the spans [first, last), which cover every sentence that has a neighbour.

    A single sentence at the end of a document shares a span with the one before it, which is then used twice.
    """
    rng = np.random.default_rng(seed)
    sizes = np.diff(corpus.offsets).tolist()
    spans: list[tuple[int, int]] = []
    for begin, end in zip(corpus.documents[:-1].tolist(), corpus.documents[1:].tolist(), strict=True):
        if end - begin < 2:
            continue
        start, total, limit = begin, 0, _limit(room, rng)
        for sentence in range(begin, end):
            if sentence - start >= 2 and total + sizes[sentence] > limit:
                spans.append((start, sentence))
                start, total, limit = sentence, 0, _limit(room, rng)
            total += sizes[sentence]
        spans.append((min(start, end - 2), end))
    first_last = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return first_last[:, 0], first_last[:, 1]


def _limit(room: int, rng: np.random.Generator) -> int:
    return int(rng.integers(2, room + 1)) if rng.random() < SHORT_SHARE else room
