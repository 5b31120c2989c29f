"""Workloads of `tformer bench`: what every contender gets (`Task`), what a round costs, and what a workload defines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tformer.bench.processes import Contender
from tformer.recipe.recipe import Recipe

SEED = 0
"""Of random weights and ids."""

OURS = "tformer"
"""The name of our contender in every table."""


@dataclass(frozen=True)
class Task:
    """One work at one batch size.

    Attributes:
        recipe: with every size decided, the vocabulary's too.
        length: tokens of an example (of a source; of a prompt).
        precision: the number format of our products, `auto` resolved: fp32, bf16 or fp16; empty: nothing is multiplied.
        compile: our model goes through torch.compile.
        options: the work's own, by the names that its command has: `new_tokens`, `beam`, `texts`, ...
    """

    work: str
    recipe: Recipe
    batch_size: int
    length: int
    precision: str
    device: torch.device
    compile: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """What one round takes at least.

    Attributes:
        flops: operations of matrix products and attention.
        bytes_read: of memory: weights, in their format, and what else has to be read every time.
        steps: optimizer steps, decoding steps, ...: `step_ms` is a round's time divided by them.
        examples: sequences, texts, sentences.
        memory: bytes that our contender should need, by purpose, `total_bytes` among them; empty: nobody reckoned.
    """

    flops: float
    bytes_read: float
    steps: int
    examples: int
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A row of `works.WORKS`.

    Attributes:
        batch_sizes, length: of a command that names none; length(recipe).
        objective: the kind that a recipe gets where it has another (a classifier is benched with a classifier's head).
        check: raises InputError, before anything is measured, for a model that cannot do the work at these sizes.
        arch: the family where neither --arch, --preset nor --config names one.
        step: what `step_ms` is of, in a word.
        make: our contender. precision: the task's, or `int8` for quantised matrices.
        cost: of one round with weights and activations in `precision`.
        product: (rows, inner, columns) of the matrix product whose rate is the ceiling; None: nothing is multiplied.
    """

    name: str
    step: str
    make: Callable[[Task, str], Contender]
    batch_sizes: tuple[int, ...]
    length: Callable[[Recipe], int]
    cost: Callable[[Task, str], Cost]
    product: Callable[[Task], tuple[int, int, int]] | None = None
    objective: str | None = None
    arch: str = "gpt"
    check: Callable[[Task], None] = lambda _: None


def synchronise(device: torch.device) -> None:
    """Wait for a GPU; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
