"""Classification with transformers' BERT: batches in the given order, each padded to its longest text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tformer.bench.peers.transformers_models import bert_for_classification
from tformer.bench.workloads import (
    SEED,
    Task,
    synchronise,
)
from tformer.bench.workloads.classify import Texts
from tformer.device import DTYPES


def make(task: Task, precision: str) -> TransformersClassification:
    return TransformersClassification(task, precision)


class TransformersClassification:
    """All texts, `batch_size` at a time; bf16: the whole model is cast to it."""

    name = "transformers"

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision

    def prepare(self) -> None:
        torch.manual_seed(SEED)
        model = bert_for_classification(self.task)
        self._model: Any = model.to(self.task.device, DTYPES[self.precision]).eval()
        self._texts = Texts(self.task)

    def run(self) -> int:
        scores: list[torch.Tensor] = []
        with torch.inference_mode():
            for start in range(0, len(self._texts), self.task.batch_size):
                indices = np.arange(start, min(start + self.task.batch_size, len(self._texts)))
                rows = [example.ids for example in self._texts.examples(0, indices)]
                lengths = np.array(list(map(len, rows)))
                mask = np.arange(lengths.max()) < lengths[:, None]
                ids = np.zeros(mask.shape, dtype=np.int64)
                ids[mask] = np.concatenate(rows)
                inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
                on_device = {name: torch.from_numpy(array).to(self.task.device) for name, array in inputs.items()}
                scores.append(self._model(**on_device).logits.float())
        torch.cat(scores).cpu()
        synchronise(self.task.device)
        return self._texts.tokens
