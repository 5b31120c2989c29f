"""Pairs of texts for next-sentence prediction (BERT, arXiv 1810.04805, section 3.1): a pure function of (epoch, index).

    [CLS] a [SEP] b [SEP]     label 0: b follows a in its document; 1: b was drawn at random from another document

Every document is cut into spans of neighbouring sentences, as many as fit into seq_len, two at least. In each epoch a
span is divided anew: its first sentences are a; b is its rest or, for exactly half of the samples, as many sentences
from a random place of another document as fit. Nearly all spans fill seq_len, some are shorter, since fine-tuning sees
short texts (section A.2). A pair that is too long loses tokens of its longer text, a at its front, b at its end.

A document of one sentence has no pair; it only lends random second texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tformer.data.permutation import derive_key, permute
from tformer.data.sentence_corpus import SentenceCorpus, prepare_sentences
from tformer.data.template import pair_template
from tformer.data.windows import Example
from tformer.errors import InputError
from tformer.tokenizer import Tokenizer

__all__ = ["SentenceCorpus", "SentencePairs", "prepare_sentences"]

SHORT_SHARE = 0.1  # of the spans: of a random length instead of the greatest


class SentencePairs:
    """The samples of a corpus. `lengths` are those of real pairs; a random second text may be of another length.

    `token_types=False` is for models without them; a template that does not tell texts apart (RoBERTa) gives none.
    Raises InputError for a corpus with fewer than two documents, or where none has two sentences, and when the template
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
        self.room = seq_len - template.num_special
        if self.room < 2:
            raise InputError(
                f"data.seq_len: {seq_len} tokens leave no room for two texts beside the template's "
                f"{template.num_special} special tokens",
                hint=f"set it to at least {template.num_special + 2}",
            )
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
            b = self._elsewhere(int(self._document[index]), len(a), rng)
        a, b = _trim(a, b, self.room)
        frame = self.template
        ids = np.concatenate([frame.prefix, a, frame.middle, b, frame.suffix]).astype(np.int64)
        types = None
        if self.has_types:
            types_a, types_b = (0,) * len(a), (frame.second_type,) * len(b)
            types = np.array([*frame.prefix_types, *types_a, *frame.middle_types, *types_b, *frame.suffix_types])
        return Example(ids, token_type_ids=types, label=int(is_random))

    def _elsewhere(self, document: int, taken: int, rng: np.random.Generator) -> np.ndarray:
        """Whole sentences from a random one outside `document` on that fit beside `taken` tokens; one at least."""
        offsets, documents = self.corpus.offsets, self.corpus.documents
        begin, end = documents[document], documents[document + 1]
        start = int(rng.integers(0, self.corpus.num_sentences - (end - begin)))
        start += int(end - begin) if start >= begin else 0
        stop = documents[np.searchsorted(documents, start, side="right")]
        fitting = int(np.searchsorted(offsets, offsets[start] + self.room - taken, side="right")) - 1
        return self.corpus.tokens(start, min(int(stop), max(start + 1, fitting)))


def _spans(corpus: SentenceCorpus, room: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(first, last) sentences of the spans [first, last): together every sentence that has a neighbour.

    A single sentence at the end of a document is paired with the one before it once more.
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


def _trim(a: np.ndarray, b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Both, shortened to `room` tokens together: the longer one first, `a` at its front, `b` at its end."""
    keep_a = max(room - len(b), room - room // 2)
    keep_b = max(room - len(a), room // 2)
    return a[max(0, len(a) - keep_a) :], b[:keep_b]
