"""Scaled dot-product attention (arXiv 1706.03762, 3.2.1): softmax(q k^T scale + bias) v, and the kind `full`.

`attend` takes the first of its ROUTES that fits; all give the same numbers. A query that sees no key gets zeros, and
finite gradients, on all of them. `logging.getLogger("tformer.nn.attention.core")` reports each choice at level DEBUG.

Shape legend: B batch, H query heads, K kv heads, T queries, S keys, h head_dim, v value_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.kernels.functions import Kernels
from tformer.nn.attention.context import AttentionInputs, Weighted
from tformer.nn.attention.mechanism import Mechanism, ProjectionOptions
from tformer.nn.attention.routes import attend_blocked, attend_chunked, attend_few

LOG = logging.getLogger(__name__)

MERGED_BIAS_ELEMENTS = 2**22  # a bias of at most this many elements becomes an additive mask of the fused kernel
FEW_QUERIES = 8


def attend(inputs: AttentionInputs) -> Weighted:
    """Attention output [B, H, T, v] and, if taps request them, the weights [B, H, T, S] before dropout, fp32.

    ValueError: `is_causal` with T != S, or H is no multiple of K.
    """
    (_, heads, num_queries, _), (_, kv_heads, num_keys, _) = inputs.q_BHTh.shape, inputs.k_BKSh.shape
    if inputs.context.is_causal and num_queries != num_keys:
        raise ValueError(f"is_causal needs as many queries as keys, found {num_queries} and {num_keys}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads")
    route = next(route for route in ROUTES if route.fits(inputs))
    if not torch.compiler.is_dynamo_compiling() and LOG.isEnabledFor(logging.DEBUG):
        LOG.debug("%s: %d queries, %d keys, %d heads", route.name, num_queries, num_keys, heads)
    return route.run(inputs)


# --- conditions ------------------------------------------------------------------------------------------------------


def few_are_faster(q_BHTh: Tensor, kernels: Kernels | None = None) -> bool:
    """bf16 in eager mode on a CPU, for a single query; without a gradient for a few more (the beams of a sentence).

    The C kernels take fp32 too.
    """
    if q_BHTh.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return False
    with_grad = torch.is_grad_enabled()
    fits_kernels = kernels is not None and q_BHTh.dtype == torch.float32 and not with_grad
    return q_BHTh.shape[2] <= (1 if with_grad else FEW_QUERIES) and (q_BHTh.dtype == torch.bfloat16 or fits_kernels)


def _fits_few(inputs: AttentionInputs) -> bool:
    if inputs.context.is_causal or not few_are_faster(inputs.q_BHTh, inputs.kernels):
        return False
    # Only the C kernels add a bias.
    return not inputs.has_bias or (inputs.kernels is not None and not torch.is_grad_enabled())


def _fits_blocked(inputs: AttentionInputs) -> bool:
    q_BHTh = inputs.q_BHTh
    if q_BHTh.device.type != "cpu" or q_BHTh.dtype != torch.bfloat16 or torch.compiler.is_dynamo_compiling():
        return False
    return q_BHTh.shape[2] > 1 and not inputs.has_bias


def _fits_fused(inputs: AttentionInputs) -> bool:
    """Equal sizes of heads and values; a bias that is small, fixed and in a dtype that keeps it exact.

    In 16 bits a distance of a few hundred loses whole steps, and only the chunked route adds the bias in fp32.
    """
    q_BHTh, context = inputs.q_BHTh, inputs.context
    if q_BHTh.shape[-1] != inputs.v_BKSv.shape[-1]:
        return False
    if not inputs.has_bias:
        return True
    examples = max(context.q_pos.shape[0], context.k_pos.shape[0])
    elements = examples * q_BHTh.shape[1] * q_BHTh.shape[2] * inputs.k_BKSh.shape[2]
    if q_BHTh.dtype not in (torch.float32, torch.float64) or elements > MERGED_BIAS_ELEMENTS:
        return False
    return not (torch.is_grad_enabled() and inputs.bias(slice(0, 1)).requires_grad)


# --- routes ----------------------------------------------------------------------------------------------------------


def _fused(inputs: AttentionInputs) -> Weighted:
    """PyTorch's kernel, which never stores the T x S scores."""
    q_BHTh, k_BKSh, v_BKSv, context, scale, *_ = inputs
    mask, is_causal = context.mask, context.is_causal
    sees_any: Tensor | None = None
    if mask is not None:
        is_causal = False
        if q_BHTh.device.type != "cpu":
            # The CPU's kernel gives zeros for a row without visible keys; others need a visible key.
            sees_any = mask.any(-1, keepdim=True)
            mask = mask | ~sees_any
    if inputs.has_bias:
        bias = inputs.bias().to(q_BHTh.dtype)
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
        dropout_p=inputs.dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q_BHTh.shape[1] != k_BKSh.shape[1],
    )
    return (out if sees_any is None else out.masked_fill(~sees_any, 0.0)), None


class Route(NamedTuple):
    """One way to compute attention: its name, whether it fits some inputs, and the function."""

    name: str
    fits: Callable[[AttentionInputs], bool]
    run: Callable[[AttentionInputs], Weighted]


ROUTES = (
    Route("chunked", lambda inputs: inputs.needs_scores, attend_chunked),
    Route("few queries", _fits_few, attend_few),
    Route("blocked", _fits_blocked, attend_blocked),
    Route("fused", _fits_fused, _fused),
    Route("chunked", lambda inputs: True, attend_chunked),
)
"""In order of preference. The first takes inputs for which scores have to be formed explicitly, the last all others."""


class FullAttention(Mechanism):
    """Dense attention: every query sees every key that the mask allows."""

    cross: ClassVar[bool] = True
    reads_dense_mask: ClassVar[bool] = True
    is_plain: ClassVar[bool] = True
    caps_scores: ClassVar[bool] = True
    reads_input: ClassVar[bool] = False

    def forward(self, inputs: AttentionInputs) -> Weighted:
        return attend(inputs)


@dataclass(frozen=True)
class FullAttentionOptions(ProjectionOptions):
    """Options of dense multi-head attention (arXiv 1706.03762); sizes (heads, head_dim, ...) belong to the stack."""

    mechanism: ClassVar[type[Mechanism]] = FullAttention

    kind: Literal["full"] = "full"
