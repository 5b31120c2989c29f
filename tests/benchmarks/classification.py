"""Classification of short texts as token ids, in the batches of `tformer classify`.

Lengths vary as those of sentences do (log-normal, a median of 18 tokens). Ours are sorted by length and batches cut by
tokens, as the command does; other libraries take `batch_size` texts in the given order and pad each batch to its
longest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import nn

from tformer.bench.options import WORK, SpeedOptions
from tformer.bench.workloads import SEED, BenchTask, Cost, Workload, synchronize
from tformer.bench.workloads.decoding import WEIGHT_BYTES, inference_model, matrix_parameters
from tformer.bench.workloads.train import objective_context, random_ids
from tformer.cost.flops import module_flops, product_shape
from tformer.data.shards.corpus import Example
from tformer.evaluation.predict import default_batch_tokens, length_sorted_batches, predict_scores
from tformer.objectives import build_objective
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.training.assemble import compiled

HEAD = "classifier"
CLASSIFIER = ("objectives=[{kind: classification}]", "model.heads=[{kind: classifier, num_labels: 2}]")
"""What makes a recipe of masked language modelling one of classification (`--set`)."""

MEDIAN_LENGTH, LOG_DEVIATION = 18, 0.6
SHORTEST, LONGEST = 4, 128


@dataclass(frozen=True)
class ClassifyOptions(SpeedOptions):
    """The options of classification."""

    work = "classify"

    texts: Annotated[int, WORK("--texts", metavar="N", help="Number of texts.")] = 10_000
    length: Annotated[int | None, WORK("--length", metavar="T", help="Length of the longest text in tokens.")] = None


class Texts:
    """Random texts as samples of classification; the drawn ids stand for [CLS] and [SEP] too."""

    def __init__(self, task: BenchTask) -> None:
        count, rng = task.options["texts"], np.random.default_rng(SEED)
        drawn = np.exp(rng.normal(math.log(MEDIAN_LENGTH), LOG_DEVIATION, count))
        self.seq_len = task.length
        self.lengths = np.clip(np.rint(drawn), min(SHORTEST, task.length), task.length).astype(np.int64)
        self.tokens = int(self.lengths.sum())
        self._ids = random_ids(task, 1, self.tokens)[0]
        self._starts = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray, /) -> list[Example]:
        spans = zip(self._starts[indices].tolist(), self.lengths[indices].tolist(), strict=True)
        return [Example(self._ids[start : start + length]) for start, length in spans]


class Classification(Workload):
    """Class scores of all texts, in their order."""

    step, batch_sizes = "text", (32,)
    arch = "bert"

    @staticmethod
    def length(recipe: Recipe) -> int:
        return min(LONGEST, recipe.seq_len)

    @staticmethod
    def check(task: BenchTask) -> None:
        if not any(head.kind == HEAD for head in task.recipe.model.heads):
            raise InputError(
                f"classify: {task.recipe.arch} has no classification head", hint="use --arch bert --preset classify"
            )

    @staticmethod
    def cost(task: BenchTask, precision: str) -> Cost:
        """Real tokens only, and one vector per text in the head; every batch of ours reads all matrices."""
        texts, model = Texts(task), task.model()
        batches = sum(1 for _ in length_sorted_batches(texts, batch_tokens=default_batch_tokens(task.device)))
        return Cost(
            flops=sum(
                count * sum(module_flops(model, source_length=length, target_length=length).values())
                for length, count in Counter(texts.lengths.tolist()).items()
            ),
            bytes_read=float(batches * sum(matrix_parameters(model, head=HEAD)) * WEIGHT_BYTES[precision]),
            steps=len(texts),
            examples=len(texts),
        )

    @staticmethod
    def product(task: BenchTask) -> tuple[int, int, int]:
        """The feed-forward product of one of our batches."""
        return (default_batch_tokens(task.device), *product_shape(task.recipe, task.length)[1:])

    def prepare(self) -> None:
        task = self.task
        self._texts = Texts(task)
        self._objective = build_objective(task.recipe.objectives, objective_context(task))
        self._model: nn.Module = compiled(inference_model(task, self.precision), wanted=task.compile, dynamic=True)

    def run(self) -> int:
        predict_scores(self._model, self._texts, self._objective.collate, head=HEAD)
        synchronize(self.device)
        return self._texts.tokens
