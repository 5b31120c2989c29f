"""Conversations as a token corpus in memory, in which the ids that are learned bear a mark."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tformer.data.permutation import span_of
from tformer.data.shards.corpus import TokenCorpus
from tformer.data.sources.conversations import Conversation, ConversationSource
from tformer.support.errors import InputError
from tformer.tokenizer.chat import ChatTemplate
from tformer.workers.work import QUIET, Work

LEARNED = 1 << 31
"""Added to the ids of answers in a corpus: no vocabulary has as many entries."""
SECOND = 1 << 30
"""Added to the first id of the second sequence of a document."""


@dataclass(frozen=True)
class WholeDocuments(TokenCorpus):
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


def marked_ids(conversation: Conversation, template: ChatTemplate) -> np.ndarray:
    """int64 [t]: the ids of a conversation, those of answers marked; of a text, with its end, all are.

    The first id is not: nothing stands before it. Raises InputError, with the row's place, for messages that the
    template refuses.
    """
    tokenizer = template.tokenizer
    if not conversation.messages:
        end = [] if tokenizer.special.eos is None else [tokenizer.special.eos]
        ids = np.array([*tokenizer.opening, *tokenizer.encode(conversation.text), *end], dtype=np.int64)
        answers = np.ones(len(ids), dtype=bool)
    else:
        try:
            found = template.encode(conversation.messages)
        except InputError as error:
            raise InputError(f"{conversation.place}: {error.message}", hint=error.hint) from error
        ids, answers = np.array(found.ids, dtype=np.int64), found.answers
    answers[:1] = False
    return ids + LEARNED * answers


def marked_corpus(
    source: ConversationSource,
    encode: Callable[[Any], Sequence[np.ndarray]],
    *,
    key: str,
    seq_len: int,
    overlong: Literal["drop", "truncate"],
    unit: str = "conversations",
    kind: type[TokenCorpus] = TokenCorpus,
    work: Work = QUIET,
) -> TokenCorpus:
    """The rows whose sequences each have an answer within seq_len + 1 ids; all sequences of a row are one document.

    encode: the marked ids of a row's sequences. key: of how it encodes, for the fingerprint. overlong: longer rows are
    left out, or cut at their end. `notes` of the result count them, and those without an answer.

    Raises InputError for a wrong row, for messages that the template refuses, and where nothing is left; Interrupted if
    `work` is stopped.
    """
    parts: list[np.ndarray] = []
    read = too_long = mute = 0
    for row in source.rows():
        work.raise_if_stopped(f"while tokenizing {source.name}")
        found = encode(row)
        fits = max(map(len, found)) <= seq_len + 1
        read, too_long = read + 1, too_long + (not fits)
        cut = [ids[: seq_len + 1] for ids in found]
        if fits or overlong == "truncate":
            if all(ids.max(initial=0) >= LEARNED for ids in cut):
                parts.append(np.concatenate(cut))
            else:
                mute += 1
        work.report(read)
    long, silent = f"longer than {seq_len:,} tokens", "without an answer that can be learned"
    if not parts:
        hint = "cut them with --set data.overlong=truncate, or raise data.seq_len with --set"
        if mute and not too_long:
            hint = "an answer is what stands in {% generation %} of the template (tokenizer.chat_template)"
        reasons = f"{too_long:,} are {long}" + (f", {mute:,} {silent}" if mute else "")
        raise InputError(f"{source.name}: none of {read:,} {unit} is left: {reasons}", hint=hint)
    done = "left out" if overlong == "drop" else "cut at their end"
    counts = ((too_long, f"{long}: {done}"), (mute, f"{silent}: left out"))
    starts = np.cumsum([0, *map(len, parts[:-1])]).tolist()
    key = f"{source.fingerprint()} {key} {seq_len} {overlong}"
    return replace(
        kind.from_ids(np.concatenate(parts), documents=starts, name=source.name),
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        notes=tuple(f"{source.name}: {count:,} of {read:,} {unit} are {what}" for count, what in counts if count),
    )
