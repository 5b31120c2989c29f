"""Cross-entropy from hidden states in chunks: the fp32 logits of all positions never exist at once.

loss = -sum_j t_j log p_j with p = softmax(z), z = softcap(h W^T + bias). For a chunk of positions at a time, the
forward pass computes the logits, the loss and, from d loss / d z = p - t, the gradients of h, W and b, which the
backward pass only multiplies. Two definitions of label smoothing eps are published, for K classes:
- uniform (PyTorch): t = 1 - eps + eps/K on the label, eps/K elsewhere;
- off_target (fairseq): t = 1 - eps on the label, eps/(K - 1) elsewhere.
z-loss (PaLM, arXiv 2204.02311) adds c (log sum exp z)^2, with the gradient 2 c (log sum exp z) p: logits stay small.

Shape legend: N positions, D d_model, V vocabulary, n positions of a chunk, or of a block of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tformer.nn.linear import accumulation_dtype

IGNORED_LABEL = -100  # a position without a label: no loss, no gradient

# Logits of one chunk: 128 MiB in 16 bits. Wide enough for the gradient of W at full speed, one chunk for most problems.
LOGIT_ELEMENTS = 2**26

# Logits computed at once on a CPU: they become the gradient of h before they leave its last cache.
SLAB_ELEMENTS = 2**24

# Logits of one softmax: 1 MiB in fp32, which stays in the cache of a core over six passes.
BLOCK_ELEMENTS = 2**18

# Numbers of a narrower matrix in the dtype of the product: 1 MiB in fp32.
WIDENED_ELEMENTS = 2**18

# 16-bit matrices multiply up to twice as fast, on a CPU and on tensor cores, if their rows begin at whole cache lines,
# unlike those of GPT-2's 50,257 classes.
ALIGNED_CLASSES = 64


class CrossEntropy(NamedTuple):
    """Sums over the positions whose label is not ignored; per position [N] when `reduction` is none."""

    loss: Tensor  # fp32, smoothed; the one that has a gradient
    nll: Tensor  # fp32, not smoothed
    counted: Tensor  # long, positions counted (a tuple's `count` is a method)
    correct: Tensor  # long, positions where the label has the highest logit


@dataclass(frozen=True)
class _LossSettings:
    softcap: float | None
    on_label: float  # t of the label
    elsewhere: float  # t of every other class
    with_grad: bool
    compiled: bool = False
    z_loss: float = 0.0


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    smoothing_kind: Literal["uniform", "off_target"] = "uniform",
    reduction: Literal["sum", "none"] = "sum",
    compiled: bool = False,
    z_loss: float = 0.0,
) -> CrossEntropy:
    """(loss, nll, counted, correct) of the logits softcap(hidden @ weight.T + bias), bias [V].

    Products run in hidden's dtype (the weight is cast), softmax and loss in fp32 (fp64 for fp64). Sums are in nats.
    reduction none: per position, zero where ignored, and without gradient.
    compiled: operations between the products go through torch.compile: on a GPU the dozen passes over the logits then
    become two or three.
    """
    with_grad = torch.is_grad_enabled() and reduction == "sum"
    targets = _targets(weight_VD.shape[0], label_smoothing, smoothing_kind)
    settings = _LossSettings(softcap, *targets, with_grad, compiled, z_loss)
    loss_N, nll_N, correct_N, total = _LinearCrossEntropy.apply(hidden_ND, weight_VD, bias, labels_N, settings)
    return _reduced(loss_N, nll_N, correct_N, labels_N != IGNORED_LABEL, reduction, total=total)


@torch.no_grad()
def cross_entropy_of(
    logits_of: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    labels_N: Tensor,
    *,
    classes: int,
    label_smoothing: float = 0.0,
    smoothing_kind: Literal["uniform", "off_target"] = "uniform",
    reduction: Literal["sum", "none"] = "sum",
    z_loss: float = 0.0,
) -> CrossEntropy:
    """The same from a function that computes logits, [n, D] -> fp32 [n, V] with V = `classes`; without gradient."""
    targets = _targets(classes, label_smoothing, smoothing_kind)
    settings = _LossSettings(None, *targets, with_grad=False, z_loss=z_loss)
    _, slab_size, block_size = _row_counts(classes, hidden_ND.device)
    loss_N, nll_N = (torch.zeros(len(labels_N), device=hidden_ND.device) for _ in range(2))
    correct_N = torch.zeros(len(labels_N), dtype=torch.bool, device=hidden_ND.device)
    for slab in _parts(range(len(labels_N)), slab_size):
        logits = logits_of(hidden_ND[slab])
        for rows in _parts(range(slab.start, slab.stop), block_size):
            block = _block_loss(logits[rows.start - slab.start : rows.stop - slab.start], labels_N[rows], settings)
            loss_N[rows], nll_N[rows], correct_N[rows] = block.loss, block.nll, block.correct
    return _reduced(loss_N, nll_N, correct_N, labels_N != IGNORED_LABEL, reduction, total=loss_N.sum())


def _targets(classes: int, smoothing: float, kind: Literal["uniform", "off_target"]) -> tuple[float, float]:
    """t of the label, and of every other class."""
    elsewhere = smoothing / {"uniform": classes, "off_target": max(classes - 1, 1)}[kind]
    return 1.0 - smoothing + (elsewhere if kind == "uniform" else 0.0), elsewhere


def _reduced(
    loss_N: Tensor, nll_N: Tensor, correct_N: Tensor, counted_N: Tensor, reduction: str, *, total: Tensor
) -> CrossEntropy:
    """`total`: the sum of the losses, the only result with a gradient."""
    if reduction == "none":
        return CrossEntropy(loss_N, nll_N, counted_N.long(), correct_N.long())
    return CrossEntropy(total, nll_N.sum(), counted_N.sum(), correct_N.sum())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias: Tensor | None, labels_N: Tensor, settings: _LossSettings
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype, wide = hidden_ND.dtype, accumulation_dtype(hidden_ND.dtype)
        weight = _aligned(weight_VD, dtype)
        (count, _), classes = hidden_ND.shape, weight_VD.shape[0]
        loss_N, nll_N = (torch.zeros(count, dtype=wide, device=hidden_ND.device) for _ in range(2))
        correct_N = torch.zeros(count, dtype=torch.bool, device=hidden_ND.device)
        needs = [needed and settings.with_grad for needed in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden_ND) if needs[0] else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros(classes, dtype=wide, device=hidden_ND.device) if needs[2] else None
        size, slab_size, block_size = _row_counts(classes, hidden_ND.device)
        products_nV = hidden_ND.new_empty(min(size, count), weight.shape[0])
        work = _compiled_work() if settings.compiled else _work
        for start in range(0, count, size):
            chunk = range(start, min(start + size, count))
            for slab in _parts(chunk, slab_size):
                hidden, products = hidden_ND[slab], products_nV[slab.start - start : slab.stop - start]
                for classes_n, rows_nD in _widened(weight, dtype):
                    torch.mm(hidden, rows_nD.T, out=products[:, classes_n])
                for rows in _parts(range(slab.start, slab.stop), block_size):
                    own = products[rows.start - slab.start : rows.stop - slab.start, :classes]
                    found = work(own, bias, labels_N[rows], settings, any(needs), grad_bias is not None)
                    loss_N[rows], nll_N[rows], correct_N[rows], bias_part = found
                    if grad_bias is not None and bias_part is not None:
                        grad_bias += bias_part
                if grad_hidden is not None:
                    for classes_n, rows_nD in _widened(weight, dtype):
                        if classes_n.start == 0:
                            torch.mm(products[:, classes_n], rows_nD, out=grad_hidden[slab])
                        else:
                            grad_hidden[slab].addmm_(products[:, classes_n], rows_nD)
            if needs[1]:
                part = (products_nV[: len(chunk)].T @ hidden_ND[chunk.start : chunk.stop])[:classes]
                # Chunks add up in fp32: later ones would be lost in 16 bits.
                grad_weight = part.to(wide) if grad_weight is None else grad_weight.add_(part)
        if needs[1] and grad_weight is None:
            grad_weight = torch.zeros_like(weight_VD, dtype=wide)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(loss_N, nll_N, correct_N)
        return loss_N, nll_N, correct_N, loss_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _loss: Tensor, _nll: Tensor, _correct: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (
            *(None if saved is None else (saved * grad.to(saved.dtype)).to(dtype) for saved, dtype in grads),
            None,
            None,
        )


def _work(
    own_nV: Tensor, bias: Tensor | None, labels_n: Tensor, settings: _LossSettings, with_grad: bool, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(loss, nll, correct) [n] of the products h W^T, and the gradient of the bias [V].

    Replaces the products by their gradients; the padding of a row stays zero.
    """
    logits, capped = _logits(own_nV, bias, settings, accumulation_dtype(own_nV.dtype))
    block = _block_loss(logits, labels_n, settings)
    grad_bias = None
    if with_grad:
        grad_logits = _grad_logits_(block, capped, labels_n, settings)
        if with_bias:
            grad_bias = grad_logits.sum(0)
        own_nV.copy_(grad_logits)
    return block.loss, block.nll, block.correct, grad_bias


