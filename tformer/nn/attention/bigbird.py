"""BigBird (arXiv 2007.14062): a window of blocks, global blocks and random blocks, under one softmax.

The sequence is cut into blocks. A query sees the blocks around its own, the first and the last ones, which see all in
turn, and a few more that are drawn once for all; where it is causal, of these only what stands before it, and only the
first blocks are global. Blocks are counted from the first real token and end with the last one: padding changes
nothing. A key that belongs to several of the groups counts once.

Work and memory are O(block) per query. Short inputs take the dense way, which is quicker there.

Shape legend: B batch, T queries, S keys, H query heads, K kv heads, h head_dim, v value_dim, N blocks of queries,
r random blocks of each. Queries are the last T of the S slots when a cache holds earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tformer.nn.attention.block_sparse import attend_sparse, dense_pays
from tformer.nn.attention.block_sparse_explicit import Places
from tformer.nn.attention.block_sparse_flex import attend_flex, check_flex
from tformer.nn.attention.block_sparse_frame import Frame
from tformer.nn.attention.block_sparse_globals import attend_rows, gather_places, gather_slots, joined, put_rows
from tformer.nn.attention.block_sparse_layout import Layout
from tformer.nn.attention.block_sparse_pattern import Pattern, band_of
from tformer.nn.attention.core import attend
from tformer.nn.attention.masks import make_mask
from tformer.nn.attention.mechanism import AttentionSizes, Call, Mechanism, ProjectionOptions, Reach, hook_functions
from tformer.nn.options import require, require_positive


@dataclass(frozen=True)
class BigBirdOptions(ProjectionOptions):
    """Options of BigBird's block-sparse attention."""

    kind: Literal["bigbird"] = "bigbird"
    block: int = 64  # positions of a block
    window_blocks: int = 3  # blocks in sight around a query's own; odd
    global_blocks: int = 1  # so many first and so many last blocks see all and are seen by all (causal: first only)
    random_blocks: int = 3  # further blocks per block of queries, drawn once for every layer
    seed: int = 0  # of that draw
    # blocks: also where dense is quicker; flex: FlexAttention on CUDA, elsewhere blocks
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

    def keys_per_query(self, length: float) -> float:
        return min(length, self.keys_of_block + 2.0 * self.global_blocks * self.block)


