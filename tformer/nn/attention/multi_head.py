"""Multi-head attention (arXiv 1706.03762, 3.2.2) with grouped key/value heads (arXiv 2305.13245).

Projections are fused: one product makes queries, keys and values of self-attention; cross-attention takes its queries
from `x` (the decoder) and its keys and values from `memory` (the encoder's output). The head and value sizes are free:
neither need equal the other, nor their product with the heads d_model. The `Mechanism` of the
attention kind computes outputs from queries, keys and values.

A cross-attention cache may have one row for several rows of `x`, the beams of a sentence. Their keys are the same, so
they become further queries of one row: [S b, T, D] -> [S, b T, D], and back at the end. With taps each row has its own
keys instead.

Shape legend: B batch, T queries, S keys, D d_model, H query heads, K kv heads, h head_dim, v value_dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tformer.kernels.functions import AttentionStep
from tformer.nn.attention import AttentionSizes, FullAttentionOptions, ProjectionOptions
from tformer.nn.attention.context import AttentionContext, AttentionInputs
from tformer.nn.cache import CrossCache, LayerCache, LayerState
from tformer.nn.fixed_cache import FixedLayer
from tformer.nn.layer_norm import LayerNorm, Norm, RMSNorm
from tformer.nn.linear import Linear
from tformer.nn.norm import GroupNorm
from tformer.nn.positions.base import Positions
from tformer.nn.structured_dropout import DropHead
from tformer.nn.taps import Tap, TapSink, tap


class MultiHeadAttention(nn.Module):
    """Self-attention, or cross-attention when `memory_dim` is given.

    qkv: Linear D -> (H + K) h + K v, rows ordered queries, keys, values, each head by head; cross-attention has
    q: D -> H h and kv: memory_dim -> K (h + v) instead. out: H v -> D. q_norm, k_norm: a norm of each head's h
    numbers, one for all heads, or of the H h and K h numbers of all heads, where the options want it.
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
            _head_norm(options, self.head_dim, heads) if options.qk_norm else None
            for heads in (self.num_heads, self.num_kv_heads)
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
        taps: this attention's scope.
        """
        if self.is_cross:
            assert cache is None or isinstance(cache, CrossCache), "cross-attention takes a CrossCache"
            return self._forward_cross(x_BTD, context, cache, norm, residual, taps)
        if norm is not None and self.mechanism.reads_input:
            x_BTD, norm = norm(x_BTD), None
        qkv_BTx = tap(taps, "qkv", self.qkv(x_BTD, norm=norm))
        if taps is None and isinstance(cache, LayerCache) and (step := self._kernel_step(qkv_BTx, positions, cache)):
            # The kernel writes the new slot into the storage, and reads the slots of rows that moved by their origins.
            keys, values, length = cache.extend()
            rows = {"origins_BS": cache.origins_BC, "lengths_B": cache.lengths_B}
            mask = context.mask if cache.lengths_B is None else None
            joined_BTx = step(qkv_BTx, keys, values, length=length, mask=mask, **rows)
            return self.out(joined_BTx, residual=residual)
        q_BTx, k_BTx, v_BTx = qkv_BTx.split_with_sizes(self._sizes, dim=-1)
        q = self._heads(self.q_norm, q_BTx, self.num_heads)
        k = self._heads(self.k_norm, k_BTx, self.num_kv_heads)
        if positions is not None and positions.has_rotate:
            q, k = positions.rotate(q, k, context.q_pos, context.q_pos, context.rotation)
        v, state = self._split_heads(v_BTx, self.num_kv_heads), None
        if isinstance(cache, LayerCache | FixedLayer):
            k, v = cache.append(k, v)
            q = q.to(k.dtype)  # a cache may be kept in more bits: see `cache.fastest_dtype`
        if not isinstance(cache, CrossCache | FixedLayer):
            state = cache
        return self._attend(q, k, v, x_BTD, context, residual, taps, positions=positions, state=state)

    def _forward_cross(
        self,
        x_BTD: Tensor,
        context: AttentionContext,
        cache: CrossCache | None,
        norm: nn.Module | None,
        residual: Tensor | None,
        taps: TapSink | None,
    ) -> Tensor:
        rows = 1  # of x for each row of the cache: the beams of a sentence
        if cache is not None and cache.filled:
            assert x_BTD.shape[0] % cache.batch_size == 0, "the cache belongs to other rows"
            rows = x_BTD.shape[0] // cache.batch_size
        beams = rows if taps is None else 1  # as further queries
        if beams > 1:
            x_BTD = x_BTD.unflatten(0, (-1, beams)).flatten(1, 2)
            residual = None if residual is None else residual.unflatten(0, (-1, beams)).flatten(1, 2)
        q = self._heads(self.q_norm, tap(taps, "q", self.q(x_BTD, norm=norm)), self.num_heads)
        if cache is not None and cache.filled:
            k, v = cache.read()
        else:
            assert context.memory is not None, "cross-attention needs the encoder's output, or a cache that holds it"
            k_BSx, v_BSx = tap(taps, "kv", self.kv(context.memory)).split_with_sizes(self._sizes[1:], dim=-1)
            k = self._heads(self.k_norm, k_BSx, self.num_kv_heads)
            v = self._split_heads(v_BSx, self.num_kv_heads)
            if cache is not None:
                cache.fill(k, v)
        if rows > beams:
            k, v = k.repeat_interleave(rows, dim=0), v.repeat_interleave(rows, dim=0)
            if context.mask is not None:
                context = replace(context, mask=context.mask.repeat_interleave(rows, dim=0))
        out_BTD = self._attend(q, k, v, x_BTD, context, residual, taps)
        return out_BTD if beams == 1 else out_BTD.unflatten(1, (beams, -1)).flatten(0, 1)

    def _attend(
        self,
        q_BHTh: Tensor,
        k_BKSh: Tensor,
        v_BKSv: Tensor,
        x_BTD: Tensor,
        context: AttentionContext,
        residual: Tensor | None,
        taps: TapSink | None,
        *,
        positions: Positions | None = None,
        state: LayerState | None = None,
    ) -> Tensor:
        """[B, T, D]: the mechanism and the output projection, from queries, keys and values of all slots."""
        q, k, v = tap(taps, "queries", q_BHTh), tap(taps, "keys", k_BKSh), tap(taps, "values", v_BKSv)
        mechanism = self.mechanism
        inputs = AttentionInputs(
            q,
            k,
            v,
            context,
            mechanism.scale,
            positions,
            mechanism.dropout if self.training else 0.0,
            taps,
            kernels=mechanism.kernels,
            x_BTD=x_BTD,
            state=state,
            softcap=mechanism.options.softcap,
            for_all_sizes=mechanism.for_all_sizes,
            project=None if self.is_cross else self.qkv,
        )
        out_BHTv, weights = mechanism(inputs)
        if self.training and self.drophead.rate > 0.0:
            out_BHTv = self.drophead(out_BHTv)
        if taps is not None and weights is not None:
            taps.keep("weights", weights)
        out_BHTv = tap(taps, "heads", out_BHTv)
        joined_BTx = tap(taps, "joined", out_BHTv.transpose(1, 2).flatten(2).to(x_BTD.dtype))
        return tap(taps, "projection", self.out(joined_BTx, residual=residual))

    def taps(self, positions: Positions | None) -> list[Tap]:
        """Inner tensors; positions: of self-attention."""
        sizes, mechanism, drops = self.sizes, self.mechanism, self.mechanism.drops_weights
        k = "H" if sizes.num_kv_heads == sizes.num_heads else "K"
        v = "h" if sizes.value_dim == sizes.head_dim else "v"
        qkv, kv = ("3Hh", "2Hh") if (k, v) == ("H", "h") else (f"Hh+{k}h+{k}{v}", f"{k}h+{k}{v}")
        own = [
            own._replace(
                letters=own.letters.replace("K", k).replace("v", v),
                parameters=tuple(f"mechanism.{name}" for name in own.parameters),
            )
            for own in mechanism.taps()
        ]
        # Parameters of the kind that none of its tensors names.
        named = {name for each in own for name in each.parameters}
        children = [*mechanism.named_children(), *mechanism.named_parameters(recurse=False)]
        rest = tuple(f"mechanism.{name}" for name, _ in children if f"mechanism.{name}" not in named)
        turned = ["turned by position"] if positions is not None and positions.has_rotate else []
        steps = ", then ".join(["normalized"] * bool(self.qk_norm) + turned)
        each = f"of each head, {steps}" if steps else "of each head"
        kind = "" if positions is None else positions.kind
        scale = {self.head_dim**-0.5: "/√h", 1.0: ""}.get(mechanism.scale, f" × {mechanism.scale:.3g}")
        key, columns = ("projected key", "r") if mechanism.projects_keys else ("key", "S")
        later = ", later keys masked" if sizes.causal else ""
        capped = "" if mechanism.options.softcap is None else f", capped at ±{mechanism.options.softcap:g} by tanh"
        fit = f"{mechanism.score_formula}{scale}: how well each query fits each {key}{capped}{later}"
        made_of = ("queries", "keys", "position_scores", "bias")
        beside = tuple(each.name for each in own if each.replaces is None)
        mixed_of = ("weights", "values", "position_values", *beside)
        products = [
            Tap("q", "B T Hh", "from the decoder's stream", parameters=("q",), title="Q product"),
            Tap("kv", f"B S {kv}", "from the encoder's output", ("memory",), ("kv",), title="KV product"),
        ]
        if not self.is_cross:
            products = [Tap("qkv", f"B T {qkv}", "Q, K and V side by side", parameters=("qkv",), title="QKV product")]
        declared = [
            *products,
            Tap("queries", "B H T h", f"queries {each}", ("q", "qkv"), ("q_norm",), title="Q"),
            Tap("keys", f"B {k} S h", f"keys {each}", ("kv", "qkv"), ("k_norm",), title="K"),
            Tap("values", f"B {k} S {v}", "values of each head", ("kv", "qkv"), title="V"),
            *own,
        ]
        if positions is not None and positions.has_score:
            meaning = f"{kind}: added to QK"
            declared.append(Tap("position_scores", "B H T S", meaning, ("queries",), ("positions.keys",)))
        if positions is not None and positions.has_bias:
            declared.append(Tap("bias", "1 H T S", f"{kind}: added to the scores", (), ("positions",)))
        if drops:
            declared.append(Tap("scores", f"B H T {columns}", fit, made_of, rest))
        if positions is not None and positions.has_mix:
            meaning = f"{kind}: added to the heads"
            declared.append(Tap("position_values", f"B H T {v}", meaning, ("weights",), ("positions.values",)))
        return [
            *declared,
            Tap(
                "weights",
                "B H T S",
                mechanism.weights_meaning,
                ("scores",) if drops else ("queries", "keys"),
                () if drops else rest,
                dropout=mechanism.dropout if drops else 0.0,
            ),
            Tap("heads", f"B H T {v}", "weights·V: weighted sums of values, per head", mixed_of,
                dropout=self.drophead.rate),
            Tap("joined", f"B T H{v}", "the heads side by side"),
            Tap("projection", "B T D", "mixed, at the model's width", parameters=("out",)),
        ]  # fmt: skip

    def _heads(self, norm: Norm | None, x_BTx: Tensor, heads: int) -> Tensor:
        """[B, T, heads * size] -> [B, heads, T, size], normalized: in memory order [B, T, H, h], without a copy."""
        if self.qk_norm in ("width", "groupnorm") and norm is not None:
            x_BTx, norm = norm(x_BTx), None
        x_BHTh = self._split_heads(x_BTx, heads)
        return x_BHTh if norm is None else norm(x_BHTh.transpose(1, 2)).transpose(1, 2)

    def _split_heads(self, x_BTx: Tensor, heads: int) -> Tensor:
        """[B, T, heads * size] -> [B, heads, T, size], a view."""
        batch, length, width = x_BTx.shape
        return x_BTx.view(batch, length, heads, width // heads).transpose(1, 2)

    def _kernel_step(self, qkv_BTx: Tensor, positions: Positions | None, cache: LayerCache) -> AttentionStep | None:
        """The kernel for one new position of each row; None where a step comes between projection and scores."""
        kernels = self.mechanism.kernels
        if kernels is None or qkv_BTx.shape[1] != 1:
            return None
        turned = positions is not None and positions.acts_in_attention
        changed = turned or self.qk_norm or self.mechanism.options.softcap is not None
        if changed or not self.mechanism.is_plain or qkv_BTx.dtype != cache.keys.dtype:
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


def _head_norm(options: ProjectionOptions, size: int, heads: int) -> Norm:
    """The norm of queries or keys of some heads of `size` numbers."""
    kind, eps = options.qk_norm, options.qk_norm_eps
    if kind == "layernorm":
        return LayerNorm(size, eps=eps)
    if kind == "groupnorm":
        return GroupNorm(size * heads, groups=heads, eps=eps, bias=False)
    width = size * (heads if kind == "width" else 1)
    return RMSNorm(width, eps=eps, learned=kind is not True, unit_offset=kind == "unit_offset")
