"""Sliding-window attention with global tokens (Longformer, arXiv 2004.05150): query i sees |i - j| <= window / 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.block_sparse.explicit import Places
from tformer.nn.attention.block_sparse.kernel import (
    attend_flex,
    attend_sparse,
    check_flex,
    dense_pays,
)
from tformer.nn.attention.block_sparse.pattern import (
    GlobalTokens,
    Pattern,
    attend_rows,
    band_of,
    first_tokens,
    gather_places,
    gather_slots,
    joined,
    marked_tokens,
    put_rows,
)
from tformer.nn.attention.context import make_mask
from tformer.nn.attention.core import attend
from tformer.nn.attention.mechanism import AttentionSizes, Call, Mechanism, ProjectionOptions, Reach, hook_functions
from tformer.nn.linear import Linear
from tformer.nn.options import require, require_positive


@dataclass(frozen=True, slots=True)
class Fold:
    """batch: B; ways: d. Row b d + c of what is folded holds the slots c, c + d, c + 2 d, ... of row b."""

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
        """What every residue reads, [B or 1, *] -> [B d or 1, *]"""
        return x_BRx if x_BRx.shape[0] != self.batch else x_BRx.repeat_interleave(self.ways, dim=0)

    def places(self, places: Places, lead: int) -> Places:
        """Positions; the queries are the last ones of the slots, behind `lead` others."""
        return Places(
            self.slots(F.pad(places.q_pos, (lead, 0))),
            self.slots(places.k_pos),
            None if places.shared_pos is None else self.repeat(places.shared_pos),
        )

    def pattern(self, pattern: Pattern, num_slots: int) -> Pattern:
        """The pattern among `num_slots` folded slots."""
        valid = pattern.key_valid
        if valid is None and num_slots % self.ways:
            valid = torch.ones(1, num_slots, dtype=torch.bool, device=pattern.band.device)

        def slots(x: Tensor | None) -> Tensor | None:
            return None if x is None else self.slots(x)

        def shared(x: Tensor | None) -> Tensor | None:
            return None if x is None else self.repeat(x)

        return replace(
            pattern,
            start=0,
            key_valid=slots(valid),
            documents=slots(pattern.documents),
            slots=slots(pattern.slots),
            shared_slots=shared(pattern.shared_slots),
            shared_valid=shared(pattern.shared_valid),
            shared_documents=shared(pattern.shared_documents),
        )


BLOCK = 64  # queries handled together, where the options leave it open
SMALL_BLOCK = 32  # the same for windows of less than two blocks: a larger one would read mostly keys out of sight


@dataclass(frozen=True)
class SlidingWindowOptions(ProjectionOptions):
    """Options of sliding-window attention."""

    kind: Literal["sliding_window"] = "sliding_window"
    window: int = (
        256  # keys in sight in all, the query's own not counted: half before, half after (causal: before only)
    )
    block: int | None = None  # queries handled together; null: chosen. Must divide window / 2
    dilation: int = 1  # gap between the keys in sight
    global_tokens: int = 0  # so many first tokens see all and are seen by all
    global_projections: bool = False  # queries, keys and values of global tokens have matrices of their own
    # blocks: also where dense is quicker; flex: FlexAttention on CUDA, elsewhere blocks
    implementation: Literal["auto", "blocks", "flex"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(window=self.window, block=self.block, dilation=self.dilation)
        require(self.window % 2 == 0, f"window: expected an even number, found {self.window}")
        half = self.window // 2
        require(
            self.block is None or half % self.block == 0,
            f"block: {self.block} does not divide half of window, {half}",
        )
        require(self.global_tokens >= 0, f"global_tokens must be at least 0, found {self.global_tokens}")
        require(not (self.global_projections and self.qk_norm), "global_projections: not defined together with qk_norm")

    def keys_per_query(self, length: float) -> float:
        return min(length, self.window + 1.0 + 2.0 * self.global_tokens)


def window_mask(options: SlidingWindowOptions, q_slots: Tensor, k_slots: Tensor, *, causal: bool) -> Tensor:
    """bool [T, S]: whether the window of a query holds a key, by their slots [T] and [S]."""
    distance = k_slots - q_slots.unsqueeze(1)
    seen = (distance.abs() <= options.window // 2 * options.dilation) & (distance % options.dilation == 0)
    return seen & (distance <= 0) if causal else seen


def allowed(
    options: SlidingWindowOptions, reach: Reach, num_queries: int, num_keys: int, device: torch.device | None = None
) -> Tensor:
    """The pattern as a dense mask, bool [B or 1, 1, T, S]: for short inputs, for pictures, and the tests' oracle."""
    k_slots = torch.arange(num_keys, device=device)
    q_slots = k_slots[num_keys - num_queries :]
    seen = window_mask(options, q_slots, k_slots, causal=False).unsqueeze(0)
    tokens = global_tokens(options, reach, num_keys, k_slots.device)
    if tokens is not None:
        seen = seen | tokens.mask.unsqueeze(1) | tokens.mask[:, num_keys - num_queries :].unsqueeze(2)
    limits, is_causal = make_mask(
        causal=reach.causal,
        num_queries=num_queries,
        num_keys=num_keys,
        key_mask=reach.key_mask,
        document_ids=reach.document_ids,
    )
    if is_causal or (reach.causal and limits is None):
        seen = seen & (k_slots <= q_slots.unsqueeze(1))
    seen = seen.unsqueeze(1)
    return seen if limits is None else seen & limits


