"""Which keys a block of queries reads and which of them a query may see: band, global tokens, random blocks.

Query i is at key slot `start + i`. Block c holds the queries c w ... (c + 1) w - 1; its span are the slots from
`before` ahead of the first of them to `after` behind the last, cut off at the ends of the sequence.

A global token is seen by every query and, as a query, sees every key (Longformer, arXiv 2004.05150, 3.1; BigBird,
arXiv 2007.14062, 2). There are few, so their rows cost O(R S).

Shape legend: B batch, H query heads, K kv heads, T queries, S keys, N blocks of queries, w queries of a block, R global
tokens or other keys that every block reads (shared), r random blocks of a block, h head_dim, v value_dim; of a group: b
examples, n blocks, s keys of a span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.context import MASKED_SCORE, AttentionContext, AttentionInputs, all_true_on_cpu

KeysAndValues = tuple[Tensor, Tensor]
"""[B, K, R, h] and [B, K, R, v]."""


@dataclass(frozen=True, slots=True)
class GlobalTokens:
    """index: slots, long [B or 1, R], in order; valid: bool, the same shape, None where all exist; mask: bool
    [B or 1, S], True at those slots."""

    index: Tensor
    valid: Tensor | None
    mask: Tensor

    @property
    def count(self) -> int:
        return self.index.shape[1]


def first_tokens(count: int, key_mask: Tensor | None, num_keys: int, device: torch.device) -> GlobalTokens | None:
    """The first `count` slots that hold tokens; None for none."""
    count = min(count, num_keys)
    if count == 0:
        return None
    if key_mask is None:
        slots = torch.arange(num_keys, device=device).unsqueeze(0)
        return GlobalTokens(slots[:, :count], None, slots < count)
    return _ranked(key_mask.bool(), count)


def marked_tokens(global_mask: Tensor, key_mask: Tensor | None) -> GlobalTokens | None:
    """The slots that a mask [B, S] marks. Reading their number synchronises accelerators."""
    marked = global_mask.bool() if key_mask is None else global_mask.bool() & key_mask.bool()
    count = int(marked.sum(dim=1).max())
    return _ranked(marked, count) if count else None


def _ranked(marked_BS: Tensor, count: int) -> GlobalTokens:
    num_keys = marked_BS.shape[1]
    rank = marked_BS.long().cumsum(dim=1)
    wanted = torch.arange(1, count + 1, device=rank.device).expand(rank.shape[0], -1).contiguous()
    index = torch.searchsorted(rank, wanted)  # the first slot where the count reaches 1, 2, ...
    return GlobalTokens(index.clamp(max=num_keys - 1), index < num_keys, marked_BS & (rank <= count))


def gather_slots(x_BKSx: Tensor, index: Tensor) -> Tensor:
    """[B, K, R, x]: the slots `index`, long [B or 1, R], of x."""
    if index.shape[0] == 1:
        return x_BKSx.index_select(2, index[0])
    return x_BKSx.gather(2, index[:, None, :, None].expand(-1, x_BKSx.shape[1], -1, x_BKSx.shape[-1]))


def gather_numbers(x_BS: Tensor, index: Tensor) -> Tensor:
    """[B or 1, R]: numbers [B or 1, S] at the slots `index`."""
    batch = max(x_BS.shape[0], index.shape[0])
    return x_BS.expand(batch, -1).gather(1, index.expand(batch, -1))


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Side by side in the last dimension, for as many examples as either has."""
    batch = max(first.shape[0], second.shape[0])
    return torch.cat([x.expand(batch, *x.shape[1:]) for x in (first, second)], dim=-1)


def put_rows(out_BHTv: Tensor, rows_BHRv: Tensor, tokens: GlobalTokens) -> Tensor:
    """`out` with the rows of global tokens in their places."""
    num_queries, index = out_BHTv.shape[2], tokens.index
    if tokens.valid is not None:
        # Rows of no token are written to an extra slot, which is cut off.
        out_BHTv = F.pad(out_BHTv, (0, 0, 0, 1))
        index = index.masked_fill(~tokens.valid, num_queries)
    out = out_BHTv.scatter(2, index[:, None, :, None].expand(*rows_BHRv.shape), rows_BHRv.to(out_BHTv.dtype))
    return out if tokens.valid is None else out[:, :, :num_queries]


