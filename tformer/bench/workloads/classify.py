"""`bench classify`: short texts as token ids, in the batches of `tformer classify`.

Lengths vary as those of sentences do (log-normal, a median of 18 tokens). Ours are sorted by length and batches cut by
tokens, as the command does; peers take `batch_size` texts in the given order and pad each batch to its longest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from torch import nn

from tformer.bench.workloads import SEED, Contender, Cost, Task, Work, synchronise
from tformer.bench.workloads.decoding import WEIGHT_BYTES, inference_model, matrix_parameters
from tformer.bench.workloads.train import objective_context, random_ids
from tformer.build import build_model
from tformer.cost.flops import module_flops, product_shape
from tformer.data.shards.corpus import Example
from tformer.evaluation.predict import default_batch_tokens, length_sorted_batches, predict_scores
from tformer.objectives import build_objective
from tformer.support.errors import InputError
from tformer.training.assemble import compiled

HEAD = "classifier"
MEDIAN_LENGTH, LOG_DEVIATION = 18, 0.6
SHORTEST, LONGEST = 4, 128


class Texts:
    """Random texts as samples of classification; the drawn ids stand for [CLS] and [SEP] too."""

    def __init__(self, task: Task) -> None:
        count, rng = task.options["texts"], np.random.default_rng(SEED)
        drawn = np.exp(rng.normal(math.log(MEDIAN_LENGTH), LOG_DEVIATION, count))
        self.seq_len = task.length
        self.lengths = np.clip(np.rint(drawn), min(SHORTEST, task.length), task.length).astype(np.int64)
        self._ids = random_ids(task, 1, int(self.lengths.sum()))[0]
        self._starts = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray, /) -> list[Example]:
        spans = zip(self._starts[indices].tolist(), self.lengths[indices].tolist(), strict=True)
        return [Example(self._ids[start : start + length]) for start, length in spans]


class Classification(Contender):
    """Class scores of all texts, in their order."""

    def prepare(self) -> None:
        task = self.task
        self._texts = Texts(task)
        self._objective = build_objective(task.recipe.objectives, objective_context(task))
        self._model: nn.Module = compiled(inference_model(task, self.precision), wanted=task.compile, dynamic=True)

    def run(self) -> int:
        predict_scores(self._model, self._texts, self._objective.collate, head=HEAD)
        synchronise(self.task.device)
        return self._texts.tokens


def check(task: Task) -> None:
    """Raise InputError for a model without a classification head."""
    if not any(head.kind == HEAD for head in task.recipe.model.heads):
        raise InputError(f"bench classify: {task.recipe.arch} has no classification head", hint="use --arch bert")


def cost(task: Task, precision: str) -> Cost:
    """Real tokens only, and one vector per text in the head; every batch of ours reads all matrices."""
    texts = Texts(task)
    model = build_model(task.recipe.model, num_labels=len(task.recipe.data.labels) or None, device="meta")
    lengths = Counter(texts.lengths.tolist())
    batches = sum(1 for _ in length_sorted_batches(texts, batch_tokens=default_batch_tokens(task.device)))
    return Cost(
        flops=sum(
            count * sum(module_flops(model, source_length=length, target_length=length).values())
            for length, count in lengths.items()
        ),
        bytes_read=float(batches * sum(matrix_parameters(model, head=HEAD)) * WEIGHT_BYTES[precision]),
        steps=len(texts),
        examples=len(texts),
    )


def product(task: Task) -> tuple[int, int, int]:
    """(rows, inner, columns) of the feed-forward product of one of our batches."""
    return (default_batch_tokens(task.device), *product_shape(task.recipe, task.length)[1:])


CLASSIFY = Work(
    name="classify",
    step="text",
    contender=Classification,
    batch_sizes=(32,),
    length=lambda recipe: min(LONGEST, recipe.seq_len),
    cost=cost,
    product=product,
    objective="classification",
    arch="bert",
    check=check,
)
