"""The same sparse attention through FlexAttention (arXiv 2412.05496), compiled for a CUDA device.

PyTorch turns a rule over (example, query, key) into a kernel that skips blocks where the rule holds nowhere. It does
not train on a CPU, and its compiler runs at the first call for every new shape: a choice for long training runs.

Shape legend: B batch, H query heads, K kv heads, T queries, S keys, h head_dim, v value_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tformer.nn.attention.mechanism import Call, Reach

SeesFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(example, query slot, key slot), index tensors -> bool."""


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def check_flex(call: Call) -> None:
    """ValueError where this way does not exist: position kinds with terms of their own, dropout."""
    hooks = call.hooks
    if call.dropout or (hooks is not None and (hooks.has_bias or hooks.has_score or hooks.has_mix)):
        raise ValueError("implementation: flex knows no dropout and no position bias; use blocks")


def attend_flex(
    q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, sees: SeesFunction, *, reach: Reach, scale: float
) -> Tensor:
    """[B, H, T, v]. A query that sees nothing gets zeros. Nothing T x S is made: the block mask is compiled as well.

    sees: the kind's pattern; `reach`'s causality, padding and documents are added to it.
    """
    # Imported on use: it brings the compiler along, which takes longer than the rest of torch.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, heads, num_queries, _ = q_BHTh.shape
    num_keys, on_cuda = k_BKSh.shape[2], q_BHTh.device.type == "cuda"
    key_mask = None if reach.key_mask is None else reach.key_mask.bool()

    def rule(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = sees(example, query, key)
        if reach.causal:
            seen = seen & (key <= query + (num_keys - num_queries))
        if key_mask is not None:
            seen = seen & key_mask[example, key]
        if reach.document_ids is not None:
            seen = seen & (reach.document_ids[example, query] == reach.document_ids[example, key])
        return seen

    block_mask = create_block_mask(rule, batch, None, num_queries, num_keys, device=q_BHTh.device, _compile=on_cuda)
    attention: Any = _compiled() if on_cuda else flex_attention
    out = attention(q_BHTh, k_BKSh, v_BKSv, block_mask=block_mask, scale=scale, enable_gqa=heads != k_BKSh.shape[1])
    assert isinstance(out, Tensor)
    return out
