"""A plain training loop of transformers, attention being PyTorch's fused one (`sdpa`).

GPT-2 for a decoder, BERT's masked language model for an encoder.
"""

from __future__ import annotations

from tformer.bench.peers.plain_training import PlainTraining
from tformer.bench.peers.transformers_models import bert_for_masked_lm, gpt2
from tformer.bench.workloads import Task


def make(task: Task, precision: str) -> PlainTraining:
    build = gpt2 if task.recipe.model.encoder is None else bert_for_masked_lm
    return PlainTraining("transformers", task, precision, build)