def row_inputs(
    inputs: AttentionInputs, tokens: GlobalTokens, *, key_valid: Tensor | None, documents: Tensor | None, k_pos: Tensor
) -> AttentionInputs:
    """Inputs of `attend` for the rows [B, H, R, v] of the global tokens, whose queries are those of `inputs`.

    key_valid: bool [B or 1, S]; documents: [B, S]; k_pos: positions of the keys.
    """
    mask = None if key_valid is None else key_valid[:, None, None, :]
    if inputs.context.causal:
        past = torch.arange(inputs.k_BKSh.shape[2], device=k_pos.device) <= tokens.index[:, None, :, None]
        mask = past if mask is None else mask & past
    if documents is not None:
        own = gather_numbers(documents, tokens.index)
        same = (own.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
        mask = same if mask is None else mask & same
    return inputs._replace(context=AttentionContext(gather_numbers(k_pos, tokens.index), k_pos, mask=mask))


@dataclass(frozen=True, slots=True)
class Pattern:
    """Attributes, where None means no limit (or nothing to read):

    block, before, after, start: see above.
    q_pos: positions of the queries, [B or 1, T]; k_pos, shared_pos: of the keys [B or 1, S] and the shared keys
        [B or 1, R]. Only read by positions that change scores.
    band: float [w, before + w + after], 0 where a query of a block may see that slot of its span, else MASKED_SCORE.
    key_valid: bool [B or 1, S], slots that may be seen through a span or at random.
    documents: [B, S]; only slots of the query's own document may be seen.
    slots, shared_slots: [B or 1, S] and [B or 1, R]; shared keys of a later slot than the query's are not seen.
    shared_valid: bool [B or 1, R]. shared_documents: [B, R].
    padded: whether there may be queries that see nothing at all; their weights are zeros.
    random: long [B or 1, N, r], blocks of w keys that a block of queries reads too; random_valid: bool, the same shape.
    """

    block: int
    before: int
    after: int
    band: Tensor
    start: int = 0
    key_valid: Tensor | None = None
    documents: Tensor | None = None
    slots: Tensor | None = None
    shared_slots: Tensor | None = None
    shared_valid: Tensor | None = None
    shared_documents: Tensor | None = None
    num_shared: int = 0
    random: Tensor | None = None
    random_valid: Tensor | None = None
    padded: bool = False
    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    shared_pos: Tensor | None = None

    @property
    def random_keys(self) -> int:
        """Keys that a block reads at random."""
        return 0 if self.random is None else self.random.shape[-1] * self.block

    def with_shared(self, tokens: GlobalTokens, slots: Tensor | None) -> Pattern:
        """The pattern where global tokens are read as shared keys only, so that each key counts once.

        slots: [1, S], where queries see no global token of a later slot.
        """
        valid = None if self.key_valid is None else gather_numbers(self.key_valid, tokens.index)
        if tokens.valid is not None:
            valid = tokens.valid if valid is None else tokens.valid & valid
        return replace(
            self,
            num_shared=tokens.count,
            shared_valid=valid,
            shared_slots=None if slots is None else tokens.index,
            shared_documents=None if self.documents is None else gather_numbers(self.documents, tokens.index),
            shared_pos=None if self.k_pos is None else gather_numbers(self.k_pos, tokens.index),
            slots=slots,
            key_valid=~tokens.mask if self.key_valid is None else self.key_valid & ~tokens.mask,
        )

    def from_slot(self, low: int) -> Pattern:
        """The pattern among the keys from slot `low` on; `start` already counts from there."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, low:]

        return replace(
            self,
            key_valid=cut(self.key_valid),
            documents=cut(self.documents),
            slots=cut(self.slots),
            k_pos=cut(self.k_pos),
        )

    def band_bias(self, group: Group, per_head: int) -> Tensor:
        """The band of a group's blocks, [1, per_head w, s]."""
        offset = group.low - (self.start + group.first * self.block - self.before)
        band = self.band[: group.width, offset : offset + group.span]
        return (band if per_head == 1 else band.repeat(per_head, 1)).unsqueeze(0)


class Run(NamedTuple):
    """Blocks of equal width and span side by side. `low`: the first slot of the first one's span."""

    first: int
    num_blocks: int
    width: int
    low: int
    span: int


class Group(NamedTuple):
    """Some blocks of a run for some examples and key heads, computed at once."""

    examples: slice
    heads: slice
    first: int
    num_blocks: int
    width: int
    low: int
    span: int

    @property
    def num_examples(self) -> int:
        return int(self.examples.stop - self.examples.start)

    @property
    def blocks(self) -> slice:
        return slice(self.first, self.first + self.num_blocks)


def runs(pattern: Pattern, num_queries: int, num_keys: int) -> Iterator[Run]:
    """One run of all whole blocks with a whole span, each other block by itself."""
    block, start = pattern.block, pattern.start
    whole = pattern.before + block + pattern.after
    first = min(max(0, -((start - pattern.before) // block)), -(-num_queries // block))
    last = max(first, min(num_queries // block, (num_keys - pattern.after - start) // block))
    for number in range(first):
        yield _single(pattern, number, num_queries, num_keys)
    if last > first:
        yield Run(first, last - first, block, start + first * block - pattern.before, whole)
    for number in range(last, -(-num_queries // block)):
        yield _single(pattern, number, num_queries, num_keys)


def _single(pattern: Pattern, number: int, num_queries: int, num_keys: int) -> Run:
    begin = pattern.start + number * pattern.block
    low = max(0, begin - pattern.before)
    high = min(num_keys, begin + pattern.block + pattern.after)
    return Run(number, 1, min(pattern.block, num_queries - number * pattern.block), low, high - low)


def part_masks(pattern: Pattern, group: Group) -> list[Tensor | None]:
    """For the span, the shared keys and the random ones, as far as there are any: bool [b or 1, n, w or 1, keys]."""
    masks = [_span_mask(pattern, group)]
    if pattern.num_shared:
        masks.append(_shared_mask(pattern, group))
    if pattern.random is not None:
        masks.append(_random_mask(pattern, group))
    return [None if mask is None or all_true_on_cpu(mask) else mask for mask in masks]


def _span_mask(pattern: Pattern, group: Group) -> Tensor | None:
    mask = None
    if pattern.key_valid is not None:
        mask = _spans(pattern.key_valid, pattern, group).unsqueeze(2)
    if pattern.documents is not None:
        same = _of_queries(pattern.documents, pattern, group) == _spans(pattern.documents, pattern, group).unsqueeze(2)
        mask = same if mask is None else mask & same
    return mask


def _shared_mask(pattern: Pattern, group: Group) -> Tensor | None:
    mask = None
    if pattern.shared_valid is not None:
        mask = _of_examples(pattern.shared_valid, group)[:, None, None]
    if pattern.slots is not None and pattern.shared_slots is not None:
        seen = _of_examples(pattern.shared_slots, group)[:, None, None] <= _of_queries(pattern.slots, pattern, group)
        mask = seen if mask is None else mask & seen
    if pattern.documents is not None and pattern.shared_documents is not None:
        shared = _of_examples(pattern.shared_documents, group)[:, None, None]
        same = _of_queries(pattern.documents, pattern, group) == shared
        mask = same if mask is None else mask & same
    return mask


def _random_mask(pattern: Pattern, group: Group) -> Tensor | None:
    assert pattern.random is not None
    index = _of_examples(pattern.random, group)[:, group.blocks]  # [b or 1, n, r]
    mask = None
    if pattern.random_valid is not None:
        valid = _of_examples(pattern.random_valid, group)[:, group.blocks]
        mask = valid.repeat_interleave(pattern.block, dim=-1).unsqueeze(2)
    if pattern.key_valid is not None:
        valid = _random_slots(_of_examples(pattern.key_valid, group), index, pattern.block).unsqueeze(2)
        mask = valid if mask is None else mask & valid
    if pattern.documents is not None:
        read = _random_slots(_of_examples(pattern.documents, group), index, pattern.block).unsqueeze(2)
        same = _of_queries(pattern.documents, pattern, group) == read
        mask = same if mask is None else mask & same
    return mask


def _of_examples(x: Tensor, group: Group) -> Tensor:
    return x if x.shape[0] == 1 else x[group.examples]


def _spans(x_BS: Tensor, pattern: Pattern, group: Group) -> Tensor:
    """[b or 1, n, s]"""
    end = group.low + (group.num_blocks - 1) * pattern.block + group.span
    return _of_examples(x_BS, group)[:, group.low : end].unfold(1, group.span, pattern.block)


def _of_queries(x_BS: Tensor, pattern: Pattern, group: Group) -> Tensor:
    """Numbers of the queries' own slots, [b or 1, n, w, 1]."""
    begin = pattern.start + group.first * pattern.block
    chosen = _of_examples(x_BS, group)[:, begin : begin + group.num_blocks * group.width]
    return chosen.unflatten(1, (group.num_blocks, group.width)).unsqueeze(-1)


def _random_slots(x_bS: Tensor, index_bnr: Tensor, block: int) -> Tensor:
    """[b, n, r w]: the slots of the blocks that were picked."""
    blocks = x_bS.unflatten(1, (-1, block))
    batch = max(blocks.shape[0], index_bnr.shape[0])
    examples = torch.arange(batch, device=x_bS.device).view(-1, 1, 1)
    return blocks.expand(batch, -1, -1)[examples, index_bnr.expand(batch, -1, -1)].flatten(2)


def band_of(allowed: Tensor) -> Tensor:
    """An additive mask of bool [*]: 0 where True, MASKED_SCORE elsewhere."""
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, MASKED_SCORE)
