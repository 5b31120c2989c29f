"""Answers of a model by name: tokens, or labels of a classifier."""

from __future__ import annotations

from typing import Any

from tformer.data.encoding import token_text
from tformer.loading import Loaded
from tformer.support.errors import InputError, did_you_mean
from tformer.tokenizer import Tokenizer

CLASSIFIERS = ("classifier", "regression")
"""Heads that answer once, with labels or a number; the others answer with tokens."""


def label_names(loaded: Loaded) -> list[str]:
    """The names of a classifier's labels; their numbers where they have none."""
    project: Any = loaded.model.heads["classifier"].project
    return list(loaded.recipe.data.labels) or [str(number) for number in range(len(project.weight))]


def answer_id(loaded: Loaded, head: str, text: str, *, option: str, tokenizer: Tokenizer | None = None) -> int:
    """The id of the token, by default of the target, or of the label that an option names.

    A token is given as text, or as the vocabulary spells it. Raises InputError for a text of no or several tokens, and
    for what is no label.
    """
    if head == "regression":
        raise InputError(f"{option} {text}: {loaded.path} answers with one number")
    if head in CLASSIFIERS:
        names = label_names(loaded)
        if text not in names:
            raise InputError(f"{option} {text}: no label of {loaded.path}", hint=did_you_mean(text, names))
        return names.index(text)
    tokenizer = tokenizer or loaded.target_tokenizer
    ids = tokenizer.encode(text)
    if len(ids) == 1 and ids[0] != tokenizer.special.unk:
        return ids[0]
    if (found := tokenizer.token_id(text)) is not None:
        return found
    if len(ids) > 1:
        pieces = ", ".join(repr(token_text(tokenizer, token)) for token in ids[:6])
        hint = "a word inside a text may be one token with the space before it"
        raise InputError(f"{option} {text!r}: {len(ids)} tokens ({pieces}), expected one", hint=hint)
    raise InputError(f"{option} {text!r} is not in the vocabulary")


def answer_text(loaded: Loaded, head: str, answer: int) -> str:
    """The text of a token, or the name of a label; a row of the matrix may have no token."""
    if head in CLASSIFIERS:
        return str(answer) if head == "regression" else label_names(loaded)[answer]
    try:
        return token_text(loaded.target_tokenizer, answer)
    except ValueError:
        return f"id {answer}"
