"""Token ids of continuations, task prefixes of sources, and suppressed tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tformer.data.encoding import encode_prompt
from tformer.decoding.completion import prompt_too_long
from tformer.recipe.recipe import Recipe
from tformer.support.decoding import ContextPolicy
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import ChatTemplate
from tformer.tokenizer.pieces import size_for_message
from tformer.tokenizer.special import DecoderTokens, SpecialIds

SHOWN_PREFIXES = 5


OnCut = Callable[[int, str, int], None]
"""Called as (number of the prompt from 1, its size, tokens of the context) when the beginning is not read."""

OnRead = Callable[[int, int], None]
"""Called for a text as (tokens that the encoder or a decoder alone reads, tokens that the decoder beside one reads)."""


def encode_prompts(
    tokenizer: Tokenizer,
    texts: Sequence[Any],
    *,
    context: ContextPolicy,
    max_seq_len: int,
    first_row: int = 0,
    on_cut: OnCut | None = None,
    template: ChatTemplate | None = None,
    system: str | None = None,
) -> list[list[int]]:
    """The ids of prompts. A text that does not fit into the context is given by its last ids alone.

    template: a text is a message after the system prompt, and messages may stand in the place of a text.

    Raises InputError for a prompt longer than the context when `context` is `error`.
    """
    if template is None:
        prompts = [encode_prompt(tokenizer, text, most=max_seq_len, keep="tail") for text in texts]
    else:
        before = [] if system is None else [{"role": "system", "content": system}]
        given = ([*before, {"role": "user", "content": each}] if isinstance(each, str) else each for each in texts)
        prompts = list(map(template.prompt, given))
    for number, (text, ids) in enumerate(zip(texts, prompts, strict=True), start=first_row + 1):
        if len(ids) <= max_seq_len:
            continue
        size = size_for_message(text, len(ids), most=max_seq_len)
        if context == "error":
            raise prompt_too_long(number, size, max_seq_len)
        if on_cut is not None:
            on_cut(number, size, max_seq_len)
    return prompts


def encode_continuation(tokenizer: Tokenizer, prompt: str, text: str, *, most: int | None = None) -> list[int]:
    """The ids of a text that follows a prompt, to append to the ids of `encode_prompt`.

    Both are encoded as one text where that begins with the prompt's own ids, so that a word at the joint is spelled as
    inside a text; else the text is encoded alone (its first letters would have changed the prompt's last token).
    `most` (see `Tokenizer.encode_batch`) counts the tokens of prompt and text together.
    """
    before, both = tokenizer.encode_batch([prompt, prompt + text], most=most)
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text, most=most)


def task_prefix(recipe: Recipe, given: str | None) -> tuple[str, str | None]:
    """(prefix, note): the text before each source ("": none), and a note for the user.

    The prefix is the one given, else the one that all training data of the run has. There is none if the tasks have
    different prefixes, because the intended task is unknown.
    """
    if given is not None:
        return given, None
    prefixes = list(dict.fromkeys(spec.prefix for spec in recipe.data.train))
    if len(prefixes) == 1 and prefixes[0]:
        [prefix] = prefixes
        return prefix, f"sources get the prefix of the run's task, '{prefix}' (--prefix TEXT gives another or none)"
    if len(prefixes) > 1:
        listed = ", ".join(f"'{prefix}'" for prefix in prefixes[:SHOWN_PREFIXES])
        more = len(prefixes) - SHOWN_PREFIXES
        return "", (
            f"the run's tasks have different prefixes, sources get none of them: {listed}"
            f"{f' and {more} more' if more > 0 else ''} (--prefix TEXT chooses)"
        )
    return "", None


def suppressed_tokens(
    special: SpecialIds,
    target: DecoderTokens | None = None,
    *,
    eos: int | None,
    suppressed: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Ids, in increasing order, of tokens that a decoder reads and never writes: pad, bos, and the start token of a
    decoder beside an encoder.

    They are ruled out of the choice, not of the distribution: probabilities are not normalized again without them, so
    that search and sampling report the same numbers as force-decoding (`score`). A token that also ends a text (BART
    starts from eos) or is the first of every text (`forced_bos`) is not suppressed.

    Args:
        target: first and last tokens of a decoder that has an encoder; None for a decoder-only model.
        suppressed: these instead (`generation.suppress_tokens`: an imported model may rule out others, or none).
    """
    if suppressed is not None:
        return tuple(sorted(set(suppressed)))
    forced = None if target is None else target.forced_bos
    reading = {special.pad, special.bos, None if target is None else target.start} - {eos, forced}
    return tuple(sorted(token for token in reading if token is not None))
