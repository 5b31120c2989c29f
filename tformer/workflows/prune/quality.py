"""What a model is worth and what it costs, before and after: the run's own figures on held-out data, and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from tformer.cost.flops import attention_flops_per_token, matmul_parameters
from tformer.data.batching.windows import (
    Example,
    document_ids,
)
from tformer.data.shards.corpus import TokenCorpus
from tformer.evaluation.lm import windows
from tformer.evaluation.predict import evaluate_objective
from tformer.evaluation.reports import (
    REPORTS,
    evaluate_labelled,
)
from tformer.model import Transformer
from tformer.nn.stack import Stack
from tformer.objectives.base import Objective
from tformer.recipe.recipe import Recipe
from tformer.training.loop import HIGHER_IS_BETTER
from tformer.workflows.prune.layers import Score


@dataclass(frozen=True)
class HeldOut:
    """What is measured on: samples, the objective that reads them, and how many at a time (None: as many as fit)."""

    name: str
    samples: Any
    objective: Objective
    recipe: Recipe
    batch_size: int | None = None
    should_stop: Callable[[], bool] = lambda: False

    def measure(self, model: nn.Module) -> dict[str, float]:
        """The figures of a validation: loss, and what else the objective tells."""
        if self.recipe.objectives[0].kind in REPORTS:
            return evaluate_labelled(model, self.objective, self.samples, self.recipe, should_stop=self.should_stop)
        return evaluate_objective(
            model,
            self.objective,
            self.samples,
            batch_size=self.batch_size,
            seed=self.recipe.seed,
            should_stop=self.should_stop,
        )

    def score(self, figures: dict[str, float]) -> Score:
        """By the run's best_metric where it was measured, then by the loss; lower is better."""
        name = self.recipe.training.best_metric
        value = figures.get(name, figures["loss"])
        return (-value if name in figures and name in HIGHER_IS_BETTER else value, figures["loss"])

    def metric(self, figures: dict[str, float]) -> str:
        """What `score` compares."""
        name = self.recipe.training.best_metric
        return name if name in figures else "loss"


class LmText:
    """Some texts in the windows of an evaluation: every token is predicted once, the last window may be short."""

    def __init__(self, corpora: Sequence[TokenCorpus], seq_len: int, *, document_mask: bool) -> None:
        self.seq_len, self.document_mask = seq_len, document_mask
        self._windows = [
            (corpus, window.start, window.stop)
            for corpus in corpora
            for window in windows(len(corpus), seq_len, seq_len)
        ]
        self.lengths: np.ndarray | None = np.array([stop - start for _, start, stop in self._windows])

    def __len__(self) -> int:
        return len(self._windows)

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Example]:
        """Windows with the label of their last token, and which documents they are made of where that matters."""
        found = []
        for corpus, start, stop in (self._windows[index] for index in indices):
            ids = corpus.slice(start, stop + 1)
            found.append(Example(ids, document_ids(corpus, start, len(ids)) if self.document_mask else None))
        return found


class Spread:
    """At most so many of some samples, evenly spread over them."""

    def __init__(self, samples: Any, most: int) -> None:
        self._samples, count = samples, min(len(samples), most)
        self._indices = np.arange(count) * len(samples) // max(count, 1)
        self.seq_len: int = samples.seq_len
        self.lengths: np.ndarray | None = None if samples.lengths is None else samples.lengths[self._indices]

    @property
    def labels(self) -> np.ndarray:
        return np.asarray(self._samples.labels)[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> Sequence[Any]:
        """The samples at these places among those that were chosen."""
        found: Sequence[Any] = self._samples.examples(epoch, self._indices[np.asarray(indices, dtype=np.int64)])
        return found


@contextmanager
def only_layers(stack: Stack, kept: Sequence[int]) -> Iterator[None]:
    """Lets a stack run with some of its layers alone, in evaluation."""
    blocks, positions = stack.blocks, stack.layer_positions
    stack.blocks = nn.ModuleList(blocks[layer] for layer in kept)
    if positions is not None:
        stack.layer_positions = nn.ModuleList(positions[layer] for layer in kept)
    try:
        yield
    finally:
        stack.blocks, stack.layer_positions = blocks, positions


def cost(model: Transformer, recipe: Recipe) -> dict[str, float]:
    """Parameters, and forward FLOPs per token at the training length: 2 N, and what each layer's attention costs.

    Of an encoder-decoder a token passes through one of the stacks: half of the products.
    """
    products = 2.0 * matmul_parameters(model)
    if model.encoder is not None and model.decoder is not None:
        products /= 2
    attention = attention_flops_per_token(recipe.model, source_length=recipe.seq_len, target_length=recipe.seq_len)
    return {"parameters": model.num_parameters(), "flops_per_token": products + attention}
