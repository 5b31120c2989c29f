"""The ids that a recipe names in `tokenizer.special_ids`, put in the place of those that a tokenizer found by name.

A tokenizer.json says which tokens are special, not what each is for. Names settle that for tokenizers made here and for
most others; the recipe of an imported model says it outright, and what it says holds wherever a role is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tformer.errors import InputError
from tformer.recipe.recipe import SpecialTokens
from tformer.tokenizer import Tokenizer

ROLES = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
First = TypeVar("First", Tokenizer, Tokenizer | None)


def with_roles(ids: SpecialTokens, tokenizer: First, target: Tokenizer | None) -> tuple[First, Tokenizer | None]:
    """Source's (or the only) and target's tokenizer. The ids are those of what is written: of the target's, if it has
    a tokenizer of its own.

    Raises InputError for an id that the tokenizer does not have.
    """
    if target is not None:
        return tokenizer, with_own_roles(ids, target)
    return (tokenizer if tokenizer is None else with_own_roles(ids, tokenizer)), None


def with_own_roles(ids: SpecialTokens, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with every role that the recipe names. Raises InputError as `with_roles`."""
    check_special_ids(ids, tokenizer, ROLES)
    named = {role: getattr(ids, role) for role in ROLES}
    changed: dict[str, Any] = {role: token for role, token in named.items() if token is not None}
    return tokenizer.with_special(replace(tokenizer.special, **changed)) if changed else tokenizer


def check_special_ids(ids: SpecialTokens, tokenizer: Tokenizer, names: Sequence[str]) -> None:
    """Raise InputError, naming the key, for an id that the tokenizer does not have."""
    for name in names:
        token = getattr(ids, name)
        if token is not None and token >= tokenizer.vocab_size:
            raise InputError(
                f"tokenizer.special_ids.{name}: found {token}, expected an id of the tokenizer, which are below "
                f"{tokenizer.vocab_size}"
            )
