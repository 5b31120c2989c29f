"""Conversations as a token corpus in memory, in which the ids that are learned bear a mark."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Literal

import numpy as np

from tformer.data.shards.corpus import TokenCorpus
from tformer.data.sources.conversations import Conversation, ConversationSource
from tformer.support.errors import InputError
from tformer.tokenizer.chat import ChatTemplate
from tformer.workers.work import QUIET, Work

LEARNED = 1 << 31
"""Added to the ids of answers in a corpus: no vocabulary has as many entries."""


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


def chat_corpus(
    source: ConversationSource,
    template: ChatTemplate,
    *,
    seq_len: int,
    overlong: Literal["drop", "truncate"],
    work: Work = QUIET,
) -> TokenCorpus:
    """The conversations that have an answer within seq_len + 1 ids, each a document.

    overlong: longer ones are left out, or cut at their end. Raises InputError for a wrong row, for messages that the
    template refuses, and where nothing is left; Interrupted if `work` is stopped.
    """
    parts: list[np.ndarray] = []
    read = too_long = 0
    for row in source.rows():
        work.raise_if_stopped(f"while tokenizing {source.name}")
        ids = marked_ids(row, template)
        fits = len(ids) <= seq_len + 1
        read, too_long = read + 1, too_long + (not fits)
        ids = ids[: seq_len + 1]
        if (fits or overlong == "truncate") and ids.max(initial=0) >= LEARNED:
            parts.append(ids)
        work.report(read)
    if not parts:
        raise InputError(
            f"{source.name}: none of {read:,} conversations is left: {too_long:,} are longer than {seq_len:,} tokens",
            hint="cut them with --set data.overlong=truncate, or raise data.seq_len with --set",
        )
    done = "left out" if overlong == "drop" else "cut at their end"
    note = f"{source.name}: {too_long:,} of {read:,} conversations are longer than {seq_len:,} tokens: {done}"
    starts = np.cumsum([0, *map(len, parts[:-1])]).tolist()
    key = f"{source.fingerprint()} {template.tokenizer.sha256} {template.source} {seq_len} {overlong}"
    return replace(
        TokenCorpus.from_ids(np.concatenate(parts), documents=starts, name=source.name),
        fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        notes=(note,) if too_long else (),
    )
