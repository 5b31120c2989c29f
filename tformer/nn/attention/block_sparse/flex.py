"""FlexAttention (arXiv 2412.05496) on CUDA, which turns a rule over (example, query, key) into a kernel.

The kernel skips blocks where the rule never holds. Its compiler runs at the first call for every new shape, which suits
long training runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tformer.nn.attention.context import AttentionInputs

SeesFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(example, query slot, key slot), index tensors -> bool."""


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attend_flex(inputs: AttentionInputs, sees: SeesFunction) -> Tensor:
    """Attention output [B, H, T, v] without a T x S tensor: the block mask is compiled too.

    A query that sees no key gets zeros.

    sees: the kind's pattern; the context's causality, padding and documents are added to it. ValueError for positions
    that change scores, and dropout.
    """
    if inputs.dropout or inputs.has_position_scores:
        raise ValueError("implementation: flex supports neither dropout nor positions with a bias; use blocks")
    # Imported on use: it imports the compiler, which takes longer than the rest of torch.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q_BHTh, k_BKSh, v_BKSv, context, scale, *_ = inputs
    batch, heads, num_queries, _ = q_BHTh.shape
    num_keys, on_cuda = k_BKSh.shape[2], q_BHTh.device.type == "cuda"
    key_mask = None if context.key_mask is None else context.key_mask.bool()
    documents = context.document_ids

    def rule(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = sees(example, query, key)
        if context.causal:
            seen = seen & (key <= query + (num_keys - num_queries))
        if key_mask is not None:
            seen = seen & key_mask[example, key]
        if documents is not None:
            seen = seen & (documents[example, query] == documents[example, key])
        return seen

    block_mask = create_block_mask(rule, batch, None, num_queries, num_keys, device=q_BHTh.device, _compile=on_cuda)
    attention: Any = _compiled() if on_cuda else flex_attention
    out = attention(q_BHTh, k_BKSh, v_BKSv, block_mask=block_mask, scale=scale, enable_gqa=heads != k_BKSh.shape[1])
    assert isinstance(out, Tensor)
    return out
