"""One architecture of Hugging Face: its config keys, its classes, its table of weights, its tokenizer's defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tformer.interop.config import Config
from tformer.interop.mapping import Fixed, Link, both
from tformer.interop.weight_files import WeightFiles
from tformer.nn.heads import HeadOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError


@dataclass(frozen=True)
class Code:
    """A file of Python that defines the classes of an architecture.

    file: its name beside config.json. lacks: `path: value` of every part of a model that it does not compute.
    """

    file: str
    lacks: Callable[[Model], Iterable[str]]


def as_it_is(model: Model, name: str, tensor: Tensor) -> Tensor:
    """The tensor unchanged, for a class whose tensors are equal in a GGUF file and on disk."""
    return tensor


@dataclass(frozen=True)
class Gguf:
    """The form of an architecture in a GGUF file, which llama.cpp reads.

    name: in `general.architecture`.
    keys: key of the file, after the name -> key of config.json.
    stored: (model, name on disk, tensor on disk) -> the tensor in the file; loaded: its inverse.
    assumed: keys of config.json that the file states -> those that llama.cpp assumes, unlike the class's defaults.
    shown: key of config.json -> the tensor that the file has where it is true.
    scalings: types of RoPE scaling.
    """

    name: str
    keys: Mapping[str, str]
    stored: Callable[[Model, str, Tensor], Tensor] = as_it_is
    loaded: Callable[[Model, str, Tensor], Tensor] = as_it_is
    assumed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    shown: Mapping[str, str] = field(default_factory=dict)
    scalings: tuple[str, ...] = ("linear",)

    def computed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of `config` that llama.cpp computes with when it reads the exported file."""
        kept = (*self.keys.values(), *self.shown, "vocab_size", "tie_word_embeddings")
        found = {key: config[key] for key in kept if config.get(key) is not None}
        scaling = config.get("rope_scaling") or {}
        found |= {"rope_scaling": scaling} if scaling.get("rope_type") in self.scalings else {}
        return {**found, **self.assumed(found)}


