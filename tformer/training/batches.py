"""Training batches: samples of one or several corpora, in the order of the batch plan, as micro-batches.

The plan's global batch holds `batch_size * grad_accum` samples; each process takes its share and cuts it into
`grad_accum` micro-batches. The cursor names the next global batch and is all that a checkpoint stores: nothing is
replayed on resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tformer.data.batch import Batch
from tformer.data.padding import padded_lengths
from tformer.data.plan import BatchPlan, Cursor
from tformer.data.prefetch import Prefetcher
from tformer.objectives.base import Objective
from tformer.recipe.recipe import Recipe
from tformer.training.material import Material, Samples


class PlannedBatches:
    """The loop's `Batches` over any samples. On a GPU a thread prepares batches ahead, in page-locked memory."""

    def __init__(
        self,
        samples: Any,
        plan: BatchPlan,
        objective: Objective,
        *,
        grad_accum: int,
        seed: int,
        packed: bool,
        cursor: dict[str, Any] | None,
        device: torch.device,
    ) -> None:
        self._samples, self._plan, self._objective = samples, plan, objective
        self._grad_accum, self._seed, self._packed = grad_accum, seed, packed
        start = Cursor.from_json(cursor) if cursor else Cursor()
        self._next = plan.canonical(start)
        self._pinned = device.type == "cuda"
        self._source: Iterator[tuple[Cursor, list[Batch]]] = self._produce(self._next)
        if self._pinned:
            self._source = Prefetcher(self._source, depth=3)

    def next(self) -> Sequence[Batch]:
        """The micro-batches of the next global batch."""
        self._next, batches = next(self._source)
        return batches

    def cursor(self) -> dict[str, Any]:
        return self._next.to_json()

    def close(self) -> None:
        """Stop the thread, if there is one."""
        if isinstance(self._source, Prefetcher):
            self._source.close()

    def _produce(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[Batch]]]:
        while True:
            batches = self._collate(cursor)
            cursor = self._plan.next(cursor)
            yield cursor, batches

    def _collate(self, cursor: Cursor) -> list[Batch]:
        ids = np.array(self._plan.batch(cursor), dtype=np.int64)
        size = -(-len(ids) // self._grad_accum)
        # Corruption and random padding depend on the batch's place, never on what was drawn before.
        draw = np.random.default_rng([self._seed, cursor.epoch, cursor.window, cursor.batch])
        batches = []
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            rows = (
                self._samples.windows(cursor.epoch, part)
                if self._packed
                else self._samples.examples(cursor.epoch, part)
            )
            batch = self._objective.collate(rows, rng=draw)
            batches.append(batch.pin_memory() if self._pinned else batch)
        return batches


def plan_of(recipe: Recipe, samples: Samples, *, rank: int = 0, world_size: int = 1) -> BatchPlan:
    """Which samples form which global batch, for one of `world_size` processes."""
    training = recipe.training
    return BatchPlan(
        seed=recipe.seed,
        num_samples=len(samples),
        lengths=samples.seq_len if samples.lengths is None else padded_lengths(samples.lengths),
        batch_size=None if training.batch_size is None else training.batch_size * training.grad_accum,
        batch_tokens=None if training.batch_tokens is None else training.batch_tokens * training.grad_accum,
        sort_window=recipe.data.sort_window,
        rank=rank,
        world=world_size,
    )


def make_batches(
    recipe: Recipe,
    material: Material,
    objective: Objective,
    *,
    cursor: dict[str, Any] | None,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> PlannedBatches:
    """The batches of a run from `cursor` on (None: from the start), for one of `world_size` processes."""
    return PlannedBatches(
        material.samples,
        plan_of(recipe, material.samples, rank=rank, world_size=world_size),
        objective,
        grad_accum=recipe.training.grad_accum,
        seed=recipe.seed,
        packed=material.packed,
        cursor=cursor,
        device=device,
    )
