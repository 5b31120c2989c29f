"""Relative position representations (Shaw et al., arXiv 1803.02155): a vector per clipped distance, on keys and values.

e_ij = (q_i . k_j + q_i . a^K_r) / sqrt(h) and z_i = sum_j w_ij (v_j + a^V_r), with r = clip(j - i, -k, k) + k. Both
terms go through the 2k + 1 table rows instead of T x S vectors: scores of all rows are gathered per pair, weights are
summed per row. Each layer owns its tables, shared by its heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tformer.nn.options import require_positive
from tformer.nn.positions.base import Positions, PositionSizes


class ShawPositions(Positions):
    """keys [2 clip + 1, h] and, unless switched off, values [2 clip + 1, value_dim]."""

    kind = "shaw"
    about = "A learned vector per clipped distance, on keys and values (arXiv 1803.02155)."
    per_layer = True
    trained = True

    def __init__(self, options: ShawOptions, *, head_dim: int, value_dim: int) -> None:
        super().__init__()
        self.options = options
        self.keys = nn.Parameter(torch.empty(2 * options.clip + 1, head_dim))
        nn.init.normal_(self.keys, std=0.02)
        self.values: nn.Parameter | None = None
        if options.values:
            self.values = nn.Parameter(torch.empty(2 * options.clip + 1, value_dim))
            nn.init.normal_(self.values, std=0.02)
        self.has_mix = options.values

    def _row_index(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        clip = self.options.clip
        return (k_pos_BS.unsqueeze(1) - q_pos_BT.unsqueeze(2)).clamp_(-clip, clip).add_(clip).unsqueeze(1)

    def score(self, q_BHTh: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        per_row_BHTr = q_BHTh @ self.keys.to(q_BHTh.dtype).T
        index = self._row_index(q_pos_BT, k_pos_BS)
        return per_row_BHTr.gather(-1, index.expand(*per_row_BHTr.shape[:3], -1))

    def mix(self, weights_BHTS: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        assert self.values is not None, "mix is called only when has_mix is set"
        index = self._row_index(q_pos_BT, k_pos_BS).expand(weights_BHTS.shape)
        # A clipped row sums many small weights: in 16 bits most of them would be lost.
        wide = weights_BHTS if weights_BHTS.dtype == torch.float64 else weights_BHTS.float()
        per_row_BHTr = wide.new_zeros((*wide.shape[:3], self.values.shape[0])).scatter_add(-1, index, wide)
        return per_row_BHTr.to(weights_BHTS.dtype) @ self.values.to(weights_BHTS.dtype)


@dataclass(frozen=True)
class ShawOptions:
    """Learned vectors by distance, added to keys and values (arXiv 1803.02155)."""

    module: ClassVar = ShawPositions
    kind: Literal["shaw"] = "shaw"
    clip: int = 16  # largest distance with its own vector
    values: bool = True  # also add the vectors to the values

    def __post_init__(self) -> None:
        require_positive(clip=self.clip)

    def build(self, sizes: PositionSizes) -> Positions:
        return ShawPositions(self, head_dim=sizes.head_dim, value_dim=sizes.value_dim)
