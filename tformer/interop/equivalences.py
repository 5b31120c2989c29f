"""Reordering the residual stream, or the coordinates of heads, so that the same function is stored in another order.

Permuting the coordinates of the residual stream does not change the function if all matrices that write to the stream
have their rows permuted and all that read from it have their columns permuted (matrices are [out, in]); norms are
permuted in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tformer.build import build_model, resolve_sizes
from tformer.recipe.model import Model

# Shapes: D d_model, h head_dim.


# Tensors with dimensions in the order of the residual stream: (name, those dimensions). {side} is encoder or decoder.
STREAM = (
    (r"{side}\.blocks\.\d+\.\w+_norm\.(weight|bias)", (0,)),
    (r"{side}\.final_norm\.(weight|bias)", (0,)),
    (r"{side}\.blocks\.\d+\.(self_attention\.qkv|cross_attention\.q|feedforward\.up)\.weight", (1,)),
    (r"{side}\.blocks\.\d+\.(self_attention\.out|cross_attention\.out|feedforward\.down)\.weight", (0,)),
    (r"{side}\.blocks\.\d+\.(self_attention\.out|cross_attention\.out|feedforward\.down)\.bias", (0,)),
)
MEMORY = ((r"decoder\.blocks\.\d+\.cross_attention\.kv\.weight", (1,)),)
TABLES = (
    (r"{tokens}\.(weight|token_types)", (1,)),
    (r"{tokens}\.norm\.(weight|bias)", (0,)),
)
LEARNED = ((r"{side}\.positions\.weight", (1,)),)
# A head that ends in the product with the tied embedding table has its last vectors in the order of that table.
HEADS = (
    (r"heads\.lm\.weight", (1,)),
    (r"heads\.masked_lm\.weight", (1,)),
    (r"heads\.masked_lm\.dense\.weight", (0, 1)),
    (r"heads\.masked_lm\.(dense\.bias|norm\.weight|norm\.bias)", (0,)),
    (r"heads\.(classifier|regression|next_sentence|multiple_choice|pooler)\.pooler\.weight", (1,)),
    (r"heads\.(replaced_token|token_classifier|span)\.dense\.weight", (1,)),
)


def halves(size: int) -> Tensor:
    """The order [0, 2, 4, ..., 1, 3, 5, ...] of `size` columns."""
    return torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])


def reorder_streams(model: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the even columns of every residual stream first. Embeddings must be as wide as the stream."""
    sides = list(model.stacks)
    widths = {side: resolve_sizes(model, side).d_model for side in sides}
    rules: list[tuple[re.Pattern[str], tuple[int, ...], int]] = []

    def add(table: tuple[tuple[str, tuple[int, ...]], ...], width: int, **names: str) -> None:
        for pattern, dimensions in table:
            for key, name in names.items():
                pattern = pattern.replace(f"{{{key}}}", name)
            rules.append((re.compile(pattern), dimensions, width))

    for side in sides:
        add(STREAM, widths[side], side=side)
        add(TABLES, widths[side], tokens="embedding" if side == sides[0] else "decoder_embedding")
        if getattr(model, side).positions.kind == "learned":
            add(LEARNED, widths[side], side=side)
    if len(sides) == 2:
        add(MEMORY, widths["encoder"])
    add(HEADS, widths[sides[-1]])
    for head in model.heads:
        if getattr(head, "pooler", getattr(head, "transform", True)) is False:  # it reads the stream directly
            add(((rf"heads\.{head.kind}\.project\.weight", (1,)),), widths[sides[-1]])

    def reordered(name: str, tensor: Tensor) -> Tensor:
        for pattern, dimensions, width in rules:
            if pattern.fullmatch(name):
                for dimension in dimensions:
                    tensor = tensor.index_select(dimension, halves(width).to(tensor.device))
        return tensor

    return {name: reordered(name, tensor) for name, tensor in weights.items()}


def reorder_heads(model: Model, weights: Mapping[str, Tensor], *, side: str) -> dict[str, Tensor]:
    """The weights with the even coordinates of every head's queries and keys first, in a stack's self-attention."""
    sizes = resolve_sizes(model, side)
    turned = sizes.num_heads + sizes.num_kv_heads
    starts = torch.arange(turned).unsqueeze(1) * sizes.head_dim
    positions = getattr(model, side).positions
    turned_part = positions.width(sizes.head_dim)
    of_head = torch.cat([halves(turned_part), torch.arange(turned_part, sizes.head_dim)])
    order = (starts + of_head).flatten()
    pattern = re.compile(rf"{side}\.blocks\.\d+\.self_attention\.(qkv\.(weight|bias)|(?P<gain>[qk]_norm\.\w+))")

    def reordered(name: str, tensor: Tensor) -> Tensor:
        if (found := pattern.fullmatch(name)) is None:
            return tensor
        if found["gain"]:  # of one head, which all share, or of all heads
            return tensor.index_select(0, order[: len(tensor)].to(tensor.device))
        rest = torch.arange(len(order), tensor.shape[0])  # values are not rotated
        return tensor.index_select(0, torch.cat([order, rest]).to(tensor.device))

    return {name: reordered(name, tensor) for name, tensor in weights.items()}


