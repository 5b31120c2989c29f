"""Divergence between two predictions: soft targets of distillation (arXiv 1503.02531).

    q = softmax(z_teacher / T),   p = softmax(z_student / T)
    divergence = T² KL(q || p) = T² sum_j q_j (log q_j - log p_j),   d divergence / d z_student = T (p - q)

The factor T² keeps the gradient as large as that of hard labels at any temperature T.

As in `losses.py`, logits over a vocabulary exist for one chunk of positions at a time: the forward pass computes the
gradients of the student's features and matrix as well, and the backward pass only multiplies them.

Shape legend: N positions, D and E feature sizes of student and teacher, V vocabulary, n positions of a chunk or block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tformer.nn.linear import accumulation_dtype
from tformer.nn.losses import BLOCK_ELEMENTS, LOGIT_ELEMENTS


class LogitProjection(NamedTuple):
    """Logits before the product: z = softcap(features @ matrix.T + bias)."""

    features: Tensor  # [N, D]
    matrix: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None


class _DivergenceSettings(NamedTuple):
    temperature: float
    softcap: float | None


def soft_cross_entropy(student_NV: Tensor, teacher_NV: Tensor, *, temperature: float) -> Tensor:
    """T² KL(teacher || student) of each row [N], for few classes; fp32, or fp64 for fp64."""
    log_p, log_q = F.log_softmax(student_NV / temperature, -1), F.log_softmax(teacher_NV / temperature, -1)
    return temperature**2 * (log_q.exp() * (log_q - log_p)).sum(-1)


def soft_binary_cross_entropy(student: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """The same for each element as a binary decision: q = sigmoid(z_teacher / T)."""
    scores, targets = student / temperature, teacher / temperature
    q = targets.sigmoid()
    yes = F.logsigmoid(targets) - F.logsigmoid(scores)
    no = F.logsigmoid(-targets) - F.logsigmoid(-scores)
    return temperature**2 * (q * yes + (1 - q) * no)


def linear_divergence(
    student: LogitProjection, teacher: LogitProjection, *, temperature: float, counted_N: Tensor | None = None
) -> Tensor:
    """Scalar: T² KL(teacher || student) summed over the positions in `counted_N` (bool; None: all).

    Only the student's features, matrix and bias have gradients. Rows that one model has beyond the other's (a table
    rounded up to a multiple of 64) are left out. Products run in the dtype of each model's features, softmax and
    sums in fp32 (fp64 for fp64).
    """
    classes = min(student.matrix.shape[0], teacher.matrix.shape[0])
    if counted_N is None:
        counted_N = torch.ones(student.features.shape[0], dtype=torch.bool, device=student.features.device)
    ours, theirs = _first_rows(student, classes), _first_rows(teacher, classes)
    settings = _DivergenceSettings(temperature, student.softcap)
    divergence: Tensor = _LinearDivergence.apply(ours.features, ours.matrix, ours.bias, theirs, counted_N, settings)
    return divergence


def _first_rows(projection: LogitProjection, classes: int) -> LogitProjection:
    if projection.matrix.shape[0] == classes:
        return projection
    bias = None if projection.bias is None else projection.bias[:classes]
    return projection._replace(matrix=projection.matrix[:classes], bias=bias)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_ND: Tensor,
        matrix_VD: Tensor,
        bias: Tensor | None,
        teacher: LogitProjection,
        counted_N: Tensor,
        settings: _DivergenceSettings,
    ) -> Tensor:
        dtype, wide = features_ND.dtype, accumulation_dtype(features_ND.dtype)
        matrix, their_matrix = matrix_VD.to(dtype), teacher.matrix.to(teacher.features.dtype)
        count, classes = features_ND.shape[0], matrix.shape[0]
        total = torch.zeros((), dtype=wide, device=features_ND.device)
        needs = ctx.needs_input_grad[:3]
        grad_features = torch.empty_like(features_ND) if needs[0] else None
        grad_matrix = torch.zeros(matrix.shape, dtype=wide, device=matrix.device) if needs[1] else None
        grad_bias = torch.zeros(classes, dtype=wide, device=matrix.device) if needs[2] else None
        size = max(1, LOGIT_ELEMENTS // classes)
        block_size = max(1, BLOCK_ELEMENTS // classes) if features_ND.device.type == "cpu" else size
        for start in range(0, count, size):
            features = features_ND[start : start + size]
            products_nV = F.linear(features, matrix)
            their_products_nV = F.linear(teacher.features[start : start + size], their_matrix)
            for block_start in range(0, features.shape[0], block_size):
                block = slice(block_start, block_start + block_size)
                products = products_nV[block]
                counted = counted_N[start + block_start : start + block_start + products.shape[0]].unsqueeze(1)
                log_q, _ = _log_softmax(their_products_nV[block], teacher.bias, teacher.softcap, settings, wide)
                log_p, capped = _log_softmax(products, bias, settings.softcap, settings, wide)
                q = log_q.exp()
                total += log_q.sub_(log_p).mul_(q).mul_(counted).sum()
                if not any(needs):
                    continue
                grad_logits = log_p.exp_().sub_(q).mul_(counted)
                if capped is not None:
                    grad_logits.mul_(capped.square_().neg_().add_(1.0))
                grad_logits.mul_(settings.temperature)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                products.copy_(grad_logits)  # they become their own gradients
            if grad_features is not None:
                torch.mm(products_nV, matrix, out=grad_features[start : start + size])
            if grad_matrix is not None:
                grad_matrix.add_(products_nV.T @ features)  # fp32: later chunks would be lost in 16 bits
        ctx.save_for_backward(grad_features, grad_matrix, grad_bias)
        ctx.dtypes = (dtype, matrix_VD.dtype, None if bias is None else bias.dtype)
        return total * settings.temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (
            *(None if saved is None else (saved * grad.to(saved.dtype)).to(dtype) for saved, dtype in grads),
            *(None, None, None),
        )


def _log_softmax(
    products_nV: Tensor, bias: Tensor | None, softcap: float | None, settings: _DivergenceSettings, wide: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """log softmax(z / T) [n, V] of z = softcap(products + bias), and tanh(uncapped / cap) where there is a cap."""
    logits = products_nV.to(wide) if bias is None else products_nV.to(wide) + bias
    capped = None
    if softcap is not None:
        capped = (logits / softcap).tanh_()
        logits = capped * softcap
    return F.log_softmax(logits / settings.temperature, -1), capped
