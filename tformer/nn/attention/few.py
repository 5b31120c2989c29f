"""Attention of few queries per row, the step of decoding, for bf16 on a CPU.

PyTorch's fused kernel reads the keys a row at a time there; one batched product of queries and keys is three to thirty
times faster. A single query goes to the right, K q: the products with one row on the left are slow. So is a softmax
over rows that do not fill vector registers: scores are padded to a multiple of 16.

Shape legend: B batch, H query heads, K kv heads, G = H / K, T queries, S keys, h head_dim, v value_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.masks import MASKED_SCORE
from tformer.nn.kernels import brought

FEW = 8  # queries
WIDTH = 16  # of a vector register, in fp32


def few_are_faster(q_BHTh: Tensor) -> bool:
    """bf16 in eager mode on a CPU, for a single query; without a gradient for a few more (the beams of a sentence)."""
    on_cpu = q_BHTh.device.type == "cpu" and q_BHTh.dtype == torch.bfloat16
    most = 1 if torch.is_grad_enabled() else FEW
    return on_cpu and q_BHTh.shape[2] <= most and not torch.compiler.is_compiling()


def few_may_have_bias() -> bool:
    """Only our own kernel adds one to the scores."""
    return brought() is not None and not torch.is_grad_enabled()


def attend_few(
    q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, *, mask: Tensor | None, bias: Tensor | None = None, scale: float
) -> Tensor:
    """[B, H, T, v]; arguments as in `core.attend`, the bias as it is added.

    Scores are rounded to bf16 once, the softmax computes in fp32.
    A kernel of our own, where there is one, reads keys and values once and rounds nothing between.
    """
    kernels = brought()
    if kernels is not None and not torch.is_grad_enabled():
        return kernels.attend(q_BHTh, k_BKSh, v_BKSv, mask=mask, bias=bias, scale=scale)
    assert bias is None
    (batch, heads, num_queries, head_dim), (num_kv_heads, num_keys) = q_BHTh.shape, k_BKSh.shape[1:3]
    rows = heads // num_kv_heads * num_queries  # G T: the query heads that share a key head become one matrix
    q_BKRh = q_BHTh.reshape(batch, num_kv_heads, rows, head_dim)
    if rows == 1:
        scores_BKRS = (k_BKSh @ q_BKRh.transpose(-1, -2)).transpose(-1, -2)
    else:
        scores_BKRS = q_BKRh @ k_BKSh.transpose(-1, -2)
    scores_BHTS = scores_BKRS.mul_(scale).view(batch, heads, num_queries, num_keys)
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill_(~mask, MASKED_SCORE)
    padded_BHTS = F.pad(scores_BHTS, (0, -num_keys % WIDTH), value=-torch.inf)
    weights_BHTS = padded_BHTS.softmax(dim=-1)[..., :num_keys]
    if mask is not None:
        weights_BHTS = weights_BHTS.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    out_BKRv = weights_BHTS.reshape(batch, num_kv_heads, rows, num_keys) @ v_BKSv
    return out_BKRv.view(batch, heads, num_queries, v_BKSv.shape[-1])
