"""Block-sparse attention: blocks of queries read few keys under one softmax.

A block of queries reads three groups of keys:

    span     the slots around it, from `before` its first query to `after` its last one: overlapping slices, no copies
    shared   keys that every block reads: global tokens
    random   blocks of keys picked by index, different for every block of queries

Which of them a query sees is decided per element (`band`, padding, documents, causality). Blocks are folded into the
batch of few large products; a group of blocks has at most `GROUP_ELEMENTS` scores, recomputed in the backward pass, so
memory beside inputs and outputs is constant and nothing is ever T x S. With W the weights and dO the output's gradient:
dV = W^T dO, dS = W (dO V^T - rowsum(W dO V^T)) scale, dQ = dS K, dK = dS^T Q.

The spans of the first blocks are cut off where the text begins. The band is made for a whole span, so that as many of
its columns are left out (blocks of 2 queries q, before = 3, after = 1; dots are slots that do not exist):

    slots                0   1   2   3   4   5   6
    block 0  .   .   .   q   q   a                      cut = 3
    block 1          .   b   b   q   q   a              cut = 1
    block 2                  b   b   b   q   q   a      cut = 0

Shape legend: B batch, H query heads, K kv heads, G = H / K, T queries, S keys, N blocks of queries, h head_dim,
v value_dim, x one of them, w queries of a block, R shared keys, r random blocks of a block; of a group of blocks: b
examples, c kv heads, n blocks, s keys of a span, M = b c n.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tformer.nn.attention.block_sparse.explicit import attend_blocks_explicit, recomputes
from tformer.nn.attention.block_sparse.pattern import BlockGroup, KeysAndValues, Pattern, band_of, part_masks, runs
from tformer.nn.attention.context import MASKED_SCORE, AttentionInputs
from tformer.nn.attention.mechanism import BACKWARD_AND_FORWARD, Mechanism
from tformer.nn.dropout import outside_graphs

GROUP_ELEMENTS = 2**19  # scores of a group on a CPU, for each thread, 2 MiB in fp32: they stay in its caches
ENOUGH_BLOCKS = 4  # of one head, to be a group by themselves on a CPU: the keys of several heads would be copied
DENSE_LENGTH = 256  # up to this length dense attention is used: it was measured to be faster
DENSE_RATIO = 1.5  # and inputs up to this many times the keys that a block reads
DEVICE_GROUP_ELEMENTS = 2**26  # elsewhere: few launches count more


class _Source(NamedTuple):
    """Keys or values of all blocks: of all slots, the shared ones, and whole blocks of slots as rows."""

    slots: Tensor  # [B, K, S, x]
    shared: Tensor | None  # [B, K, R, x]
    blocks: Tensor | None  # [B K S / w, w x], where blocks are read at random

    @staticmethod
    def of(slots: Tensor, shared: Tensor | None, pattern: Pattern) -> _Source:
        width = pattern.block * slots.shape[-1]
        return _Source(slots, shared, None if pattern.random is None else slots.contiguous().view(-1, width))


class _Parts(NamedTuple):
    """Keys or values that a group reads."""

    span: Tensor  # [M, s, x]
    shared: Tensor | None  # [b c, R, x]
    random: Tensor | None  # [M, r w, x]

    def products(self, x_MGwx: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """x times the transposed parts, side by side, [M, G w, s + R + r w]; `bias` belongs to the span."""
        keys = self.span.transpose(1, 2)
        wide = x_MGwx.dtype in (torch.float16, torch.bfloat16) and x_MGwx.device.type != "cpu"
        if bias is None:
            found = [torch.bmm(x_MGwx, keys)]
        elif wide:
            found = [torch.bmm(x_MGwx, keys).float().mul_(scale).add_(bias)]
        else:  # one pass: the product is added to the bias
            found = [torch.baddbmm(bias.to(x_MGwx.dtype), x_MGwx, keys, alpha=scale)]
        if self.shared is not None:
            rows = x_MGwx.reshape(self.shared.shape[0], -1, x_MGwx.shape[-1])
            product = torch.bmm(rows, self.shared.transpose(1, 2)).view(*x_MGwx.shape[:2], -1)
            found.append(product.to(found[0].dtype).mul_(scale))
        if self.random is not None:
            found.append(torch.bmm(x_MGwx, self.random.transpose(1, 2)).to(found[0].dtype).mul_(scale))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def mixed(self, weights: Tensor) -> Tensor:
        """weights [M, G w, s + R + r w] times the parts, [M, G w, x]."""
        span = self.span.shape[1]
        out = torch.bmm(weights[..., :span], self.span)
        if self.shared is not None:
            end = span + self.shared.shape[1]
            rows = weights[..., span:end].reshape(self.shared.shape[0], -1, end - span)
            out += torch.bmm(rows, self.shared).view_as(out)
            span = end
        if self.random is not None:
            out.baddbmm_(weights[..., span:], self.random)
        return out


class _View(NamedTuple):
    """One group of blocks: its rows of queries, and the keys and values that it reads."""

    pattern: Pattern
    group: BlockGroup
    per_head: int  # G: the G query heads of a key head are one matrix
    random: Tensor | None  # rows of `_Source.blocks` that the group reads, [M r]

    def rows(self, x_BHTx: Tensor) -> Tensor:
        """The rows of the group's queries: [M, G w, x]."""
        x = self._queries(x_BHTx).unflatten(2, (self.group.num_blocks, self.group.width))
        if self.per_head == 1:
            return x.flatten(0, 2)
        return x.unflatten(1, (-1, self.per_head)).transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def put_rows(self, target_BHTx: Tensor, rows: Tensor) -> None:
        """The inverse of `rows`."""
        num_blocks, width = self.group.num_blocks, self.group.width
        view = self._queries(target_BHTx)
        split = rows.view(view.shape[0], -1, num_blocks, self.per_head, width, rows.shape[-1])
        view.unflatten(2, (num_blocks, width)).unflatten(1, (-1, self.per_head)).copy_(split.transpose(2, 3))

    def _queries(self, x_BHTx: Tensor) -> Tensor:
        group = self.group
        heads = slice(group.heads.start * self.per_head, group.heads.stop * self.per_head)
        start = group.first * self.pattern.block
        return x_BHTx[group.examples, heads, start : start + group.num_blocks * group.width]

    def spans(self, x_BKSx: Tensor, *, offset: int = 0, size: int | None = None) -> Tensor:
        """`size` slots of each span from `offset` on, [b, c, n, s, x]: a view, overlapping where size exceeds a block.

        size: None for all of them.
        """
        group, block = self.group, self.pattern.block
        size = group.span if size is None else size
        low = group.low + offset
        view = x_BKSx[group.examples, group.heads, low : low + (group.num_blocks - 1) * block + size]
        return view.unfold(2, size, block).transpose(-1, -2)

    def parts(self, source: _Source) -> _Parts:
        span, shared, random = self.spans(source.slots).flatten(0, 2), source.shared, None
        if shared is not None:
            shared = shared[self.group.examples, self.group.heads].flatten(0, 1)
        if source.blocks is not None and self.random is not None:
            random = source.blocks.index_select(0, self.random).view(span.shape[0], -1, span.shape[-1])
        return _Parts(span, shared, random)

    def weights(self, q_MGwh: Tensor, keys: _Parts, scale: float) -> Tensor:
        """[M, G w, s + R + r w], fp32 or the dtype of the products."""
        pattern, group = self.pattern, self.group
        whole_span = pattern.start + group.first * pattern.block - pattern.before  # its first slot, if it existed
        cut = group.low - whole_span
        band = pattern.band[: group.width, cut : cut + group.span]
        band = band if self.per_head == 1 else band.repeat(self.per_head, 1)
        scores = keys.products(q_MGwh, bias=band.unsqueeze(0), scale=scale)
        masks = part_masks(pattern, group)
        split = scores.view(group.num_examples, -1, group.num_blocks, self.per_head, group.width, scores.shape[-1])
        start = 0
        for size, mask in zip((part.shape[1] for part in keys if part is not None), masks, strict=True):
            if mask is not None:  # [b or 1, n, w or 1, keys]
                # Added: a fill by a mask that is broadcast costs more than the softmax.
                split[..., start : start + size].add_(band_of(mask).to(scores.dtype)[:, None, :, None])
            start += size
        weights = scores.softmax(dim=-1)
        if pattern.padded and any(mask is not None for mask in masks):
            dead = scores.amax(dim=-1, keepdim=True) <= MASKED_SCORE / 2  # a query without visible keys
            weights = weights.masked_fill_(dead, 0.0)
        return weights

    def add_gradients(
        self, grad_BKSx: Tensor, grad_shared_BKRx: Tensor | None, weights: Tensor, rows_MGwx: Tensor
    ) -> None:
        """Add weights^T rows to the gradients of the keys (or values) that the group read."""
        group, block, start = self.group, self.pattern.block, self.group.span
        found = torch.bmm(weights[..., :start].transpose(1, 2), rows_MGwx)
        spans = found.view(group.num_examples, -1, group.num_blocks, group.span, found.shape[-1])
        for offset in range(0, group.span, block):  # spans overlap, pieces of a block's size do not
            size = min(block, group.span - offset)
            self.spans(grad_BKSx, offset=offset, size=size).add_(spans[..., offset : offset + size, :])
        if grad_shared_BKRx is not None:
            shared = grad_shared_BKRx[group.examples, group.heads]
            end = start + shared.shape[2]
            per_sequence = shared.shape[0] * shared.shape[1]
            chosen = weights[..., start:end].reshape(per_sequence, -1, end - start)
            found = torch.bmm(chosen.transpose(1, 2), rows_MGwx.reshape(per_sequence, -1, rows_MGwx.shape[-1]))
            shared += found.view_as(shared)
            start = end
        if self.random is not None:
            found = torch.bmm(weights[..., start:].transpose(1, 2), rows_MGwx)
            target = grad_BKSx.view(-1, block * grad_BKSx.shape[-1])
            target.index_add_(0, self.random, found.view(self.random.shape[0], -1).to(target.dtype))


