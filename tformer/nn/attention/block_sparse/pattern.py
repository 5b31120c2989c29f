"""Which keys a block of queries reads and which of them a query may see: band, shared keys, random blocks.

Query i is at key slot `start + i`. Block c holds the queries c w ... (c + 1) w - 1; its span are the slots from
`before` ahead of the first of them to `after` behind the last, cut off at the ends of the sequence:

    slots        0 1 2 3 4 5 6 7 8 9 . .       w = 3, before = 4, after = 2, start = 1
    block 0        q q q                       queries 0, 1, 2
    its span     k k k k k k                   slots 0 ... 5: three are cut off
    block 1              q q q                 queries 3, 4, 5
    its span     k k k k k k k k k             slots 0 ... 8

The band says which slots of a span each query of the block sees. Other keys are shared by all blocks, or read at random
as whole blocks of w slots.

Shape legend: B batch, T queries, S keys, N blocks of queries, w queries of a block, R shared keys, r random blocks of a
block, h head_dim, v value_dim; of a group: b examples, n blocks, s keys of a span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tformer.nn.attention.block_sparse.global_tokens import GlobalTokens, gather_numbers
from tformer.nn.attention.context import MASKED_SCORE, all_true_on_cpu

KeysAndValues = tuple[Tensor, Tensor]
"""[B, K, R, h] and [B, K, R, v]."""


class KeyNumbers(NamedTuple):
    """Four numbers of each key, [B or 1, keys]: they say where it stands and which queries may see it.

    valid: bool, False for keys that no query sees. documents: a key is seen by queries of its document. slots: a key is
    not seen by queries of an earlier slot. positions: read only by positions that change scores. None: no limit, or
    nothing to read.
    """

    valid: Tensor | None = None
    documents: Tensor | None = None
    slots: Tensor | None = None
    positions: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> KeyNumbers:
        """The numbers of other keys, or of these in another order."""
        return KeyNumbers(*(None if x is None else function(x) for x in self))


NO_LIMITS = KeyNumbers()


class RandomBlocks(NamedTuple):
    """Blocks of w keys that each block of queries reads: their numbers, long [B or 1, N, r], and whether they exist."""

    blocks: Tensor
    exists: Tensor


@dataclass(frozen=True, slots=True)
class Pattern:
    """Attributes:

    block, before, after, start: w and the spans, see above.
    band: float [w, before + w + after], 0 where a query of a block may see that slot of its span, else MASKED_SCORE.
    keys: of the S slots, read through spans and at random. The document and the slot of a query are those of its slot.
        The slots limit shared keys only: in a span the band does it, and random blocks are earlier ones.
    shared: of the keys that every block reads; None: there are none.
    random: blocks read at random; None: there are none.
    q_pos: positions of the queries, [B or 1, T]. Only read by positions that change scores.
    padded: whether there may be queries that see nothing at all; their weights are zeros.
    """

    block: int
    before: int
    after: int
    band: Tensor
    start: int = 0
    keys: KeyNumbers = NO_LIMITS
    shared: KeyNumbers | None = None
    random: RandomBlocks | None = None
    q_pos: Tensor | None = None
    padded: bool = False

    @property
    def random_keys(self) -> int:
        """Keys that a block reads at random."""
        return 0 if self.random is None else self.random.blocks.shape[-1] * self.block

    def with_shared(self, tokens: GlobalTokens, slots: Tensor | None) -> Pattern:
        """The pattern where global tokens are read as shared keys only, so that each key counts once.

        slots: [1, S], where queries see no global token of a later slot.
        """
        shared = self.keys.map(lambda x: gather_numbers(x, tokens.index))
        if tokens.valid is not None:
            shared = shared._replace(valid=tokens.valid if shared.valid is None else tokens.valid & shared.valid)
        valid = ~tokens.mask if self.keys.valid is None else self.keys.valid & ~tokens.mask
        return replace(
            self,
            keys=self.keys._replace(valid=valid, slots=slots),
            shared=shared._replace(slots=None if slots is None else tokens.index),
        )


class BlockRun(NamedTuple):
    """Blocks of equal width and span side by side. `low`: the first slot of the first one's span."""

    first: int
    num_blocks: int
    width: int
    low: int
    span: int