@cache
def _compiled_work() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    return torch.compile(_work)


def _aligned(weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """W in `dtype` or a narrower one; in 16 bits with rows of zeros up to a multiple of `ALIGNED_CLASSES`."""
    classes = weight_VD.shape[0]
    missing = -classes % ALIGNED_CLASSES if classes > ALIGNED_CLASSES else 0
    if not missing or dtype.itemsize != 2:
        return weight_VD if weight_VD.dtype.itemsize < dtype.itemsize else weight_VD.to(dtype)
    aligned = weight_VD.new_zeros(classes + missing, weight_VD.shape[1], dtype=dtype)
    aligned[:classes] = weight_VD
    return aligned


def _widened(weight_VD: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(classes, their rows of W in `dtype`): all, or some at a time in one buffer where W is narrower (frozen)."""
    if weight_VD.dtype == dtype:
        yield slice(0, len(weight_VD)), weight_VD
        return
    buffer = weight_VD.new_empty(max(1, WIDENED_ELEMENTS // weight_VD.shape[1]), weight_VD.shape[1], dtype=dtype)
    for start in range(0, len(weight_VD), len(buffer)):
        rows = weight_VD[start : start + len(buffer)]
        yield slice(start, start + len(rows)), buffer[: len(rows)].copy_(rows)


def _row_counts(classes: int, device: torch.device) -> tuple[int, int, int]:
    """Positions of a chunk, a slab and a block; the latter two are smaller on a CPU only, for its caches."""
    size = max(1, LOGIT_ELEMENTS // max(1, classes))
    if device.type != "cpu":
        return size, size, size
    slab, block = (max(1, elements // max(1, classes)) for elements in (SLAB_ELEMENTS, BLOCK_ELEMENTS))
    return size, slab, block


def _parts(rows: range, size: int) -> Iterator[slice]:
    """`rows` in the fewest slices of at most `size`, about equally long: short ones multiply slowly."""
    size = -(-len(rows) // max(1, -(-len(rows) // size)))
    for start in range(rows.start, rows.stop, max(1, size)):
        yield slice(start, min(start + size, rows.stop))


def _logits(
    products_nV: Tensor, bias: Tensor | None, settings: _LossSettings, wide: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Logits [n, V] in fp32, and tanh(uncapped / cap) when there is a cap, for its derivative.

    In place of h W^T where that is in fp32 already.
    """
    logits = products_nV.to(wide)
    if bias is not None:
        logits.add_(bias)
    if settings.softcap is None:
        return logits, None
    capped = logits.div_(settings.softcap).tanh_()
    return capped * settings.softcap, capped


class _BlockLoss(NamedTuple):
    loss: Tensor  # [n]; zero where ignored, like nll, correct and the probabilities
    nll: Tensor
    correct: Tensor
    probabilities: Tensor  # [n, V]
    normalizer: Tensor  # [n]: log sum exp z


def _block_loss(logits_nV: Tensor, labels_n: Tensor, settings: _LossSettings) -> _BlockLoss:
    """Loss and softmax in few passes.

    log sum exp z = max z - log max p: the softmax is one fast pass, while `logsumexp`, or `exp` and a sum, take several
    times as long on a CPU. The largest probability is at least 1 / V: its logarithm is exact and finite.
    """
    counted = labels_n != IGNORED_LABEL
    label_logits = logits_nV.gather(1, labels_n.clamp(min=0).unsqueeze(1)).squeeze(1)
    highest = logits_nV.amax(-1)
    probabilities = logits_nV.softmax(-1)
    normalizer = highest - probabilities.amax(-1).log()
    loss = nll = normalizer - label_logits
    if settings.elsewhere > 0.0:
        # -sum_j log p_j over all classes is V lse - sum_j z_j.
        spread = normalizer * logits_nV.shape[1] - logits_nV.sum(-1)
        loss = (settings.on_label - settings.elsewhere) * nll + settings.elsewhere * spread
    if settings.z_loss > 0.0:
        loss = loss + settings.z_loss * normalizer.square()
    correct = _is_first_best(logits_nV, labels_n, counted & (label_logits == highest))
    if labels_n.device.type != "cpu" or torch.compiler.is_dynamo_compiling() or not counted.all():
        probabilities.masked_fill_(~counted.unsqueeze(1), 0.0)
    return _BlockLoss(loss.where(counted, 0.0), nll.where(counted, 0.0), correct, probabilities, normalizer)


def _is_first_best(logits_nV: Tensor, labels_n: Tensor, candidate_n: Tensor) -> Tensor:
    """True where `argmax` chooses the label, bool [n]; in 16 bits several classes may share the highest logit."""
    # Finding the rows would wait for a GPU.
    if labels_n.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return candidate_n & (logits_nV.argmax(-1) == labels_n)
    rows = candidate_n.nonzero().squeeze(1)
    return candidate_n.index_put((rows,), logits_nV[rows].argmax(-1) == labels_n[rows])


def _grad_logits_(block: _BlockLoss, capped_nV: Tensor | None, labels_n: Tensor, settings: _LossSettings) -> Tensor:
    """d loss / d (h W^T + bias) = (p - t) * d softcap (with z-loss more p), [n, V]; in place of the probabilities."""
    counted = (labels_n != IGNORED_LABEL).unsqueeze(1).to(block.probabilities.dtype)
    grad = block.probabilities
    if settings.z_loss > 0.0:
        grad.mul_((1.0 + 2.0 * settings.z_loss * block.normalizer).unsqueeze(1))
    if settings.elsewhere > 0.0:
        grad.sub_(counted * settings.elsewhere)
    drop = counted * (settings.elsewhere - settings.on_label)
    grad.scatter_add_(1, labels_n.clamp(min=0).unsqueeze(1), drop)
    if capped_nV is not None:
        grad.mul_(capped_nV.square_().neg_().add_(1.0))
    return grad