def _views(pattern: Pattern, q_BHTh: Tensor, keys: _Source) -> Iterator[_View]:
    """All blocks of all examples and heads, cut into groups of at most about GROUP_ELEMENTS scores."""
    batch, num_kv_heads, num_keys, _ = keys.slots.shape
    per_head, on_cpu = q_BHTh.shape[1] // num_kv_heads, q_BHTh.device.type == "cpu"
    budget = GROUP_ELEMENTS * torch.get_num_threads() if on_cpu else DEVICE_GROUP_ELEMENTS
    others = pattern.random_keys + (0 if keys.shared is None else keys.shared.shape[2])
    for run in runs(pattern, q_BHTh.shape[2], num_keys):
        per_block = per_head * run.width * (run.span + others)
        count = max(1, min(run.num_blocks, budget // per_block))
        copies = not on_cpu or count < ENOUGH_BLOCKS
        heads = max(1, min(num_kv_heads, budget // (per_block * count))) if copies else 1
        examples = max(1, min(batch, budget // (per_block * count * heads))) if heads == num_kv_heads else 1
        for example in range(0, batch, examples):
            for head in range(0, num_kv_heads, heads):
                for first in range(0, run.num_blocks, count):
                    group = BlockGroup(
                        slice(example, min(example + examples, batch)),
                        slice(head, min(head + heads, num_kv_heads)),
                        run.first + first,
                        min(count, run.num_blocks - first),
                        run.width,
                        run.low + first * pattern.block,
                        run.span,
                    )
                    yield _View(pattern, group, per_head, _random_rows(pattern, group, keys.slots))


def _random_rows(pattern: Pattern, group: BlockGroup, k_BKSh: Tensor) -> Tensor | None:
    """Rows of `_Source.blocks` that the blocks of a group read at random, [M r]."""
    if pattern.random is None:
        return None
    index = pattern.random.blocks  # [b or 1, N, r]
    index = (index if index.shape[0] == 1 else index[group.examples])[:, group.blocks]
    num_kv_heads, num_blocks = k_BKSh.shape[1], k_BKSh.shape[2] // pattern.block
    examples = torch.arange(group.examples.start, group.examples.stop, device=index.device).view(-1, 1, 1, 1)
    heads = torch.arange(group.heads.start, group.heads.stop, device=index.device).view(1, -1, 1, 1)
    return ((examples * num_kv_heads + heads) * num_blocks + index.unsqueeze(1)).flatten()


class _BlockSparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTh: Tensor,
        k_BKSh: Tensor,
        v_BKSv: Tensor,
        shared_k_BKRh: Tensor | None,
        shared_v_BKRv: Tensor | None,
        pattern: Pattern,
        scale: float,
    ) -> Tensor:
        batch, heads, num_queries, _ = q_BHTh.shape
        out = q_BHTh.new_empty(batch, num_queries, heads, v_BKSv.shape[-1]).transpose(1, 2)
        keys, values = _Source.of(k_BKSh, shared_k_BKRh, pattern), _Source.of(v_BKSv, shared_v_BKRv, pattern)
        for view in _views(pattern, q_BHTh, keys):
            weights = view.weights(view.rows(q_BHTh), view.parts(keys), scale)
            view.put_rows(out, view.parts(values).mixed(weights.to(q_BHTh.dtype)))
        ctx.save_for_backward(q_BHTh, k_BKSh, v_BKSv, shared_k_BKRh, shared_v_BKRv)
        ctx.pattern, ctx.scale = pattern, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTv: Tensor) -> tuple[Tensor | None, ...]:
        pattern, scale = ctx.pattern, ctx.scale
        q_BHTh, k_BKSh, v_BKSv, shared_k, shared_v = ctx.saved_tensors
        grad_q = torch.empty_like(q_BHTh.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        # Blocks add up, in fp32 where the inputs have 16 bits.
        wide = torch.promote_types(q_BHTh.dtype, torch.float32)
        grads = [None if x is None else torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format)
                 for x in (k_BKSh, v_BKSv, shared_k, shared_v)]  # fmt: skip
        grad_k, grad_v, grad_shared_k, grad_shared_v = grads
        assert grad_k is not None and grad_v is not None
        keys, values = _Source.of(k_BKSh, shared_k, pattern), _Source.of(v_BKSv, shared_v, pattern)
        for view in _views(pattern, q_BHTh, keys):
            read, read_values, queries = view.parts(keys), view.parts(values), view.rows(q_BHTh)
            weights = view.weights(queries, read, scale)
            grad_out = view.rows(grad_BHTv)
            view.add_gradients(grad_v, grad_shared_v, weights.to(q_BHTh.dtype), grad_out)
            grad_weights = read_values.products(grad_out).to(weights.dtype)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_scores = grad_scores.to(q_BHTh.dtype).mul_(scale)
            view.put_rows(grad_q, read.mixed(grad_scores))
            view.add_gradients(grad_k, grad_shared_k, grad_scores, queries)
        found = [None if grad is None else grad.to(q_BHTh.dtype) for grad in grads]
        return grad_q, *found, None, None


@outside_graphs
def attend_sparse(inputs: AttentionInputs, pattern: Pattern, shared: KeysAndValues | None) -> Tensor:
    """[B, H, T, v]: in memory order [B, T, H, v], or by explicit scores if positions or dropout need them.

    inputs: the pattern replaces its context, which is not read. Where blocks are read at random, S is a multiple of the
    pattern's block. shared: keys [B, K, R, h] and values [B, K, R, v] of every block.
    """
    if inputs.has_position_scores or inputs.dropout > 0.0:
        return attend_blocks_explicit(inputs, pattern, shared)
    return _BlockSparseAttention.apply(*inputs[:3], *(shared or (None, None)), pattern, inputs.scale)


def dense_is_faster(num_queries: int, num_keys: int, keys_of_block: int) -> bool:
    """True if dense masked attention is cheaper: short inputs, or blocks that read most keys."""
    return num_queries == num_keys and num_keys <= max(DENSE_LENGTH, DENSE_RATIO * keys_of_block)


def sparse_flops(
    mechanism: Mechanism, pattern: Pattern, queries: int, keys: int, *, others: int, training: bool
) -> float:
    """Operations of `attend_sparse` for one example. others: shared and random keys that a block reads."""
    if training and mechanism.dropout:
        blocks, each = -(-queries // pattern.block), pattern.before + pattern.block + pattern.after + others
        _, again = recomputes(pattern, blocks, rows=mechanism.sizes.num_heads, keys=each)
        return mechanism.flops_per_score * blocks * pattern.block * each * (BACKWARD_AND_FORWARD + again)
    scores = sum(run.num_blocks * run.width * (run.span + others) for run in runs(pattern, queries, keys))
    return mechanism.flops_per_score * scores * (BACKWARD_AND_FORWARD + 0.5 if training else 1)  # scores once more
