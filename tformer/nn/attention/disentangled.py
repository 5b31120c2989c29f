"""Disentangled attention (DeBERTa, arXiv 2006.03654), with buckets and shared projections as in v2 and v3 (2111.09543).

    score(i, j) = q_i . k_j + q_i . K_r + k_j . Q_r,    r the bucket of i - j

K and Q are projections of a table of relative positions, which all layers share: by the layer's own projections of
queries and keys, or by further ones. The scale is 1 / sqrt(n h) for n terms. Up to half of `buckets` each distance has
its own row of the table; larger ones share rows in logarithmic steps, and `max_distance` has the last.

Shape legend: B batch, H query heads, K kv heads, T queries, S keys, R rows of the table, D d_model, h head_dim; t, s
queries and keys of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tformer.nn.attention.context import AttentionContext, AttentionInputs, Weighted
from tformer.nn.attention.mechanism import BACKWARD_AND_FORWARD, AttentionSizes, Mechanism, ProjectionOptions
from tformer.nn.attention.routes import attend_chunked, dot_products
from tformer.nn.layer_norm import LayerNorm
from tformer.nn.linear import Linear
from tformer.nn.options import require, require_positive


def log_bucket(distance: Tensor, *, buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance (query position minus key position), of the same sign and shape, long."""
    middle = buckets // 2
    # In fp32 and in this order, as released models compute it: other roundings move a distance to another bucket.
    ratio = torch.log(distance.abs().clamp(min=middle) / middle)
    steps = torch.ceil(ratio / torch.log(torch.tensor((max_distance - 1) / middle)) * (middle - 1))
    return torch.where(distance.abs() <= middle, distance, (steps.long() + middle) * distance.sign())


