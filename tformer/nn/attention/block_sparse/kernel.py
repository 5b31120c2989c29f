"""Block-sparse attention: blocks of queries read few keys under one softmax; also through FlexAttention on CUDA.

A block of queries reads three groups of keys:

    span     the slots around it, from `before` its first query to `after` its last one: overlapping slices, no copies
    shared   keys that every block reads: global tokens
    random   blocks of keys picked by index, different for every block of queries

Which of them a query sees is decided per element (`band`, padding, documents, causality). Blocks are folded into the
batch of few large products; a group of blocks has at most `GROUP_ELEMENTS` scores, recomputed in the backward pass, so
memory beside inputs and outputs is constant and nothing is ever T x S. With W the weights and G the output's gradient:
dV = W^T G, dS = W (G V^T - rowsum(W G V^T)) scale, dQ = dS K, dK = dS^T Q.

FlexAttention (arXiv 2412.05496) turns a rule over (example, query, key) into a CUDA kernel that skips blocks where the
rule never holds. Its compiler runs at the first call for every new shape, which suits long training runs.

Shape legend: B batch, H query heads, K kv heads, G = H / K, T queries, S keys, N blocks of queries, h head_dim,
v value_dim, w queries of a block, R shared keys, r random blocks of a block; of a group of blocks: b examples, c kv
heads, n blocks, s keys of a span, M = b c n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tformer.nn.attention.block_sparse.explicit import attend_blocks_explicit, recomputes
from tformer.nn.attention.block_sparse.pattern import Group, KeysAndValues, Pattern, band_of, part_masks, runs
from tformer.nn.attention.context import MASKED_SCORE, AttentionInputs
from tformer.nn.attention.mechanism import BACKWARD_AND_FORWARD, Mechanism
from tformer.nn.dropout import outside_graphs

SeesFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(example, query slot, key slot), index tensors -> bool."""


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attend_flex(inputs: AttentionInputs, sees: SeesFunction) -> Tensor:
    """[B, H, T, v]. A query that sees nothing gets zeros. Nothing T x S is made: the block mask is compiled as well.

    sees: the kind's pattern; the context's causality, padding and documents are added to it. ValueError for positions
    that change scores, and dropout.
    """
    if inputs.dropout or inputs.has_position_scores:
        raise ValueError("implementation: flex supports neither dropout nor positions with a bias; use blocks")
    # Imported on use: it imports the compiler, which takes longer than the rest of torch.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q_BHTh, k_BKSh, v_BKSv, context, scale, *_ = inputs
    batch, heads, num_queries, _ = q_BHTh.shape
    num_keys, on_cuda = k_BKSh.shape[2], q_BHTh.device.type == "cuda"
    key_mask = None if context.key_mask is None else context.key_mask.bool()
    documents = context.document_ids

    def rule(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = sees(example, query, key)
        if context.causal:
            seen = seen & (key <= query + (num_keys - num_queries))
        if key_mask is not None:
            seen = seen & key_mask[example, key]
        if documents is not None:
            seen = seen & (documents[example, query] == documents[example, key])
        return seen

    block_mask = create_block_mask(rule, batch, None, num_queries, num_keys, device=q_BHTh.device, _compile=on_cuda)
    attention: Any = _compiled() if on_cuda else flex_attention
    out = attention(q_BHTh, k_BKSh, v_BKSv, block_mask=block_mask, scale=scale, enable_gqa=heads != k_BKSh.shape[1])
    assert isinstance(out, Tensor)
    return out


GROUP_ELEMENTS = 2**19  # scores of a group on a CPU, for each thread, 2 MiB in fp32: they stay in its caches
ENOUGH_BLOCKS = 4  # of one head, to be a group by themselves on a CPU: the keys of several heads would be copied
DENSE_LENGTH = 256  # inputs up to this long are attended to densely: less than blocks cost, as measured
DENSE_RATIO = 1.5  # and inputs up to this many times the keys that a block reads
DEVICE_GROUP_ELEMENTS = 2**26  # elsewhere: few launches count more


class _Tensors(NamedTuple):
    q_BHTh: Tensor
    k_BKSh: Tensor
    v_BKSv: Tensor
    shared_k_BKRh: Tensor | None
    shared_v_BKRv: Tensor | None

    @property
    def queries_per_key_head(self) -> int:
        return self.q_BHTh.shape[1] // self.k_BKSh.shape[1]


def groups(pattern: Pattern, tensors: _Tensors) -> Iterator[Group]:
    """All blocks of all examples and heads, cut into groups of at most about GROUP_ELEMENTS scores."""
    batch, num_kv_heads = tensors.k_BKSh.shape[:2]
    on_cpu = tensors.q_BHTh.device.type == "cpu"
    budget = GROUP_ELEMENTS * torch.get_num_threads() if on_cpu else DEVICE_GROUP_ELEMENTS
    shared = 0 if tensors.shared_k_BKRh is None else tensors.shared_k_BKRh.shape[2]
    for run in runs(pattern, tensors.q_BHTh.shape[2], tensors.k_BKSh.shape[2]):
        keys = run.span + shared + pattern.random_keys
        per_block = tensors.queries_per_key_head * run.width * keys
        count = max(1, min(run.num_blocks, budget // per_block))
        copies = not on_cpu or count < ENOUGH_BLOCKS
        heads = max(1, min(num_kv_heads, budget // (per_block * count))) if copies else 1
        examples = max(1, min(batch, budget // (per_block * count * heads))) if heads == num_kv_heads else 1
        for example in range(0, batch, examples):
            for head in range(0, num_kv_heads, heads):
                for first in range(0, run.num_blocks, count):
                    yield Group(
                        slice(example, min(example + examples, batch)),
                        slice(head, min(head + heads, num_kv_heads)),
                        run.first + first,
                        min(count, run.num_blocks - first),
                        run.width,
                        run.low + first * pattern.block,
                        run.span,
                    )


def _rows(x_BHTx: Tensor, group: Group, pattern: Pattern, per_head: int) -> Tensor:
    """The rows of a group's queries: [M, G w, x]. The G heads of a key head are one matrix."""
    heads = slice(group.heads.start * per_head, group.heads.stop * per_head)
    start = group.first * pattern.block
    x = x_BHTx[group.examples, heads, start : start + group.num_blocks * group.width]
    x = x.unflatten(2, (group.num_blocks, group.width))
    if per_head == 1:
        return x.flatten(0, 2)
    return x.unflatten(1, (-1, per_head)).transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _put_rows(target_BHTx: Tensor, rows: Tensor, group: Group, pattern: Pattern, per_head: int) -> None:
    heads = slice(group.heads.start * per_head, group.heads.stop * per_head)
    start = group.first * pattern.block
    view = target_BHTx[group.examples, heads, start : start + group.num_blocks * group.width]
    split = rows.view(view.shape[0], -1, group.num_blocks, per_head, group.width, rows.shape[-1])
    view.unflatten(2, (group.num_blocks, group.width)).unflatten(1, (-1, per_head)).copy_(split.transpose(2, 3))


def _spans(x_BKSx: Tensor, group: Group, block: int, *, offset: int = 0, size: int | None = None) -> Tensor:
    """`size` slots of each span from `offset` on, [b, c, n, s, x]: a view, overlapping where size exceeds a block."""
    size = group.span if size is None else size
    low = group.low + offset
    view = x_BKSx[group.examples, group.heads, low : low + (group.num_blocks - 1) * block + size]
    return view.unfold(2, size, block).transpose(-1, -2)


def _blocks_of(x_BKSx: Tensor, block: int) -> Tensor:
    """[B K S / w, w x]: whole blocks as rows."""
    return x_BKSx.contiguous().view(-1, block * x_BKSx.shape[-1])


def _random_rows(k_BKSh: Tensor, group: Group, pattern: Pattern) -> Tensor:
    """Rows of `_blocks_of` that the blocks of a group read at random, [M r]."""
    assert pattern.random is not None
    index = pattern.random if pattern.random.shape[0] == 1 else pattern.random[group.examples]  # [b or 1, N, r]
    index = index[:, group.blocks]
    num_kv_heads, num_blocks = k_BKSh.shape[1], k_BKSh.shape[2] // pattern.block
    examples = torch.arange(group.examples.start, group.examples.stop, device=index.device).view(-1, 1, 1, 1)
    heads = torch.arange(group.heads.start, group.heads.stop, device=index.device).view(1, -1, 1, 1)
    return ((examples * num_kv_heads + heads) * num_blocks + index.unsqueeze(1)).flatten()


def _shared(x_BKRx: Tensor, group: Group) -> Tensor:
    """[b c, R, x]"""
    return x_BKRx[group.examples, group.heads].flatten(0, 1)


class _Parts(NamedTuple):
    """Keys or values of a group."""

    span: Tensor  # [M, s, x]
    shared: Tensor | None  # [b c, R, x]
    random: Tensor | None  # [M, r w, x]


def _parts(x: Tensor, shared: Tensor | None, blocks: Tensor | None, rows: Tensor | None, group: Group,
           pattern: Pattern) -> _Parts:  # fmt: skip
    span = _spans(x, group, pattern.block).flatten(0, 2)
    picked = None
    if blocks is not None and rows is not None:
        picked = blocks.index_select(0, rows).view(span.shape[0], -1, x.shape[-1])
    return _Parts(span, None if shared is None else _shared(shared, group), picked)


def _products(x_MGwx: Tensor, parts: _Parts, *, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """x times the transposed parts, side by side, [M, G w, s + R + r w]; `bias` belongs to the span."""
    keys = parts.span.transpose(1, 2)
    wide = x_MGwx.dtype in (torch.float16, torch.bfloat16) and x_MGwx.device.type != "cpu"
    if bias is None:
        found = [torch.bmm(x_MGwx, keys)]
    elif wide:
        found = [torch.bmm(x_MGwx, keys).float().mul_(scale).add_(bias)]
    else:  # one pass: the product is added to the bias
        found = [torch.baddbmm(bias.to(x_MGwx.dtype), x_MGwx, keys, alpha=scale)]
    if parts.shared is not None:
        rows = x_MGwx.reshape(parts.shared.shape[0], -1, x_MGwx.shape[-1])
        product = torch.bmm(rows, parts.shared.transpose(1, 2)).view(*x_MGwx.shape[:2], -1)
        found.append(product.to(found[0].dtype).mul_(scale))
    if parts.random is not None:
        found.append(torch.bmm(x_MGwx, parts.random.transpose(1, 2)).to(found[0].dtype).mul_(scale))
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _sum_of_products(weights: Tensor, parts: _Parts) -> Tensor:
    """weights [M, G w, s + R + r w] times the parts, [M, G w, x]."""
    span = parts.span.shape[1]
    out = torch.bmm(weights[..., :span], parts.span)
    if parts.shared is not None:
        end = span + parts.shared.shape[1]
        rows = weights[..., span:end].reshape(parts.shared.shape[0], -1, end - span)
        out += torch.bmm(rows, parts.shared).view_as(out)
        span = end
    if parts.random is not None:
        out.baddbmm_(weights[..., span:], parts.random)
    return out


def _weights(q_MGwh: Tensor, keys: _Parts, group: Group, pattern: Pattern, per_head: int, scale: float) -> Tensor:
    """[M, G w, s + R + r w], fp32 or the dtype of the products."""
    scores = _products(q_MGwh, keys, bias=pattern.band_bias(group, per_head), scale=scale)
    masks = part_masks(pattern, group)
    split = scores.view(group.num_examples, -1, group.num_blocks, per_head, group.width, scores.shape[-1])
    start = 0
    for size, mask in zip((keys.span.shape[1], *_sizes(keys)), masks, strict=True):
        if mask is not None:  # [b or 1, n, w or 1, keys]
            # Added: a fill by a mask that is broadcast costs more than the softmax.
            split[..., start : start + size].add_(band_of(mask).to(scores.dtype)[:, None, :, None])
        start += size
    weights = scores.softmax(dim=-1)
    if pattern.padded and any(mask is not None for mask in masks):
        dead = scores.amax(dim=-1, keepdim=True) <= MASKED_SCORE / 2  # a query without visible keys
        weights = weights.masked_fill_(dead, 0.0)
    return weights


def _sizes(parts: _Parts) -> list[int]:
    return [part.shape[1] for part in (parts.shared, parts.random) if part is not None]


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
        tensors = _Tensors(q_BHTh, k_BKSh, v_BKSv, shared_k_BKRh, shared_v_BKRv)
        batch, heads, num_queries, _ = q_BHTh.shape
        per_head = tensors.queries_per_key_head
        out = q_BHTh.new_empty(batch, num_queries, heads, v_BKSv.shape[-1]).transpose(1, 2)
        key_blocks, value_blocks = _all_blocks(tensors, pattern)
        for group in groups(pattern, tensors):
            rows = None if pattern.random is None else _random_rows(k_BKSh, group, pattern)
            keys = _parts(k_BKSh, shared_k_BKRh, key_blocks, rows, group, pattern)
            values = _parts(v_BKSv, shared_v_BKRv, value_blocks, rows, group, pattern)
            weights = _weights(_rows(q_BHTh, group, pattern, per_head), keys, group, pattern, per_head, scale)
            _put_rows(out, _sum_of_products(weights.to(q_BHTh.dtype), values), group, pattern, per_head)
        ctx.save_for_backward(*tensors)
        ctx.pattern, ctx.scale = pattern, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTv: Tensor) -> tuple[Tensor | None, ...]:
        tensors, pattern, scale = _Tensors(*ctx.saved_tensors), ctx.pattern, ctx.scale
        q_BHTh, k_BKSh, v_BKSv, shared_k, shared_v = tensors
        per_head = tensors.queries_per_key_head
        grad_q = torch.empty_like(q_BHTh.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        # Blocks add up, in fp32 where the inputs have 16 bits.
        wide = torch.promote_types(q_BHTh.dtype, torch.float32)
        grads = [None if x is None else torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format)
                 for x in tensors[1:]]  # fmt: skip
        grad_k, grad_v, grad_shared_k, grad_shared_v = grads
        key_blocks, value_blocks = _all_blocks(tensors, pattern)
        for group in groups(pattern, tensors):
            rows = None if pattern.random is None else _random_rows(k_BKSh, group, pattern)
            keys = _parts(k_BKSh, shared_k, key_blocks, rows, group, pattern)
            values = _parts(v_BKSv, shared_v, value_blocks, rows, group, pattern)
            queries = _rows(q_BHTh, group, pattern, per_head)
            weights = _weights(queries, keys, group, pattern, per_head, scale)
            grad_out = _rows(grad_BHTv, group, pattern, per_head)
            _add_gradients(grad_v, grad_shared_v, weights.to(q_BHTh.dtype), grad_out, rows, group, pattern)
            grad_weights = _products(grad_out, values).to(weights.dtype)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_scores = grad_scores.to(q_BHTh.dtype).mul_(scale)
            _put_rows(grad_q, _sum_of_products(grad_scores, keys), group, pattern, per_head)
            _add_gradients(grad_k, grad_shared_k, grad_scores, queries, rows, group, pattern)
        found = [None if grad is None else grad.to(q_BHTh.dtype) for grad in grads]
        return grad_q, *found, None, None


def _all_blocks(tensors: _Tensors, pattern: Pattern) -> tuple[Tensor | None, Tensor | None]:
    if pattern.random is None:
        return None, None
    return _blocks_of(tensors.k_BKSh, pattern.block), _blocks_of(tensors.v_BKSv, pattern.block)


def _add_gradients(
    grad_BKSx: Tensor | None,
    grad_shared_BKRx: Tensor | None,
    weights: Tensor,
    rows_MGwx: Tensor,
    random_rows: Tensor | None,
    group: Group,
    pattern: Pattern,
) -> None:
    """Add weights^T rows to the gradients of the keys (or values) that a group read."""
    assert grad_BKSx is not None
    block, start = pattern.block, group.span
    found = torch.bmm(weights[..., :start].transpose(1, 2), rows_MGwx)
    spans = found.view(group.num_examples, -1, group.num_blocks, group.span, found.shape[-1])
    for offset in range(0, group.span, block):  # spans overlap, pieces of a block's size do not
        size = min(block, group.span - offset)
        _spans(grad_BKSx, group, block, offset=offset, size=size).add_(spans[..., offset : offset + size, :])
    if grad_shared_BKRx is not None:
        shared = grad_shared_BKRx[group.examples, group.heads]
        end = start + shared.shape[2]
        per_sequence = shared.shape[0] * shared.shape[1]
        chosen = weights[..., start:end].reshape(per_sequence, -1, end - start)
        found = torch.bmm(chosen.transpose(1, 2), rows_MGwx.reshape(per_sequence, -1, rows_MGwx.shape[-1]))
        shared += found.view_as(shared)
        start = end
    if random_rows is not None:
        found = torch.bmm(weights[..., start:].transpose(1, 2), rows_MGwx)
        target = grad_BKSx.view(-1, block * grad_BKSx.shape[-1])
        target.index_add_(0, random_rows, found.view(random_rows.shape[0], -1).to(target.dtype))


def attend_blocks(
    q_BHTh: Tensor,
    k_BKSh: Tensor,
    v_BKSv: Tensor,
    pattern: Pattern,
    *,
    shared: KeysAndValues | None = None,
    scale: float,
) -> Tensor:
    """[B, H, T, v] in memory order [B, T, H, v]. shared: keys [B, K, R, h] and values [B, K, R, v] of every block.

    Where blocks are read at random, S is a multiple of the pattern's block.
    """
    shared_k, shared_v = (None, None) if shared is None else shared
    return _BlockSparseAttention.apply(q_BHTh, k_BKSh, v_BKSv, shared_k, shared_v, pattern, scale)


@outside_graphs
def attend_sparse(inputs: AttentionInputs, pattern: Pattern, shared: KeysAndValues | None) -> Tensor:
    """[B, H, T, v]: `attend_blocks`, or explicit scores if positions or dropout need them.

    inputs: the pattern replaces its context, which is not read. shared: see `attend_blocks`.
    """
    if inputs.has_position_scores or inputs.dropout > 0.0:
        return attend_blocks_explicit(inputs, pattern, shared)
    return attend_blocks(*inputs[:3], pattern, shared=shared, scale=inputs.scale)


def dense_is_faster(num_queries: int, num_keys: int, keys_of_block: int) -> bool:
    """Whether scores of all keys, masked, cost less than blocks: in short inputs, and where a block reads most."""
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
