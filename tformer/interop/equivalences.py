"""Exact changes of form: another `model` section and other weights that compute the very same function.

A class of Hugging Face may ask for one form of what tformer stores in another: sinusoids in halves, a bias that is
zero. `step_for` finds the change that removes one difference between a recipe and a class; every change is a pure
function (model, weights) -> (model, weights), whose property, equal logits, is tested. Nothing here rounds: numbers are
reordered, and zeros and ones are added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tformer.build import build_model
from tformer.interop.permutations import reorder_heads, reorder_streams
from tformer.recipe.model import Model

Weights = Mapping[str, Tensor]
Form = tuple[Model, dict[str, Tensor]]


@dataclass(frozen=True)
class Step:
    """One change. `apply`: (model, weights) -> the same function in another form; without weights, of the section."""

    note: str
    apply: Callable[[Model, Weights], Form]


def sinusoids_in_halves(model: Model, weights: Weights) -> Form:
    """The paper's interleaved sinusoids as Marian's [sin | cos]: every stream with its even columns first."""
    for side in _sides(model):
        if getattr(model, side).positions.kind == "sinusoidal":
            model = changed(model, f"model.{side}.positions.layout", "halves")
    return model, reorder_streams(model, weights)


def rope_in_halves(model: Model, weights: Weights, *, side: str) -> Form:
    """Rotations of neighbouring coordinates as rotations of coordinates half a head apart, Llama's."""
    model = changed(model, f"model.{side}.positions.layout", "halves")
    return model, reorder_heads(model, weights, side=side)


def extended(model: Model, weights: Weights, *, path: str, value: Any) -> Form:
    """A missing bias as one of zeros, a norm without a gain as one of gain 1, no token types as types of zeros."""
    model = changed(model, path, value)
    if not weights:
        return model, {}
    built = build_model(model, device="meta")
    tied, some = built.tied_names(), next(iter(weights.values()))
    owners = {name: tensor for name, tensor in built.state_dict().items() if name not in tied}
    new = {
        name: (torch.ones if _is_gain(name) else torch.zeros)(tensor.shape, dtype=some.dtype)
        for name, tensor in owners.items()
        if name not in weights
    }
    return model, {**weights, **new}


def step_for(model: Model, path: str, ours: Any, theirs: Any) -> Step | None:
    """The change that turns `ours` into `theirs` at a dotted path of the `model` section; None: there is none."""
    for pattern, before, after, make in STEPS:
        found = re.fullmatch(pattern, path)
        if found and type(ours) is type(before) and ours == before and (after is ANY or theirs == after):
            return make(model, path, theirs)
    return None


def changed(model: Model, path: str, value: Any) -> Model:
    """The section with another value at a dotted path, `model.heads.KIND.option` for heads."""
    data: Any = model.model_dump(mode="json")
    place = data
    *parents, last = path.split(".")[1:]
    for key in parents:
        is_list = isinstance(place, list)
        place = next(one for one in place if one["kind"] == key) if is_list else place[key]
    place[last] = value
    return Model.model_validate(data)


ANY = object()
Maker = Callable[[Model, str, Any], Step | None]


def _layout(model: Model, path: str, value: Any) -> Step | None:
    side = path.split(".")[1]
    kind = getattr(model, side).positions.kind
    if kind == "rope":
        return Step(
            f"{path}: interleaved, written as halves (the rows of queries and keys are reordered)",
            lambda section, weights: rope_in_halves(section, weights, side=side),
        )
    if kind != "sinusoidal" or model.patches is not None or model.embedding.size not in (None, model.d_model):
        return None
    positions = [getattr(model, side).positions for side in _sides(model)]
    if any(one.kind == "sinusoidal" and one.layout != "interleaved" for one in positions):
        return None
    return Step(
        "sinusoids: interleaved, written as halves (the columns of the residual stream are reordered)",
        sinusoids_in_halves,
    )


def _extend(what: str) -> Maker:
    def make(model: Model, path: str, value: Any) -> Step:
        return Step(f"{path}: {what}", lambda section, weights: extended(section, weights, path=path, value=value))

    return make


ZERO_BIAS, UNIT_GAIN = _extend("none, written as zeros"), _extend("none, written as ones")
SIDE = r"model\.(encoder|decoder)"

# (dotted path, our value, theirs, the change)
STEPS: tuple[tuple[str, Any, Any, Maker], ...] = (
    (rf"{SIDE}\.positions\.layout", "interleaved", "halves", _layout),
    (rf"{SIDE}\.attention\.(qkv|out)_bias", False, True, ZERO_BIAS),
    (rf"{SIDE}\.feedforward\.bias", False, True, ZERO_BIAS),
    (rf"{SIDE}\.norm\.bias", False, True, ZERO_BIAS),
    (rf"{SIDE}\.norm\.learned", False, True, UNIT_GAIN),
    (r"model\.heads\.(lm|masked_lm)\.bias", False, True, ZERO_BIAS),
    (r"model\.embedding\.token_types", 0, ANY, _extend("none, written as types of zeros")),
)


def _sides(model: Model) -> list[str]:
    return [side for side in ("encoder", "decoder") if getattr(model, side) is not None]


def _is_gain(name: str) -> bool:
    return re.search(r"norm\.weight$", name) is not None
