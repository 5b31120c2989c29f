"""Adafactor: second moments of a matrix kept as one number for each row and each column.

Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5 (no momentum). For a matrix X [r, c] with gradient G at
step t, rate rho, and constants eps1 = 1e-30, eps2 = 1e-3, d = 1:

    beta = 1 - t^-0.8
    R <- beta R + (1 - beta) mean over columns of (G^2 + eps1)
    C <- beta C + (1 - beta) mean over rows of (G^2 + eps1)
    U  = G / sqrt(R C / mean(R))
    X <- (1 - rho wd) X - rho max(eps2, RMS(X)) U / max(1, RMS(U) / d)

A vector keeps its whole second moment. The paper's R and C are sums; means give the same U. Its relative step
rho = min(1e-2, t^-1/2) is the rate 0.01 with the schedule `truncated_rsqrt` of 10,000 steps, as T5 was trained
(arXiv 1910.10683, 3.1.2). The decoupled weight decay is that of torch.optim.Adafactor; the paper has none.

`transformers.optimization.Adafactor` follows the same rule without decay; its decay multiplies rho by RMS(X) too.
torch.optim.Adafactor bounds R C / mean(R) from below by its eps1^2 instead of adding eps1 to G^2, and always applies
min(lr, t^-1/2) itself.

The parts of a fused matrix such as [q; k; v] are updated as separate matrices (`row_splits`).

Shapes: r rows, c columns, n parts of a fused matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

DECAY_EXPONENT = 0.8
EPS_SQUARE = 1.0e-30
"""eps1: added to the squared gradient."""
EPS_SCALE = 1.0e-3
"""eps2: the smallest scale of a parameter, so that one that starts at zero can leave it."""
CLIP_RMS = 1.0
"""d: the largest root mean square of an update before rate and scale."""


class Adafactor(torch.optim.Optimizer):
    """Adafactor. `row_splits`: row counts of the blocks of a fused matrix, which add up to its rows.

    A parameter of more than two dimensions is the matrix of its first dimension and all others. Raises ValueError for
    splits that do not add up.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        row_splits: Mapping[Tensor, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.row_splits: dict[Tensor, Sequence[int]] = dict(row_splits or {})
        for parameter, rows in self.row_splits.items():
            if sum(rows) != parameter.shape[0]:
                raise ValueError(f"row splits {list(rows)} do not add up to the {parameter.shape[0]} rows")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; `closure` must be None."""
        if closure is not None:
            raise ValueError("Adafactor takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        rows = self.row_splits.get(parameter)
        state = self.state[parameter]
        if not state:
            state.update(fresh_state(parameter, rows))
        state["step"] += 1
        share = float(state["step"]) ** -DECAY_EXPONENT  # 1 - beta
        if parameter.ndim < 2:
            second = state["second"].lerp_(gradient.square().add_(EPS_SQUARE), share)
            _apply(parameter, gradient * second.rsqrt(), rate, decay)
            return
        sizes = list(rows or (parameter.shape[0],))
        parts = (tensor.split(sizes) for tensor in (parameter.flatten(1), gradient.flatten(1), state["rows"]))
        for part_rc, gradient_rc, rows_r, columns_c in zip(*parts, state["columns"], strict=True):
            squares_rc = gradient_rc.square()
            rows_r.lerp_(squares_rc.mean(dim=1).add_(EPS_SQUARE), share)
            columns_c.lerp_(squares_rc.mean(dim=0).add_(EPS_SQUARE), share)
            scale_r = (rows_r / rows_r.mean()).rsqrt_()
            update_rc = torch.mul(gradient_rc, scale_r.unsqueeze(1), out=squares_rc).mul_(columns_c.rsqrt())
            _apply(part_rc, update_rc, rate, decay)


def fresh_state(parameter: Tensor, rows: Sequence[int] | None) -> dict[str, Tensor]:
    """The state before the first step: `rows` [r] and `columns` [n, c] of a matrix, `second` of a vector, the step."""
    step = torch.zeros((), dtype=torch.float32, device="cpu")
    if parameter.ndim < 2:
        return {"step": step, "second": torch.zeros_like(parameter)}
    columns = parameter.numel() // parameter.shape[0]
    return {
        "step": step,
        "rows": parameter.new_zeros(parameter.shape[0]),
        "columns": parameter.new_zeros(len(rows or (0,)), columns),
    }


def _apply(parameter: Tensor, update: Tensor, rate: float, decay: float) -> None:
    """Clip the update, scale it by the size of the parameter, and add it."""
    scale = _rms(parameter).clamp_(min=EPS_SCALE)
    scale.div_((_rms(update) / CLIP_RMS).clamp_(min=1.0))
    if decay:
        parameter.mul_(1 - rate * decay)
    parameter.addcmul_(update, scale, value=-rate)


def _rms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / math.sqrt(tensor.numel())
