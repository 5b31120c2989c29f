"""BigBird's block-sparse attention (arXiv 2007.14062): a window of blocks, global blocks and random blocks.

`bigbird_blocks` says which blocks a query sees, `bigbird_frame` moves the rows of a batch so that their blocks begin at
the same slot. Three ways compute the same: dense attention under the mask of the blocks (short inputs), blocks of
queries with the keys that they read, and single steps behind a cache.

Shape legend: B batch, X heads, T queries, S keys, N blocks of queries, F slots of the frame.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tformer.nn.attention.bigbird_blocks import Blocks
from tformer.nn.attention.bigbird_frame import Frame
from tformer.nn.attention.block_sparse.flex import attend_flex
from tformer.nn.attention.block_sparse.global_tokens import (
    GlobalTokens,
    gather_numbers,
    gather_slots,
    joined,
    put_rows,
    row_inputs,
)
from tformer.nn.attention.block_sparse.kernel import attend_sparse, dense_is_faster, sparse_flops
from tformer.nn.attention.block_sparse.pattern import KeyNumbers, Pattern, RandomBlocks, band_of
from tformer.nn.attention.context import AttentionContext, AttentionInputs, Weighted, all_true_on_cpu
from tformer.nn.attention.core import attend
from tformer.nn.attention.mechanism import AttentionSizes, Mechanism, ProjectionOptions
from tformer.nn.options import require, require_positive


class BigBirdAttention(Mechanism):
    """Blocks around a query's own, global blocks and random ones under one softmax."""

    options: BigBirdOptions

    def __init__(self, options: BigBirdOptions, sizes: AttentionSizes) -> None:
        super().__init__(options, sizes)
        if options.dense_up_to and sizes.causal:
            raise ValueError(f"dense_up_to: found {options.dense_up_to}, a decoder's text grows token by token: 0 only")

    def forward(self, inputs: AttentionInputs) -> Weighted:
        q_BHTh, k_BKSh, _, context = inputs[:4]
        num_queries, num_keys, options = q_BHTh.shape[2], k_BKSh.shape[2], self.options
        if num_keys <= options.dense_up_to:
            return attend(inputs._replace(context=context.with_mask()))
        is_short = dense_is_faster(num_queries, num_keys, options.keys_of_block)
        explicit = inputs.for_all_sizes or inputs.need_weights or inputs.taps_scores
        if explicit or (options.implementation == "auto" and is_short):
            return attend(inputs._replace(context=replace(context, mask=self.visible_mask(context), is_causal=False)))
        blocks = self.blocks(context)
        if num_queries < num_keys and num_queries <= options.block:
            return self._step(inputs, blocks), None
        if options.implementation == "flex" and q_BHTh.is_cuda:
            rule = blocks.rule(-(-num_keys // options.block), start=num_keys - num_queries)
            return attend_flex(inputs, rule), None
        return self._by_blocks(inputs, blocks), None

    def flops(self, queries: float, keys: float, *, training: bool = False) -> float:
        options, causal, length = self.options, self.sizes.causal, round(keys)
        is_dense = options.implementation == "auto" and dense_is_faster(length, length, options.keys_of_block)
        if is_dense or length <= options.dense_up_to:
            return super().flops(queries, keys, training=training)
        slots, side = -(-length // options.block) * options.block, options.window_blocks // 2 * options.block
        pattern = Pattern(options.block, side, 0 if causal else side, torch.empty(0))
        tokens = options.global_blocks * options.block * (1 if causal else 2)
        others = tokens + options.random_blocks * options.block
        rows = 0.0 if causal else super().flops(tokens, slots, training=training)
        return rows + sparse_flops(self, pattern, length, slots, others=others, training=training)

    def visible_mask(self, context: AttentionContext) -> Tensor:
        num_queries, num_keys = context.q_pos.shape[1], context.k_pos.shape[1]
        if num_keys <= self.options.dense_up_to:
            return super().visible_mask(context)
        slots = torch.arange(num_keys, device=context.k_pos.device).unsqueeze(0)
        blocks = self.blocks(context)
        places = slots - blocks.offset
        seen = blocks.mask(places[:, num_keys - num_queries :], places).unsqueeze(1)
        return seen & super().visible_mask(context)

    def blocks(self, context: AttentionContext) -> Blocks:
        """The blocks of one forward pass."""
        options, num_keys = self.options, context.k_pos.shape[1]
        if context.key_mask is None:
            offset = torch.zeros(1, 1, dtype=torch.long, device=context.k_pos.device)
            length = offset + num_keys
        else:
            real = context.key_mask.to(torch.uint8)
            offset = real.argmax(dim=1, keepdim=True)
            length = num_keys - real.flip(1).argmax(dim=1, keepdim=True) - offset
        return Blocks(
            size=options.block,
            side=options.window_blocks // 2,
            num_global=options.global_blocks,
            num_random=options.random_blocks,
            seed=options.seed,
            layer=self.sizes.layer,
            causal=context.causal,
            offset=offset,
            count=-(-length // options.block),
        )

    def _step(self, inputs: AttentionInputs, blocks: Blocks) -> Tensor:
        """At most a block of new queries behind a cache: they read a slice for their windows, the rest by index."""
        q_BHTh, k_BKSh, v_BKSv, context = inputs[:4]
        num_queries, num_keys = q_BHTh.shape[2], k_BKSh.shape[2]
        start = num_keys - num_queries
        low = max(0, start - (blocks.side + 1) * blocks.size + 1)
        slots = torch.arange(num_keys, device=q_BHTh.device).unsqueeze(0)
        q_places = slots[:, start:] - blocks.offset
        keys, values, k_pos, read = k_BKSh[:, :, low:], v_BKSv[:, :, low:], context.k_pos[:, low:], slots[:, low:]
        counts = None
        if low > 0:
            index, is_beside = blocks.beside(q_places[:, :: max(1, num_queries - 1)])
            counts = joined(is_beside & (index < low), torch.ones_like(read, dtype=torch.bool)).unsqueeze(1)
            index = index.clamp(0, num_keys - 1)
            keys = torch.cat([gather_slots(k_BKSh, index), keys], dim=2)
            values = torch.cat([gather_slots(v_BKSv, index), values], dim=2)
            k_pos, read = joined(gather_numbers(context.k_pos, index), k_pos), joined(index, read)
        mask = blocks.mask(q_places, read - blocks.offset)
        if counts is not None:
            mask = mask & counts
        if context.key_mask is not None:
            mask = mask & gather_numbers(context.key_mask.bool(), read).unsqueeze(1)
        read_context = AttentionContext(context.q_pos, k_pos, mask=mask.unsqueeze(1))
        return attend(inputs._replace(k_BKSh=keys, v_BKSv=values, context=read_context))[0]

    def _by_blocks(self, inputs: AttentionInputs, blocks: Blocks) -> Tensor:
        """All queries, block by block, in the frame where every row begins with its first real token."""
        q_BHTh, k_BKSh, v_BKSv, context = inputs[:4]
        num_keys = k_BKSh.shape[2]
        frame = Frame.of(blocks.offset, context.key_mask, q_BHTh.shape[2], num_keys, blocks.size)
        framed = inputs._replace(q_BHTh=frame.queries(q_BHTh), k_BKSh=frame.keys(k_BKSh), v_BKSv=frame.keys(v_BKSv))
        valid, k_pos = frame.valid(context.key_mask), frame.key_numbers(context.k_pos)
        documents = None if context.document_ids is None else frame.key_numbers(context.document_ids)
        slots = torch.arange(frame.num_slots, device=q_BHTh.device).unsqueeze(0)
        pattern = replace(
            _pattern(blocks, frame.start, slots[:, frame.start :: blocks.size] // blocks.size),
            q_pos=frame.query_numbers(context.q_pos),
            keys=KeyNumbers(valid, documents, positions=k_pos),
            padded=context.key_mask is not None,
        )
        shared = None
        tokens = _global_tokens(blocks, slots, num_keys)
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
    dense_up_to: int = 0  # batches of at most this many positions have full attention; encoders only
    # blocks: also where dense is faster; flex: FlexAttention on CUDA, elsewhere blocks
    implementation: Literal["auto", "blocks", "flex"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(block=self.block, window_blocks=self.window_blocks)
        require(self.window_blocks % 2 == 1, f"window_blocks: expected an odd number, found {self.window_blocks}")
        require(self.global_blocks >= 0, f"global_blocks must be at least 0, found {self.global_blocks}")
        require(self.random_blocks >= 0, f"random_blocks must be at least 0, found {self.random_blocks}")
        require(self.dense_up_to >= 0, f"dense_up_to must be at least 0, found {self.dense_up_to}")

    @property
    def keys_of_block(self) -> int:
        """Keys that a block of queries reads."""
        return self.block * (self.window_blocks + 2 * self.global_blocks + self.random_blocks)

    @property
    def fused_only(self) -> bool:
        return self.implementation == "flex"


def _pattern(blocks: Blocks, start: int, of_queries: Tensor) -> Pattern:
    """Window and random blocks for query blocks [1, N]. The first query block begins at slot `start`."""
    size, before = blocks.size, blocks.side * blocks.size
    after = 0 if blocks.causal else before
    slots = torch.arange(-before, size + after, device=of_queries.device)
    seen = slots <= torch.arange(size, device=of_queries.device).unsqueeze(1)
    band = band_of(seen if blocks.causal else torch.ones_like(seen))
    if blocks.num_random == 0:
        return Pattern(size, before, after, band, start)
    return Pattern(size, before, after, band, start, random=RandomBlocks(*blocks.random(of_queries)))


def _global_tokens(blocks: Blocks, places: Tensor, num_keys: int) -> GlobalTokens | None:
    """The slots of global blocks in a frame where slots are `places` [1, F]; padding is not excluded."""
    size = blocks.num_global * blocks.size
    if size == 0:
        return None
    mask = blocks.is_global(places // blocks.size, blocks.count)
    index = places[:, :size]
    if blocks.causal:
        return GlobalTokens(index, None, mask)
    last = (blocks.count - blocks.num_global) * blocks.size + torch.arange(size, device=places.device)
    is_first = torch.arange(2 * size, device=places.device)[: index.shape[1] + size] < index.shape[1]
    index = joined(index, last)
    exists = (is_first | (index >= size)) & (index < num_keys)  # a block may be among the first and the last
    return GlobalTokens(index.clamp(0, num_keys - 1), None if all_true_on_cpu(exists) else exists, mask)
