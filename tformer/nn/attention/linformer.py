"""Linformer (arXiv 2006.04768): keys and values are projected along the sequence, from T to `rank` of them.

    out = softmax(q (E k)^T scale) (F v),  E, F [rank, max_seq_len]

A shorter input uses the first T columns. Padding is set to zero before it is projected, so that it adds nothing; after
that every query sees all `rank` keys. Each projected key mixes all positions: there is no causal mode, no score between
two positions to which a bias could be added, and documents of one row cannot be hidden from each other.

The effective weights on positions are softmax(...) F, which may be negative and need not sum to 1.

Shape legend: B batch, T positions, H query heads, K kv heads, h head_dim, v value_dim, r rank, n max_seq_len.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tformer.nn.attention.context import AttentionContext, AttentionInputs, Weighted
from tformer.nn.attention.core import attend
from tformer.nn.attention.mechanism import AttentionSizes, Mechanism, ProjectionOptions
from tformer.nn.attention.routes import mix_values
from tformer.nn.options import require_positive
from tformer.nn.taps import Tap

Sharing = Literal["none", "headwise", "key_value", "layerwise"]


class LinformerAttention(Mechanism):
    """Full attention over `rank` projected keys and values.

    keys, values: E and F, [r, n], or [K, r, n] without sharing; one parameter under both names where they are one.
    """

    causal: ClassVar[bool] = False
    one_document: ClassVar[bool] = True
    fixed_length: ClassVar[bool] = True
    signed_weights: ClassVar[bool] = True
    takes_position_scores: ClassVar[bool] = False
    projects_keys: ClassVar[bool] = True
    weights_meaning: ClassVar[str] = "effective share of each value in each output; computed only for this view"

    def __init__(self, options: LinformerOptions, sizes: AttentionSizes) -> None:
        super().__init__(options, sizes)
        if sizes.causal or sizes.is_cross:
            raise ValueError("kind: linformer has no causal mode and no cross-attention")
        if sizes.max_seq_len is None:
            raise ValueError("kind: linformer needs max_seq_len")
        if options.rank > sizes.max_seq_len:
            raise ValueError(f"rank: found {options.rank}, expected at most max_seq_len ({sizes.max_seq_len})")
        self.rank, self.max_seq_len, self.sharing = options.rank, sizes.max_seq_len, options.sharing
        heads = [sizes.num_kv_heads] if options.sharing == "none" else []
        shape = [*heads, options.rank, sizes.max_seq_len]
        self.keys = nn.Parameter(torch.empty(shape))
        separate = options.sharing in ("none", "headwise")
        self.values = nn.Parameter(torch.empty(shape)) if separate else self.keys
        self.reset_parameters(0.0)

    def taps(self) -> list[Tap]:
        meaning = "positions mixed into fewer, by a learned matrix"
        return [
            Tap("projected_K", "B K r h", meaning, ("keys",), ("keys",), replaces="keys"),
            Tap("projected_V", "B K r v", meaning, ("values",), ("values",), replaces="values"),
        ]

    @torch.no_grad()
    def reset_parameters(self, std: float) -> None:
        """N(0, 1 / rank), as in the paper: lengths and products of projected vectors keep their mean. `std`: unused."""
        for parameter in self.parameters():
            parameter.normal_(0.0, 1.0 / math.sqrt(self.rank))

    def share_with(self, first: Mechanism) -> None:
        assert isinstance(first, LinformerAttention)
        if "layerwise" not in (self.sharing, first.sharing):
            return
        if (self.rank, self.sharing) != (first.rank, first.sharing):
            found = f"{first.sharing} of rank {first.rank} and {self.sharing} of rank {self.rank}"
            raise ValueError(f"sharing: layerwise needs the same rank and sharing in all layers, found {found}")
        self.keys = self.values = first.keys

    def forward(self, inputs: AttentionInputs) -> Weighted:
        """See `Mechanism`; ValueError for an input that is longer than the projections, or causal, or packed."""
        context, length = inputs.context, inputs.k_BKSh.shape[2]
        if length > self.max_seq_len:
            raise ValueError(f"linformer's projections have {self.max_seq_len} columns, the input needs {length}")
        if context.causal or inputs.state is not None:
            raise ValueError("linformer has no causal mode")
        if context.document_ids is not None:
            raise ValueError("document_ids: linformer attention cannot keep documents of one row apart")
        padding = None if context.key_mask is None else ~context.key_mask.bool()[:, None, :, None]
        keys = inputs.tap("projected_K", _project(self.keys, inputs.k_BKSh, padding))
        values = inputs.tap("projected_V", _project(self.values, inputs.v_BKSv, padding))
        # Queries see all projected keys.
        unmasked = AttentionContext(context.q_pos, context.q_pos)
        inputs = inputs._replace(positions=None, taps_weights=False)
        out_BHTv, weights_BHTr = attend(inputs._replace(k_BKSh=keys, v_BKSv=values, context=unmasked))
        if weights_BHTr is None or inputs.taps is None:
            return out_BHTv, None
        weights = inputs.taps.replaced("weights", self._on_positions(weights_BHTr, length, padding))
        return mix_values(inputs, weights) if inputs.replaces_weights else out_BHTv, weights

    def flops(self, queries: float, keys: float, *, training: bool = False) -> float:
        """E k and F v, and attention over `rank` keys."""
        projected = keys * self.sizes.num_kv_heads / self.sizes.num_heads
        return super().flops(queries + projected, self.rank, training=training)

    def _on_positions(self, weights_BHTr: Tensor, length: int, padding: Tensor | None) -> Tensor:
        """softmax(...) F, [B, H, T, T]: the effective weight of each position's value in the output."""
        matrix = self.values[..., :length].to(weights_BHTr.dtype)
        if matrix.ndim == 3:
            matrix = matrix.repeat_interleave(weights_BHTr.shape[1] // matrix.shape[0], dim=0)
        effective = weights_BHTr @ matrix
        return effective if padding is None else effective.masked_fill(padding.transpose(2, 3), 0.0)


@dataclass(frozen=True)
class LinformerOptions(ProjectionOptions):
    """Options of Linformer's low-rank attention (arXiv 2006.04768)."""

    mechanism: ClassVar[type[Mechanism]] = LinformerAttention

    kind: Literal["linformer"] = "linformer"
    rank: int = 128  # projected keys; at most max_seq_len
    # Which matrices [rank, max_seq_len] are one: none (keys and values of every head have their own), headwise (one for
    # keys and one for values of a layer), key_value (one for both), layerwise (one for all layers).
    sharing: Sharing = "headwise"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(rank=self.rank)

    def saved_values(self, *, queries: int, keys: int, values: int, itemsize: int, max_seq_len: int) -> float:
        """The projected keys and values."""
        return self.rank * (keys + values) / max_seq_len


def _project(matrix: Tensor, x_BKTx: Tensor, padding_B1T1: Tensor | None) -> Tensor:
    """[B, K, T, x] -> [B, K, r, x]."""
    if padding_B1T1 is not None:
        x_BKTx = x_BKTx.masked_fill(padding_B1T1, 0.0)
    matrix = matrix[..., : x_BKTx.shape[2]].to(x_BKTx.dtype)
    return torch.einsum("rt,bktx->bkrx" if matrix.ndim == 2 else "krt,bktx->bkrx", matrix, x_BKTx)
