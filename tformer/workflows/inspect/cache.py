"""What decoding remembers, kind by kind: keys and values of every token, or sums that do not grow (Performer).

A layer that keeps keys and values takes K (head_dim + value_dim) numbers a token; Performer m (value_dim + 1) + 1 for
each key head, whatever the length. Cross-attention keeps the keys and values of the source, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tformer.model import Transformer
from tformer.nn.attention.performer import TABLE, PerformerState
from tformer.nn.layer_cache import LayerCache

FP32_BYTES = 4  # Performer's sums are never narrower


@dataclass(frozen=True)
class CacheSize:
    """Bytes for one sequence. per_token: of a token written; constant: whatever the length; per_source_token: of the
    encoder's positions."""

    per_token: int
    constant: int
    per_source_token: int

    def at(self, length: int, source_length: int) -> int:
        """Bytes with `length` tokens written and a source of `source_length`."""
        return self.per_token * length + self.constant + self.per_source_token * source_length

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes_per_token": self.per_token,
            "bytes_constant": self.constant,
            "bytes_per_source_token": self.per_source_token,
        }


def cache_size(model: Transformer, dtype: torch.dtype) -> CacheSize | None:
    """Of a model on any device, also meta; None for one that does not decode."""
    if model.decoder is None:
        return None
    per_token = constant = per_source = 0
    for block in model.decoder.layers:
        attention = block.self_attention
        state = attention.new_state(batch_size=1, capacity=1, device="meta", dtype=dtype)
        if isinstance(state, LayerCache):
            per_token += (state.keys.numel() + state.values.numel()) * dtype.itemsize
        elif isinstance(state, PerformerState):
            features = attention.mechanism.get_buffer(TABLE).shape[0]
            numbers = attention.num_kv_heads * (features * (attention.value_dim + 1) + 1)
            constant += numbers * max(FP32_BYTES, dtype.itemsize)
        if block.cross_attention is not None:
            cross = block.cross_attention
            per_source += cross.num_kv_heads * (cross.head_dim + cross.value_dim) * dtype.itemsize
    return CacheSize(per_token, constant, per_source)
