"""Choice of the Hugging Face class that computes exactly what a recipe's `model` section says.

Both sides are compared in a canonical form: two sections that compute the same function of the same weights are equal.
Sizes that follow from others are filled in; what concerns training (dropouts, initialization) and options without
effect beside the others are left out. Comparing two canonical forms names every difference that matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tformer.checkpoint.average import value_differences
from tformer.interop.architecture import Architecture, kind_in_classes
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config
from tformer.interop.equivalences import Rewrite, inside, step_for
from tformer.nn.heads import LmHeadOptions
from tformer.nn.positions.base import LearnedOptions
from tformer.recipe.model import Model, Stack, layer_sections
from tformer.support.bounds import mistake_of
from tformer.support.errors import InputError, did_you_mean

OF_TRAINING = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "drophead")

# Features that no class of Hugging Face has: (dotted path, value). A refusal names them before other differences.
NOWHERE: tuple[tuple[str, Any], ...] = (
    (r"model\.embedding\.fixnorm", True),
    (r"model\.(encoder|decoder)\.positions\.layout", "fairseq"),
    (r"model\.encoder\.attention\.qk_norm", True),
    (r"model\.(encoder|decoder)\.feedforward\.activation", "relu2"),
    (r"model\.heads\.\w+\.pooling", "max"),
    (r"model\.heads\.\w+\.pooling", "attention"),
)
# The kinds that some class has; a model with another kind is refused by its name.
KNOWN_KINDS: tuple[tuple[str, frozenset[Any]], ...] = (
    (r"model\.embedding\.convolution", frozenset({0})),
    (r"model\.patches\.stem", frozenset({"conv"})),
    (r"model\.encoder\.attention\.kind", frozenset({"full", "disentangled", "sliding_window", "bigbird"})),
    (r"model\.decoder\.attention\.kind", frozenset({"full", "sliding_window"})),
    (r"model\.(encoder|decoder)\.norm\.kind", frozenset({"layernorm", "rmsnorm"})),
    (
        r"model\.(encoder|decoder)\.positions\.kind",
        frozenset({"none", "sinusoidal", "learned", "rope", "alibi", "t5_bias", "learned_t5_bias"}),
    ),
)


def canonical(model: Model) -> dict[str, Any]:
    """Canonical form of a resolved model section (with vocabulary sizes and numbers of labels), as plain values."""
    data = model.model_dump(mode="json")
    del data["init"]
    both = model.is_encoder_decoder
    for side in ("encoder", "decoder"):
        stack: Stack | None = getattr(model, side)
        if stack is not None:
            layers = [_stack(model, layer) for layer in layer_sections(stack, path=f"model.{side}")]
            others = {str(number): layer for number, layer in enumerate(layers) if layer != layers[0]}
            data[side] = {**layers[0], "layers": others}
    del data["embedding"]["dropout"]
    if model.embedding.ngram == 1:
        del data["embedding"]["ngram_rows"]
    if data["embedding"]["size"] == model.d_model:
        data["embedding"]["size"] = None
    if data["embedding"]["size"] is None:
        del data["embedding"]["project"]
    for options, head in zip(model.heads, data["heads"], strict=True):
        head.pop("dropout", None)
        if head.get("pooler") is False:
            del head["activation"], head["pooler_bias"], head["pooler_norm"]
        if head.get("transform") is False:
            del head["activation"], head["dense_bias"]
        if isinstance(options, LmHeadOptions):
            head["scale"] = options.factor((data["decoder"] or data["encoder"])["d_model"])
    data["heads"] = {head.pop("kind"): head for head in data["heads"]}
    if not both:
        del data["tie"]["source_target"]
    if not {"lm", "masked_lm"} & data["heads"].keys():
        del data["tie"]["output"]
    data["max_target_len"] = model.longest_target if both else None
    if not any(stack.positions.module.fixed_length for stack in model.stacks.values()):
        data["max_seq_len"] = data["max_target_len"] = None  # no table of positions has this length
    if model.patches is not None:
        del data["patches"]["stem_depth"]  # of convolutions, which no class has
        if model.patches.stem == "linear":
            data["patches"]["stem"] = "conv"  # one kernel in two shapes
        if model.decoder is None:
            data["embedding"] = {"norm": model.embedding.norm}
            del data["max_seq_len"], data["vocab_size"]
    if data["target_vocab_size"] == model.vocab_size:
        data["target_vocab_size"] = None
    return data


def without_learned_rates(model: Model) -> Model:
    """The model section with the learned LayerDrop rates replaced by fixed ones, which computes the same function."""
    stacks = model.stacks
    fixed = {side: stack.model_copy(update={"layerdrop": stack.layerdrop_rate}) for side, stack in stacks.items()}
    return model.model_copy(update=fixed)


def differences(first: Model, second: Model) -> list[tuple[str, Any, Any]]:
    """(dotted path, value in `first`, value in `second`) of every difference that changes what a model computes."""
    found = value_differences(canonical(first), canonical(second), "model")
    return [one for one in found if not _equal_but_for_rounding(*one[1:])]


def _equal_but_for_rounding(first: Any, second: Any) -> bool:
    """Whether two numbers differ by the rounding of a square root."""
    numbers = isinstance(first, float) and isinstance(second, int | float)
    return numbers and abs(first - second) <= 1e-12 * abs(first)


def unknown_anywhere(model: Model) -> list[tuple[str, Any]]:
    """(dotted path, value) of every feature that no class of Hugging Face has."""
    found = [
        (path, value)
        for path, value in _leaves(canonical(model), "model")
        if any(value == odd and re.fullmatch(pattern, path) for pattern, odd in NOWHERE)
        or any(re.fullmatch(pattern, path) and value not in kinds for pattern, kinds in KNOWN_KINDS)
    ]
    # Layers may differ in what some classes have by layer.
    return found + [
        (f"model.{side}.layers", stack.layers)
        for side, stack in model.stacks.items()
        if any(not layer.keys() <= {"attention", "positions", "attention_norm"} for layer in stack.layers.values())
    ]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}")


def _stack(model: Model, stack: Stack) -> dict[str, Any]:
    """The canonical form of one layer of a stack."""
    width = model.d_model if stack.d_model is None else stack.d_model
    size = width // stack.num_heads if stack.head_dim is None else stack.head_dim
    data = stack.model_dump(mode="json", exclude={*OF_TRAINING, "layers"})
    data |= {"d_model": width, "head_dim": size, "value_dim": stack.value_dim or size}
    data["num_kv_heads"] = stack.num_kv_heads or stack.num_heads
    data["layer_groups"] = stack.layer_groups or stack.num_layers
    if data["attention"]["scale"] == "auto":
        data["attention"]["scale"] = size**-0.5
    if not data["attention"]["qk_norm"]:
        del data["attention"]["qk_norm_eps"]
    if data["attention"]["kind"] == "sliding_window":
        del data["attention"]["block"], data["attention"]["implementation"]  # ways of computing the same
    if data["attention"]["kind"] == "bigbird":
        del data["attention"]["implementation"]
    if data["feedforward"]["d_ff"] is None:
        data["feedforward"]["d_ff"] = 4 * width
    if stack.norm.kind != "layernorm" or not stack.norm.learned:
        del data["norm"]["bias"]
    if isinstance(stack.positions, LearnedOptions) and model.patches is not None:
        del data["positions"]["ids"]
    return data


MAX_LISTED = 6
MAX_ROUNDS = 4  # rounds of changes: a change may reveal another difference
# Distance of a class: one per differing value; this much for a stack or head that only one side has, and for a config
# that cannot be read back.
OTHER_PARTS, UNREADABLE = 50, 40

Difference = tuple[str, Any, Any]  # dotted path, value here, value there


@dataclass(frozen=True)
class ExportTarget:
    """A class, its keys of config.json, and the steps that bring the model into the form of that class.

    model: as the class has it; the recipe's own where `steps` is empty.
    steps: the changes that lead there, to be applied to the weights in this order.
    """

    architecture: Architecture
    class_name: str
    config: dict[str, Any]
    model: Model
    steps: tuple[Rewrite, ...] = ()


def choose_class(
    model: Model,
    *,
    family: str,
    source: str | None = None,
    model_type: str | None = None,
    common: Mapping[str, Any] | None = None,
) -> ExportTarget:
    """The class to export to.

    Args:
        model: resolved (vocabulary sizes and numbers of labels filled in).
        family: the recipe's `arch`, whose architectures are tried first.
        source: the model type that the model came from, which is tried before them.
        model_type: the only one to try; None: all that `transformers` has classes for.
        common: keys of config.json that are the same for every class, such as special ids; they go before the class's.

    Raises:
        InputError: no class computes this; names the fields, or an unknown `model_type`.
    """
    if model_type is not None and model_type not in ARCHITECTURES:
        raise InputError(
            f"model type {model_type!r} is not one of {', '.join(sorted(ARCHITECTURES))}",
            hint=did_you_mean(model_type, list(ARCHITECTURES)),
        )
    code = None if model_type is None else ARCHITECTURES[model_type].code
    if code is not None and (missing := list(code.lacks(model))):
        raise InputError(f"{code.file}, the code that export can write, lacks {'; '.join(missing)}")
    fitting: list[ExportTarget] = []
    refusals: list[tuple[int, str, str]] = []
    for architecture, class_name in _candidates(model, family, source, model_type):
        outcome = _attempt(model, architecture, class_name, common or {})
        if isinstance(outcome, ExportTarget):
            fitting.append(outcome)
        else:
            refusals.append((outcome[0], class_name, outcome[1]))
    if fitting:
        return min(fitting, key=lambda choice: len(choice.steps))  # the first of equals
    where = f" of {model_type}" if model_type else ""
    if unknown := unknown_anywhere(model):
        listed = "; ".join(f"{path}: {_shown(value)}" for path, value in unknown[:MAX_LISTED])
        raise InputError(f"no class of Hugging Face that tformer writes has {listed}")
    if not refusals:
        kinds = ", ".join(head.kind for head in model.heads) or "none"
        raise InputError(f"model.heads: no class{where} of Hugging Face that tformer writes has the heads {kinds}")
    _, class_name, problem = min(refusals, key=lambda refusal: refusal[0])
    raise InputError(f"no class{where} of Hugging Face computes this model; {class_name} comes nearest: {problem}")


def choose_class_or_code(model: Model, *, model_type: str | None = None, **options: Any) -> ExportTarget:
    """The class to export to: one of Hugging Face, else the class of tformer's own modelling code.

    options: as in `choose_class`. Raises InputError if that code lacks a feature as well.
    """
    try:
        return choose_class(model, model_type=model_type, **options)
    except InputError as refusal:
        if model_type is not None:
            raise
        [carrying] = [name for name, one in ARCHITECTURES.items() if one.code is not None]
        try:
            return choose_class(model, model_type=carrying, **options)
        except InputError as lacking:
            raise InputError(f"{refusal.message}; {lacking.message}") from None


def label_keys(model: Model, names: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of config.json about labels; {} for a model without a head over labels.

    names: of the labels in order; without them they get `transformers`' own, LABEL_0 and so on.
    """
    for head in model.heads:
        problem = None
        if head.kind == "classifier":
            count = head.num_labels or 0
            problem = "multi_label_classification" if head.multi_label else "single_label_classification"
        elif head.kind == "token_classifier":
            count = head.num_labels or 0
        elif head.kind == "regression":
            count, problem = 1, "regression"
        else:
            continue
        shown = names if len(names) == count else [f"LABEL_{number}" for number in range(count)]
        return {
            **({} if problem is None else {"problem_type": problem}),
            "id2label": {str(number): name for number, name in enumerate(shown)},
            "label2id": {name: number for number, name in enumerate(shown)},
        }
    return {}


