"""Scaled dot-product attention (arXiv 1706.03762, 3.2.1): softmax(q k^T scale + bias) v, and the kind `full`.

`attend` takes the first of its routes that fits. A query that may look nowhere gets zeros, and finite gradients, on all
of them.

Shape legend: B batch, H query heads, K kv heads, T queries, S keys, h head_dim, v value_dim, t queries of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.mechanism import AttentionSizes, Call, Mechanism, ProjectionOptions, hook_functions
from tformer.nn.attention.routes import (
    attend_blocked,
    attend_chunked,
    attend_few,
    blocks_are_faster,
    few_are_faster,
    few_may_have_bias,
)

BiasFunction = Callable[[slice], Tensor]
ScoreFunction = Callable[[Tensor, slice], Tensor]
MixFunction = Callable[[Tensor, slice], Tensor]

# A bias of at most this many elements is formed whole, to ride into the fused kernel as an additive mask.
MERGED_BIAS_ELEMENTS = 2**22


def attend(
    q_BHTh: Tensor,
    k_BKSh: Tensor,
    v_BKSv: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float,
    bias_fn: BiasFunction | None = None,
    score_fn: ScoreFunction | None = None,
    mix_fn: MixFunction | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention output [B, H, T, v] and, when asked for, the weights [B, H, T, S] before dropout (fp32, else None).

    mask: bool, broadcastable to [B, H, T, S], True = may look; complete (see `masks.py`).
    is_causal: only with T == S. Without a mask it is the mask; beside one it lets later keys be skipped.
    bias_fn(rows) -> [B or 1, H, t, S], added to the scaled scores. score_fn(q_BHth, rows) -> [B, H, t, S], added before
    the scale. mix_fn(weights_BHts, rows) -> [B, H, t, v], added to the output; s <= S are the first keys, all that
    were read. `rows` is a slice of the queries.
    dropout: the rate to apply now (0 in evaluation).
    ValueError when is_causal meets T != S, or H is no multiple of K.
    """
    num_queries, num_keys = q_BHTh.shape[2], k_BKSh.shape[2]
    if is_causal and num_queries != num_keys:
        raise ValueError(f"is_causal needs as many queries as keys, found {num_queries} and {num_keys}")
    if q_BHTh.shape[1] % k_BKSh.shape[1]:
        raise ValueError(f"{q_BHTh.shape[1]} query heads cannot share {k_BKSh.shape[1]} key/value heads")
    explicit = (
        need_weights or score_fn is not None or mix_fn is not None or (dropout > 0.0 and q_BHTh.device.type == "cpu")
    )
    blocked = not explicit and bias_fn is None and blocks_are_faster(q_BHTh)
    few = not (explicit or is_causal) and few_are_faster(q_BHTh) and (bias_fn is None or few_may_have_bias())
    explicit = explicit or (not (blocked or few) and q_BHTh.shape[-1] != v_BKSv.shape[-1])
    bias: Tensor | None = None
    if bias_fn is not None and not (explicit or few):
        bias = _mergeable_bias(bias_fn, q_BHTh, num_keys)
        explicit = bias is None
    weights: Tensor | None = None
    if explicit:
        out, weights = attend_chunked(
            q_BHTh,
            k_BKSh,
            v_BKSv,
            mask=mask,
            is_causal=is_causal,
            scale=scale,
            bias_fn=bias_fn,
            score_fn=score_fn,
            mix_fn=mix_fn,
            dropout=dropout,
            need_weights=need_weights,
        )
    elif few:
        bias = None if bias_fn is None else bias_fn(slice(0, num_queries)).float()
        out = attend_few(q_BHTh, k_BKSh, v_BKSv, mask=mask, bias=bias, scale=scale)
    elif blocked:
        out = attend_blocked(q_BHTh, k_BKSh, v_BKSv, mask=mask, is_causal=is_causal, scale=scale)
    else:
        out = _attend_fused(
            q_BHTh, k_BKSh, v_BKSv, mask=mask, is_causal=is_causal, scale=scale, bias=bias, dropout=dropout
        )
    return out, weights


def _mergeable_bias(bias_fn: BiasFunction, q_BHTh: Tensor, num_keys: int) -> Tensor | None:
    """The whole bias when it is small, fixed and in a dtype that keeps it exact; else None.

    In 16 bits a distance of a few hundred loses whole steps, and only the explicit path adds the bias in fp32.
    """
    num_queries = q_BHTh.shape[2]
    exact = q_BHTh.dtype in (torch.float32, torch.float64)
    if not exact or q_BHTh.shape[1] * num_queries * num_keys > MERGED_BIAS_ELEMENTS:
        return None
    if torch.is_grad_enabled() and bias_fn(slice(0, 1)).requires_grad:
        return None
    bias = bias_fn(slice(0, num_queries))
    return bias.to(q_BHTh.dtype) if bias.numel() <= MERGED_BIAS_ELEMENTS else None


def _attend_fused(
    q_BHTh: Tensor,
    k_BKSh: Tensor,
    v_BKSv: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    alive: Tensor | None = None
    if mask is not None:
        is_causal = False
        if q_BHTh.device.type != "cpu":
            # The CPU's kernel gives zeros for a row that may look nowhere; for others it looks everywhere, unseen.
            alive = mask.any(-1, keepdim=True)
            mask = mask | ~alive
    if bias is not None:
        if mask is None and is_causal:
            size = q_BHTh.shape[2]
            mask = torch.ones(size, size, dtype=torch.bool, device=q_BHTh.device).tril_()
            is_causal = False
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    out = F.scaled_dot_product_attention(
        q_BHTh,
        k_BKSh,
        v_BKSv,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q_BHTh.shape[1] != k_BKSh.shape[1],
    )
    return out if alive is None else out.masked_fill(~alive, 0.0)


@dataclass(frozen=True)
class FullAttentionOptions(ProjectionOptions):
    """Options of dense multi-head attention; sizes (heads, head_dim, ...) belong to the stack."""

    kind: Literal["full"] = "full"


class FullAttention(Mechanism):
    """softmax(q k^T scale + bias) v, by the fastest of `core.attend`'s ways."""

    reads_dense_mask: ClassVar[bool] = True

    def __init__(self, options: FullAttentionOptions, sizes: AttentionSizes) -> None:
        super().__init__()

    def forward(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        return attend(
            q_BHTh,
            k_BKSh,
            v_BKSv,
            mask=call.mask,
            is_causal=call.is_causal,
            scale=call.scale,
            **hook_functions(call.hooks, call.q_pos, call.k_pos),
            dropout=call.dropout,
            need_weights=call.need_weights,
        )
