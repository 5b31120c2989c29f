"""Base classes of attention kinds: their options, their sizes, and the step from queries, keys and values to outputs.

`MultiHeadAttention` owns the projections, rotations and caches that every kind shares, and hands the rest to a
`Mechanism`. A new kind is a file beside this one with its mechanism and its options, and its options in the union of
`__init__`.

Shape legend: B batch, T queries, S keys, D d_model, H query heads, K kv heads, h head_dim, v value_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tformer.kernels.functions import Kernels
from tformer.nn.attention.context import AttentionContext, AttentionInputs, Weighted, causal_mask
from tformer.nn.cache import LayerCache, LayerState
from tformer.nn.options import require, require_positive
from tformer.nn.taps import Tap

BACKWARD_AND_FORWARD = 3
"""The backward pass costs two forward passes: one for the gradient of each factor of a product."""


@dataclass(frozen=True)
class ProjectionOptions:
    """Options that every kind of attention has: its name, its projections and the scale of its scores.

    A kind's own options are a subclass, which also states `mechanism` (its class).
    """

    mechanism: ClassVar[type[Mechanism]]

    kind: str = ""
    qkv_bias: bool = True  # biases of the query, key and value projections
    out_bias: bool = True  # bias of the output projection
    scale: Literal["auto"] | float = "auto"  # factor of the scores; auto: 1/sqrt(head_dim); T5 uses 1.0
    # RMS-normalize queries and keys per head. true: without gains; learned: with a gain for each coordinate (Qwen3);
    # unit_offset: with gains 1 + w (Gemma 3); width: all heads side by side as one vector, with gains (OLMo 2).
    # LayerNorm of each head: layernorm: with a gain and bias that all share (Phi); groupnorm: own gains (StableLM 2)
    qk_norm: bool | Literal["learned", "unit_offset", "width", "layernorm", "groupnorm"] = False
    qk_norm_eps: float = 1.0e-6  # added to the mean square of a head in qk_norm
    softcap: float | None = None  # c * tanh(score / c), before biases and masks (Gemma 2, arXiv 2408.00118)

    def __post_init__(self) -> None:
        if self.scale != "auto":
            require_positive(scale=self.scale)
        require_positive(qk_norm_eps=self.qk_norm_eps, softcap=self.softcap)
        require(
            self.softcap is None or self.mechanism.caps_scores,
            f"softcap: {self.kind} attention forms no scores that could be capped, found {self.softcap}",
        )

    def saved_values(self, *, queries: int, keys: int, values: int, itemsize: int, max_seq_len: int) -> float:
        """Numbers per token that the backward pass keeps beside Q, K, V and the output."""
        return 0.0

    @property
    def fused_only(self) -> bool:
        """True if this implementation cannot use attention dropout or positions that change scores."""
        return False


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a mechanism, its layer (from 0), and whether it is causal or cross-attention."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    max_seq_len: int | None = None
    layer: int = 0
    causal: bool = False
    is_cross: bool = False


class StateBytes(NamedTuple):
    """Bytes of one sequence's decoding state in one layer: for each token, and whatever the length."""

    per_token: int
    constant: int