class BlockGroup(NamedTuple):
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


def runs(pattern: Pattern, num_queries: int, num_keys: int) -> Iterator[BlockRun]:
    """One run of all whole blocks with a whole span, each other block by itself."""
    block, start = pattern.block, pattern.start
    whole = pattern.before + block + pattern.after
    first = min(max(0, -((start - pattern.before) // block)), -(-num_queries // block))
    last = max(first, min(num_queries // block, (num_keys - pattern.after - start) // block))
    for number in range(first):
        yield _single(pattern, number, num_queries, num_keys)
    if last > first:
        yield BlockRun(first, last - first, block, start + first * block - pattern.before, whole)
    for number in range(last, -(-num_queries // block)):
        yield _single(pattern, number, num_queries, num_keys)


def _single(pattern: Pattern, number: int, num_queries: int, num_keys: int) -> BlockRun:
    begin = pattern.start + number * pattern.block
    low = max(0, begin - pattern.before)
    high = min(num_keys, begin + pattern.block + pattern.after)
    return BlockRun(number, 1, min(pattern.block, num_queries - number * pattern.block), low, high - low)


def part_masks(pattern: Pattern, group: BlockGroup) -> list[Tensor | None]:
    """Masks of the span, and of the shared and the random keys if there are any: bool [b or 1, n, w or 1, keys].

    None where every key is visible.
    """
    in_blocks = pattern.keys._replace(slots=None)
    masks = [_mask(pattern, group, in_blocks, lambda x: _spans(x, pattern, group).unsqueeze(2))]
    if pattern.shared is not None:
        masks.append(_mask(pattern, group, pattern.shared, lambda x: _of_examples(x, group)[:, None, None]))
    if pattern.random is not None:
        index, exists = (_of_examples(x, group)[:, group.blocks] for x in pattern.random)  # [b or 1, n, r]
        exists = exists.repeat_interleave(pattern.block, dim=-1).unsqueeze(2)
        seen = _mask(
            pattern, group, in_blocks,
            lambda x: _random_slots(_of_examples(x, group), index, pattern.block).unsqueeze(2),
        )  # fmt: skip
        masks.append(exists if seen is None else exists & seen)
    return [None if mask is None or all_true_on_cpu(mask) else mask for mask in masks]


def _mask(
    pattern: Pattern, group: BlockGroup, keys: KeyNumbers, of_blocks: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Mask of the keys that the queries see.

    of_blocks: numbers [B or 1, keys] -> [b or 1, n or 1, 1, keys of a block].
    """
    seen = None if keys.valid is None else of_blocks(keys.valid)
    if keys.slots is not None and pattern.keys.slots is not None:
        earlier = of_blocks(keys.slots) <= _of_queries(pattern.keys.slots, pattern, group)
        seen = earlier if seen is None else seen & earlier
    if keys.documents is not None and pattern.keys.documents is not None:
        same = _of_queries(pattern.keys.documents, pattern, group) == of_blocks(keys.documents)
        seen = same if seen is None else seen & same
    return seen


def _of_examples(x: Tensor, group: BlockGroup) -> Tensor:
    return x if x.shape[0] == 1 else x[group.examples]


def _spans(x_BS: Tensor, pattern: Pattern, group: BlockGroup) -> Tensor:
    """[b or 1, n, s]"""
    end = group.low + (group.num_blocks - 1) * pattern.block + group.span
    return _of_examples(x_BS, group)[:, group.low : end].unfold(1, group.span, pattern.block)


def _of_queries(x_BS: Tensor, pattern: Pattern, group: BlockGroup) -> Tensor:
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
