"""Which heads stay, given how much each matters: as many in every layer, or the best of the whole model.

Self- and cross-attention of a decoder layer have one number of heads, so they lose as many: the k-th best head of the
one and the k-th best of the other stand or fall together, by the mean of their importance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tformer.errors import InputError
from tformer.model import Transformer
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.recipe.layers import PER_HEAD_POSITIONS
from tformer.recipe.model import Model

PER_LAYER = ("even", "free")
PROJECTIONS = frozenset({"qkv", "q", "kv", "out"})


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one layer that stay, ascending; as many of the cross-attention, where there is one."""

    self_attention: tuple[int, ...]
    cross_attention: tuple[int, ...] | None = None

    def of(self, attention: str) -> tuple[int, ...]:
        """Those of `self_attention` or `cross_attention`."""
        kept: tuple[int, ...] = getattr(self, attention)
        return kept


@dataclass(frozen=True)
class HeadChoice:
    """{stack: [heads that stay, of each layer]}, how many there were and are, and what a person should know."""

    layers: Mapping[str, list[LayerHeads]]
    before: int
    after: int
    per_layer: str
    note: str = ""


def require_prunable_heads(model: Model, built: Transformer, sides: Sequence[str]) -> None:
    """Raises InputError, naming the field, for stacks whose heads cannot be taken out one by one."""
    for side in sides:
        section, stack = getattr(model, side), getattr(built, side)
        kind = section.positions.kind
        if kind in PER_HEAD_POSITIONS:
            raise InputError(
                f"--heads: model.{side}.positions.kind is {kind}, whose slopes or biases belong to heads that all "
                "layers share",
                hint="prune layers instead",
            )
        for block in stack.layers:
            attention = block.self_attention
            if attention.num_kv_heads != attention.num_heads:
                raise InputError(
                    f"--heads: model.{side}.num_kv_heads is {attention.num_kv_heads} for {attention.num_heads} query "
                    "heads, which cannot leave one by one",
                    hint="prune layers instead",
                )
            for one in (attention, block.cross_attention):
                if one is not None and not _is_bare(one):
                    raise InputError(
                        f"--heads: model.{side}.attention.kind is {section.attention.kind}, which has more to its "
                        "heads than projections",
                        hint="prune layers instead",
                    )


def _is_bare(attention: MultiHeadAttention) -> bool:
    """Whether queries, keys, values and the output are all that is stored of an attention."""
    return {name.split(".")[0] for name in attention.state_dict()} <= PROJECTIONS


def choose_heads(
    importance: Mapping[str, Sequence[Mapping[str, Tensor]]], *, amount: float, per_layer: str
) -> HeadChoice:
    """The heads that stay.

    Args:
        importance: {stack: [{"self_attention": [H], perhaps "cross_attention": [H]} of each layer]}.
        amount: below 1 a share of all heads to take out, else how many.
        per_layer: `even`, the same share of every layer; `free`, the least important of all, but the last of no layer.

    Raises:
        InputError: nothing would go, or more than can.
    """
    slots = {side: [_slots(layer) for layer in layers] for side, layers in importance.items()}
    total = sum(len(layer) for layers in slots.values() for layer in layers)
    least = sum(len(layers) for layers in slots.values())
    wanted = math.floor(amount * total + 0.5) if amount < 1 else int(amount)
    if wanted > total - least:
        raise InputError(
            f"--heads {amount:g}: of {total} heads at most {total - least} can go: every layer keeps one",
            hint="--drop-layers takes whole layers out",
        )
    counts = _even(slots, wanted / total) if per_layer == "even" else _free(slots, wanted)
    kept = {
        side: [
            LayerHeads(**{name: _best(scores, count) for name, scores in layer.items()})
            for layer, count in zip(layers, counts[side], strict=True)
        ]
        for side, layers in importance.items()
    }
    after = sum(map(sum, counts.values()))
    if after == total:
        raise InputError(f"--heads {amount:g}: of {total} heads in {least} layers none would go")
    note = ""
    if total - after != wanted:
        note = f"{total - after} heads go, not {wanted}: as many in every layer (--heads-per-layer free takes any)"
    return HeadChoice(kept, total, after, per_layer, note)


def _slots(layer: Mapping[str, Tensor]) -> list[float]:
    """[H] importances, falling: the k-th best of each attention of the layer, averaged."""
    ranked = [sorted(scores.tolist(), reverse=True) for scores in layer.values()]
    return [sum(column) / len(column) for column in zip(*ranked, strict=True)]


def _even(slots: Mapping[str, list[list[float]]], share: float) -> dict[str, list[int]]:
    return {
        side: [max(1, len(layer) - math.floor(len(layer) * share + 0.5)) for layer in layers]
        for side, layers in slots.items()
    }


def _free(slots: Mapping[str, list[list[float]]], wanted: int) -> dict[str, list[int]]:
    """How many stay in each layer when the `wanted` least important go; of equal ones the deepest first."""
    removable = sorted(
        (score, -number, -layer, side)
        for side, layers in slots.items()
        for layer, scores in enumerate(layers)
        for number, score in enumerate(scores)
        if number
    )
    counts = {side: [len(layer) for layer in layers] for side, layers in slots.items()}
    for _, _, layer, side in removable[:wanted]:
        counts[side][-layer] -= 1
    return counts


def _best(scores: Tensor, count: int) -> tuple[int, ...]:
    order = sorted(range(len(scores)), key=lambda head: (-float(scores[head]), head))
    return tuple(sorted(order[:count]))
