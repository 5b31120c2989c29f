"""Workloads of `tformer bench`: what a contender gets (`BenchTask`), what a round costs, what a workload defines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tformer.bench.machine import peak_of_process
from tformer.build import build_model

if TYPE_CHECKING:
    from tformer.model import Transformer
    from tformer.recipe.recipe import Recipe

SEED = 0
"""Seed of random weights and ids."""

OURS = "tformer"
"""The name of our contender in every table."""


@dataclass(frozen=True)
class BenchTask:
    """One workload at one batch size.

    Attributes:
        recipe: with every size decided, the vocabulary's too.
        length: tokens of an example (of a source; of a prompt).
        precision: number format of our products, `auto` resolved: fp32, bf16 or fp16.
        compile: our model goes through torch.compile.
        options: the workload's own, by the names of its command: `new_tokens`, `beam_size`, ...
    """

    work: str
    recipe: Recipe
    batch_size: int
    length: int
    precision: str
    device: torch.device
    compile: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        size = self.recipe.model.vocab_size
        assert size is not None
        return size

    def model(self, device: str = "meta") -> Transformer:
        """Our model of the recipe's sizes."""
        return build_model(self.recipe.model, num_labels=len(self.recipe.data.labels) or None, device=device)


@dataclass(frozen=True)
class Cost:
    """Lower bounds of what one round takes.

    Attributes:
        flops: operations of matrix products and attention.
        bytes_read: from memory: weights, in their format, and what else is read in every step.
        steps: optimizer steps, decoding steps, ...: `step_ms` is a round's time divided by them.
        examples: sequences, texts, sentences.
        memory: estimated bytes of our contender by purpose, with `total_bytes`; empty: no estimate.
    """

    flops: float
    bytes_read: float
    steps: int
    examples: int
    memory: Mapping[str, int] = field(default_factory=dict)


class Contender(ABC):
    """One library at one workload in one number format, in a separate process (see `processes.race`).

    Attributes:
        name: `tformer`, or the library's.
        precision: number format of its products: fp32, bf16, int8, ...
    """

    name = OURS

    def __init__(self, task: BenchTask, precision: str) -> None:
        self.task, self.precision, self.device = task, precision, task.device

    @abstractmethod
    def prepare(self) -> None:
        """Build the model and other objects, untimed. Raises ValueError for an unsupported setting."""

    @abstractmethod
    def run(self) -> int:
        """One timed round, complete when it returns (a GPU is synchronized): the number of tokens processed."""

    def warm_up(self) -> None:
        """Rounds that are not timed."""
        self.run()

    def peak_memory(self) -> dict[str, int]:
        """Peaks of this process in bytes: `peak_rss_bytes`, and on a GPU `peak_gpu_bytes` of PyTorch's allocator."""
        peaks = {"peak_rss_bytes": peak_of_process()}
        if self.device.type == "cuda":
            peaks["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return peaks


class Workload(Contender):
    """A workload, a row of `speed.WORKS`, and our contender at it.

    The contender's precision is the task's, or `int8` or `int4` for quantized matrices.

    Attributes:
        step: what `step_ms` measures, in a word.
        batch_sizes: the default.
        arch: the family where neither --arch, --preset nor --config names one.
    """

    step: ClassVar[str]
    batch_sizes: ClassVar[tuple[int, ...]]
    arch: ClassVar[str] = "gpt"

    @staticmethod
    def length(recipe: Recipe) -> int:
        """The default length."""
        return recipe.seq_len

    @staticmethod
    @abstractmethod
    def check(task: BenchTask) -> None:
        """Raise InputError, before anything is measured, for a model that cannot do the work at these sizes."""

    @staticmethod
    @abstractmethod
    def cost(task: BenchTask, precision: str) -> Cost:
        """The cost of one round with weights and activations in `precision`."""

    @staticmethod
    @abstractmethod
    def product(task: BenchTask) -> tuple[int, int, int]:
        """(rows, inner, columns) of the matrix product measured as the ceiling."""


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