def layout_of(options: BigBirdOptions, reach: Reach, num_keys: int, device: torch.device, *, layer: int = 0) -> Layout:
    """Where the blocks of a call stand."""
    if reach.key_mask is None:
        offset = torch.zeros(1, 1, dtype=torch.long, device=device)
        length = offset + num_keys
    else:
        real = reach.key_mask.to(torch.uint8)
        offset = real.argmax(dim=1, keepdim=True)
        length = num_keys - real.flip(1).argmax(dim=1, keepdim=True) - offset
    return Layout(
        block=options.block,
        side=options.window_blocks // 2,
        num_global=options.global_blocks,
        num_random=options.random_blocks,
        seed=options.seed,
        layer=layer,
        causal=reach.causal,
        offset=offset,
        num_blocks=-(-length // options.block),
    )


def allowed(
    options: BigBirdOptions,
    reach: Reach,
    num_queries: int,
    num_keys: int,
    device: torch.device | None = None,
    *,
    layer: int = 0,
) -> Tensor:
    """The pattern as a dense mask, bool [B or 1, 1, T, S]: for short inputs, for pictures, and the tests' oracle."""
    slots = torch.arange(num_keys, device=device).unsqueeze(0)
    layout = layout_of(options, reach, num_keys, slots.device, layer=layer)
    places = slots - layout.offset
    seen = layout.sees(places[:, num_keys - num_queries :], places).unsqueeze(1)
    limits, _ = make_mask(
        causal=False,
        num_queries=num_queries,
        num_keys=num_keys,
        key_mask=reach.key_mask,
        document_ids=reach.document_ids,
    )
    return seen if limits is None else seen & limits


class BigBirdAttention(Mechanism):
    """Blocks around a query's own, global blocks and random ones under one softmax."""

    def __init__(self, options: BigBirdOptions, sizes: AttentionSizes) -> None:
        super().__init__()
        self.options, self.layer = options, sizes.layer

    def forward(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        num_queries, num_keys, options = q_BHTh.shape[2], k_BKSh.shape[2], self.options
        keys = options.keys_of_block
        if call.need_weights or (options.implementation == "auto" and dense_pays(num_queries, num_keys, keys)):
            return attend(
                q_BHTh,
                k_BKSh,
                v_BKSv,
                mask=allowed(options, call.reach, num_queries, num_keys, q_BHTh.device, layer=self.layer),
                is_causal=False,
                scale=call.scale,
                **hook_functions(call.hooks, call.q_pos, call.k_pos),
                dropout=call.dropout,
                need_weights=call.need_weights,
            )
        layout = layout_of(options, call.reach, num_keys, q_BHTh.device, layer=self.layer)
        if num_queries < num_keys and num_queries <= options.block:
            return self._step(q_BHTh, k_BKSh, v_BKSv, call, layout), None
        if options.implementation == "flex" and q_BHTh.is_cuda:
            check_flex(call)
            rule = layout.rule(-(-num_keys // options.block), start=num_keys - num_queries)
            return attend_flex(q_BHTh, k_BKSh, v_BKSv, rule, reach=call.reach, scale=call.scale), None
        return self._blocks(q_BHTh, k_BKSh, v_BKSv, call, layout), None

    def _step(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call, layout: Layout) -> Tensor:
        """At most a block of new queries behind a cache: they read a slice for their windows, the rest by index."""
        num_queries, num_keys = q_BHTh.shape[2], k_BKSh.shape[2]
        start = num_keys - num_queries
        low = max(0, start - (layout.side + 1) * layout.block + 1)
        slots = torch.arange(num_keys, device=q_BHTh.device).unsqueeze(0)
        q_places = slots[:, start:] - layout.offset
        keys, values, k_pos, read = k_BKSh[:, :, low:], v_BKSv[:, :, low:], call.k_pos[:, low:], slots[:, low:]
        counts = None
        if low > 0:
            index, is_beside = layout.beside(q_places[:, :: max(1, num_queries - 1)])
            counts = joined(is_beside & (index < low), torch.ones_like(read, dtype=torch.bool)).unsqueeze(1)
            index = index.clamp(0, num_keys - 1)
            keys = torch.cat([gather_slots(k_BKSh, index), keys], dim=2)
            values = torch.cat([gather_slots(v_BKSv, index), values], dim=2)
            k_pos, read = joined(gather_places(call.k_pos, index), k_pos), joined(index, read)
        mask = layout.sees(q_places, read - layout.offset)
        if counts is not None:
            mask = mask & counts
        if call.reach.key_mask is not None:
            mask = mask & gather_places(call.reach.key_mask.bool(), read).unsqueeze(1)
        out, _ = attend(
            q_BHTh,
            keys,
            values,
            mask=mask.unsqueeze(1),
            is_causal=False,
            scale=call.scale,
            **hook_functions(call.hooks, call.q_pos, k_pos),
            dropout=call.dropout,
            need_weights=False,
        )
        return out

    def _blocks(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call, layout: Layout) -> Tensor:
        reach, num_keys = call.reach, k_BKSh.shape[2]
        frame = Frame.of(layout.offset, reach.key_mask, q_BHTh.shape[2], num_keys, layout.block)
        queries, keys, values = frame.queries(q_BHTh), frame.keys(k_BKSh), frame.keys(v_BKSv)
        real, k_pos = frame.valid(reach.key_mask), frame.key_places(call.k_pos)
        documents = None if reach.document_ids is None else frame.key_places(reach.document_ids)
        slots = torch.arange(frame.num_slots, device=q_BHTh.device).unsqueeze(0)
        pattern = replace(
            _pattern(layout, frame.start, slots[:, frame.start :: layout.block] // layout.block),
            key_valid=real,
            documents=documents,
            padded=reach.key_mask is not None,
        )
        places, shared = Places(frame.query_places(call.q_pos), k_pos), None
        tokens = layout.global_tokens(slots, num_keys)
        if tokens is not None:
            shared = gather_slots(keys, tokens.index), gather_slots(values, tokens.index)
            places = replace(places, shared_pos=gather_places(k_pos, tokens.index))
            pattern = pattern.with_shared(tokens, slots if reach.causal else None)
        out = attend_sparse(queries, keys, values, pattern, shared=shared, call=call, places=places)
        if tokens is not None and not reach.causal:
            chosen = gather_slots(queries, tokens.index)
            rows, _ = attend_rows(chosen, keys, values, tokens, call, key_valid=real, documents=documents, k_pos=k_pos)
            out = put_rows(out, rows, tokens)
        return frame.back(out)


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
