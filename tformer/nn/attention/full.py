"""Dense scaled dot-product attention (arXiv 1706.03762, 3.2.1): every query sees every key that the mask allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from tformer.nn.attention.core import attend
from tformer.nn.attention.mechanism import AttentionSizes, Call, Mechanism, ProjectionOptions, hook_functions


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
