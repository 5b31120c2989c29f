"""What tformer knows of one of Hugging Face's architectures: its config, its classes, its table of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tformer.interop.config import Config
from tformer.interop.mapping import Link
from tformer.recipe.model import Model


@dataclass(frozen=True)
class Architecture:
    """One `model_type`.

    model_type: as config.json says it.
    classes: the classes that are read and written; each with the kinds of our heads, in their order, for which it is
        the one to write ((), where several recipes lead to it and `write` decides).
    family: the recipe's `arch`.
    read: (config, class) -> the recipe's `model` section as plain values, every size filled in. It takes every key that
        it knows from the config and refuses what tformer lacks; the caller calls `finish`.
    write: (model, class) -> this architecture's own keys of config.json, without model_type, architectures, special ids
        and labels. The model is resolved: vocabulary sizes and numbers of labels are filled in. It may write what comes
        nearest: the caller reads the result back and refuses any field that came out different.
    links: (model, class) -> the whole table of weights.
    prefix: what the names of the body begin with in a file of one of the `classes`; files of the bare body lack it.
    renamed: old names: (pattern, replacement) of `re.sub` on the whole name.
    skipped: patterns (`re.fullmatch`) of tensors that are no weights of the classes: buffers, and heads of other
        classes that files carry along.
    """

    model_type: str
    classes: Mapping[str, tuple[str, ...]]
    family: str
    read: Callable[[Config, str], dict[str, Any]]
    write: Callable[[Model, str], dict[str, Any]]
    links: Callable[[Model, str], Sequence[Link]]
    prefix: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
