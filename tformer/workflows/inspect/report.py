"""What a model is and what it costs, as one document: tree, operations, memory, cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tformer.build import layer_sizes
from tformer.recipe.model import Model
from tformer.training.estimate import MemoryEstimate, estimate_memory
from tformer.workflows.inspect.cache import CacheSize, cache_size
from tformer.workflows.inspect.flops import Flops, flops_of, labelled_share, module_flops
from tformer.workflows.inspect.subject import Subject, stack_sides
from tformer.workflows.inspect.tree import Node, build_tree


@dataclass(frozen=True)
class Report:
    """Everything that `tformer inspect` says without being asked for more.

    heads: of each layer, by stack. parameters: distinct ones of the model (and of its generator beside them).
    """

    subject: Subject
    trees: tuple[Node, ...]
    parameters: int
    generator_parameters: int
    heads: Mapping[str, list[int]]
    flops: Flops
    memory: MemoryEstimate
    cache: CacheSize | None

    @property
    def tied(self) -> dict[str, str]:
        """{further name of a parameter, also of the generator's: the name under which it is counted}."""
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
            "notes": list(subject.notes),
        }
        if self.generator_parameters:
            found["generator_parameters"] = self.generator_parameters
        if self.cache is not None:
            at = self.cache.at(subject.target_length, subject.source_length)
            found["cache"] = {**self.cache.to_json(), "bytes_at_length": at, "length": subject.target_length}
        return found


def report_on(subject: Subject) -> Report:
    """All numbers of a subject; nothing is allocated."""
    recipe, model = subject.recipe, subject.model
    lengths = {"source_length": subject.source_length, "target_length": subject.target_length}
    trees = [build_tree(model, module_flops(model, recipe.model, **lengths))]
    beside = 0
    if subject.generator is not None and recipe.generator is not None:
        trees.append(
            build_tree(subject.generator, module_flops(subject.generator, recipe.generator, **lengths),
                       name="generator", beside=model)
        )  # fmt: skip
        shared = {id(parameter) for parameter in model.parameters()}
        beside = sum(p.numel() for p in subject.generator.parameters() if id(p) not in shared)
    own = {side: [sizes.num_heads for sizes in layer_sizes(recipe.model, side)] for side in stack_sides(recipe.model)}
    return Report(
        subject=subject,
        trees=tuple(trees),
        parameters=model.num_parameters(),
        generator_parameters=beside,
        heads=own,
        flops=flops_of(subject),
        memory=_memory(subject, model.num_parameters() + beside),
        cache=cache_size(model, subject.dtype),
    )


def _memory(subject: Subject, parameters: int) -> MemoryEstimate:
    """Of training the model, and the generator beside it: its parameters are among `parameters`."""
    recipe, training = subject.recipe, subject.recipe.training

    def estimate(model: Model, parameters: int, *, is_main: bool) -> MemoryEstimate:
        return estimate_memory(
            model,
            num_parameters=parameters,
            optimizer=recipe.optimizer.kind,
            tokens_per_micro_batch=subject.batch_size * subject.source_length,
            dtype=subject.dtype,
            activation_checkpointing=training.activation_checkpointing,
            ema=training.ema_decay is not None,
            seq_len=subject.source_length,
            target_seq_len=subject.target_length if subject.has_both else None,
            on_cpu=subject.device == "cpu",
            labelled_share=labelled_share(recipe, is_main=is_main),
        )

    found = estimate(recipe.model, parameters, is_main=True)
    if recipe.generator is None:
        return found
    beside = estimate(recipe.generator, 0, is_main=False)
    return replace(
        found,
        activations=found.activations + beside.activations,
        workspace=max(found.workspace, beside.workspace),
        held=found.held + beside.held,
    )