@dataclass(frozen=True)
class Architecture:
    """One `model_type`.

    model_type: its name in config.json.
    classes: the classes that are read and written, with the kinds of tformer's heads of each, in order; () for the
        bare body. Beside them any class may have the body's pooler.
    family: the recipe's `arch`.
    read: (config, class) -> the recipe's `model` section as plain values, with every size. It takes every key of the
        config that it knows and refuses features that tformer lacks; the caller calls `finish`.
    write: (model, class) -> this architecture's own keys of config.json, without model_type, architectures, special
        ids and labels. The model is resolved: vocabulary sizes and numbers of labels are filled in. It may write the
        nearest equivalent: the caller reads the result back and refuses any field that came out different.
    links: (model, class) -> the table of weights; `table` leaves out the heads that a model lacks.
    prefix: prefix of the body's tensor names in files of a class with a head; files of the bare body lack it.
    pooler: name on disk of the dense layer on the body's first vector, which any class may have; None if there is none.
    renamed: old tensor names: (pattern, replacement) of `re.sub` on the whole name.
    skipped: patterns (`re.fullmatch`) of tensors that no class here uses: buffers, and heads of other classes.
    of_files: (section as read, weight files) -> the section with the values that only the files decide.
    undecided: dotted paths of the section that only `of_files` decides.
    fixed: (model, class) -> tensors on disk that follow from the section by a formula.
    differs: model -> a note for the user about each case in which the class computes something else.
    special_ids: ids of special tokens that `transformers` assumes where config.json lacks the key.
    slow_tokenizer: the tokenizer class of folders without tokenizer.json; None: the vocabulary file decides.
    own_tokenizer_rules: `AutoTokenizer` reads every tokenizer of this type by fixed rules and ignores the class that a
        folder names.
    code: what a folder carries to define the classes; None: transformers has them.
    ctranslate2: config.json -> the keys that CTranslate2's converter ignores, with the values that it computes with;
        None: it was not tried.
    gguf: None: llama.cpp's results are not known to be equal.
    """

    model_type: str
    classes: Mapping[str, tuple[str, ...]]
    family: str
    read: Callable[[Config, str], dict[str, Any]]
    write: Callable[[Model, str], dict[str, Any]]
    links: Callable[[Model, str], Sequence[Link]]
    prefix: str = ""
    pooler: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    of_files: Callable[[dict[str, Any], WeightFiles], dict[str, Any]] | None = None
    undecided: tuple[str, ...] = ()
    fixed: Callable[[Model, str], Sequence[Fixed]] = lambda model, class_name: ()
    differs: Callable[[Model], Sequence[str]] = lambda model: ()
    special_ids: Mapping[str, int] = field(default_factory=dict)
    slow_tokenizer: str | None = None
    own_tokenizer_rules: bool = False
    code: Code | None = None
    ctranslate2: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    gguf: Gguf | None = None

    def section(self, config: Config, class_name: str, *, pooler: bool = False) -> dict[str, Any]:
        """The recipe's `model` section of a class. pooler: whether the body's pooler is a further head."""
        found = self.read(config, class_name)
        heads = found["heads"] if self.classes[class_name] else []
        if pooler:
            config.expect("pooler_act", "tanh")
        return found | {"heads": [*heads, *([{"kind": "pooler"}] if pooler else [])]}

    def table(self, model: Model, class_name: str) -> list[Link]:
        """The links of the model's own tensors."""
        kinds = {head.kind for head in model.heads}
        found = [one for one in self.links(model, class_name) if _head_of(one) is None or _head_of(one) in kinds]
        if self.pooler is None or "pooler" not in kinds:
            return found
        if any(f"{self.pooler}.weight" in one.theirs for one in found):
            raise InputError(f"model.heads: found a pooler, which {class_name} has in another head")
        return [*found, *both("heads.pooler.pooler", self.pooler)]

    def written(self, model: Model, class_name: str) -> tuple[list[Link], list[Fixed]]:
        """Links and formulas of the tensors in a file of the class, under the names there."""
        links, fixed = self.table(model, class_name), list(self.fixed(model, class_name))
        if self.classes[class_name] or not self.prefix:
            return links, fixed
        bare = [replace(one, theirs=tuple(name.removeprefix(self.prefix) for name in one.theirs)) for one in links]
        return bare, [replace(one, name=one.name.removeprefix(self.prefix)) for one in fixed]


def kind_in_classes(head: HeadOptions) -> str:
    """The kind of a head in `Architecture.classes`: a class with labels is one for classification and regression."""
    return "classifier" if head.label_kind is not None else head.kind


# The class that opens a folder -> endings of the names of the classes that it opens.
AUTO_CLASSES = {
    "AutoModelForCausalLM": ("LMHeadModel", "ForCausalLM"),
    "AutoModelForSeq2SeqLM": ("ForConditionalGeneration", "MTModel"),
    "AutoModelForPreTraining": ("ForPreTraining",),
    "AutoModelForMaskedLM": ("ForMaskedLM",),
    "AutoModelForSequenceClassification": ("ForSequenceClassification",),
    "AutoModelForImageClassification": ("ForImageClassification",),
    "AutoModelForTokenClassification": ("ForTokenClassification",),
    "AutoModelForQuestionAnswering": ("ForQuestionAnswering",),
    "AutoModelForMultipleChoice": ("ForMultipleChoice",),
    "AutoModelForTextEncoding": ("EncoderModel",),
    "AutoModel": ("Model",),
}


def auto_class(class_name: str) -> str:
    """The `AutoModel...` that opens a folder of this class."""
    return next(auto for auto, endings in AUTO_CLASSES.items() if class_name.endswith(endings))


def _head_of(entry: Link) -> str | None:
    """The kind of head that a tensor belongs to; None: of the body."""
    part, _, rest = entry.ours.partition(".")
    return rest.partition(".")[0] if part == "heads" else None