def _candidates(
    model: Model, family: str, source: str | None, model_type: str | None
) -> list[tuple[Architecture, str]]:
    """The classes with the model's heads: first the source's, then those of the recipe's family."""
    kinds = [kind_in_classes(head) for head in model.heads]
    pooler = "pooler" in kinds
    wanted = sorted(kind for kind in kinds if kind != "pooler")
    return [
        (architecture, class_name)
        for architecture in sorted(
            ARCHITECTURES.values(), key=lambda one: (one.model_type != source, one.family != family)
        )
        for class_name, heads in architecture.classes.items()
        if sorted(heads) == wanted
        and (architecture.code is None if model_type is None else model_type == architecture.model_type)
        and (architecture.pooler or not pooler)
    ]


def _attempt(
    model: Model, architecture: Architecture, class_name: str, common: Mapping[str, Any]
) -> ExportTarget | tuple[int, str]:
    """The class as an `ExportTarget` if it fits, else its distance from the model and the differences as text."""
    steps: list[Rewrite] = []
    for _ in range(MAX_ROUNDS):
        try:
            config, found = _compare(model, architecture, class_name, common)
        except InputError as error:
            return UNREADABLE, error.message
        if not found:
            return ExportTarget(architecture, class_name, config, model, tuple(steps))
        wanted = {difference[0]: step_for(model, *difference) for difference in found}
        left = [difference for difference in found if wanted[difference[0]] is None]
        if left:
            return distance(left)
        for path, ours, theirs in found:
            step = step_for(model, path, ours, theirs)  # computed again: a change may have removed several differences
            if step is not None and inside(model.model_dump(mode="json"), path.split(".")[1:]) == ours:
                model, _ = step.apply(model, {})
                steps.append(step)
    return distance(found)