class Mechanism(nn.Module):
    """Base class of attention kinds. The class attributes are the facts that other modules read about a kind.

    Attributes:
        options, sizes: what it was built from.
        scale: factor of the scores.
        dropout: probability of dropping a weight while training; `MultiHeadAttention` sets it.
        for_all_sizes: one traced graph serves all lengths, so that nothing may be chosen by them; `to_onnx` sets it.
    """

    causal: ClassVar[bool] = True
    """Whether there is a causal mode, which decoders need."""
    cross: ClassVar[bool] = False
    """Whether queries and keys may belong to two sequences; beside other kinds, cross-attention is full."""
    one_document: ClassVar[bool] = False
    """Whether all positions of a row are mixed, so that packed documents cannot be hidden from each other."""
    fixed_length: ClassVar[bool] = False
    """Whether inputs longer than `max_seq_len` are impossible."""
    signed_weights: ClassVar[bool] = False
    """Whether the returned weights are effective ones, which may be negative and need not sum to one."""
    traces_lengths: ClassVar[bool] = True
    """Whether one traced graph serves all lengths, with `for_all_sizes`."""
    random_buffers: ClassVar[tuple[str, ...]] = ()
    """Names of buffers that are drawn at random: a mean of several has no meaning."""
    reads_dense_mask: ClassVar[bool] = False
    """Whether the dense mask is needed; a stack makes none if no layer reads it."""
    is_plain: ClassVar[bool] = False
    """Whether it is softmax(q k^T scale) v under the dense mask and nothing else: a step may be one kernel."""
    reads_input: ClassVar[bool] = True
    """Whether it reads the input of the projections, `AttentionInputs.x_BTD`."""
    forms_scores: ClassVar[bool] = False
    """Whether scores are always formed explicitly, from `head_dim` numbers for each query and key."""
    takes_position_scores: ClassVar[bool] = True
    """Whether there are scores to which positions can add a bias or terms."""
    caps_scores: ClassVar[bool] = False
    """Whether the scores may have a soft cap."""
    drops_weights: ClassVar[bool] = True
    """Whether there are weights that attention dropout could drop."""
    projects_keys: ClassVar[bool] = False
    """Whether the scores are those of projected keys, not of positions."""
    score_formula: ClassVar[str] = "Q·Kᵀ"
    """The unscaled score of a query and a key."""
    weights_meaning: ClassVar[str] = "softmax over keys: how much each query takes of each value"
    """What the returned weights are."""

    def __init__(self, options: ProjectionOptions, sizes: AttentionSizes) -> None:
        super().__init__()
        self.options, self.sizes = options, sizes
        self.dropout, self.for_all_sizes = 0.0, False
        self.kernels: Kernels | None = None  # set by `prepare_inference`
        self.scale = sizes.head_dim**-0.5 if options.scale == "auto" else options.scale

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_state = cls.new_state is not Mechanism.new_state
        assert not own_state or cls.state_bytes is not Mechanism.state_bytes, f"{cls.__name__} needs state_bytes"

    @property
    def kind(self) -> str:
        """Name of the kind in recipes."""
        return self.options.kind

    def forward(self, inputs: AttentionInputs) -> Weighted:
        """Outputs [B, H, T, v] and, if the taps request them, the weights [B, H, T, S] in fp32 before dropout.

        `inputs` hold this mechanism's scale and kernels, and the dropout to apply now.
        """
        raise NotImplementedError

    def visible_mask(self, context: AttentionContext) -> Tensor:
        """The keys that each query may see, bool [B or 1, 1, T, S]."""
        num_queries, num_keys, device = context.q_pos.shape[1], context.k_pos.shape[1], context.q_pos.device
        seen = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
        if context.causal:
            seen = seen & causal_mask(num_queries, num_keys, device)
        limits, _ = context.limits()
        return seen if limits is None else seen & limits

    def flops(self, queries: float, keys: float, *, training: bool = False) -> float:
        """Operations of the matrix products for one example, projections not included: forward, or with backward."""
        return self.flops_per_score * queries * keys * (BACKWARD_AND_FORWARD if training else 1)

    @property
    def flops_per_score(self) -> float:
        """Forward operations for a query and a key in all heads: the score, and adding the value."""
        return 2.0 * self.sizes.num_heads * (self.sizes.head_dim + self.sizes.value_dim)

    def new_state(
        self, *, batch_size: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> LayerState:
        """Empty decoding state of one layer: keys and values, unless a kind has something smaller."""
        return LayerCache(
            batch_size=batch_size,
            num_kv_heads=self.sizes.num_kv_heads,
            capacity=capacity,
            head_dim=self.sizes.head_dim,
            value_dim=self.sizes.value_dim,
            device=device,
            dtype=dtype,
        )

    def state_bytes(self, dtype: torch.dtype) -> StateBytes:
        """Size of `new_state`. A kind that overrides one overrides both."""
        sizes = self.sizes
        return StateBytes(sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim) * dtype.itemsize, 0)

    def taps(self) -> list[Tap]:
        """Inner tensors that only this kind has. Their parameters are relative to the mechanism."""
        return []

    def reset_parameters(self, std: float) -> None:
        """Draw the kind's own parameters and tables; `std`: of matrices. `init.initialize` calls it."""

    def share_with(self, first: Mechanism) -> None:
        """Share parameters with the first layer of the kind in a stack. ValueError if that is impossible."""
