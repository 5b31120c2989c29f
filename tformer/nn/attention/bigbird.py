"""BigBird's block-sparse attention (arXiv 2007.14062): a window of blocks, global blocks and random blocks.

Blocks are counted from a row's first real token and end with its last one, so that padding changes nothing. A place is
a slot counted from there. Random blocks are a pure function of (seed, layer, block, number of blocks): a hash of these
numbers picks among the candidates, so that the pattern is the same on every device, at every length of a causal
sequence and behind any padding.

Shape legend: B batch, X heads, T queries, S keys, N blocks of queries, r random blocks of each, F slots of the frame,
x head_dim or value_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.block_sparse.kernel import attend_flex, attend_sparse, dense_is_faster, sparse_flops
from tformer.nn.attention.block_sparse.pattern import (
    GlobalTokens,
    Pattern,
    band_of,
    gather_numbers,
    gather_slots,
    joined,
    put_rows,
    row_inputs,
)
from tformer.nn.attention.context import AttentionContext, AttentionInputs, Weighted, all_true_on_cpu
from tformer.nn.attention.core import attend
from tformer.nn.attention.mechanism import Mechanism, ProjectionOptions
from tformer.nn.options import require, require_positive

# Odd 64-bit constants of the splitmix64 generator and of golden-ratio hashing; products wrap around.
STEP = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
POSITIVE = (1 << 63) - 1


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _mixed(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of x, long [*]; at least 0."""
    x = (x ^ ((x >> 30) & (POSITIVE >> 29))) * _signed(FIRST)
    x = (x ^ ((x >> 27) & (POSITIVE >> 26))) * _signed(SECOND)
    return (x ^ ((x >> 31) & (POSITIVE >> 30))) & POSITIVE


