"""Token ids of prompts, and the tokens that generation never writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tformer.data.sources.files import (
    Errors,
    decode_text,
    read_bytes,
    split_lines,
)
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import DecoderTokens, SpecialIds

STDIN_NAME = "standard input"
CHUNK_BYTES = 1 << 16
MAX_LISTED_PREFIXES = 5


def task_prefix(recipe: Recipe, given: str | None) -> tuple[str, str | None]:
    """(prefix, note): the prefix of every source ("": none), and a note for the user.

    The prefix is the given one, else the one that all training data of the run has. Where the run's tasks have
    different prefixes there is none: only the user knows which task is meant.
    """
    if given is not None:
        return given, None
    prefixes = list(dict.fromkeys(spec.prefix for spec in recipe.data.train))
    if len(prefixes) == 1 and prefixes[0]:
        [prefix] = prefixes
        return prefix, f"sources get the prefix of the run's task, '{prefix}' (--prefix TEXT gives another or none)"
    if len(prefixes) > 1:
        listed = ", ".join(f"'{prefix}'" for prefix in prefixes[:MAX_LISTED_PREFIXES])
        more = len(prefixes) - MAX_LISTED_PREFIXES
        return "", (
            f"the run's tasks have different prefixes, sources get none of them: {listed}"
            f"{f' and {more} more' if more > 0 else ''} (--prefix TEXT chooses)"
        )
    return "", None


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """What an empty prompt begins from: the bos token, else eos (texts were packed with it between them), else a
    newline, else the vocabulary's first token."""
    for special in (tokenizer.special.bos, tokenizer.special.eos):
        if special is not None:
            return [special]
    newline = tokenizer.encode("\n")
    if len(newline) == 1 and newline[0] != tokenizer.special.unk:
        return newline
    return [0]


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt, after those that the tokenizer begins every text with (Llama's `<s>`; mostly none).

    One without tokens (empty, or spaces only for a word tokenizer) gives `start_ids`.
    """
    return [*tokenizer.opening, *tokenizer.encode(text)] or start_ids(tokenizer)


def encode_continuation(tokenizer: Tokenizer, prompt: str, text: str) -> list[int]:
    """The ids of a text that follows a prompt, after those of `encode_prompt`.

    The two are read as one text where that begins with the prompt's own ids, so that a word at the joint is spelled as
    inside a text; else the text is read alone (its first letters would have changed the prompt's last token).
    """
    before, both = tokenizer.encode_batch([prompt, prompt + text])
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text)


def read_lines(path: str, *, errors: Errors = "strict") -> Iterator[str]:
    """The lines of a file (`-`: standard input) without their ends, read as they are asked for.

    Raises InputError for a missing or unreadable file, and for invalid UTF-8 (line and byte) unless `errors` says
    `replace`.
    """
    name, chunks = (STDIN_NAME, _stdin_chunks()) if path == "-" else (path, read_bytes(Path(path)))
    for line in split_lines(decode_text(chunks, name=name, errors=errors), name=name):
        yield line.removesuffix("\n")


def _stdin_chunks() -> Iterator[bytes]:
    """What has arrived, without waiting for a whole chunk."""
    return iter(lambda: os.read(sys.stdin.fileno(), CHUNK_BYTES), b"")


def unwritten_tokens(
    special: SpecialIds,
    target: DecoderTokens | None = None,
    *,
    eos: int | None,
    suppressed: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Ids, in increasing order: pad, bos and what a decoder beside an encoder starts from.

    Where one of them ends a text too (BART starts from eos) or is the first of every text (`forced_bos`), it stays.

    target: of the decoder beside an encoder; None: a decoder alone.
    suppressed: these, in the place of all that (`generation.suppress_tokens`: a model from elsewhere may rule out
    others, or none).
    """
    if suppressed is not None:
        return tuple(sorted(set(suppressed)))
    forced = None if target is None else target.forced_bos
    reading = {special.pad, special.bos, None if target is None else target.start} - {eos, forced}
    return tuple(sorted(token for token in reading if token is not None))
