"""The training loop that people write around a library's model: fp32 or under bf16 autocast, fused AdamW."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tformer.bench.workloads import (
    SEED,
    Task,
    synchronise,
)
from tformer.bench.workloads.train import (
    NUM_BATCHES,
    STEPS,
    random_ids,
)

MASKED_SHARE = 0.15
WARM_UP_STEPS = 3


class PlainTraining:
    """Forward with labels, backward, clipping, AdamW, gradients set to None.

    build: the library's model; it is called with `input_ids` and `labels` (equal for a causal model, which shifts them
    itself) and answers with something that has a `loss`.
    """

    def __init__(self, name: str, task: Task, precision: str, build: Callable[[Task], Any]) -> None:
        self.name, self.task, self.precision = name, task, precision
        self._build = build
        self._done = 0

    def prepare(self) -> None:
        task, device = self.task, self.task.device
        torch.manual_seed(SEED)
        causal = task.recipe.model.encoder is None
        self._model: Any = self._build(task).to(device).train()
        self._batches = [self._batch(number, causal=causal) for number in range(NUM_BATCHES)]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._steps(WARM_UP_STEPS)

    def run(self) -> int:
        steps = STEPS[self.task.device.type]
        self._steps(steps)
        return steps * self.task.batch_size * self.task.length

    def _batch(self, number: int, *, causal: bool) -> dict[str, torch.Tensor]:
        rows = slice(number * self.task.batch_size, (number + 1) * self.task.batch_size)
        ids = torch.from_numpy(random_ids(self.task, NUM_BATCHES * self.task.batch_size, self.task.length)[rows])
        labels = ids if causal else ids.masked_fill(torch.rand(ids.shape) > MASKED_SHARE, -100)
        return {"input_ids": ids.to(self.task.device), "labels": labels.to(self.task.device)}

    def _steps(self, count: int) -> None:
        clip = self.task.recipe.optimizer.clip_grad_norm
        for _ in range(count):
            with self._autocast():
                loss = self._model(**self._batches[self._done % NUM_BATCHES]).loss
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), clip, foreach=True)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._done += 1
        synchronise(self.task.device)

    def _autocast(self) -> Any:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.task.device.type, dtype=torch.bfloat16)
