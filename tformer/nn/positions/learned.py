"""A learned vector per position, added to the embeddings (GPT, BERT, BART).

`offset` rows at the start belong to no position: BART's and OPT's tables begin at 2, RoBERTa's after its padding id.
`ids` says where padding stands: arange at the position that counting has come to, nonpad_cumsum (RoBERTa, 1907.11692)
in the row before the first position, so that row = cumsum(non-pad) · non-pad + offset − 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.options import require
from tformer.nn.positions.base import Positions


@dataclass(frozen=True)
class LearnedOptions:
    kind: Literal["learned"] = "learned"
    offset: int = 0
    ids: Literal["arange", "nonpad_cumsum"] = "arange"

    def __post_init__(self) -> None:
        require(self.offset >= 0, f"offset must be at least 0, found {self.offset}")


class LearnedPositions(Positions):
    """weight [max_seq_len + offset, D]. The caller refuses lengths past `max_seq_len`, on the host."""

    has_embed = True

    def __init__(self, options: LearnedOptions, *, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        self.options = options
        self.max_seq_len = max_seq_len
        if options.ids == "nonpad_cumsum":
            self.padding_position = max(-1, -options.offset)  # without an offset there is no row before the first
        self.weight = nn.Parameter(torch.empty(max_seq_len + options.offset, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        return x_BTD + F.embedding(pos_BT + self.options.offset, self.weight).to(x_BTD.dtype)
