"""Size and cost of a model as one document: tree of modules, operations, memory, decoding cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from tformer.build import layer_sizes
from tformer.cost.flops import Flops, example_flops, module_flops
from tformer.cost.memory import DecodingCacheSize, MemoryEstimate, cache_size, training_memory
from tformer.interop.doors import formats_by_recipe
from tformer.nn.attention.mechanism import Mechanism
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.feedforward import FeedForward
from tformer.nn.heads import VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.patches import PatchEmbedding
from tformer.nn.positions.base import Positions
from tformer.workflows.inspect.subject import InspectedModel


@dataclass(frozen=True)
class Node:
    """A module, or `count` equal neighbours, with the numbers of all of them together.

    flops: forward, of one example. tied: {parameter counted elsewhere: its name there}.
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
        """Everything but the name; equal for nodes that can be folded."""
        return (self.kind, self.detail, self.parameters, self.flops, len(self.tied), self.count,
                *(child.name + str(child.shape()) for child in self.children))  # fmt: skip


def build_tree(
    model: nn.Module, flops: Mapping[str, float], *, name: str = "model", beside: nn.Module | None = None
) -> Node:
    """The tree of a model. flops: of `cost.flops.module_flops`. Parameters shared with `beside` are counted there."""
    prefix = "" if beside is None else f"{name}."
    # The name under which each parameter is counted, by its id.
    owners = {} if beside is None else {id(parameter): place for place, parameter in beside.named_parameters()}

    def node_of(module: nn.Module, name: str, path: str) -> Node:
        own, tied = 0, {}
        for parameter_name, parameter in module.named_parameters(recurse=False):
            place = prefix + f"{path}.{parameter_name}".lstrip(".")
            owner = owners.setdefault(id(parameter), place)
            if owner == place:
                own += parameter.numel()
            else:
                tied[place] = owner
        children = []
        for child_name, child in module._modules.items():  # a block may serve several layers
            if child is None:
                continue
            node = node_of(child, child_name, f"{path}.{child_name}".lstrip("."))
            # Modules without parameters and cost (mechanisms, dropouts, computed tables) are omitted.
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

    return node_of(model, name, "")


def _folded(nodes: Iterable[Node]) -> Iterator[Node]:
    """Equal neighbours with numbers as names, folded into one node with the numbers of all."""
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and node.name.isdecimal() and node.shape() == groups[-1][0].shape():
            groups[-1].append(node)
        else:
            groups.append([node])
    for first, *others in groups:
        count = 1 + len(others)
        yield (
            first
            if not others
            else replace(
                first,
                name=f"{first.name}-{others[-1].name}",
                parameters=first.parameters * count,
                flops=first.flops * count,
                count=count,
            )
        )


def _detail(module: nn.Module) -> str:
    """The sizes of a module, as short text."""
    if isinstance(module, Linear):
        return f"{module.in_features} → {module.out_features}"
    if isinstance(module, TokenEmbedding | VocabularyHead):
        return " × ".join(map(str, module.weight.shape))
    if isinstance(module, PatchEmbedding):
        return f"{module.channels} × {module.size} × {module.size} → {module.d_model}"
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


@dataclass(frozen=True)
class Report:
    """The default output of `tformer inspect`.

    heads: of each layer, by stack. parameters: distinct ones of the model; generator_parameters: further ones of
    ELECTRA's generator.
    """

    subject: InspectedModel
    trees: tuple[Node, ...]
    parameters: int
    generator_parameters: int
    heads: Mapping[str, list[int]]
    flops: Flops
    memory: MemoryEstimate
    cache: DecodingCacheSize | None

    @property
    def tied(self) -> dict[str, str]:
        """{further name of a tied parameter: the name under which it is counted}, also of the generator."""
        model, generator = self.subject.model, self.subject.generator
        tied = model.tied_names()
        if generator is not None:
            owners = {id(parameter): name for name, parameter in model.named_parameters()}
            tied |= {f"generator.{alias}": f"generator.{owner}" for alias, owner in generator.tied_names().items()}
            tied |= {
                f"generator.{name}": owners[id(parameter)]
                for name, parameter in generator.named_parameters(remove_duplicate=False)
                if id(parameter) in owners
            }
        return tied

    @property
    def examples_per_step(self) -> int:
        return self.subject.batch_size * self.subject.recipe.training.grad_accum

    @cached_property
    def formats(self) -> list[str] | None:
        """The formats of export that the recipe allows; None: there is no checkpoint."""
        checkpoint = self.subject.checkpoint
        return None if checkpoint is None else formats_by_recipe(checkpoint, self.subject.recipe)

    def to_json(self) -> dict[str, Any]:
        subject, tokens = self.subject, self.subject.tokens
        found: dict[str, Any] = {
            "name": subject.name,
            "arch": subject.recipe.arch,
            "parameters": self.parameters,
            "tied": self.tied,
            "heads": dict(self.heads),
            "tree": [tree.to_json() for tree in self.trees],
            "sizes": {
                "source_length": subject.source_length,
                "target_length": subject.target_length if subject.has_both else None,
                "batch_size": subject.batch_size,
                "examples_per_step": self.examples_per_step,
                "vocab_size": subject.recipe.model.vocab_size,
                "target_vocab_size": subject.recipe.model.target_vocab_size,
            },
            "flops": {
                "forward_per_example": self.flops.forward,
                "forward_per_token": self.flops.forward / tokens,
                "training_per_example": self.flops.training,
                "training_per_token": self.flops.training / tokens,
                "training_per_step": self.flops.training * self.examples_per_step,
            },
            "memory": {
                "precision": str(subject.dtype).removeprefix("torch."),
                "device": subject.device,
                **self.memory.to_json(),
            },
            "cache": None,
            "formats": self.formats,
            "notes": list(subject.notes),
        }
        if self.generator_parameters:
            found["generator_parameters"] = self.generator_parameters
        if self.cache is not None:
            at = self.cache.at(subject.target_length, subject.source_length)
            found["cache"] = {**self.cache.to_json(), "bytes_at_length": at, "length": subject.target_length}
        return found


def report_on(subject: InspectedModel) -> Report:
    """All numbers of a model; allocates no memory for it."""
    recipe, model = subject.recipe, subject.model
    lengths = {"source_length": subject.source_length, "target_length": subject.target_length}
    trees = [build_tree(model, module_flops(model, **lengths))]
    beside = 0
    if subject.generator is not None and recipe.generator is not None:
        trees.append(
            build_tree(subject.generator, module_flops(subject.generator, **lengths),
                       name="generator", beside=model)
        )  # fmt: skip
        shared = {id(parameter) for parameter in model.parameters()}
        beside = sum(p.numel() for p in subject.generator.parameters() if id(p) not in shared)
    own = {side: [sizes.num_heads for sizes in layer_sizes(recipe.model, side)] for side in recipe.model.stacks}
    return Report(
        subject=subject,
        trees=tuple(trees),
        parameters=model.num_parameters(),
        generator_parameters=beside,
        heads=own,
        flops=example_flops(recipe, model, subject.generator, **lengths),
        memory=training_memory(
            recipe,
            [each for each in (model, subject.generator) if each is not None],
            tokens_per_micro_batch=subject.batch_size * subject.source_length,
            dtype=subject.dtype,
            seq_len=subject.source_length,
            target_seq_len=subject.target_length if subject.has_both else None,
            on_cpu=subject.device == "cpu",
        ),
        cache=cache_size(model, subject.dtype),
    )