Weights = Mapping[str, Tensor]
Form = tuple[Model, dict[str, Tensor]]


@dataclass(frozen=True)
class Rewrite:
    """One change of form. `apply`: (model, weights) -> an equal model in another form; weights may be empty."""

    note: str
    apply: Callable[[Model, Weights], Form]


def sinusoids_in_halves(model: Model, weights: Weights) -> Form:
    """The model with interleaved sinusoids in Marian's layout [sin | cos]: every stream's even columns first."""
    for side, stack in model.stacks.items():
        if stack.positions.kind == "sinusoidal":
            model = changed(model, f"model.{side}.positions.layout", "halves")
    return model, reorder_streams(model, weights)


def extended(model: Model, weights: Weights, *, path: str, value: Any) -> Form:
    """The model with a missing parameter made explicit: a bias of zeros, a gain of ones, token types of zeros."""
    model = changed(model, path, value)
    if not weights:
        return model, {}
    built = build_model(model, device="meta")
    tied, some = built.tied_names(), next(iter(weights.values()))
    owners = {name: tensor for name, tensor in built.state_dict().items() if name not in tied}
    new = {
        name: (torch.ones if name.endswith("norm.weight") else torch.zeros)(tensor.shape, dtype=some.dtype)
        for name, tensor in owners.items()
        if name not in weights
    }
    return model, {**weights, **new}


def step_for(model: Model, path: str, ours: Any, theirs: Any) -> Rewrite | None:
    """The change that turns `ours` into `theirs` at a dotted path of the `model` section, or None."""
    for pattern, before, after, make in STEPS:
        found = re.fullmatch(pattern, path)
        if found and type(ours) is type(before) and ours == before and (after is ANY or theirs == after):
            return make(model, path, theirs)
    return None


def changed(model: Model, path: str, value: Any) -> Model:
    """The section with a new value at a dotted path; a head's option is `model.heads.KIND.option`."""
    data = model.model_dump(mode="json")
    *parents, last = path.split(".")[1:]
    inside(data, parents)[last] = value
    return Model.model_validate(data)


def inside(data: Any, keys: Sequence[str]) -> Any:
    """The value at these keys of nested values; a head is found by its kind."""
    for key in keys:
        data = next(one for one in data if one["kind"] == key) if isinstance(data, list) else data[key]
    return data


ANY = object()
Maker = Callable[[Model, str, Any], Rewrite | None]


def _layout(model: Model, path: str, value: Any) -> Rewrite | None:
    side = path.split(".")[1]
    kind = getattr(model, side).positions.kind
    if kind == "rope":  # in Llama's layout rotated coordinates lie half a head apart, they are not adjacent
        return Rewrite(
            f"{path}: interleaved, written as halves (the rows of queries and keys are reordered)",
            lambda section, weights: (changed(section, path, "halves"), reorder_heads(section, weights, side=side)),
        )
    if kind != "sinusoidal" or model.patches is not None or model.embedding.size not in (None, model.d_model):
        return None
    positions = [stack.positions for stack in model.stacks.values()]
    if any(one.kind == "sinusoidal" and one.layout != "interleaved" for one in positions):
        return None
    return Rewrite(
        "sinusoids: interleaved, written as halves (the columns of the residual stream are reordered)",
        sinusoids_in_halves,
    )


def _extend(what: str) -> Maker:
    def make(model: Model, path: str, value: Any) -> Rewrite:
        return Rewrite(f"{path}: {what}", lambda section, weights: extended(section, weights, path=path, value=value))

    return make


ZERO_BIAS, UNIT_GAIN = _extend("none, written as zeros"), _extend("none, written as ones")
SIDE = r"model\.(encoder|decoder)"

# (dotted path, our value, theirs, the change)
STEPS: tuple[tuple[str, Any, Any, Maker], ...] = (
    (rf"{SIDE}\.positions\.layout", "interleaved", "halves", _layout),
    (rf"{SIDE}\.attention\.(qkv|out)_bias", False, True, ZERO_BIAS),
    (rf"{SIDE}\.feedforward\.bias", False, True, ZERO_BIAS),
    (rf"{SIDE}\.attention\.qk_norm", True, "learned", UNIT_GAIN),
    (rf"{SIDE}\.norm\.bias", False, True, ZERO_BIAS),
    (rf"{SIDE}\.norm\.learned", False, True, UNIT_GAIN),
    (r"model\.heads\.(lm|masked_lm)\.bias", False, True, ZERO_BIAS),
    (r"model\.embedding\.token_types", 0, ANY, _extend("none, written as types of zeros")),
)
