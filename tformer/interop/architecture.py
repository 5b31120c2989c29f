"""What tformer knows of one of Hugging Face's architectures: its config, its classes, its table of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tformer.interop.config import Config
from tformer.interop.mapping import Fixed, Link, to_theirs
from tformer.interop.weight_files import WeightFiles
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
    of_files: (section as read, weight files) -> the section with what the files decide and config.json does not.
    undecided: dotted paths of the section that `of_files` alone decides: a config that says nothing of them is right.
    fixed: (model, class) -> tensors on disk that follow from the section.
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
    of_files: Callable[[dict[str, Any], WeightFiles], dict[str, Any]] | None = None
    undecided: tuple[str, ...] = ()
    fixed: Callable[[Model, str], Sequence[Fixed]] = lambda model, class_name: ()

    def tensors(self, model: Model, class_name: str, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All that a file of the class holds, by name on disk, of our tensors (owners only)."""
        made = {entry.name: entry.make() for entry in self.fixed(model, class_name) if entry.written}
        return to_theirs(self.links(model, class_name), ours) | made
