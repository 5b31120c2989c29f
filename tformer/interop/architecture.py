"""One architecture of Hugging Face: its config keys, its classes, its table of weights, its tokenizer's defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tformer.interop.config import Config
from tformer.interop.mapping import Fixed, Link, to_theirs
from tformer.interop.weight_files import WeightFiles
from tformer.recipe.model import Model


@dataclass(frozen=True)
class Code:
    """A file of Python that defines the classes of an architecture.

    file: its name beside config.json. lacks: `path: value` of every part of a model that it does not compute.
    """

    file: str
    lacks: Callable[[Model], Iterable[str]]


@dataclass(frozen=True)
class Architecture:
    """One `model_type`.

    model_type: its name in config.json.
    classes: the classes that are read and written. The value is the kinds of tformer's heads for which `export` writes
        this class, in order; () where several recipes lead to it and `write` decides.
    family: the recipe's `arch`.
    read: (config, class) -> the recipe's `model` section as plain values, with every size. It takes every key of the
        config that it knows and refuses features that tformer lacks; the caller calls `finish`.
    write: (model, class) -> this architecture's own keys of config.json, without model_type, architectures, special
        ids and labels. The model is resolved: vocabulary sizes and numbers of labels are filled in. It may write the
        nearest equivalent: the caller reads the result back and refuses any field that came out different.
    links: (model, class) -> the whole table of weights.
    prefix: prefix of the body's tensor names in files of one of the `classes`; files of the bare body lack it.
    renamed: old tensor names: (pattern, replacement) of `re.sub` on the whole name.
    skipped: patterns (`re.fullmatch`) of tensors that no class here uses: buffers, and heads of other classes.
    of_files: (section as read, weight files) -> the section with the values that only the files decide.
    undecided: dotted paths of the section that only `of_files` decides.
    fixed: (model, class) -> tensors on disk that follow from the section by a formula.
    special_ids: ids of special tokens that `transformers` assumes where config.json lacks the key.
    slow_tokenizer: the tokenizer class of folders without tokenizer.json; None: by the kind of vocabulary file.
    own_tokenizer_rules: `AutoTokenizer` reads every tokenizer of this type by fixed rules and ignores the class that a
        folder names.
    code: what a folder carries to define the classes; None: transformers has them.
    ctranslate2: CTranslate2's loader and the config traits that it reads; None: its results are not known to be equal.
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
    special_ids: Mapping[str, int] = field(default_factory=dict)
    slow_tokenizer: str | None = None
    own_tokenizer_rules: bool = False
    code: Code | None = None
    ctranslate2: tuple[str, Mapping[str, bool]] | None = None

    def tensors(self, model: Model, class_name: str, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors of a file of the class, by name on disk.

        ours: tformer's tensors by name, without aliases of tied ones.
        """
        made = {entry.name: entry.make() for entry in self.fixed(model, class_name) if entry.written}
        return to_theirs(self.links(model, class_name), ours) | made
