"""A model as a tree of modules: parameters, tied ones counted once where they are first met, and operations.

Neighbours that are alike in every number (the layers of a stack, as a rule) are one node with a `count`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tformer.nn.attention.mechanism import Mechanism
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.embedding import PatchEmbedding, TokenEmbedding
from tformer.nn.feedforward import FeedForward
from tformer.nn.heads import VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.positions.base import Positions


@dataclass(frozen=True)
class Node:
    """A module, or `count` neighbours that are alike; numbers are those of all of them together.

    flops: forward, of one example. tied: its parameters that are counted elsewhere -> where.
    """

    name: str
    kind: str
    detail: str
    parameters: int
    flops: float
    count: int = 1
    tied: Mapping[str, str] = field(default_factory=dict)
    children: tuple[Node, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "detail": self.detail,
            "parameters": self.parameters,
            "flops": self.flops,
            "count": self.count,
            "tied": dict(self.tied),
            "children": [child.to_json() for child in self.children],
        }

    def shape(self) -> tuple[Any, ...]:
        """What two nodes that are alike have in common: all but the name."""
        return (self.kind, self.detail, self.parameters, self.flops, len(self.tied), self.count,
                *(child.name + str(child.shape()) for child in self.children))  # fmt: skip


def build_tree(
    model: nn.Module, flops: Mapping[str, float], *, name: str = "model", beside: nn.Module | None = None
) -> Node:
    """The tree of a model; `flops` as of `flops.module_flops`. What `beside`, told before, has too is counted there."""
    owners = {} if beside is None else {id(parameter): place for place, parameter in beside.named_parameters()}
    return _node(model, name, "", flops, _Owners("" if beside is None else f"{name}.", owners))


@dataclass(frozen=True)
class _Owners:
    """Where each parameter was first met, by its id; `prefix`: of names in this tree."""

    prefix: str
    places: dict[int, str]


def _node(module: nn.Module, name: str, path: str, flops: Mapping[str, float], owners: _Owners) -> Node:
    own, tied = 0, {}
    for parameter_name, parameter in module.named_parameters(recurse=False):
        place = owners.prefix + f"{path}.{parameter_name}".lstrip(".")
        owner = owners.places.setdefault(id(parameter), place)
        if owner == place:
            own += parameter.numel()
        else:
            tied[place] = owner
    children = []
    for child_name, child in module.named_children():
        node = _node(child, child_name, f"{path}.{child_name}".lstrip("."), flops, owners)
        # What has no parameters and costs nothing (mechanisms, dropouts, computed tables) is left out.
        if node.parameters or node.tied or node.flops or isinstance(child, Positions):
            children.append(node)
    return Node(
        name=name,
        kind=type(module).__name__,
        detail=_detail(module),
        parameters=own + sum(child.parameters for child in children),
        flops=flops.get(path, 0.0) + sum(child.flops for child in children),
        tied=tied,
        children=tuple(_folded(children)),
    )


def _folded(nodes: Iterable[Node]) -> Iterator[Node]:
    """Neighbours whose names are numbers and whose numbers are alike, as one."""
    group: list[Node] = []
    for node in nodes:
        if group and not (node.name.isdecimal() and node.shape() == group[0].shape()):
            yield _together(group)
            group = []
        group.append(node)
    if group:
        yield _together(group)


def _together(group: list[Node]) -> Node:
    first, count = group[0], len(group)
    if count == 1:
        return first
    return replace(
        first,
        name=f"{first.name}-{group[-1].name}",
        parameters=first.parameters * count,
        flops=first.flops * count,
        count=count,
    )


def _detail(module: nn.Module) -> str:
    """The sizes of a module, in a few characters."""
    if isinstance(module, Linear):
        return f"{module.in_features} → {module.out_features}"
    if isinstance(module, TokenEmbedding | VocabularyHead):
        return " × ".join(map(str, module.weight.shape))
    if isinstance(module, PatchEmbedding):
        return f"{module.channels} × {module.size} × {module.size} → {module.weight.shape[0]}"
    if isinstance(module, MultiHeadAttention):
        shared = "" if module.num_kv_heads == module.num_heads else f", {module.num_kv_heads} kv"
        size = str(module.head_dim)
        if module.value_dim != module.head_dim:
            size += f" and {module.value_dim}"
        return f"{module.num_heads} head{'s' * (module.num_heads > 1)} of {size}{shared}"
    if isinstance(module, Mechanism):
        return type(module).__name__.removesuffix("Attention").lower()
    if isinstance(module, FeedForward):
        gated = "gated, " if module.gated else ""
        return f"{gated}{module.down.in_features} wide"
    return ""
