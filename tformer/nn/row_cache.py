"""Decoding cache whose rows join and leave between steps, for continuous batching.

A `ModelCache` fills the same slot of every row. Here rows have different lengths, and slot s holds the position s:

    row 0    * * * * * * * .        length 7
    row 1    * * * . . . . .        length 3; the next step writes slot 3
    row 2    * * * * * . . .        length 5

C kernels read the lengths, so that a row costs what its own slots cost, and a recorded step is repeated whatever the
lengths are. PyTorch's operators get all slots and a mask; slots that are not in use are zeros, because the weight 0
times NaN is NaN. A row that leaves is replaced by the last one. Memory has room for more rows and slots than are in
use; it grows, and is given back when the last row leaves.

Shape legend: B rows in use, R rows of memory, K kv heads, C slots of memory, S slots in use, h head_dim, v value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tformer.nn.cache import LayerCache, ModelCache, check_fit

ROOM = 64
"""Slots by which the memory of a row grows."""


class RowCache(ModelCache):
    """Keys and values of rows of different lengths; `lengths` has the length of each row in use."""

    has_lengths = True

    def __init__(self, empty: ModelCache) -> None:
        """`empty`: a cache of the model that holds keys and values; every row gets its capacity."""
        device, capacity = empty.key_positions.device, empty.capacity
        super().__init__(empty.layers, batch_size=1, capacity=capacity, device=device, kernels=empty.kernels)
        self.key_positions = torch.arange(capacity, device=device).unsqueeze(0)
        self.lengths: list[int] = []
        self._lengths_R = torch.zeros(0, dtype=torch.int32, device=device)
        self._memory = [_slots_of(layer) for layer in empty.layers]
        self._free()

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of one row, in all layers."""
        return sum(part.shape[1] * part.shape[3] * part.itemsize for memory in self._memory for part in memory)

    def advance(self, positions_BT: Tensor, valid_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add a slot to every row: see `ModelCache.advance`. positions: of the new slots, the lengths before."""
        assert positions_BT.shape[1] == 1 and valid_BT is None
        self._make_room(self.batch_size, self.length + 1)
        self.lengths, self.length = [length + 1 for length in self.lengths], self.length + 1
        self._lengths_R[: self.batch_size] += 1
        k_pos = self.key_positions[:, : self.length]
        return k_pos, k_pos < self._lengths_R[: self.batch_size, None]

    def join(self, read: ModelCache) -> None:
        """Add a row that holds what `read`, a cache of one row, holds."""
        row, length = self.batch_size, read.length
        self._make_room(row + 1, max(self.length, length))
        for memory, layer in zip(self._memory, read.layers, strict=True):
            for slots, new in zip(memory, _slots_of(layer), strict=True):
                slots[row, :, :length] = new[0, :, :length]
        self.lengths.append(length)
        self._use_rows()

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last, length = self.batch_size - 1, self.lengths.pop()
        if row < last:
            self.lengths[row] = length
        for slots in (slots for memory in self._memory for slots in memory):
            slots[row] = slots[last]
            slots[last] = 0
        self._use_rows() if self.lengths else self._free()

    def _free(self) -> None:
        self._memory = [
            tuple(slots.new_empty(0, slots.shape[1], 0, slots.shape[3]) for slots in memory) for memory in self._memory
        ]
        self._use_rows()

    def _make_room(self, rows: int, slots: int) -> None:
        """Let the memory hold this number of rows and slots."""
        check_fit(slots, self.capacity)
        has_rows, _, has_slots, _ = self._memory[0][0].shape
        if rows <= has_rows and slots <= has_slots:
            return
        rows = has_rows if rows <= has_rows else max(rows, 2 * has_rows)
        if rows > len(self._lengths_R):  # recorded steps read the lengths at their address
            self._lengths_R, self._tapes = self._lengths_R.new_zeros(rows), {}
        slots = has_slots if slots <= has_slots else min(-(-slots // ROOM) * ROOM, self.capacity)
        for layer, memory in enumerate(self._memory):
            larger = tuple(old.new_zeros(rows, old.shape[1], slots, old.shape[3]) for old in memory)
            for old, new in zip(memory, larger, strict=True):
                for row, length in enumerate(self.lengths):
                    new[row, :, :length] = old[row, :, :length]
            self._memory[layer] = larger
        self._use_rows()

    def _use_rows(self) -> None:
        """Show the layers the rows in use."""
        rows = self.batch_size
        self.length, self.padded = max(self.lengths, default=0), len(set(self.lengths)) > 1
        self._lengths_R[:rows] = torch.tensor(self.lengths, dtype=torch.int32)
        for layer, (keys, values) in zip(self.layers, self._memory, strict=True):
            assert isinstance(layer, LayerCache)
            layer.use_rows(keys[:rows], values[:rows], self._lengths_R[:rows], length=self.length)


def _slots_of(layer: object) -> tuple[Tensor, ...]:
    """A layer's memory of keys and of values."""
    assert isinstance(layer, LayerCache), f"rows of a {type(layer).__name__} cannot join"
    return layer.keys, layer.values
