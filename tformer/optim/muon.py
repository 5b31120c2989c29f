"""Muon: momentum whose update is orthogonalized, for the hidden matrices of a network.

Keller Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/); at scale: arXiv 2502.16982. For a matrix
W [r, c] with gradient G:

    M <- M + (1 - mu) (G - M)                       momentum, as a moving average (as torch.optim.Muon has it)
    U  = G + mu (M - G)                             Nesterov
    O  = NewtonSchulz5(U)                           close to the semi-orthogonal matrix nearest to U
    W <- (1 - lr wd) W - lr sqrt(max(1, r / c)) O

NorMuon (arXiv 2510.05491) then gives all rows of O, the neurons, updates of similar size, by a second moment of each.
As in modded-nanogpt the norm of the whole update stays; the paper sets its root mean square to 0.2:

    v  <- v + (1 - beta) (mean over columns of O^2 - v)
    O' = O / sqrt(v),    O <- O' |O| / |O'|

Matrices of the same shape, up to transposition, go through Newton-Schulz as one stack, so that a whole model costs a
handful of batched products instead of thousands of small ones. The parts of a fused matrix such as [q; k; v] are
orthogonalized separately (`row_splits`): they are different maps that share storage.

Shapes: n matrices in a stack, r rows <= c columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic a x + b x^3 + c x^5 with the steepest slope at 0 that maps [0, 1] to about [0.7, 1.2]."""
NUM_STEPS = 5
EPS = 1.0e-7
MAX_STACK_ELEMENTS = 2**26
"""Larger stacks are split, which bounds the memory of one step (256 MiB for an fp32 stack)."""


def newton_schulz(matrices_nrc: Tensor, *, compute_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[n, r, c] -> [n, r, c] in `compute_dtype`: singular vectors kept, singular values moved to about [0.7, 1.2].

    Costs n (4 r^2 c + 2 r^3) multiply-adds a step, so r <= c is the cheaper orientation.
    """
    a, b, c = COEFFICIENTS
    norms_n11 = torch.linalg.vector_norm(matrices_nrc, dim=(1, 2), keepdim=True).clamp_min(EPS)
    x_nrc = (matrices_nrc / norms_n11).to(compute_dtype)  # Frobenius norm 1: no singular value exceeds 1
    for _ in range(NUM_STEPS):
        gram_nrr = torch.bmm(x_nrc, x_nrc.mT)
        poly_nrr = torch.baddbmm(gram_nrr, gram_nrr, gram_nrr, beta=b, alpha=c)
        x_nrc = torch.baddbmm(x_nrc, poly_nrr, x_nrc, beta=a)
    return x_nrc


def even_rows(updates_nrc: Tensor, second_nr: Tensor, decay: float) -> Tensor:
    """NorMuon's step: the updates with rows of similar size; `second_nr` is brought up to date.

    The factor 1 / (1 - decay^t) that removes the bias of `second_nr` cancels, because the norm of a matrix stays.
    """
    second_nr.lerp_(updates_nrc.square().mean(dim=2), 1 - decay)
    even_nrc = updates_nrc * second_nr.clamp_min(EPS**2).rsqrt().unsqueeze(2)
    before_n11, after_n11 = (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (updates_nrc, even_nrc))
    return even_nrc.mul_(before_n11 / after_n11.clamp_min(EPS))


Block = tuple[Tensor, Tensor, Any]
"""Rows of a parameter that are a separate matrix, their update, and NorMuon's second moments of them or None."""


def fresh_state(parameter: Tensor, *, with_rows: bool) -> dict[str, Tensor]:
    """The state before the first step: `momentum` [r, c], and for NorMuon `rows` [r]."""
    rows = {"rows": parameter.new_zeros(parameter.shape[0])} if with_rows else {}
    return {"momentum": torch.zeros_like(parameter), **rows}


class Muon(torch.optim.Optimizer):
    """Muon for matrices. `row_splits`: row counts of the blocks of a fused parameter, which add up to its rows.

    row_decay: beta of NorMuon's second moments of rows; None: Muon without them.

    Raises ValueError for a parameter that is not a matrix and for splits that do not add up.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        row_decay: float | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        row_splits: Mapping[Tensor, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.compute_dtype, self.row_decay = compute_dtype, row_decay
        self.row_splits: dict[Tensor, Sequence[int]] = dict(row_splits or {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon needs matrices, found a parameter of shape {tuple(parameter.shape)}")
                rows = self.row_splits.get(parameter, (parameter.shape[0],))
                if sum(rows) != parameter.shape[0]:
                    raise ValueError(f"row splits {list(rows)} do not add up to the {parameter.shape[0]} rows")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; `closure` must be None."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            if parameters:
                self._update(parameters, gradients, group["lr"], group["weight_decay"], group["momentum"])

    def _update(
        self, parameters: list[Tensor], gradients: list[Tensor], lr: float, decay: float, momentum: float
    ) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = fresh_state(parameter, with_rows=self.row_decay is not None)
        averages = [self.state[parameter]["momentum"] for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, averages, momentum)
        if decay:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        for wide, tall in self._stacks(parameters, updates):
            flat = [update for _, update, _ in wide] + [update.mT for _, update, _ in tall]
            done = newton_schulz(torch.stack(flat), compute_dtype=self.compute_dtype).to(flat[0].dtype).unbind()
            if wide:
                torch._foreach_add_([target for target, _, _ in wide], self._even(wide, done[: len(wide)]), alpha=-lr)
            if tall:
                rows, columns = tall[0][0].shape
                results = self._even(tall, [result.mT for result in done[len(wide) :]])
                torch._foreach_add_([target for target, _, _ in tall], results, alpha=-lr * math.sqrt(rows / columns))

    def _even(self, blocks: Sequence[Block], updates: Sequence[Tensor]) -> list[Tensor]:
        """The updates of blocks of one shape; NorMuon gives them rows of similar size."""
        if self.row_decay is None:
            return list(updates)
        seconds = [second for _, _, second in blocks]
        second_nr = torch.stack(seconds)
        even_nrc = even_rows(torch.stack(list(updates)), second_nr, self.row_decay)
        torch._foreach_copy_(seconds, list(second_nr.unbind()))
        return list(even_nrc.unbind())

    def _stacks(self, parameters: list[Tensor], updates: Sequence[Tensor]) -> Iterator[tuple[list[Block], list[Block]]]:
        """Blocks of one shape up to transposition: those with r <= c, and those with r > c."""
        by_shape: dict[tuple[int, int], list[Block]] = {}
        for parameter, update in zip(parameters, updates, strict=True):
            rows = list(self.row_splits.get(parameter, (parameter.shape[0],)))
            second = self.state[parameter].get("rows")
            seconds = [None] * len(rows) if second is None else second.split(rows)
            for block in zip(parameter.split(rows), update.split(rows), seconds, strict=True):
                shape = block[0].shape
                by_shape.setdefault((min(shape), max(shape)), []).append(block)
        for (short, long), blocks in by_shape.items():
            size = max(1, MAX_STACK_ELEMENTS // max(1, short * long))
            for start in range(0, len(blocks), size):
                part = blocks[start : start + size]
                wide = [block for block in part if block[0].shape[0] <= block[0].shape[1]]
                tall = [block for block in part if block[0].shape[0] > block[0].shape[1]]
                yield wide, tall
