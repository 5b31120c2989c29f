"""`generate` of transformers with GPT-2: greedy, with the cache, the same number of tokens for every row."""

from __future__ import annotations

from typing import Any

import torch

from tformer.bench.peers.transformers_models import gpt2
from tformer.bench.workloads import (
    SEED,
    Task,
    synchronise,
)
from tformer.bench.workloads.train import random_ids
from tformer.device import DTYPES


def make(task: Task, precision: str) -> TransformersGeneration:
    return TransformersGeneration(task, precision)


class TransformersGeneration:
    """One call of `generate`; bf16: the whole model is cast to it."""

    name = "transformers"

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision

    def prepare(self) -> None:
        task = self.task
        torch.manual_seed(SEED)
        self._model: Any = gpt2(task).to(task.device, DTYPES[self.precision]).eval()
        self._model.generation_config.eos_token_id = None  # nothing ends a text before its number of tokens
        self._ids = torch.from_numpy(random_ids(task, task.batch_size, task.length)).to(task.device)
        self._mask = torch.ones_like(self._ids)

    def run(self) -> int:
        with torch.inference_mode():
            out = self._model.generate(
                self._ids,
                attention_mask=self._mask,
                do_sample=False,
                max_new_tokens=self.task.options["new_tokens"],
                use_cache=True,
            )
        synchronise(self.task.device)
        return int(out.shape[0] * (out.shape[1] - self.task.length))
