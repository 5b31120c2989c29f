"""What a `model` section computes, in one form: two sections that give the same function of the same weights are equal.

Sizes that follow from others are filled in; what concerns training (dropouts, initialisation) and options without
effect beside the others are left out. Comparing two canonical forms names every difference that matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tformer.nn.positions.learned import LearnedOptions
from tformer.recipe.model import Model, Stack

OF_TRAINING = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "drophead")

# Features of tformer's that no class has: (dotted path, value). They are named before anything else is compared.
NOWHERE: tuple[tuple[str, Any], ...] = (
    (r"model\.embedding\.fixnorm", True),
    (r"model\.(encoder|decoder)\.attention\.kind", "additive"),
    (r"model\.(encoder|decoder)\.attention\.kind", "sliding_window"),
    (r"model\.(encoder|decoder)\.attention\.kind", "bigbird"),
    (r"model\.(encoder|decoder)\.attention\.kind", "linformer"),
    (r"model\.(encoder|decoder)\.attention\.kind", "performer"),
    (r"model\.(encoder|decoder)\.norm\.kind", "scalenorm"),
    (r"model\.(encoder|decoder)\.norm\.kind", "batchnorm"),
    (r"model\.(encoder|decoder)\.norm\.kind", "groupnorm"),
    (r"model\.(encoder|decoder)\.positions\.kind", "shaw"),
    (r"model\.(encoder|decoder)\.positions\.kind", "patch2d"),
    (r"model\.(encoder|decoder)\.positions\.layout", "fairseq"),
    (r"model\.(encoder|decoder)\.attention\.qk_norm", True),
    (r"model\.(encoder|decoder)\.feedforward\.activation", "relu2"),
    (r"model\.heads\.\w+\.pooling", "mean"),
)


def canonical(model: Model) -> dict[str, Any]:
    """A resolved model section (vocabulary sizes and numbers of labels filled in) as nested plain values."""
    data = model.model_dump(mode="json")
    del data["init"]
    both = model.encoder is not None and model.decoder is not None
    for side in ("encoder", "decoder"):
        stack: Stack | None = getattr(model, side)
        if stack is not None:
            data[side] = _stack(model, stack, data[side])
    del data["embedding"]["dropout"]
    if data["embedding"]["size"] == model.d_model:
        data["embedding"]["size"] = None
    for head in data["heads"]:
        head.pop("dropout", None)
        if head.get("pooler") is False:
            del head["activation"]
        if "scale" in head:
            named = {"none": 1.0, "inverse_sqrt_d": model.d_model**-0.5}
            head["scale"] = named.get(head["scale"], head["scale"])
    data["heads"] = {head.pop("kind"): head for head in data["heads"]}
    if not both:
        del data["tie"]["source_target"]
    if not {"lm", "masked_lm"} & data["heads"].keys():
        del data["tie"]["output"]
    if not any(data[side] and data[side]["positions"]["kind"] == "learned" for side in ("encoder", "decoder")):
        data["max_seq_len"] = None  # no table ends there
    if model.patches is not None:
        del data["patches"]["stem"]  # two shapes of one kernel
        if model.decoder is None:
            data["embedding"] = {"norm": model.embedding.norm}
            del data["max_seq_len"], data["vocab_size"]
    if data["target_vocab_size"] == model.vocab_size:
        data["target_vocab_size"] = None
    return data


def without_learned_rates(model: Model) -> Model:
    """The same function without the LayerDrop rates that are learned beside its weights."""
    stacks = {side: stack for side in ("encoder", "decoder") if (stack := getattr(model, side)) is not None}
    fixed = {side: stack.model_copy(update={"layerdrop": stack.layerdrop_rate}) for side, stack in stacks.items()}
    return model.model_copy(update=fixed)


def differences(first: Model, second: Model) -> list[tuple[str, Any, Any]]:
    """(dotted path, value in `first`, value in `second`) of everything that makes two models different functions."""
    return list(_differences(canonical(first), canonical(second), "model"))


def unknown_anywhere(model: Model) -> list[tuple[str, Any]]:
    """(dotted path, value) of every feature that no class of Hugging Face has."""
    found = [
        (path, value)
        for path, value in _leaves(canonical(model), "model")
        if any(value == odd and re.fullmatch(pattern, path) for pattern, odd in NOWHERE)
    ]
    sides = [side for side in ("encoder", "decoder") if getattr(model, side) is not None]
    return found + [(f"model.{side}.layers", layers) for side in sides if (layers := getattr(model, side).layers)]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}")


def _stack(model: Model, stack: Stack, data: dict[str, Any]) -> dict[str, Any]:
    width = model.d_model if stack.d_model is None else stack.d_model
    size = width // stack.num_heads if stack.head_dim is None else stack.head_dim
    data = {key: value for key, value in data.items() if key not in OF_TRAINING}
    data |= {"d_model": width, "head_dim": size, "value_dim": stack.value_dim or size}
    data["num_kv_heads"] = stack.num_kv_heads or stack.num_heads
    if data["attention"]["scale"] == "auto":
        data["attention"]["scale"] = size**-0.5
    if data["feedforward"]["d_ff"] is None:
        data["feedforward"]["d_ff"] = 4 * width
    if stack.norm.kind != "layernorm" or not stack.norm.learned:
        del data["norm"]["bias"]
    if isinstance(stack.positions, LearnedOptions) and model.patches is not None:
        del data["positions"]["ids"]
    return data


def _differences(first: Any, second: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            yield from _differences(first.get(key), second.get(key), f"{path}.{key}")
    elif first != second and not (isinstance(first, float) and _close(first, second)):
        yield path, first, second


def _close(first: float, second: Any) -> bool:
    """Equal but for the last bits of a square root."""
    return isinstance(second, int | float) and abs(first - second) <= 1e-12 * abs(first)
