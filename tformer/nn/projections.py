"""Which projections share a matrix: products of one input are fused, and initialisation and Muon tell them apart."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.feedforward import FeedForward
from tformer.nn.linear import Linear


def block_matrices(model: nn.Module) -> Iterator[tuple[str, Linear, list[int]]]:
    """(name, matrix, rows of each projection in it) of every product inside the blocks of a model."""
    for name, module in model.named_modules():
        if isinstance(module, FeedForward):
            rows = module.up.weight.shape[0]
            yield f"{name}.up", module.up, [rows // 2] * 2 if module.gated else [rows]
            yield f"{name}.down", module.down, [module.down.weight.shape[0]]
        elif isinstance(module, MultiHeadAttention):
            queries = module.num_heads * module.head_dim
            keys, values = module.num_kv_heads * module.head_dim, module.num_kv_heads * module.value_dim
            if module.is_cross:
                yield f"{name}.q", module.q, [queries]
                yield f"{name}.kv", module.kv, [keys, values]
            else:
                yield f"{name}.qkv", module.qkv, [queries, keys, values]
            yield f"{name}.out", module.out, [module.out.weight.shape[0]]