class DisentangledAttention(Mechanism):
    """softmax((q k^T + positions of keys + positions of queries) scale) v.

    table: [R, D], two rows for each of `buckets` (or of `max_distance`, without buckets); norm: of its rows.
    position_q, position_k: Linear D -> H h and D -> K h, unless the projections are shared.
    """

    options: DisentangledOptions
    reads_dense_mask: ClassVar[bool] = True
    forms_scores: ClassVar[bool] = True
    score_formula: ClassVar[str] = "Q·Kᵀ + terms of positions"

    def __init__(self, options: DisentangledOptions, sizes: AttentionSizes) -> None:
        super().__init__(options, sizes)
        self.reads_keys, self.reads_queries = options.terms != "p2c", options.terms != "c2p"
        if options.scale == "auto":
            self.scale = (sizes.head_dim * (1 + self.reads_keys + self.reads_queries)) ** -0.5
        self.span = options.buckets or options.max_distance
        self.table = nn.Parameter(torch.empty(2 * self.span, sizes.d_model))
        self.norm = LayerNorm(sizes.d_model, eps=options.table_norm_eps) if options.table_norm else None
        own, biased = not options.share_projections, options.qkv_bias
        widths = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.position_q = Linear(sizes.d_model, widths[0], bias=biased) if own and self.reads_queries else None
        self.position_k = Linear(sizes.d_model, widths[1], bias=biased) if own and self.reads_keys else None
        self.reset_parameters(0.02)

    @torch.no_grad()
    def reset_parameters(self, std: float) -> None:
        self.table.normal_(0.0, std)

    def share_with(self, first: Mechanism) -> None:
        assert isinstance(first, DisentangledAttention)
        ours, theirs = ((each.options.buckets, each.options.max_distance, each.norm is None) for each in (self, first))
        if ours != theirs:
            raise ValueError("buckets, max_distance and table_norm must be the same in all layers, which share a table")
        self.table, self.norm = first.table, first.norm

    def forward(self, inputs: AttentionInputs) -> Weighted:
        q_HRh, k_KRh = self._positions(inputs)
        scores = partial(self._scores, inputs.context, q_HRh, k_KRh)
        return attend_chunked(inputs, compute_scores=scores, numbers_per_pair=3)

    def flops(self, queries: float, keys: float, *, training: bool = False) -> float:
        """The terms are products with every row of the table, which is projected once for each example."""
        sizes, rows = self.sizes, len(self.table)
        heads = 2.0 * sizes.num_heads * sizes.head_dim * rows
        terms = heads * (queries * self.reads_keys + keys * self.reads_queries)
        width = sizes.num_heads + 2 * sizes.num_kv_heads
        if not self.options.share_projections:
            width = sizes.num_heads * self.reads_queries + sizes.num_kv_heads * self.reads_keys
        terms += 2.0 * rows * sizes.d_model * width * sizes.head_dim
        return super().flops(queries, keys, training=training) + terms * (BACKWARD_AND_FORWARD if training else 1)

    def _positions(self, inputs: AttentionInputs) -> tuple[Tensor | None, Tensor | None]:
        """The table as queries [1, H, R, h] and as keys [1, K, R, h]; None for a term that is not computed."""
        sizes = self.sizes
        table_1RD = (self.table if self.norm is None else self.norm(self.table)).unsqueeze(0)
        q_1Rx = k_1Rx = None
        if self.options.share_projections:
            assert inputs.x_BTD is not None and inputs.project is not None
            widths = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
            projected = inputs.project(table_1RD.to(inputs.x_BTD.dtype))
            q_1Rx, k_1Rx = projected[..., : widths[0]], projected[..., widths[0] : sum(widths)]
        else:
            table_1RD = table_1RD.to(inputs.q_BHTh.dtype)
            q_1Rx = None if self.position_q is None else self.position_q(table_1RD)
            k_1Rx = None if self.position_k is None else self.position_k(table_1RD)

        def split(x_1Rx: Tensor | None, wanted: bool) -> Tensor | None:
            if x_1Rx is None or not wanted:
                return None
            return x_1Rx.to(inputs.q_BHTh.dtype).unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2)

        return split(q_1Rx, self.reads_queries), split(k_1Rx, self.reads_keys)

    def _scores(
        self,
        context: AttentionContext,
        q_1HRh: Tensor | None,
        k_1KRh: Tensor | None,
        q_BHth: Tensor,
        k_BKsh: Tensor,
        rows: slice,
    ) -> Tensor:
        """[B, H, t, s]."""
        distance = context.q_pos[:, rows].unsqueeze(2) - context.k_pos[:, : k_BKsh.shape[2]].unsqueeze(1)
        if self.options.buckets:
            distance = log_bucket(distance, buckets=self.span, max_distance=self.options.max_distance)
        index = (distance + self.span).clamp(0, 2 * self.span - 1).unsqueeze(1)
        index = index.expand(*q_BHth.shape[:3], -1)
        scores = dot_products(q_BHth, k_BKsh)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if k_1KRh is not None:
            scores = scores + dot_products(q_BHth, k_1KRh).gather(-1, index)
        if q_1HRh is not None:
            scores = scores + dot_products(q_1HRh.expand(len(k_BKsh), -1, -1, -1), k_BKsh).gather(-2, index)
        return scores


@dataclass(frozen=True)
class DisentangledOptions(ProjectionOptions):
    """Options of disentangled attention (DeBERTa, arXiv 2006.03654)."""

    mechanism: ClassVar[type[Mechanism]] = DisentangledAttention

    kind: Literal["disentangled"] = "disentangled"
    buckets: int = 256  # rows of the table for distances of each sign; 0: one for each up to max_distance
    max_distance: int = 512  # distances from here on share the last row
    # the scores beside those of contents: content to position, position to content, or both
    terms: Literal["both", "c2p", "p2c"] = "both"
    share_projections: bool = True  # the table passes through the projections of queries and keys; false: further ones
    table_norm: bool = True  # normalize the rows of the table
    table_norm_eps: float = 1.0e-7  # added to the variance in table_norm

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(max_distance=self.max_distance, table_norm_eps=self.table_norm_eps)
        require(self.buckets == 0 or self.buckets >= 4, f"buckets must be 0 or at least 4, found {self.buckets}")
        require(
            self.buckets == 0 or self.max_distance - 1 > self.buckets // 2,
            f"max_distance {self.max_distance} must exceed half the buckets ({self.buckets // 2}) by more than 1",
        )
        require(not self.qk_norm, "qk_norm: not defined together with disentangled attention")
