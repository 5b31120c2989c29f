"""Sliding-window attention with global tokens (Longformer, arXiv 2004.05150): a query sees its `window` nearest keys.

`window` counts the visible keys beside the query's own: in an encoder half before and half after it, in a decoder all
before it. The reach r is the distance of the farthest one: query i sees keys |i - j| <= r, with r = window / 2 in an
encoder and r = window in a decoder.

With a dilation d the window's keys are d slots apart. Slots of one residue modulo d then see only each other, and are
folded into the batch as separate sequences. Global tokens see all and are seen by all; with `global_projections`
their rows have queries, keys and values from separate matrices, while other queries see them through the ordinary
ones. The global tokens of a causal sequence come first, so their rows do not differ from the others'.

Work and memory are O(window) per query. Short inputs use dense attention, which is faster there.

Shape legend: B batch, T queries, S keys, D d_model, H query heads, K kv heads, h head_dim, v value_dim, R global
tokens, d dilation. Queries are the last T of the S slots when a cache holds earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.block_sparse.flex import attend_flex
from tformer.nn.attention.block_sparse.global_tokens import (
    GlobalTokens,
    first_tokens,
    gather_numbers,
    gather_slots,
    joined,
    marked_tokens,
    put_rows,
    row_inputs,
)
from tformer.nn.attention.block_sparse.kernel import attend_sparse, dense_is_faster, sparse_flops
from tformer.nn.attention.block_sparse.pattern import KeyNumbers, Pattern, band_of
from tformer.nn.attention.context import AttentionContext, AttentionInputs, Weighted
from tformer.nn.attention.core import attend
from tformer.nn.attention.mechanism import BACKWARD_AND_FORWARD, AttentionSizes, Mechanism, ProjectionOptions
from tformer.nn.attention.routes import mix_values
from tformer.nn.linear import Linear
from tformer.nn.options import require, require_positive
from tformer.nn.taps import Tap


@dataclass(frozen=True, slots=True)
class Fold:
    """Folding for a dilation. batch: B; ways: d. Folded row b d + c holds the slots c, c + d, c + 2 d, ... of row b."""

    batch: int
    ways: int

    def heads(self, x_BXSx: Tensor) -> Tensor:
        """[B, X, S, x] -> [B d, X, ceil(S / d), x]"""
        padded = F.pad(x_BXSx, (0, 0, 0, -x_BXSx.shape[2] % self.ways))
        return padded.unflatten(2, (-1, self.ways)).permute(0, 3, 1, 2, 4).flatten(0, 1)

    def back(self, x: Tensor, num_slots: int) -> Tensor:
        """The inverse of `heads`."""
        return x.unflatten(0, (self.batch, self.ways)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :num_slots]

    def slots(self, x_BS: Tensor) -> Tensor:
        """Numbers [B or 1, S] -> [B d, ceil(S / d)]"""
        x_BS = x_BS.expand(self.batch, -1)
        return F.pad(x_BS, (0, -x_BS.shape[1] % self.ways)).unflatten(1, (-1, self.ways)).transpose(1, 2).flatten(0, 1)

    def repeat(self, x_BRx: Tensor) -> Tensor:
        """Tensors that all residues share, [B or 1, *] -> [B d or 1, *]"""
        return x_BRx if x_BRx.shape[0] != self.batch else x_BRx.repeat_interleave(self.ways, dim=0)

    def pattern(self, pattern: Pattern, num_slots: int) -> Pattern:
        """The pattern among `num_slots` folded slots."""
        assert pattern.q_pos is not None
        keys = pattern.keys
        if keys.valid is None and num_slots % self.ways:
            keys = keys._replace(valid=torch.ones(1, num_slots, dtype=torch.bool, device=pattern.band.device))
        return replace(
            pattern,
            start=0,
            keys=keys.map(self.slots),
            shared=None if pattern.shared is None else pattern.shared.map(self.repeat),
            q_pos=self.slots(F.pad(pattern.q_pos, (pattern.start, 0))),
        )


BLOCK = 64  # queries computed together, if `block` is null
SMALL_BLOCK = 32  # the same for windows of less than two blocks: a larger block would read mostly invisible keys


def window_mask(reach: int, dilation: int, q_slots: Tensor, k_slots: Tensor, *, causal: bool) -> Tensor:
    """bool [T, S]: whether the window of a query holds a key, by their slots [T] and [S]."""
    distance = k_slots - q_slots.unsqueeze(1)
    seen = (distance.abs() <= reach * dilation) & (distance % dilation == 0)
    return seen & (distance <= 0) if causal else seen


def global_tokens(options: SlidingWindowOptions, context: AttentionContext) -> GlobalTokens | None:
    """The global tokens of the context, else the first real tokens."""
    if context.global_mask is not None:
        return marked_tokens(context.global_mask, context.key_mask)
    return first_tokens(options.global_tokens, context.key_mask, context.k_pos.shape[1], context.k_pos.device)


def flex_rule(
    reach: int, dilation: int, tokens: GlobalTokens | None, *, start: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The pattern as a function of single (example, query, key), without causality, padding and documents."""

    def sees(example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = key - query - start
        seen = (distance.abs() <= reach * dilation) & (distance % dilation == 0)
        if tokens is None:
            return seen
        row = example if tokens.mask.shape[0] > 1 else torch.zeros_like(example)
        return seen | tokens.mask[row, key] | tokens.mask[row, query + start]

    return sees


class SlidingWindowAttention(Mechanism):
    """The window's keys and the global ones under one softmax. With a soft cap scores are formed for all keys.

    With `global_projections`: global_q Linear D -> H h, global_k D -> K h, global_v D -> K v.
    """

    caps_scores: ClassVar[bool] = True
    options: SlidingWindowOptions

    def __init__(self, options: SlidingWindowOptions, sizes: AttentionSizes) -> None:
        super().__init__(options, sizes)
        self.reach = options.reach(causal=sizes.causal)
        if not sizes.causal and options.window % 2:
            raise ValueError(
                f"window: expected an even number in an encoder (half on each side), found {options.window}"
            )
        self.block = options.block or (BLOCK if self.reach >= BLOCK else SMALL_BLOCK)
        if options.block is not None and self.reach % options.block:
            raise ValueError(f"block: {options.block} does not divide the {self.reach} keys of a side of the window")
        if options.global_projections:
            if sizes.causal:
                raise ValueError("global_projections: only for encoders; causal global tokens see no more than others")
            widths = (sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim,
                      sizes.num_kv_heads * sizes.value_dim)  # fmt: skip
            self.global_q, self.global_k, self.global_v = (
                Linear(sizes.d_model, width, bias=options.qkv_bias) for width in widths
            )

    def forward(self, inputs: AttentionInputs) -> Weighted:
        q_BHTh, k_BKSh, _, context = inputs[:4]
        num_queries, num_keys, options = q_BHTh.shape[2], k_BKSh.shape[2], self.options
        if num_keys > num_queries and context.global_mask is not None:
            raise ValueError("global_attention_mask: not together with a cache of earlier tokens")
        tokens = global_tokens(options, context)
        keys = self.block + 2 * self.reach + (0 if tokens is None else tokens.count)
        has_own_rows, weights = options.global_projections, None
        any_size = inputs.for_all_sizes
        is_step = not any_size and num_queries < num_keys and num_queries <= self.block
        explicit = any_size or inputs.need_weights or inputs.taps_scores or (inputs.softcap is not None and not is_step)
        if explicit or (options.implementation == "auto" and dense_is_faster(num_queries, num_keys, keys)):
            dense = context.with_mask()
            if any_size or options.dilation > 1 or num_keys > self.reach + 1:  # else the window holds everything
                dense = replace(context, mask=self.visible_mask(context), is_causal=False)
            taps_weights = tokens is None or not has_own_rows
            out, weights = attend(inputs._replace(context=dense, taps_weights=taps_weights))
        elif is_step:
            out = self._step(inputs, tokens)
        elif options.implementation == "flex" and q_BHTh.is_cuda:
            out = attend_flex(inputs, flex_rule(self.reach, options.dilation, tokens, start=num_keys - num_queries))
        else:
            out = self._blocks(inputs, tokens)
            # The first tokens of a causal sequence see all earlier tokens anyway.
            has_own_rows = not context.causal or context.global_mask is not None
        if tokens is None or not has_own_rows:
            return out, weights
        # The rows of the global tokens, which see all keys, by separate matrices if there are any.
        chosen = inputs._replace(q_BHTh=gather_slots(q_BHTh, tokens.index), tap_prefix="global_", taps_weights=False)
        if options.global_projections:
            q, k, v = self._projected(inputs, tokens)
            chosen = chosen._replace(q_BHTh=q, k_BKSh=k, v_BKSv=v)
        key_mask = None if context.key_mask is None else context.key_mask.bool()
        chosen = row_inputs(chosen, tokens, key_valid=key_mask, documents=context.document_ids, k_pos=context.k_pos)
        rows, row_weights = attend(chosen)
        if weights is not None and row_weights is not None and inputs.taps is not None:
            weights = put_rows(weights, row_weights, tokens)
            if inputs.replaces_weights:
                weights = inputs.taps.replaced("weights", weights)
                out = mix_values(inputs, weights)
                rows = mix_values(chosen, gather_slots(weights, tokens.index))
        return put_rows(out, rows, tokens), weights

    def flops(self, queries: float, keys: float, *, training: bool = False) -> float:
        options, sizes, length = self.options, self.sizes, round(keys)
        tokens, rows = min(options.global_tokens, length), 0.0
        is_dense = dense_is_faster(length, length, self.block + 2 * self.reach + tokens)
        is_dense = (is_dense and options.implementation == "auto") or options.softcap is not None
        if tokens and (options.global_projections or not (is_dense or sizes.causal)):
            rows = super().flops(tokens, keys, training=training)
        if options.global_projections:
            products = tokens * self.global_q.weight.numel() + length * self.global_k.weight.numel()
            products += length * self.global_v.weight.numel()
            rows += 2.0 * products * (BACKWARD_AND_FORWARD if training else 1) * (tokens > 0)
        if is_dense:
            return rows + super().flops(queries, keys, training=training)
        ways = options.dilation  # as many sequences of every ways-th token, see `Fold`
        each, pattern = -(-length // ways), self._pattern(0, sizes.causal, torch.device("cpu"))
        return rows + ways * sparse_flops(self, pattern, each, each, others=tokens, training=training)

    def taps(self) -> list[Tap]:
        if not self.options.global_projections:
            return []
        meaning = "rows of the global tokens, which see all, by separate matrices"
        return [Tap("global_scores", "B H G S", meaning, ("input",), ("global_q", "global_k", "global_v"))]

    def visible_mask(self, context: AttentionContext) -> Tensor:
        num_queries, num_keys = context.q_pos.shape[1], context.k_pos.shape[1]
        slots = torch.arange(num_keys, device=context.q_pos.device)
        q_slots = slots[num_keys - num_queries :]
        seen = window_mask(self.reach, self.options.dilation, q_slots, slots, causal=False).unsqueeze(0)
        tokens = global_tokens(self.options, context)
        if tokens is not None:
            seen = seen | tokens.mask.unsqueeze(1) | tokens.mask[:, num_keys - num_queries :].unsqueeze(2)
        return seen.unsqueeze(1) & super().visible_mask(context)

    def _step(self, inputs: AttentionInputs, tokens: GlobalTokens | None) -> Tensor:
        """A few new queries behind a cache: they read the slots of their windows, a slice, and the global tokens."""
        context, options = inputs.context, self.options
        num_queries, num_keys = inputs.q_BHTh.shape[2], inputs.k_BKSh.shape[2]
        slots = torch.arange(num_keys, device=inputs.q_BHTh.device)
        q_slots = slots[num_keys - num_queries :]
        reach, low = self.reach * options.dilation, num_keys - num_queries
        step = options.dilation if num_queries == 1 else 1
        low = max(low % step, low - reach)
        read = slice(low, None, step)
        seen = window_mask(self.reach, options.dilation, q_slots, slots[read], causal=True).unsqueeze(0)
        keys, values, k_pos = inputs.k_BKSh[:, :, read], inputs.v_BKSv[:, :, read], context.k_pos[:, read]
        valid = None if context.key_mask is None else context.key_mask[:, read].bool().unsqueeze(1)
        if tokens is not None:
            seen = seen | tokens.mask[:, read].unsqueeze(1) & (slots[read] <= q_slots.unsqueeze(1))
            seen = seen if valid is None else seen & valid
            # A global token outside the slice is read beside it.
            beside = (tokens.index < low) | ((tokens.index - low) % step != 0)
            beside = beside if tokens.valid is None else beside & tokens.valid
            keys = torch.cat([gather_slots(inputs.k_BKSh, tokens.index), keys], dim=2)
            values = torch.cat([gather_slots(inputs.v_BKSv, tokens.index), values], dim=2)
            k_pos = joined(gather_numbers(context.k_pos, tokens.index), k_pos)
            before = beside.unsqueeze(1) & (tokens.index.unsqueeze(1) <= q_slots.unsqueeze(1))
            seen = joined(before, seen)
        elif valid is not None:
            seen = seen & valid
        everything = num_queries == 1 and tokens is None and valid is None
        read_context = AttentionContext(context.q_pos, k_pos, mask=None if everything else seen.unsqueeze(1))
        return attend(inputs._replace(k_BKSh=keys, v_BKSv=values, context=read_context))[0]

    def _blocks(self, inputs: AttentionInputs, tokens: GlobalTokens | None) -> Tensor:
        """Output rows of all queries as local ones, in blocks; the caller replaces the rows of global tokens."""
        context, fold = inputs.context, Fold(inputs.q_BHTh.shape[0], self.options.dilation)
        num_queries, num_keys = inputs.q_BHTh.shape[2], inputs.k_BKSh.shape[2]
        low = max(0, num_keys - num_queries - self.reach * fold.ways)
        start = num_keys - num_queries - low
        pattern = replace(
            self._pattern(start, context.causal, inputs.q_BHTh.device),
            q_pos=context.q_pos,
            keys=KeyNumbers(
                None if context.key_mask is None else context.key_mask.bool(),
                context.document_ids,
                positions=context.k_pos,
            ),
            padded=context.key_mask is not None,
        )
        shared = None
        if tokens is not None:
            shared = gather_slots(inputs.k_BKSh, tokens.index), gather_slots(inputs.v_BKSv, tokens.index)
            slots = torch.arange(num_keys, device=inputs.q_BHTh.device).unsqueeze(0)
            pattern = pattern.with_shared(tokens, slots if context.causal else None)
        pattern = replace(pattern, keys=pattern.keys.map(lambda x: x[:, low:]))  # `start` counts from there
        inputs = inputs._replace(k_BKSh=inputs.k_BKSh[:, :, low:], v_BKSv=inputs.v_BKSv[:, :, low:])
        if fold.ways == 1:
            return attend_sparse(inputs, pattern, shared)
        folded = inputs._replace(
            q_BHTh=fold.heads(F.pad(inputs.q_BHTh, (0, 0, start, 0))),
            k_BKSh=fold.heads(inputs.k_BKSh),
            v_BKSv=fold.heads(inputs.v_BKSv),
        )
        repeated = None if shared is None else (fold.repeat(shared[0]), fold.repeat(shared[1]))
        out = attend_sparse(folded, fold.pattern(pattern, num_keys - low), repeated)
        return fold.back(out, num_keys - low)[:, :, start:]

    def _pattern(self, start: int, causal: bool, device: torch.device) -> Pattern:
        before, after = self.reach, 0 if causal else self.reach
        slots = torch.arange(-before, self.block + after, device=device)
        band = band_of(window_mask(self.reach, 1, slots[before : before + self.block], slots, causal=causal))
        return Pattern(self.block, before, after, band, start)

    def _projected(self, inputs: AttentionInputs, tokens: GlobalTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the global tokens, keys and values of all, by their own matrices; rotated as the others are."""
        sizes, context, positions, x_BTD = self.sizes, inputs.context, inputs.positions, inputs.x_BTD
        assert x_BTD is not None
        q_BRx = self.global_q(gather_slots(x_BTD.unsqueeze(1), tokens.index).squeeze(1))
        q = q_BRx.unflatten(-1, (sizes.num_heads, -1)).transpose(1, 2)
        k, v = (
            matrix(x_BTD).unflatten(-1, (sizes.num_kv_heads, -1)).transpose(1, 2)
            for matrix in (self.global_k, self.global_v)
        )
        if positions is not None and positions.has_rotate:
            q, k = positions.rotate(q, k, gather_numbers(context.q_pos, tokens.index), context.k_pos)
        return q, k, v


@dataclass(frozen=True)
class SlidingWindowOptions(ProjectionOptions):
    """Options of sliding-window attention (Longformer, arXiv 2004.05150)."""

    mechanism: ClassVar[type[Mechanism]] = SlidingWindowAttention

    kind: Literal["sliding_window"] = "sliding_window"
    window: int = 256  # visible keys beside the query's own: encoder half before, half after; decoder all before
    block: int | None = None  # queries computed together; null: chosen. Must divide the keys of a side
    dilation: int = 1  # distance between visible keys
    global_tokens: int = 0  # number of first tokens that see all and are seen by all
    global_projections: bool = False  # queries, keys and values of global tokens have separate matrices
    # blocks: also where dense is faster; flex: FlexAttention on CUDA, elsewhere blocks
    implementation: Literal["auto", "blocks", "flex"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(window=self.window, block=self.block, dilation=self.dilation)
        require(self.global_tokens >= 0, f"global_tokens must be at least 0, found {self.global_tokens}")
        require(not (self.global_projections and self.qk_norm), "global_projections: not defined together with qk_norm")
        require(not (self.fused_only and self.softcap), "implementation: flex has no softcap, expected auto or blocks")

    def reach(self, *, causal: bool) -> int:
        """The distance of the farthest visible key, in steps of the dilation."""
        return self.window if causal else self.window // 2

    @property
    def fused_only(self) -> bool:
        return self.implementation == "flex"
