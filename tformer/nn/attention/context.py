"""Attention context of one forward pass: positions, padding, documents, masks.

A mask is bool, broadcastable to [B, H, T, S], True where a key is visible. None: no limit beside `is_causal`. A mask
that exists is complete: it already forbids the future.

Shape legend: B batch, T queries, S keys. Queries are the last T of the S slots when a cache holds earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tformer.kernels.functions import Kernels
from tformer.nn.cache import LayerState
from tformer.nn.positions.base import Positions
from tformer.nn.taps import TapSink, tap

Weighted = tuple[Tensor, Tensor | None]
"""Output [B, H, T, v] and, if taps request them, the weights [B, H, T, S] before dropout, fp32."""

# Far below any score, but finite: a row without visible keys is uniform until it is zeroed, never NaN.
MASKED_SCORE = -1.0e30


def causal_mask(num_queries: int, num_keys: int, device: torch.device | None = None) -> Tensor:
    """bool [T, S]: the last query sees every key, the one before all but the last, and so on."""
    query_slots = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    return torch.arange(num_keys, device=device) <= query_slots


def make_mask(
    *,
    causal: bool,
    num_queries: int,
    num_keys: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> tuple[Tensor | None, bool]:
    """The dense mask and `is_causal` of every layer.

    num_keys: None when the queries are the keys. key_mask [B, S]: bool or 0/1, true where a key holds a token; needed
    when a causal pass has fewer queries than keys. document_ids [B, T]: integers; a query sees only the keys of
    its document.
    Returns (mask bool [B, 1, T or 1, S] or None, is_causal); when both are given the mask is already causal and the
    flag only says that later keys need not be read.
    """
    num_keys = num_queries if num_keys is None else num_keys
    mask: Tensor | None = None
    if document_ids is not None:
        mask = (document_ids.unsqueeze(2) == document_ids.unsqueeze(1)).unsqueeze(1)
    needs_past = causal and num_queries > 1
    if key_mask is not None and (mask is not None or not all_true_on_cpu(key_mask)):
        visible = key_mask.bool()[:, None, None, :]
        mask = visible if mask is None else mask & visible
    if not needs_past:
        return mask, False
    if mask is None and num_queries == num_keys:
        return None, True
    device = mask.device if mask is not None else key_mask.device if key_mask is not None else None
    past = causal_mask(num_queries, num_keys, device)[None, None]
    return past if mask is None else mask & past, num_queries == num_keys


def all_true_on_cpu(mask: Tensor) -> bool:
    """Whether nothing is masked; checked in eager mode on a CPU only, where it costs no synchronization."""
    return mask.device.type == "cpu" and not torch.compiler.is_dynamo_compiling() and bool(mask.all())


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Which keys each query sees in one forward pass: the same value for every layer of a stack, but for rotations.

    Attributes:
        q_pos, k_pos: positions of queries and keys, long [B or 1, T] and [B or 1, S]; cached keys come first.
        causal: a query sees no later slot.
        key_mask: [B, S], True or 1 where a slot holds a token; None: everywhere.
        document_ids: [B, T] of queries that are the keys; positions of different documents do not see each other.
        global_mask: [B, T], True or 1 where a position sees all and is seen by all (Longformer); None: the kind's own.
        mask, is_causal: the dense mask made of causality, padding and documents, see `limits`; only for kinds that
            read one.
        rotation: `positions.prepare(q_pos)`, computed once for all layers with the same positions; None: each layer
            computes it.
        memory: the encoder's output [B, S, memory_dim], from which cross-attention makes keys and values.
        cross: the context of the same block's cross-attention.
    """

    q_pos: Tensor
    k_pos: Tensor
    causal: bool = False
    key_mask: Tensor | None = None
    document_ids: Tensor | None = None
    global_mask: Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    rotation: Any = None
    memory: Tensor | None = None
    cross: AttentionContext | None = None

    @staticmethod
    def for_length(length: int, num_keys: int | None = None, *, causal: bool = False) -> AttentionContext:
        """The context of `length` tokens without padding, the last of `num_keys` (default: all), with its mask."""
        end = length if num_keys is None else num_keys
        q_pos, k_pos = (torch.arange(start, end).unsqueeze(0) for start in (end - length, 0))
        return AttentionContext(q_pos, k_pos, causal=causal).with_mask()

    def limits(self) -> tuple[Tensor | None, bool]:
        """(mask, is_causal) of causality, padding and documents; see `make_mask`."""
        return make_mask(
            causal=self.causal,
            num_queries=self.q_pos.shape[1],
            num_keys=self.k_pos.shape[1],
            key_mask=self.key_mask,
            document_ids=self.document_ids,
        )

    def with_mask(self) -> AttentionContext:
        """The same context with its dense mask."""
        mask, is_causal = self.limits()
        return replace(self, mask=mask, is_causal=is_causal)