def global_tokens(
    options: SlidingWindowOptions, reach: Reach, num_keys: int, device: torch.device
) -> GlobalTokens | None:
    """Those that the call names, else the first real tokens."""
    if reach.global_mask is not None:
        return marked_tokens(reach.global_mask, reach.key_mask)
    return first_tokens(options.global_tokens, reach.key_mask, num_keys, device)


def flex_rule(
    options: SlidingWindowOptions, tokens: GlobalTokens | None, *, start: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The pattern element by element, without the limits that every kind has; query i stands at slot start + i."""
    reach = options.window // 2 * options.dilation

    def sees(example: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = key - query - start
        seen = (distance.abs() <= reach) & (distance % options.dilation == 0)
        if tokens is None:
            return seen
        row = example if tokens.mask.shape[0] > 1 else torch.zeros_like(example)
        return seen | tokens.mask[row, key] | tokens.mask[row, query + start]

    return sees


class SlidingWindowAttention(Mechanism):
    """The window's keys and the global ones under one softmax.

    With `global_projections`: global_q Linear D -> H h, global_k D -> K h, global_v D -> K v.
    """

    def __init__(self, options: SlidingWindowOptions, sizes: AttentionSizes) -> None:
        super().__init__()
        self.options, self.sizes = options, sizes
        half = options.window // 2
        self.block = options.block or (BLOCK if half >= BLOCK else SMALL_BLOCK)
        if options.global_projections:
            if sizes.causal:
                raise ValueError("global_projections: only for encoders; causal global tokens see no more than others")
            widths = (sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim,
                      sizes.num_kv_heads * sizes.value_dim)  # fmt: skip
            self.global_q, self.global_k, self.global_v = (
                Linear(sizes.d_model, width, bias=options.qkv_bias) for width in widths
            )

    def forward(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        num_queries, num_keys = q_BHTh.shape[2], k_BKSh.shape[2]
        if num_keys > num_queries and call.reach.global_mask is not None:
            raise ValueError("global_attention_mask: not together with a cache of earlier tokens")
        options = self.options
        tokens = global_tokens(options, call.reach, num_keys, q_BHTh.device)
        keys = self.block + options.window + (0 if tokens is None else tokens.count)
        has_own_rows, weights = options.global_projections, None
        if call.need_weights or (options.implementation == "auto" and dense_pays(num_queries, num_keys, keys)):
            out, weights = self._dense(q_BHTh, k_BKSh, v_BKSv, call)
        elif num_queries < num_keys and num_queries <= self.block:
            out = self._step(q_BHTh, k_BKSh, v_BKSv, call, tokens)
        elif options.implementation == "flex" and q_BHTh.is_cuda:
            out = self._flex(q_BHTh, k_BKSh, v_BKSv, call, tokens)
        else:
            out = self._blocks(q_BHTh, k_BKSh, v_BKSv, call, tokens)
            # The first tokens of a causal sequence see all that stands before them as it is.
            has_own_rows = not call.reach.causal or call.reach.global_mask is not None
        if tokens is None or not has_own_rows:
            return out, weights
        rows, row_weights = self._global_rows(q_BHTh, k_BKSh, v_BKSv, call, tokens)
        if weights is not None and row_weights is not None:
            weights = put_rows(weights, row_weights, tokens)
        return put_rows(out, rows, tokens), weights

    def _dense(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        num_queries, num_keys, reach = q_BHTh.shape[2], k_BKSh.shape[2], call.reach
        is_causal = False
        if self.options.dilation == 1 and num_keys <= self.options.window // 2 + 1:  # the window holds everything
            mask, is_causal = make_mask(
                causal=reach.causal,
                num_queries=num_queries,
                num_keys=num_keys,
                key_mask=reach.key_mask,
                document_ids=reach.document_ids,
            )
        else:
            mask = allowed(self.options, reach, num_queries, num_keys, q_BHTh.device)
        return attend(
            q_BHTh,
            k_BKSh,
            v_BKSv,
            mask=mask,
            is_causal=is_causal,
            scale=call.scale,
            **hook_functions(call.hooks, call.q_pos, call.k_pos),
            dropout=call.dropout,
            need_weights=call.need_weights,
        )

    def _step(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call, tokens: GlobalTokens | None) -> Tensor:
        """A few new queries behind a cache: they read the slots of their windows, a slice, and the global tokens."""
        num_queries, num_keys, options = q_BHTh.shape[2], k_BKSh.shape[2], self.options
        slots = torch.arange(num_keys, device=q_BHTh.device)
        q_slots = slots[num_keys - num_queries :]
        reach, low = options.window // 2 * options.dilation, num_keys - num_queries
        step = options.dilation if num_queries == 1 else 1
        low = max(low % step, low - reach)
        read = slice(low, None, step)
        seen = window_mask(options, q_slots, slots[read], causal=True).unsqueeze(0)
        keys, values, k_pos = k_BKSh[:, :, read], v_BKSv[:, :, read], call.k_pos[:, read]
        valid = None if call.reach.key_mask is None else call.reach.key_mask[:, read].bool().unsqueeze(1)
        if tokens is not None:
            seen = seen | tokens.mask[:, read].unsqueeze(1) & (slots[read] <= q_slots.unsqueeze(1))
            seen = seen if valid is None else seen & valid
            # A global token outside the slice is read beside it.
            beside = (tokens.index < low) | ((tokens.index - low) % step != 0)
            beside = beside if tokens.valid is None else beside & tokens.valid
            keys = torch.cat([gather_slots(k_BKSh, tokens.index), keys], dim=2)
            values = torch.cat([gather_slots(v_BKSv, tokens.index), values], dim=2)
            k_pos = joined(gather_places(call.k_pos, tokens.index), k_pos)
            before = beside.unsqueeze(1) & (tokens.index.unsqueeze(1) <= q_slots.unsqueeze(1))
            seen = joined(before, seen)
        elif valid is not None:
            seen = seen & valid
        everything = num_queries == 1 and tokens is None and valid is None
        out, _ = attend(
            q_BHTh,
            keys,
            values,
            mask=None if everything else seen.unsqueeze(1),
            is_causal=False,
            scale=call.scale,
            **hook_functions(call.hooks, call.q_pos, k_pos),
            dropout=call.dropout,
            need_weights=False,
        )
        return out

    def _blocks(
        self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call, tokens: GlobalTokens | None
    ) -> Tensor:
        """The rows of local queries, in blocks. Those of global tokens are not yet their own."""
        num_queries, num_keys, half = q_BHTh.shape[2], k_BKSh.shape[2], self.options.window // 2
        reach, fold = call.reach, Fold(q_BHTh.shape[0], self.options.dilation)
        low = max(0, num_keys - num_queries - half * fold.ways)
        start = num_keys - num_queries - low
        pattern = replace(
            self._pattern(start, reach.causal, q_BHTh.device),
            key_valid=None if reach.key_mask is None else reach.key_mask.bool(),
            documents=reach.document_ids,
            padded=reach.key_mask is not None,
        )
        places, shared = Places(call.q_pos, call.k_pos[:, low:]), None
        if tokens is not None:
            shared = gather_slots(k_BKSh, tokens.index), gather_slots(v_BKSv, tokens.index)
            places = replace(places, shared_pos=gather_places(call.k_pos, tokens.index))
            slots = torch.arange(num_keys, device=q_BHTh.device).unsqueeze(0)
            pattern = pattern.with_shared(tokens, slots if reach.causal else None)
        pattern = pattern.from_slot(low)
        keys, values = k_BKSh[:, :, low:], v_BKSv[:, :, low:]
        if fold.ways == 1:
            return attend_sparse(q_BHTh, keys, values, pattern, shared=shared, call=call, places=places)
        out = attend_sparse(
            fold.heads(F.pad(q_BHTh, (0, 0, start, 0))),
            fold.heads(keys),
            fold.heads(values),
            fold.pattern(pattern, num_keys - low),
            shared=None if shared is None else (fold.repeat(shared[0]), fold.repeat(shared[1])),
            call=call,
            places=fold.places(places, start),
        )
        return fold.back(out, num_keys - low)[:, :, start:]

    def _pattern(self, start: int, causal: bool, device: torch.device) -> Pattern:
        half = self.options.window // 2
        after = 0 if causal else half
        slots = torch.arange(-half, self.block + after, device=device)
        local = replace(self.options, dilation=1, block=None)
        band = band_of(window_mask(local, slots[half : half + self.block], slots, causal=causal))
        return Pattern(self.block, half, after, band, start)

    def _flex(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call, tokens: GlobalTokens | None) -> Tensor:
        check_flex(call)
        rule = flex_rule(self.options, tokens, start=k_BKSh.shape[2] - q_BHTh.shape[2])
        return attend_flex(q_BHTh, k_BKSh, v_BKSv, rule, reach=call.reach, scale=call.scale)

    def _global_rows(
        self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call, tokens: GlobalTokens
    ) -> tuple[Tensor, Tensor | None]:
        key_mask = None if call.reach.key_mask is None else call.reach.key_mask.bool()
        q_BHRh = gather_slots(q_BHTh, tokens.index)
        if self.options.global_projections:
            q_BHRh, k_BKSh, v_BKSv = self._projected(call, tokens)
        return attend_rows(q_BHRh, k_BKSh, v_BKSv, tokens, call, key_valid=key_mask, documents=call.reach.document_ids)

    def _projected(self, call: Call, tokens: GlobalTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the global tokens, keys and values of all, by their own matrices; turned as the others are."""
        sizes, x_B1TD = self.sizes, call.x_BTD.unsqueeze(1)
        q_BRx = self.global_q(gather_slots(x_B1TD, tokens.index).squeeze(1))
        q = q_BRx.unflatten(-1, (sizes.num_heads, -1)).transpose(1, 2)
        k, v = (
            matrix(call.x_BTD).unflatten(-1, (sizes.num_kv_heads, -1)).transpose(1, 2)
            for matrix in (self.global_k, self.global_v)
        )
        if call.hooks is not None and call.hooks.has_rotate:
            q, k = call.hooks.rotate(q, k, gather_places(call.q_pos, tokens.index), call.k_pos)
        return q, k, v
