"""What decoding remembers: keys and values of past positions, preallocated, with one length for all rows.

Slots are filled in order of arrival, the same slot in every row. What a slot means differs per row (left padding), so
`ModelCache` keeps each slot's position and whether it holds a token. Lengths are Python integers: no device sync.

Shape legend: B batch, K kv heads, C capacity in slots, S slots in use, T new slots, h head_dim, v value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one self-attention layer, [B, K, C, h] and [B, K, C, v]."""

    def __init__(
        self,
        *,
        batch_size: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        value_dim: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.keys = torch.zeros(batch_size, num_kv_heads, capacity, head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(batch_size, num_kv_heads, capacity, value_dim, device=device, dtype=dtype)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def append(self, k_BKTh: Tensor, v_BKTv: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new slots and return views of all S in use. ValueError when they do not fit."""
        end = self.length + k_BKTh.shape[2]
        _check_fit(end, self.capacity)
        self.keys[:, :, self.length : end] = k_BKTh
        self.values[:, :, self.length : end] = v_BKTv
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select_rows(self, index: Tensor) -> None:
        # Only the slots in use are copied into storage of the full capacity.
        self.keys = _select(self.keys, index, self.length)
        self.values = _select(self.values, index, self.length)

    def truncate(self, length: int) -> None:
        self.length = length


class CrossCache:
    """Keys and values of one cross-attention layer: computed from the encoder's output once, then only read."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def filled(self) -> bool:
        return self.keys is not None

    def fill(self, k_BKSh: Tensor, v_BKSv: Tensor) -> None:
        self.keys, self.values = k_BKSh, v_BKSv

    def read(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None, "the cross-attention cache was read before fill"
        return self.keys, self.values

    def select_rows(self, index: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)


class ModelCache:
    """The caches of all layers of a decoder, and what each slot holds.

    key_positions: long [B, C]; key_valid: bool [B, C], False for padding; length: slots in use.
    encoder_mask: bool [B, S_source] or None, kept here so that it follows the rows.
    """

    def __init__(
        self,
        layers: list[LayerCache],
        cross: list[CrossCache] | None = None,
        *,
        batch_size: int,
        capacity: int,
        device: torch.device | str,
    ) -> None:
        self.layers = layers
        self.cross = cross or []
        self.capacity = capacity
        self.key_positions = torch.zeros(batch_size, capacity, dtype=torch.long, device=device)
        self.key_valid = torch.zeros(batch_size, capacity, dtype=torch.bool, device=device)
        self.encoder_mask: Tensor | None = None
        self.length = 0

    @property
    def batch_size(self) -> int:
        return self.key_positions.shape[0]

    def advance(self, positions_BT: Tensor, valid_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Announce T new slots; positions [B or 1, T], valid None when all hold tokens.

        Returns (key_positions [B, S], key_valid [B, S]) of all slots in use, the new ones included. Called once per
        forward pass, before the layers append theirs. ValueError when the slots do not fit.
        """
        start, end = self.length, self.length + positions_BT.shape[1]
        _check_fit(end, self.capacity)
        self.key_positions[:, start:end] = positions_BT
        self.key_valid[:, start:end] = True if valid_BT is None else valid_BT
        self.length = end
        return self.key_positions[:, :end], self.key_valid[:, :end]

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was; `index` long [B'] may repeat or drop rows (beam search)."""
        for layer in self.layers:
            layer.select_rows(index)
        for cross in self.cross:
            cross.select_rows(index)
        self.key_positions = self.key_positions.index_select(0, index)
        self.key_valid = self.key_valid.index_select(0, index)
        if self.encoder_mask is not None:
            self.encoder_mask = self.encoder_mask.index_select(0, index)

    def compact(self, rows: Tensor) -> None:
        """Keep only `rows` (long [B'] or bool [B]), in order."""
        self.reorder(rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows)

    def expand(self, n: int) -> None:
        """Repeat each row n times in place: a, b -> a, a, b, b (several samples from one prefill)."""
        if n > 1:
            rows = torch.arange(self.batch_size, device=self.key_positions.device)
            self.reorder(rows.repeat_interleave(n))

    def truncate(self, length: int) -> None:
        """Forget every slot from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        self.length = length
        for layer in self.layers:
            layer.truncate(length)


def _check_fit(end: int, capacity: int) -> None:
    if end > capacity:
        raise ValueError(f"the cache holds {capacity} positions, {end} are needed")


def _select(storage_BKCx: Tensor, index: Tensor, length: int) -> Tensor:
    selected = storage_BKCx.new_zeros((index.shape[0], *storage_BKCx.shape[1:]))
    selected[:, :, :length] = storage_BKCx[:, :, :length].index_select(0, index)
    return selected
