"""What single layers have of their own: the `layers` mapping of a stack, merged into one section per layer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from pydantic import ValidationError

from tformer.errors import InputError, did_you_mean
from tformer.nn.attention import AttentionOptions
from tformer.recipe.model import Stack

PER_LAYER = frozenset(
    {
        "attention",
        "feedforward",
        "norm",
        "num_heads",
        "dropout",
        "attention_dropout",
        "activation_dropout",
        "layerdrop",
        "drophead",
    }
)
NUMBER_OR_OPTIONS = ("layerdrop", "drophead")
PER_HEAD_POSITIONS = ("alibi", "t5_bias")  # one bias for each head, the same module for all layers
ATTENTION_KEYS = {options.kind: {field.name for field in fields(options)} for options in get_args(AttentionOptions)}


def layer_sections(section: Stack, *, path: str) -> list[Stack]:
    """One section per layer: the stack's own, with that layer's overrides merged in.

    path: of the stack in the recipe, for messages. Raises InputError for an override that does not fit.
    """
    for layer, overrides in section.layers.items():
        place = f"{path}.layers.{layer}"
        if layer >= section.num_layers:
            raise InputError(f"{place}: the stack has {section.num_layers} layers, numbered from 0")
        for key in overrides:
            if key not in PER_LAYER:
                raise InputError(f"{place}.{key}: not an option of a single layer", hint=did_you_mean(key, PER_LAYER))
        if overrides.get("num_heads", section.num_heads) != section.num_heads:
            _check_own_heads(section, path, place)
        if "layerdrop" in overrides:
            _check_own_layerdrop(section, overrides["layerdrop"], path, place)
    return [
        _merged(section, section.layers.get(layer, {}), f"{path}.layers.{layer}") for layer in range(section.num_layers)
    ]


def _check_own_heads(section: Stack, path: str, place: str) -> None:
    if section.head_dim is None:
        raise InputError(f"{place}.num_heads: the size of a head must be given then", hint=f"set {path}.head_dim")
    if section.positions.kind in PER_HEAD_POSITIONS:
        raise InputError(
            f"{place}.num_heads: every layer needs the {section.num_heads} heads of {path}, whose positions of kind "
            f"{section.positions.kind} have a bias for each head"
        )
    if section.num_kv_heads not in (None, section.num_heads):
        raise InputError(
            f"{place}.num_heads: every layer needs the {section.num_heads} heads of {path}, which share "
            f"{section.num_kv_heads} key/value heads (num_kv_heads)"
        )


def _check_own_layerdrop(section: Stack, rate: Any, path: str, place: str) -> None:
    if section.learns_layerdrop:
        raise InputError(f"{place}.layerdrop: {path}.layerdrop learns the rate of every layer: leave this one out")
    if isinstance(rate, dict):
        raise InputError(f"{place}.layerdrop: found a mapping, expected a number: one layer's rate is not learned")


def _merged(section: Stack, overrides: dict[str, Any], place: str) -> Stack:
    if not overrides:
        return section
    values = section.model_dump()
    if "num_heads" in overrides:
        values["num_kv_heads"] = None  # as many
    for key, override in overrides.items():
        if key in NUMBER_OR_OPTIONS or not isinstance(values[key], dict):
            values[key] = override
            continue
        if not isinstance(override, dict):
            raise InputError(f"{place}.{key}: expected a mapping of options, found {override!r}")
        known = values[key].keys()
        if key == "attention" and override.get("kind") in ATTENTION_KEYS:
            known = ATTENTION_KEYS[override["kind"]]  # a layer of another kind keeps what both kinds have
        for option in override:
            if option not in known:
                raise InputError(f"{place}.{key}.{option}: unknown option", hint=did_you_mean(option, known))
        values[key] = {option: value for option, value in (values[key] | override).items() if option in known}
    try:
        return Stack.model_validate(values)
    except ValidationError as error:
        problem = max(error.errors(), key=lambda one: len(_keys(one["loc"], values)))
        where = ".".join(_keys(problem["loc"], values))
        raise InputError(f"{place}.{where}: {problem['msg']}, found {problem['input']!r}") from error


def _keys(location: tuple[int | str, ...], values: Any) -> list[str]:
    """pydantic's location without the names of union members."""
    keys = []
    for name in location:
        if isinstance(values, dict) and name in values:
            values = values[name]
            keys.append(str(name))
    return keys
