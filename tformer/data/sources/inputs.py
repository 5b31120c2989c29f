"""Inputs of a call in Python: one text, pair of texts or image, or a list of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tformer.errors import InputError
from tformer.formatting import shortened

TEXT = "a text"
SHOWN_CHARACTERS = 60  # of a value in a message


def as_list(inputs: Any, is_input: Callable[[Any], bool], expected: str, *, name: str) -> tuple[list[Any], bool]:
    """(inputs as a list, whether it was one input). A list is never one.

    Raises InputError for what is no input, with its number in the list from 0.
    """
    if is_input(inputs) and not isinstance(inputs, list):
        return [inputs], True
    is_table = isinstance(inputs, Mapping) or hasattr(inputs, "columns")  # iterating it gives names of columns
    if is_table or isinstance(inputs, str | bytes | os.PathLike) or not isinstance(inputs, Iterable):
        raise InputError(f"{name}: found {shown(inputs)}, expected {expected}, or a list of them")
    each = list(inputs)
    for number, item in enumerate(each):
        if not is_input(item):
            raise InputError(f"{name}[{number}]: found {shown(item)}, expected {expected}")
    return each, False


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_text_or_pair(value: Any) -> bool:
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    return is_text(value) or (is_pair and is_text(value[0]) and (value[1] is None or is_text(value[1])))


def shown(value: Any) -> str:
    """A value in a message: its beginning, on one line; of a data frame its type."""
    is_table = hasattr(value, "columns")
    return type(value).__name__ if is_table else shortened(" ".join(repr(value).split()), SHOWN_CHARACTERS)


def as_pairs(texts: Iterable[str | tuple[str, str]]) -> list[tuple[str, str | None]]:
    """(text, second text or None) of texts and pairs of texts."""
    return [(text, None) if isinstance(text, str) else text for text in texts]
