"""Additive attention (Bahdanau et al., arXiv 1409.0473): scores from a small network instead of a product.

    score(q, k) = w . tanh(q + k)

with one learned vector w per head; the matrices of the paper's W q + U k are the projections of queries and keys, which
every kind has. No factor 1/sqrt(head_dim) is applied beyond the kind's `scale` (auto: 1).

The tanh of every pair has h numbers: they are formed for a chunk of queries at a time (`routes.attend_chunked`), and
formed again in the backward pass.

Shape legend: B batch, H query heads, K kv heads, G = H / K, T queries, S keys, h head_dim, v value_dim; t queries of a
chunk, s keys that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tformer.nn.attention.context import AttentionInputs, Weighted
from tformer.nn.attention.mechanism import AttentionSizes, Mechanism, ProjectionOptions
from tformer.nn.attention.routes import attend_chunked


class AdditiveAttention(Mechanism):
    """softmax(w . tanh(q + k) scale + bias) v. weight: w of every head, [H, h]."""

    cross: ClassVar[bool] = True
    forms_scores: ClassVar[bool] = True
    reads_dense_mask: ClassVar[bool] = True
    score_formula: ClassVar[str] = "w · tanh(Q + K)"

    def __init__(self, options: AdditiveOptions, sizes: AttentionSizes) -> None:
        super().__init__(options, sizes)
        self.scale = 1.0 if options.scale == "auto" else options.scale
        self.weight = nn.Parameter(torch.empty(sizes.num_heads, sizes.head_dim))
        self.reset_parameters(0.02)

    @torch.no_grad()
    def reset_parameters(self, std: float) -> None:
        self.weight.normal_(0.0, std)

    def forward(self, inputs: AttentionInputs) -> Weighted:
        return attend_chunked(inputs, compute_scores=self._scores, numbers_per_pair=inputs.q_BHTh.shape[-1])

    def flops(self, queries: float, keys: float, *, training: bool = False) -> float:
        """A score costs a sum, a tanh and a product with w: 4 h instead of 2 h. A tanh counts as one operation."""
        return 1.5 * super().flops(queries, keys, training=training)

    def _scores(self, q_BHth: Tensor, k_BKsh: Tensor, rows: slice) -> Tensor:
        """[B, H, t, s]."""
        q_BKGt1h = q_BHth.unflatten(1, (k_BKsh.shape[1], -1)).unsqueeze(-2)
        activations = (q_BKGt1h + k_BKsh[:, :, None, None]).tanh_()
        weight_KGh = self.weight.to(q_BHth.dtype).unflatten(0, (k_BKsh.shape[1], -1))
        return (activations @ weight_KGh[:, :, None, :, None]).squeeze(-1).flatten(1, 2)


@dataclass(frozen=True)
class AdditiveOptions(ProjectionOptions):
    """Options of additive attention (arXiv 1409.0473)."""

    mechanism: ClassVar[type[Mechanism]] = AdditiveAttention

    kind: Literal["additive"] = "additive"
