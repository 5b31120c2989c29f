"""Tiny encoders of `transformers` with unusual sizes, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.interop.parity import padding, tokens

VOCABULARY, LENGTH = 61, 11
MASK = padding(LENGTH, 11, 8, 5)
LEFT = padding(LENGTH, 11, 8, 5, left=True)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 36,
    "max_position_embeddings": 23,
    "type_vocab_size": 3,
    "layer_norm_eps": 0.02,
}
DISTIL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dim": 20,
    "n_layers": 3,
    "n_heads": 5,
    "hidden_dim": 36,
    "max_position_embeddings": 23,
}


def make(name: str, task: str, **values: Any) -> nn.Module:
    """`<name>For<task>` with unusual sizes."""
    sizes = DISTIL if name == "DistilBert" else SIZES
    config = getattr(transformers, f"{name}Config")(**{**sizes, **values})
    return getattr(transformers, f"{name}For{task}")(config)


def batch(mask: Tensor = MASK, *, pad: int = 0, types: int = 1) -> dict[str, Tensor]:
    ids = tokens(*mask.shape, vocabulary=VOCABULARY).masked_fill(mask == 0, pad)
    typed = {"token_type_ids": torch.arange(mask.shape[1]).expand(mask.shape) % types} if types > 1 else {}
    return {"input_ids": ids, "attention_mask": mask, **typed}