def _compare(
    model: Model, architecture: Architecture, class_name: str, common: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Difference]]:
    """The class's config for a model, and the differences of the model read back from it. InputError: unreadable."""
    config = architecture.write(model, class_name)
    pooler = any(head.kind == "pooler" for head in model.heads)
    for key, value in config.items():
        if value is not None and key in common and common[key] is None:
            raise InputError(f"{class_name} needs a {key}, here {value}: the tokenizer has no such token")
    reader = Config({**label_keys(model), **config, **common}, name=f"export as {class_name}")
    try:
        found = Model.model_validate(architecture.section(reader, class_name, pooler=pooler))
    except ValidationError as error:
        raise InputError(mistake_of(error.errors()[0])) from error
    reader.finish()
    return config, [one for one in differences(model, found) if one[0] not in architecture.undecided]


def distance(found: Sequence[Difference]) -> tuple[int, str]:
    """Distance of a class from the model, and the differences as text.

    A stack or head that only one of them has outweighs any number of values.
    """
    more = len(found) - MAX_LISTED
    listed = "; ".join(
        f"{path} is {_shown(ours)}, expected {_shown(theirs)}" for path, ours, theirs in found[:MAX_LISTED]
    )
    return (
        sum(OTHER_PARTS if isinstance(ours, dict) or isinstance(theirs, dict) else 1 for _, ours, theirs in found),
        listed + (f"; and {more} more" if more > 0 else ""),
    )


def _shown(value: Any) -> str:
    words = {None: "none", True: "true", False: "false"}
    if isinstance(value, dict):
        return "given"
    return words[value] if value is None or isinstance(value, bool) else str(value)
