"""Conversations as a token corpus in memory, with a mark for each id: whether it is learned, in which sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tformer.data.permutation import span_of
from tformer.data.shards.corpus import LEARNED, SECOND, TokenCorpus
from tformer.data.sources.conversations import Conversation, ConversationSource
from tformer.data.sources.reading import BadRows
from tformer.support.errors import InputError
from tformer.tokenizer.chat import ChatIds, ChatTemplate
from tformer.workers.work import QUIET, Work


@dataclass(frozen=True)
class MarkedCorpus(TokenCorpus):
    """A corpus in memory with the marks of its ids."""

    marks: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))  # of the whole shard

    def marks_of(self, start: int, stop: int) -> np.ndarray:
        """uint8 [t]: the marks of ids [start, stop)."""
        return self.marks[self.start + start : self.start + stop]


@dataclass(frozen=True)
class WholeDocuments(MarkedCorpus):
    """A corpus whose documents are never divided."""

    def split(self, *, fraction: float) -> tuple[TokenCorpus, TokenCorpus]:
        """(training part, validation part): the last `fraction` of the documents, at least one."""
        count = len(self.document_offsets) - 1
        if count < 2:
            raise InputError(f"{self.name}: 1 example is too few to hold one out", hint="give more, or --valid FILE")
        cut = min(max(1, round(count * (1 - fraction))), count - 1)
        return self._documents(0, cut), self._documents(cut, count)

    def share(self, *, fraction: float, seed: int) -> TokenCorpus:
        """Connected documents, at a place fixed by the seed."""
        return self._documents(*span_of(len(self.document_offsets) - 1, fraction=fraction, seed=seed))

    def _documents(self, start: int, stop: int) -> TokenCorpus:
        return self.subset(int(self.document_offsets[start]), int(self.document_offsets[stop]))


def answer_ids(conversation: Conversation, template: ChatTemplate) -> list[ChatIds]:
    """The examples of a conversation; a text is an answer as a whole, with an end of text.

    The first id is in no answer, since no id precedes it. Raises InputError, with the row's place, for messages that
    the template refuses.
    """
    tokenizer = template.tokenizer
    if not conversation.messages:
        end = [] if tokenizer.special.eos is None else [tokenizer.special.eos]
        ids = [*tokenizer.opening, *tokenizer.encode(conversation.text), *end]
        found = [ChatIds(ids, np.ones(len(ids), dtype=bool))]
    else:
        try:
            reader = template.with_tools(conversation.tools) if conversation.tools else template
            found = reader.examples(conversation.messages)
        except InputError as error:
            raise InputError(f"{conversation.place}: {error.message}", hint=error.hint) from error
    for each in found:
        each.answers[:1] = False
    return found


def join_sequences(sequences: Sequence[ChatIds]) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 [t], marks uint8 [t]) of one or two sequences, one after the other."""
    ids = np.concatenate([np.array(each.ids, dtype=np.int64) for each in sequences])
    marks = [LEARNED * each.answers + SECOND * number for number, each in enumerate(sequences)]
    return ids, np.concatenate(marks).astype(np.uint8)


def marked_corpus(
    source: ConversationSource,
    encode: Callable[[Any], Sequence[Sequence[ChatIds]]],
    *,
    key: str,
    seq_len: int,
    overlong: Literal["drop", "truncate"],
    unit: str = "conversations",
    kind: type[MarkedCorpus] = MarkedCorpus,
    work: Work = QUIET,
) -> MarkedCorpus:
    """The examples whose sequences each have an answer within seq_len + 1 ids; each example is one document.

    encode: the sequences of a row's examples. key: of how it encodes, for the fingerprint. overlong:
    longer ones are left out, or cut at their end. `notes` of the result count them, those without an answer, and those
    whose two sequences are equal.

    Raises InputError for a wrong row, for messages that the template refuses, and where nothing is left; Interrupted if
    `work` is stopped.
    """
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    rows = read = too_long = mute = equal = 0
    for rows, row in enumerate(source.rows(), 1):
        work.raise_if_stopped(f"while tokenizing {source.name}")
        for found in encode(row):
            fits = max(len(each.ids) for each in found) <= seq_len + 1
            read, too_long = read + 1, too_long + (not fits)
            cut = [ChatIds(each.ids[: seq_len + 1], each.answers[: seq_len + 1]) for each in found]
            if fits or overlong == "truncate":
                if len(cut) > 1 and cut[0].ids == cut[1].ids:
                    equal += 1
                elif all(each.answers.any() for each in cut):
                    parts.append(join_sequences(cut))
                else:
                    mute += 1
        work.report(rows)
    long, silent = f"are longer than {seq_len:,} tokens", "are without an answer that can be learned"
    same = "have two answers with equal tokens"
    counts = [(too_long, long), (mute, silent), (equal, same)]
    if not parts:
        bad = BadRows(source.bad_rows())
        hint = "cut them with --set data.overlong=truncate, or raise data.seq_len with --set" if too_long else None
        if mute and not too_long:
            hint = "an answer is what stands in {% generation %} of the template (tokenizer.chat_template)"
        counts.append((bad.total, f"are left out: {bad}"))
        reasons = ", ".join(f"{count:,} {what}" for count, what in counts if count)
        raise InputError(f"{source.name}: none of {read + bad.total:,} {unit} is left: {reasons}", hint=hint)
    notes: tuple[str, ...] = ()
    if read > rows:
        why = "the chat template rewrites an answer when more messages follow"
        notes, unit = (f"{source.name}: {rows:,} {unit} are {read:,} examples: {why}",), "examples"
    done = ("left out" if overlong == "drop" else "cut at their end", "left out", "left out")
    ids, marks = zip(*parts, strict=True)
    starts = np.cumsum([0, *map(len, ids[:-1])]).tolist()
    key = f"{source.fingerprint()} {key} {seq_len} {overlong}"
    return replace(
        kind.from_ids(np.concatenate(ids), documents=starts, name=source.name),
        marks=np.concatenate(marks),
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        notes=(
            *notes,
            *(
                f"{source.name}: {count:,} of {read:,} {unit} {what}: {how}"
                for (count, what), how in zip(counts, done, strict=True)
                if count
            ),
        ),
    )
