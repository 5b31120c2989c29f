"""What an attention kind is: a way from queries, keys and values to outputs, behind one interface.

`MultiHeadAttention` owns the projections, rotations, caches and taps that every kind shares, and hands the rest to a
`Mechanism`. A new kind is a file beside this one with its options and its mechanism, a member of the union and a row in
the table of `__init__`.

Shape legend: B batch, T queries, S keys, D d_model, H query heads, K kv heads, h head_dim, v value_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from tformer.nn.cache import (
    LayerCache,
    LayerState,
)
from tformer.nn.options import require_positive
from tformer.nn.positions.base import Positions


@dataclass(frozen=True)
class ProjectionOptions:
    """What every kind has: its name, its projections and the scale of its scores."""

    kind: str = ""
    qkv_bias: bool = True
    out_bias: bool = True
    scale: Literal["auto"] | float = "auto"  # auto: 1/sqrt(head_dim); T5 uses 1.0
    qk_norm: bool = False  # RMS-normalise queries and keys per head, without learned gains

    def __post_init__(self) -> None:
        if self.scale != "auto":
            require_positive(scale=self.scale)

    def keys_per_query(self, length: float) -> float:
        """How many keys' worth of work (4 head_dim operations each and head) a query costs in `length` positions."""
        return length


@dataclass(frozen=True)
class AttentionSizes:
    """Where a mechanism stands. `layer` counts from 0; `causal` and `is_cross` say which attention of it this is."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    max_seq_len: int | None = None
    layer: int = 0
    causal: bool = False
    is_cross: bool = False


@dataclass(frozen=True, slots=True)
class Reach:
    """What a dense mask is made of, for mechanisms that never form one.

    Attributes:
        causal: a query sees no later slot. Queries are the last T of the S slots.
        key_mask: [B, S], True or 1 where a slot holds a token; None: everywhere.
        document_ids: [B, T] of queries that are the keys; positions of different documents do not see each other.
        global_mask: [B, T], True or 1 where a position sees all and is seen by all (Longformer); None: the kind's own.
    """

    causal: bool = False
    key_mask: Tensor | None = None
    document_ids: Tensor | None = None
    global_mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a mechanism: everything beside queries, keys and values.

    Attributes:
        x_BTD: what queries, keys and values were projected from.
        q_pos, k_pos: positions, long [B or 1, T] and [B or 1, S].
        scale: factor of the scores. dropout: rate on the weights now (0 outside training).
        mask, is_causal: the dense mask as `masks.make_mask` gives it; only for kinds that read one.
        reach: what it was made of.
        hooks: the position kind, whose bias, score and mix belong to the scores; rotation has been done.
        need_weights: also return the weights [B, H, T, S].
        state: what decoding remembers of this layer, the new slots included; None outside decoding.
    """

    x_BTD: Tensor
    q_pos: Tensor
    k_pos: Tensor
    scale: float
    dropout: float = 0.0
    mask: Tensor | None = None
    is_causal: bool = False
    reach: Reach = Reach()
    hooks: Positions | None = None
    need_weights: bool = False
    state: LayerState | None = None


class Mechanism(nn.Module):
    """Base of all kinds: neutral defaults, no behaviour."""

    reads_dense_mask: ClassVar[bool] = False
    """Whether `Call.mask` is needed; the model makes none when no layer of a stack does."""
    takes_position_scores: ClassVar[bool] = True
    """Whether there are scores that a position kind's bias, score and mix could join."""
    drops_weights: ClassVar[bool] = True
    """Whether there are weights that attention dropout could drop."""

    def forward(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, H, T, v] and, when asked for, the weights [B, H, T, S] in fp32 before dropout."""
        raise NotImplementedError

    def new_state(
        self, sizes: AttentionSizes, *, batch_size: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> LayerState:
        """What decoding remembers of one layer: keys and values, unless a kind has something smaller."""
        return LayerCache(
            batch_size=batch_size,
            num_kv_heads=sizes.num_kv_heads,
            capacity=capacity,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_dim,
            device=device,
            dtype=dtype,
        )

    def reset_parameters(self, std: float) -> None:
        """Draw the kind's own parameters and tables; `init.initialise` calls it. `std`: that of matrices."""

    def share_with(self, first: Mechanism) -> None:
        """Take over what all layers of a stack have in common from the first of the kind. ValueError: it cannot."""


class MechanismMaker(Protocol):
    """A row of the table: options and sizes in, mechanism out. ValueError when they do not suit each other."""

    def __call__(self, options: Any, sizes: AttentionSizes) -> Mechanism: ...


def hook_functions(hooks: Positions | None, q_pos: Tensor, k_pos: Tensor) -> dict[str, Callable[..., Tensor]]:
    """The hooks that a position kind has, bound to the positions, as `core.attend` takes them."""
    if hooks is None:
        return {}
    functions: dict[str, Callable[..., Tensor]] = {}
    if hooks.has_bias:
        functions["bias_fn"] = lambda rows: hooks.bias(q_pos[:, rows], k_pos)
    if hooks.has_score:
        functions["score_fn"] = lambda q, rows: hooks.score(q, q_pos[:, rows], k_pos)
    if hooks.has_mix:
        functions["mix_fn"] = lambda weights, rows: hooks.mix(weights, q_pos[:, rows], k_pos[:, : weights.shape[-1]])
    return functions
