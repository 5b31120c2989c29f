"""Global tokens: every query sees them, and as queries they see every key.

Longformer, arXiv 2004.05150, 3.1; BigBird, arXiv 2007.14062, 2. There are few, so their rows cost O(R S).

Shape legend: B batch, H query heads, K kv heads, S keys, R global tokens, x head_dim or value_dim, v value_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.attention.context import AttentionContext, AttentionInputs


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
    """The slots that a mask [B, S] marks. Reading their number synchronizes accelerators."""
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
    """Inputs of `attend` for the rows [B, H, R, v] of the global tokens, with the queries of `inputs`.

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