def random_blocks(
    blocks: Tensor, num_blocks: Tensor, *, count: int, seed: int, layer: int, side: int, num_global: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Blocks to read, long [B or 1, N, count], and whether each exists, bool.

    blocks: long [B or 1, N], the blocks of queries. num_blocks: long [B or 1, 1], those of the whole sequence. Neither
    the window of `side` blocks around a block's own, nor the `num_global` first (and, unless causal, last) ones are
    drawn, and none twice; where fewer candidates are left, the rest do not exist. Causal: only earlier blocks.
    """
    first = torch.full_like(blocks, num_global)
    if causal:
        end = (blocks - side).clamp(min=num_global)
        skipped_from, skipped = end, torch.zeros_like(blocks)
    else:
        blocks, end = torch.broadcast_tensors(blocks, num_blocks - num_global)
        skipped_from = torch.maximum(blocks - side, first)
        skipped = (torch.minimum(blocks + side + 1, end) - skipped_from).clamp(min=0)
    candidates = (end - first - skipped).clamp(min=0)
    start = _signed((seed * 0x632BE59BD9B4E019 + layer + 1) * STEP)
    ranks: list[Tensor] = []
    for draw in range(count):
        key = _mixed(blocks * _signed(SECOND) + _signed(start + (draw + 1) * FIRST))
        rank = key % (candidates - draw).clamp(min=1)
        for earlier in torch.stack(ranks).sort(dim=0).values if ranks else ():
            rank = rank + (rank >= earlier)  # the rank among all candidates of one among those that are left
        ranks.append(rank)
    if not ranks:
        empty = blocks.unsqueeze(-1)[..., :0]
        return empty, empty.bool()
    chosen = torch.stack(ranks, dim=-1)
    exists = torch.arange(count, device=blocks.device) < candidates.unsqueeze(-1)
    found = chosen + num_global
    found = found + torch.where(found >= skipped_from.unsqueeze(-1), skipped.unsqueeze(-1), 0)
    return found.masked_fill(~exists, 0), exists


@dataclass(frozen=True, slots=True)
class Layout:
    """The options of BigBird in plain numbers, the layer's among them, and the rows of a batch.

    side: blocks of the window before and after a block's own. offset: long [B or 1, 1], the slot of the first real
    token. num_blocks: long [B or 1, 1], blocks up to the last one.
    """

    block: int
    side: int
    num_global: int
    num_random: int
    seed: int
    layer: int
    causal: bool
    offset: Tensor
    num_blocks: Tensor

    def random(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The random blocks of blocks of queries [B or 1, N]: see `random_blocks`."""
        return random_blocks(
            blocks,
            self.num_blocks,
            count=self.num_random,
            seed=self.seed,
            layer=self.layer,
            side=self.side,
            num_global=self.num_global,
            causal=self.causal,
        )

    def is_global(self, blocks: Tensor) -> Tensor:
        """bool, of blocks [B or 1, *]."""
        first = blocks < self.num_global
        if self.causal:
            return first
        return first | ((blocks >= self.num_blocks - self.num_global) & (blocks < self.num_blocks))

    def sees(self, q_places: Tensor, k_places: Tensor) -> Tensor:
        """bool [B or 1, T, S], by places [B or 1, T] and [B or 1, S]: the pattern, and causality."""
        q_blocks, k_blocks = q_places // self.block, k_places // self.block
        seen = (q_blocks.unsqueeze(2) - k_blocks.unsqueeze(1)).abs() <= self.side
        seen = seen | self.is_global(k_blocks).unsqueeze(1)
        if not self.causal:
            seen = seen | self.is_global(q_blocks).unsqueeze(2)
        index, exists = self.random(q_blocks)
        for draw in range(self.num_random):
            seen = seen | ((index[..., draw, None] == k_blocks.unsqueeze(1)) & exists[..., draw, None])
        seen = seen & (q_places >= 0).unsqueeze(2)
        return seen & (k_places.unsqueeze(1) <= q_places.unsqueeze(2)) if self.causal else seen

    def rule(self, total_blocks: int, *, start: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The same for single (example, query, key), without causality; query i is at slot start + i."""
        numbers = torch.arange(total_blocks, device=self.offset.device).unsqueeze(0)
        index, exists = self.random(numbers)
        is_global = self.is_global(numbers)

        def sees(example: Tensor, query: Tensor, key: Tensor) -> Tensor:
            def row(x: Tensor) -> Tensor:
                return example if x.shape[0] > 1 else torch.zeros_like(example)

            offset = self.offset[row(self.offset), 0]
            q_block, k_block = (query + start - offset) // self.block, (key - offset) // self.block
            first = torch.clamp(q_block, min=0)
            seen = (q_block - k_block).abs() <= self.side
            seen = seen | is_global[row(is_global), torch.clamp(k_block, min=0)]
            if not self.causal:
                seen = seen | is_global[row(is_global), first]
            for draw in range(self.num_random):
                there = exists[row(index), first, draw]
                seen = seen | ((index[row(index), first, draw] == k_block) & there)
            return seen & (query + start >= offset)

        return sees

    def global_tokens(self, places: Tensor, num_keys: int) -> GlobalTokens | None:
        """The slots of global blocks in a frame where slots are `places` [1, F]; padding is not excluded."""
        size = self.num_global * self.block
        if size == 0:
            return None
        mask = self.is_global(places // self.block)
        index = places[:, :size]
        if self.causal:
            return GlobalTokens(index, None, mask)
        last = (self.num_blocks - self.num_global) * self.block + torch.arange(size, device=places.device)
        is_first = torch.arange(2 * size, device=places.device)[: index.shape[1] + size] < index.shape[1]
        index = joined(index, last)
        exists = (is_first | (index >= size)) & (index < num_keys)  # a block may be among the first and the last
        return GlobalTokens(index.clamp(0, num_keys - 1), None if all_true_on_cpu(exists) else exists, mask)

    def beside(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Keys outside the windows of the queries between two places, which lie in at most two blocks.

        Returns the slots of the global and the random blocks, long [B or 1, keys], and a bool mask of the same shape,
        False for missing and repeated blocks.
        ends: the first and the last place, [B or 1, 2], or the only one, [B or 1, 1].
        """
        index, counts = self.random(ends // self.block)
        if ends.shape[1] == 2:
            twice = ((index[:, 1, :, None] == index[:, 0, None]) & counts[:, 0, None]).any(-1)
            counts = torch.stack([counts[:, 0], counts[:, 1] & ~twice], dim=1)
        first = torch.arange(self.num_global, device=ends.device).expand(index.shape[0], -1)
        blocks = torch.cat([first, index.flatten(1)], dim=1)
        counts = torch.cat([torch.ones_like(first, dtype=torch.bool), counts.flatten(1)], dim=1)
        places = (blocks.unsqueeze(-1) * self.block + torch.arange(self.block, device=ends.device)).flatten(1)
        return places + self.offset, counts.repeat_interleave(self.block, dim=1)


@dataclass(frozen=True, slots=True)
class Frame:
    """num_slots: F. start: the frame's slot of the first query row. lead: rows of no query before the first query.

    source: long [B, F], the slot that each slot of the frame holds; None: the same one. offset: long [B, 1].
    """

    num_queries: int
    num_keys: int
    num_slots: int
    start: int
    lead: int
    offset: Tensor
    source: Tensor | None

    @staticmethod
    def of(offset: Tensor, key_mask: Tensor | None, num_queries: int, num_keys: int, block: int) -> Frame:
        num_slots, earlier = -(-num_keys // block) * block, num_keys - num_queries
        if key_mask is None or all_true_on_cpu(offset == 0):
            start = earlier // block * block
            return Frame(num_queries, num_keys, num_slots, start, earlier - start, offset, None)
        source = torch.arange(num_slots, device=offset.device) + offset
        return Frame(num_queries, num_keys, num_slots, 0, earlier, offset, source)

    def keys(self, x_BXSx: Tensor) -> Tensor:
        """[B, X, S, x] -> [B, X, F, x]"""
        if self.source is None:
            more = self.num_slots - self.num_keys
            return F.pad(x_BXSx, (0, 0, 0, more)) if more else x_BXSx
        index = self.source.clamp(max=self.num_keys - 1)[:, None, :, None]
        return x_BXSx.gather(2, index.expand(-1, x_BXSx.shape[1], -1, x_BXSx.shape[-1]))

    def queries(self, x_BXTx: Tensor) -> Tensor:
        """[B, X, T, x] -> [B, X, rows from `start` on, x]"""
        padded = F.pad(x_BXTx, (0, 0, self.lead, 0)) if self.lead else x_BXTx
        return padded if self.source is None else self.keys(padded)

    def back(self, x_BXTx: Tensor) -> Tensor:
        """The inverse of `queries`; queries before the first real token get zeros."""
        if self.source is None:
            return x_BXTx[:, :, self.lead :]
        target = torch.arange(self.num_keys - self.num_queries, self.num_keys, device=self.offset.device) - self.offset
        index = target.clamp(min=0)[:, None, :, None]
        found = x_BXTx.gather(2, index.expand(-1, x_BXTx.shape[1], -1, x_BXTx.shape[-1]))
        return found.masked_fill((target < 0)[:, None, :, None], 0.0)

    def key_numbers(self, x_BS: Tensor) -> Tensor:
        """Numbers [B or 1, S] -> [B or 1, F]"""
        if self.source is None:
            return F.pad(x_BS, (0, self.num_slots - self.num_keys))
        return x_BS.expand(self.source.shape[0], -1).gather(1, self.source.clamp(max=self.num_keys - 1))

    def query_numbers(self, x_BT: Tensor) -> Tensor:
        """Numbers [B or 1, T] -> [B or 1, rows from `start` on]"""
        padded = F.pad(x_BT, (self.lead, 0))
        return padded if self.source is None else self.key_numbers(padded)

    def valid(self, key_mask: Tensor | None) -> Tensor | None:
        """bool [B or 1, F], where a slot of the frame holds a token; None: everywhere."""
        if key_mask is None:
            if self.num_slots == self.num_keys:
                return None
            return (torch.arange(self.num_slots, device=self.offset.device) < self.num_keys).unsqueeze(0)
        found = self.key_numbers(key_mask.bool())
        return found if self.source is None else found & (self.source < self.num_keys)


def layout_of(options: BigBirdOptions, context: AttentionContext, *, layer: int) -> Layout:
    """The places of the blocks in one forward pass."""
    num_keys = context.k_pos.shape[1]
    if context.key_mask is None:
        offset = torch.zeros(1, 1, dtype=torch.long, device=context.k_pos.device)
        length = offset + num_keys
    else:
        real = context.key_mask.to(torch.uint8)
        offset = real.argmax(dim=1, keepdim=True)
        length = num_keys - real.flip(1).argmax(dim=1, keepdim=True) - offset
    return Layout(
        block=options.block,
        side=options.window_blocks // 2,
        num_global=options.global_blocks,
        num_random=options.random_blocks,
        seed=options.seed,
        layer=layer,
        causal=context.causal,
        offset=offset,
        num_blocks=-(-length // options.block),
    )


class BigBirdAttention(Mechanism):
    """Blocks around a query's own, global blocks and random ones under one softmax."""

    options: BigBirdOptions

    def forward(self, inputs: AttentionInputs) -> Weighted:
        q_BHTh, k_BKSh, _, context = inputs[:4]
        num_queries, num_keys, options = q_BHTh.shape[2], k_BKSh.shape[2], self.options
        is_short = dense_is_faster(num_queries, num_keys, options.keys_of_block)
        if inputs.need_weights or inputs.taps_scores or (options.implementation == "auto" and is_short):
            return attend(inputs._replace(context=replace(context, mask=self.visible_mask(context), is_causal=False)))
        layout = layout_of(options, context, layer=self.sizes.layer)
        if num_queries < num_keys and num_queries <= options.block:
            return self._step(inputs, layout), None
        if options.implementation == "flex" and q_BHTh.is_cuda:
            rule = layout.rule(-(-num_keys // options.block), start=num_keys - num_queries)
            return attend_flex(inputs, rule), None
        return self._blocks(inputs, layout), None

    def flops(self, queries: float, keys: float, *, training: bool = False) -> float:
        options, causal, length = self.options, self.sizes.causal, round(keys)
        if options.implementation == "auto" and dense_is_faster(length, length, options.keys_of_block):
            return super().flops(queries, keys, training=training)
        slots, side = -(-length // options.block) * options.block, options.window_blocks // 2 * options.block
        pattern = Pattern(options.block, side, 0 if causal else side, torch.empty(0))
        tokens = options.global_blocks * options.block * (1 if causal else 2)
        others = tokens + options.random_blocks * options.block
        rows = 0.0 if causal else super().flops(tokens, slots, training=training)
        return rows + sparse_flops(self, pattern, length, slots, others=others, training=training)

    def visible_mask(self, context: AttentionContext) -> Tensor:
        num_queries, num_keys = context.q_pos.shape[1], context.k_pos.shape[1]
        slots = torch.arange(num_keys, device=context.k_pos.device).unsqueeze(0)
        layout = layout_of(self.options, context, layer=self.sizes.layer)
        places = slots - layout.offset
        seen = layout.sees(places[:, num_keys - num_queries :], places).unsqueeze(1)
        return seen & super().visible_mask(context)

    def _step(self, inputs: AttentionInputs, layout: Layout) -> Tensor:
        """At most a block of new queries behind a cache: they read a slice for their windows, the rest by index."""
        q_BHTh, k_BKSh, v_BKSv, context = inputs[:4]
        num_queries, num_keys = q_BHTh.shape[2], k_BKSh.shape[2]
        start = num_keys - num_queries
        low = max(0, start - (layout.side + 1) * layout.block + 1)
        slots = torch.arange(num_keys, device=q_BHTh.device).unsqueeze(0)
        q_places = slots[:, start:] - layout.offset
        keys, values, k_pos, read = k_BKSh[:, :, low:], v_BKSv[:, :, low:], context.k_pos[:, low:], slots[:, low:]
        counts = None
        if low > 0:
            index, is_beside = layout.beside(q_places[:, :: max(1, num_queries - 1)])
            counts = joined(is_beside & (index < low), torch.ones_like(read, dtype=torch.bool)).unsqueeze(1)
            index = index.clamp(0, num_keys - 1)
            keys = torch.cat([gather_slots(k_BKSh, index), keys], dim=2)
            values = torch.cat([gather_slots(v_BKSv, index), values], dim=2)
            k_pos, read = joined(gather_numbers(context.k_pos, index), k_pos), joined(index, read)
        mask = layout.sees(q_places, read - layout.offset)
        if counts is not None:
            mask = mask & counts
        if context.key_mask is not None:
            mask = mask & gather_numbers(context.key_mask.bool(), read).unsqueeze(1)
        read_context = AttentionContext(context.q_pos, k_pos, mask=mask.unsqueeze(1))
        return attend(inputs._replace(k_BKSh=keys, v_BKSv=values, context=read_context))[0]

    def _blocks(self, inputs: AttentionInputs, layout: Layout) -> Tensor:
        """All queries, block by block, in the frame where every row begins with its first real token."""
        q_BHTh, k_BKSh, v_BKSv, context = inputs[:4]
        num_keys = k_BKSh.shape[2]
        frame = Frame.of(layout.offset, context.key_mask, q_BHTh.shape[2], num_keys, layout.block)
        framed = inputs._replace(q_BHTh=frame.queries(q_BHTh), k_BKSh=frame.keys(k_BKSh), v_BKSv=frame.keys(v_BKSv))
        valid, k_pos = frame.valid(context.key_mask), frame.key_numbers(context.k_pos)
        documents = None if context.document_ids is None else frame.key_numbers(context.document_ids)
        slots = torch.arange(frame.num_slots, device=q_BHTh.device).unsqueeze(0)
        pattern = replace(
            _pattern(layout, frame.start, slots[:, frame.start :: layout.block] // layout.block),
            q_pos=frame.query_numbers(context.q_pos),
            k_pos=k_pos,
            key_valid=valid,
            documents=documents,
            padded=context.key_mask is not None,
        )
        shared = None
        tokens = layout.global_tokens(slots, num_keys)
        if tokens is not None:
            shared = gather_slots(framed.k_BKSh, tokens.index), gather_slots(framed.v_BKSv, tokens.index)
            pattern = pattern.with_shared(tokens, slots if context.causal else None)
        out = attend_sparse(framed, pattern, shared)
        if tokens is not None and not context.causal:
            chosen = framed._replace(q_BHTh=gather_slots(framed.q_BHTh, tokens.index))
            rows, _ = attend(row_inputs(chosen, tokens, key_valid=valid, documents=documents, k_pos=k_pos))
            out = put_rows(out, rows, tokens)
        return frame.back(out)


@dataclass(frozen=True)
class BigBirdOptions(ProjectionOptions):
    """Options of BigBird's block-sparse attention (arXiv 2007.14062)."""

    mechanism: ClassVar[type[Mechanism]] = BigBirdAttention

    kind: Literal["bigbird"] = "bigbird"
    block: int = 64  # positions of a block
    window_blocks: int = 3  # visible blocks around and with a query's own; odd
    global_blocks: int = 1  # number of first and of last blocks that see all and are seen by all (causal: first only)
    random_blocks: int = 3  # further blocks per block of queries, drawn once for every layer
    seed: int = 0  # random seed of the random blocks
    # blocks: also where dense is faster; flex: FlexAttention on CUDA, elsewhere blocks
    implementation: Literal["auto", "blocks", "flex"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(block=self.block, window_blocks=self.window_blocks)
        require(self.window_blocks % 2 == 1, f"window_blocks: expected an odd number, found {self.window_blocks}")
        require(self.global_blocks >= 0, f"global_blocks must be at least 0, found {self.global_blocks}")
        require(self.random_blocks >= 0, f"random_blocks must be at least 0, found {self.random_blocks}")

    @property
    def keys_of_block(self) -> int:
        """Keys that a block of queries reads."""
        return self.block * (self.window_blocks + 2 * self.global_blocks + self.random_blocks)

    @property
    def fused_only(self) -> bool:
        return self.implementation == "flex"

    def summary(self) -> str:
        return f"block {self.block}"


def _pattern(layout: Layout, start: int, blocks: Tensor) -> Pattern:
    """The window and the random blocks of the blocks of queries [1, N], of which the first begins at slot `start`."""
    block, before = layout.block, layout.side * layout.block
    after = 0 if layout.causal else before
    slots = torch.arange(-before, block + after, device=blocks.device)
    seen = slots <= torch.arange(block, device=blocks.device).unsqueeze(1)
    band = band_of(seen if layout.causal else torch.ones_like(seen))
    if layout.num_random == 0:
        return Pattern(block, before, after, band, start)
    random, exists = layout.random(blocks)
    return Pattern(block, before, after, band, start, random=random, random_valid=exists)
