"""Multi-head attention (arXiv 1706.03762, 3.2.2) with grouped key/value heads (arXiv 2305.13245).

Projections are fused: one product makes queries, keys and values of self-attention; cross-attention takes its queries
from `x` (the decoder) and its keys and values from `memory` (the encoder's output). The head and value sizes are free:
neither need equal the other, nor their product with the heads d_model. The `Mechanism` of the
attention kind computes outputs from queries, keys and values.

A cross-attention cache may have one row for several rows of `x`, the beams of a sentence. Their keys are the same, so
they become further queries of one row: [S b, T, D] -> [S, b T, D], and back at the end.

Shape legend: B batch, T queries, S keys, D d_model, H query heads, K kv heads, h head_dim, v value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tformer.nn.attention import AttentionSizes, FullAttentionOptions, ProjectionOptions
from tformer.nn.attention.context import AttentionContext, TapSink, tap
from tformer.nn.cache import CrossCache, LayerCache, LayerState
from tformer.nn.fixed_cache import FixedLayer
from tformer.nn.layer_norm import RMSNorm
from tformer.nn.linear import Linear
from tformer.nn.positions.base import Positions
from tformer.nn.products import AttentionStep
from tformer.nn.structured_dropout import DropHead


class MultiHeadAttention(nn.Module):
    """Self-attention, or cross-attention when `memory_dim` is given.

    qkv: Linear D -> (H + K) h + K v, rows ordered queries, keys, values, each head by head; cross-attention has
    q: D -> H h and kv: memory_dim -> K (h + v) instead. out: H v -> D. q_norm, k_norm: RMSNorm of each head's h
    numbers, one for all heads, where the options want it.
    """

    def __init__(
        self,
        d_model: int,
        options: ProjectionOptions = FullAttentionOptions(),
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        memory_dim: int | None = None,
        dropout: float = 0.0,
        drophead: DropHead | None = None,
        max_seq_len: int | None = None,
        layer: int = 0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if head_dim is None and d_model % num_heads:
            raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}; give head_dim")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not divisible by num_kv_heads {self.num_kv_heads}")
        self.head_dim = head_dim or d_model // num_heads
        self.value_dim = value_dim or self.head_dim
        self.qk_norm = options.qk_norm
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, eps=options.qk_norm_eps, learned=options.qk_norm == "learned")
            if options.qk_norm
            else None
            for _ in range(2)
        )
        self.drophead = DropHead(0.0) if drophead is None else drophead
        self.is_cross = memory_dim is not None
        self._sizes = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.value_dim,
        )
        if memory_dim is None:
            self.qkv = Linear(d_model, sum(self._sizes), bias=options.qkv_bias)
        else:
            self.q = Linear(d_model, self._sizes[0], bias=options.qkv_bias)
            self.kv = Linear(memory_dim, sum(self._sizes[1:]), bias=options.qkv_bias)
        self.out = Linear(self.num_heads * self.value_dim, d_model, bias=options.out_bias)
        self.sizes = AttentionSizes(
            d_model=d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            max_seq_len=max_seq_len,
            layer=layer,
            causal=causal,
            is_cross=self.is_cross,
        )
        self.mechanism = options.mechanism(options, self.sizes)
        self.mechanism.dropout = dropout

    def forward(
        self,
        x_BTD: Tensor,
        context: AttentionContext,
        *,
        positions: Positions | None = None,
        cache: LayerState | FixedLayer | CrossCache | None = None,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
        taps: TapSink | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D], of norm(x) and plus `residual` where these are given.

        context: its memory [B, S, memory_dim] is read by cross-attention, until a CrossCache holds its keys and values.
            With fewer rows in a CrossCache than in x, its mask has the cache's rows and is the same for all queries.
        positions: of self-attention; cross-attention has none.
        taps: this attention's scope, see `tap_names`.
        """
        beams = 1
        if self.is_cross:
            assert cache is None or isinstance(cache, CrossCache), "cross-attention takes a CrossCache"
            beams = _rows_per_sentence(x_BTD, cache)
            if beams > 1:
                x_BTD = x_BTD.unflatten(0, (-1, beams)).flatten(1, 2)
                residual = None if residual is None else residual.unflatten(0, (-1, beams)).flatten(1, 2)
            q, k, v = self._project_cross(x_BTD, context.memory, cache, norm, taps)
        else:
            if norm is not None and self.mechanism.reads_input:
                x_BTD, norm = norm(x_BTD), None
            qkv_BTx = tap(taps, "qkv", self.qkv(x_BTD, norm=norm))
            own = cache if taps is None and isinstance(cache, LayerCache) else None
            if own is not None and (step := self._kernel_step(qkv_BTx, positions, own)):
                keys, values, length = own.extend()
                joined_BTx = step(qkv_BTx, keys, values, length=length, mask=context.mask, origins_BS=own.origins_BC)
                return self.out(joined_BTx, residual=residual)
            q, k, v = self._split_self(qkv_BTx, context, positions)
            if isinstance(cache, LayerCache | FixedLayer):
                k, v = cache.append(k, v)
                q = q.to(k.dtype)  # a cache may be kept in more bits: see `cache.fastest_dtype`
        if taps is not None:
            for name, tensor in (("queries", q), ("keys", k), ("values", v)):
                taps.put(name, tensor)
        state = None if isinstance(cache, CrossCache | FixedLayer) else cache
        out_BHTv, weights = self.mechanism(q, k, v, context, x_BTD=x_BTD, positions=positions, state=state, taps=taps)
        if self.training and self.drophead.rate > 0.0:
            out_BHTv = self.drophead(out_BHTv)
        if taps is not None and weights is not None:
            if beams > 1:
                weights = weights.unflatten(2, (beams, -1)).transpose(1, 2).flatten(0, 1)
            taps.put("weights", weights)
        tap(taps, "heads", out_BHTv)
        joined_BTx = tap(taps, "joined", out_BHTv.transpose(1, 2).flatten(2).to(x_BTD.dtype))
        out_BTD = tap(taps, "projection", self.out(joined_BTx, residual=residual))
        return out_BTD if beams == 1 else out_BTD.unflatten(1, (beams, -1)).flatten(0, 1)

    def tap_names(self, positions: Positions) -> list[str]:
        """Names of the inner tensors; those of scores exist only beside `weights`."""
        of_positions = {
            "position_scores": positions.has_score,
            "bias": positions.has_bias,
            "position_values": positions.has_mix,
        }
        return [
            *(("q", "kv") if self.is_cross else ("qkv",)),
            *("queries", "keys", "values"),
            *self.mechanism.taps(),
            *(name for name, exists in of_positions.items() if exists and not self.is_cross),
            *(("scores",) if self.mechanism.drops_weights else ()),
            *("weights", "heads", "joined", "projection"),
        ]

    def _split_heads(self, x_BTx: Tensor, heads: int) -> Tensor:
        """[B, T, heads * size] -> [B, heads, T, size], a view."""
        batch, length, width = x_BTx.shape
        return x_BTx.view(batch, length, heads, width // heads).transpose(1, 2)

    def _kernel_step(self, qkv_BTx: Tensor, positions: Positions | None, cache: LayerCache) -> AttentionStep | None:
        """The kernel for one new position of each row, where nothing comes between projection and scores, or None."""
        kernels = self.mechanism.kernels
        if kernels is None or qkv_BTx.shape[1] != 1:
            return None
        turned = positions is not None and positions.acts_in_attention
        if turned or self.qk_norm or not self.mechanism.is_plain or qkv_BTx.dtype != cache.keys.dtype:
            return None
        if qkv_BTx.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return None
        if cache.kernel_step is None:
            cache.kernel_step = kernels.attention_step(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                value_dim=self.value_dim,
                scale=self.mechanism.scale,
            )
        return cache.kernel_step

    def _split_self(
        self, qkv_BTx: Tensor, context: AttentionContext, positions: Positions | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BTx, k_BTx, v_BTx = qkv_BTx.split_with_sizes(self._sizes, dim=-1)
        q = _normalised(self.q_norm, self._split_heads(q_BTx, self.num_heads))
        k = _normalised(self.k_norm, self._split_heads(k_BTx, self.num_kv_heads))
        if positions is not None and positions.has_rotate:
            q, k = positions.rotate(q, k, context.q_pos, context.q_pos, context.rotation)
        return q, k, self._split_heads(v_BTx, self.num_kv_heads)

    def _project_cross(
        self,
        x_BTD: Tensor,
        memory: Tensor | None,
        cache: CrossCache | None,
        norm: nn.Module | None,
        taps: TapSink | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = _normalised(self.q_norm, self._split_heads(tap(taps, "q", self.q(x_BTD, norm=norm)), self.num_heads))
        if cache is not None and cache.filled:
            return (q, *cache.read())
        assert memory is not None, "cross-attention needs the encoder's output, or a cache that holds it"
        k_BSx, v_BSx = tap(taps, "kv", self.kv(memory)).split_with_sizes(self._sizes[1:], dim=-1)
        k = _normalised(self.k_norm, self._split_heads(k_BSx, self.num_kv_heads))
        v = self._split_heads(v_BSx, self.num_kv_heads)
        if cache is not None:
            cache.fill(k, v)
        return q, k, v


def _normalised(norm: RMSNorm | None, x_BHTh: Tensor) -> Tensor:
    """Each head's numbers after the norm, computed in memory order [B, T, H, h], so that no copy is made."""
    return x_BHTh if norm is None else norm(x_BHTh.transpose(1, 2)).transpose(1, 2)


def _rows_per_sentence(x_BTD: Tensor, cache: CrossCache | None) -> int:
    """How many rows of `x` share a row of the cache: beams."""
    if cache is None or not cache.filled:
        return 1
    assert x_BTD.shape[0] % cache.batch_size == 0, "the cache belongs to other rows"
    return x_BTD.shape[0] // cache.batch_size
