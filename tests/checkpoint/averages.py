"""What the tests of averaging share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoint.conftest import save
from tformer.checkpoint.run import RunDirectory

RECIPE = """
model: {d_model: 8, max_seq_len: 16, decoder: {num_layers: 1, num_heads: 2, dropout: 0.1}}
data: {labels: [no, yes]}
seed: 1
"""


TARGET_TOKENIZER = '{"model": {"type": "word"}}'


def random_weights(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    table = torch.randn(3, 2, generator=draw)
    return {
        "embedding.weight": table,
        "heads.lm.weight": table,
        "norm.gain": torch.randn(4, generator=draw),
        "half": torch.randn(5, generator=draw).to(torch.float16),
        "brain": torch.randn(5, generator=draw).to(torch.bfloat16),
        "table": torch.arange(4),
        "flags": torch.tensor([True, False]),
    }


def keep(run: RunDirectory, step: int, **changes: Any) -> Path:
    return save(run, step, **({"weights": random_weights(step), "recipe_yaml": RECIPE, "keep_last": 99} | changes))
