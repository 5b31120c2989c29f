"""Attention of one query per row, the step of decoding, for bf16 on a CPU.

PyTorch's fused kernel reads the keys a row at a time there. As one batched product K q, with the keys on the left, it
is three to thirty times faster; the products with one row on the left, q K^T, are not.

Shape legend: B batch, H query heads, K kv heads, G = H / K, S keys, h head_dim, v value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tformer.nn.attention.masks import MASKED_SCORE


def single_is_faster(q_BHTh: Tensor) -> bool:
    """bf16 in eager mode on a CPU, for a single query."""
    on_cpu = q_BHTh.device.type == "cpu" and q_BHTh.dtype == torch.bfloat16
    return on_cpu and q_BHTh.shape[2] == 1 and not torch.compiler.is_compiling()


def attend_single(q_BH1h: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """[B, H, 1, v]; arguments as in `core.attend`. Scores are rounded to bf16 once, the softmax computes in fp32."""
    q_BKGh = q_BH1h.squeeze(2).unflatten(1, (k_BKSh.shape[1], -1))
    scores_BH1S = (k_BKSh @ q_BKGh.transpose(-1, -2)).mul_(scale).transpose(-1, -2).flatten(1, 2).unsqueeze(2)
    if mask is None:
        weights = scores_BH1S.softmax(dim=-1)
    else:
        weights = scores_BH1S.masked_fill(~mask, MASKED_SCORE).softmax(dim=-1)
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return (weights.view(*q_BKGh.shape[:3], -1) @ v_BKSv).flatten(1, 2).unsqueeze(2)