class AttentionInputs(NamedTuple):
    """Arguments of the attention functions.

    Attributes:
        context: its `mask` and `is_causal` decide which keys are visible; its positions go to `positions`.
        scale: factor of the scores.
        softcap: c of c tanh(score / c), of the scaled scores; None: no cap.
        positions: adds its score to the products, its bias to the scaled scores, its mix to the output.
        dropout: the rate to apply now (0 in evaluation).
        taps: the scores are formed and the weights returned if they want them.
        tap_prefix: of the names of tapped tensors.
        taps_weights: the weights of these scores are those of the tap; False: the caller makes those from them.
        kernels: the C kernels of a model that was prepared for inference; None: only PyTorch's operators.
        x_BTD: the input of the projections that made queries, keys and values.
        for_all_sizes: nothing is chosen by the number of queries and keys.
        project: makes queries, keys and values of vectors [*, D], as it did of x_BTD; None in cross-attention.
        state: the layer's decoding state, which already holds the new keys and values; None outside decoding.
    """

    q_BHTh: Tensor
    k_BKSh: Tensor
    v_BKSv: Tensor
    context: AttentionContext
    scale: float
    positions: Positions | None = None
    dropout: float = 0.0
    taps: TapSink | None = None
    tap_prefix: str = ""
    taps_weights: bool = True
    kernels: Kernels | None = None
    x_BTD: Tensor | None = None
    state: LayerState | None = None
    softcap: float | None = None
    project: Callable[[Tensor], Tensor] | None = None
    for_all_sizes: bool = False

    @property
    def need_weights(self) -> bool:
        return self.taps is not None and self.taps.wants("weights")

    @property
    def replaces_weights(self) -> bool:
        return self.taps is not None and self.taps.replaces("weights")

    @property
    def taps_scores(self) -> bool:
        """Whether a tap wants a tensor from which the weights are computed, or the positions' part of the output."""
        names = ("position_scores", "bias", "scores", "position_values")
        return self.taps is not None and any(self.taps.wants(self.tap_prefix + name) for name in names)

    def tap(self, name: str, value: Tensor) -> Tensor:
        """`value` or what replaces it, collected if it is wanted."""
        return tap(self.taps, self.tap_prefix + name, value)

    @property
    def has_bias(self) -> bool:
        return self.positions is not None and self.positions.has_bias

    @property
    def has_position_scores(self) -> bool:
        """Whether the positions change scores or weights."""
        positions = self.positions
        return positions is not None and (positions.has_bias or positions.has_score or positions.has_mix)

    @property
    def needs_scores(self) -> bool:
        """Whether scores or weights have to be formed explicitly."""
        positions = self.positions
        return (
            self.need_weights
            or self.taps_scores
            or self.for_all_sizes
            or self.softcap is not None
            or (positions is not None and (positions.has_score or positions.has_mix))
            or (self.dropout > 0.0 and self.q_BHTh.device.type == "cpu")
        )

    def bias(self, rows: slice | None = None) -> Tensor:
        """The positions' bias for some queries, or all of them, [B or 1, H, t, S]."""
        assert self.positions is not None
        q_pos = self.context.q_pos
        return self.positions.bias(q_pos if rows is None else q_pos[:, rows], self.context.k_pos)
