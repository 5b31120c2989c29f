"""Options of commands as keyword arguments in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from os import PathLike
from typing import Any, TypeVar, cast, get_origin, get_type_hints

from tformer.support.bounds import expected_by, out_of_bounds
from tformer.support.errors import InputError, TformerError, did_you_mean
from tformer.support.options import CommandOnly, as_keyword, declared_option, facts_of, hints_of

FLAG = re.compile(r"--[a-z][a-z0-9-]*")
Options = TypeVar("Options")


def from_keywords(
    options_type: type[Options], values: Mapping[str, Any], *, caller: str, without: Mapping[str, str] | None = None
) -> Options:
    """Options from keyword arguments, which have the names of the flags: `max_new_tokens=20` for `--max-new-tokens 20`.

    Args:
        caller: the function's name in messages.
        without: keywords that this caller does not take, with a hint on each, besides those of `CommandOnly`.

    A text or path for an option that takes several is one of them. Raises InputError for an unknown keyword, and for a
    value of another type.
    """
    from pydantic import TypeAdapter, ValidationError

    declared: dict[str, tuple[str, Any, str | None]] = _keywords(cast(Any, options_type))
    excluded = {keyword: hint for keyword, (_, _, hint) in declared.items() if hint is not None} | {**(without or {})}
    filled = {}
    for keyword, value in values.items():
        if keyword in excluded:
            raise InputError(f"{caller} takes no {keyword}", hint=excluded[keyword])
        if keyword not in declared:
            known = sorted(declared.keys() - excluded.keys())
            raise InputError(f"{caller} has no option '{keyword}'", hint=did_you_mean(keyword, known))
        name, hint, _ = declared[keyword]
        if get_origin(hint) is tuple and isinstance(value, str | PathLike):
            value = (value,)
        if get_origin(hint) is tuple and isinstance(value, list | tuple):
            value = tuple(str(item) if isinstance(item, PathLike) else item for item in value)
        elif isinstance(value, PathLike):
            value = str(value)
        try:
            filled[name] = TypeAdapter(hint).validate_python(value)
        except ValidationError as error:
            expected = expected_by(error.errors(include_url=False)[0])
            raise InputError(f"{keyword}: found {value!r}, expected {expected}") from error
        if wrong := out_of_bounds(filled[name], facts_of(hints_of(options_type)[name])):
            raise InputError(f"{keyword} {wrong}")
    return options_type(**filled)


@cache
def _keywords(options_type: type[Any]) -> dict[str, tuple[str, Any, str | None]]:
    """{keyword: (name, type, what to do in place of an option that Python does not have)} of the fields with a flag."""
    types, found = get_type_hints(options_type), {}
    for name, hint in hints_of(options_type).items():
        declared = declared_option(hint)
        if declared.flags:
            hints = [fact.hint for fact in facts_of(hint) if isinstance(fact, CommandOnly)]
            flag = next(flag for flag in declared.flags if flag.startswith("--"))
            found[as_keyword(flag)] = (name, types[name], hints[0] if hints else None)
    return found


@contextmanager
def flags_as_keywords() -> Iterator[None]:
    """Messages of user errors name keywords (`top_k`) in place of flags (`--top-k`): see `with_keywords`."""
    try:
        yield
    except TformerError as error:
        error.message = with_keywords(error.message)
        error.hint = error.hint and with_keywords(error.hint)
        error.args = (error.message,)
        raise


def with_keywords(text: str) -> str:
    """A message with keywords (`top_k`) in place of flags (`--top-k`); unchanged if it quotes a command."""
    return text if "tformer " in text else FLAG.sub(lambda match: as_keyword(match[0]), text)
