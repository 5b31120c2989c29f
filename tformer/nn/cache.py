"""Decoding cache: keys and values of each layer, and the position and validity of each slot.

Slots are filled in order of arrival, the same slot in every row, and lengths are Python integers: no synchronization
with the device. The position of a slot may differ between rows (left padding), so each is stored, and whether the slot
holds a token.

Rows. Beam search has several rows for every sentence, side by side (`fan_out`). The keys and values of cross-attention
and the encoder's mask then stay one per sentence, and only those of self-attention move when rows are reordered:

    sentence                    0           1
    row of self-attention       0   1   2   3   4   5        three beams
    row of cross-attention      0           1

Slots of a row. Storage grows with the slots in use, so that keys of different heads lie close together:

    slot        0  1  2  3  4  5  6  7  8  9 10 11 ...
    in use      *  *  *  *  *  *                             length 6
    storage     *  *  *  *  *  *  .  .                       a multiple of SLACK, `keys.shape[2]`
    capacity    *  *  *  *  *  *  .  .  .  .  .  .           the most that storage may grow to

Four classes work together in a step:

    ModelCache    counts slots: `advance` once per pass, before every layer adds its own. Moves the rows of all layers.
    LayerCache    adds slots in one of two ways. `append` writes keys and values and returns all of them, for PyTorch's
                  operators. `extend` returns the storage, and the C kernel that asked for it writes and reads it.
    Spares        lends the memory into which rows are gathered when they move.
    Tape          repeats a step that only C kernels computed. It takes the storage of each layer from `extend`, too.

Rows that moved by table. Gathering costs as much as reading all keys, so rows that kernels read stay where they were
written, and a table says where: slot s of row b is in row `origins_BC[b, s]` of the storage. Here rows became [2, 0, 0]
before the last slot:

    storage     row 0   a a a x        origins    row 0   2 2 2 0        row 0 reads    c c c x
                row 1   b b b y                   row 1   0 0 0 1        row 1 reads    a a a y
                row 2   c c c z                   row 2   0 0 0 2        row 2 reads    a a a z

Only kernels follow the table (`read_by_kernel`). Before anything else reads a layer, its rows are gathered (`_settle`).

Shape legend: B batch (rows), K kv heads, C capacity in slots, S slots in use, T new slots, h head_dim, v value_dim;
b beams, so that B / b sentences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.kernels.functions import AttentionStep, Kernels
from tformer.kernels.tape import Tape

FEW_SLOTS = 1024
"""Slots of all rows together, up to which attention on a CPU is bound by overhead, not by reading the cache."""
SLACK = 8
"""Slots by which the storage of a row grows."""


def fastest_dtype(
    dtype: torch.dtype, device: torch.device, *, slots: int, kernels: Kernels | None = None
) -> torch.dtype:
    """The faster dtype for cached keys and values of `slots` positions, computed in `dtype` and read by single queries.

    PyTorch's kernels for one query take several times as long in bf16 as in fp32 on a CPU, though they read half.
    """
    if kernels is not None:
        return dtype
    few_on_cpu = device.type == "cpu" and slots <= FEW_SLOTS
    return torch.float32 if few_on_cpu and dtype == torch.bfloat16 else dtype


class LayerState(Protocol):
    """Decoding state of one layer of any attention kind."""

    def select_rows(self, index: Tensor, *, capacity: int | None = None, spares: Spares | None = None) -> None:
        """Row i becomes what row index[i] was, with room for `capacity` slots (None: as before)."""

    def truncate(self, length: int) -> None:
        """Remove the slots from `length` on. ValueError if the kind cannot."""


class LayerCache:
    """Keys and values of one self-attention layer, [B, K, C, h] and [B, K, C, v].

    Attributes:
        read_by_kernel: whether the last slots were added by `extend`: its callers follow `origins_BC`.
        origins_BC: int32 [B, C], the row of the storage that holds each slot of a row; None: its own.
        lengths_B: int32 [B], the slots of each row in use, the new one included (`RowCache`); None: `length` in all.
        kernel_step: the kernel's arguments for the next slot, which attention makes in its first step and keeps here.
    """

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
        # Slots beyond `length` are never read, and memory that is not written costs nothing on a CPU.
        rows = (batch_size, num_kv_heads, capacity)
        self._keys = _Storage(torch.empty(*rows, head_dim, device=device, dtype=dtype))
        self._values = _Storage(torch.empty(*rows, value_dim, device=device, dtype=dtype))
        self.capacity, self.length = capacity, 0
        self.read_by_kernel = False
        self.origins_BC: Tensor | None = None
        self.lengths_B: Tensor | None = None
        self.kernel_step: AttentionStep | None = None

    @property
    def keys(self) -> Tensor:
        return self._keys.slots

    @property
    def values(self) -> Tensor:
        return self._values.slots

    def append(self, k_BKTh: Tensor, v_BKTv: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new slots and return views of all S in use. ValueError when they do not fit."""
        self._settle()
        start = self.length
        keys, values, end = self.extend(k_BKTh.shape[2])
        self.read_by_kernel = False
        if self.lengths_B is not None:
            newest = torch.arange(len(keys), device=keys.device), slice(None), self.lengths_B - 1
            keys[newest], values[newest] = k_BKTh[:, :, 0], v_BKTv[:, :, 0]
        else:
            keys[:, :, start:end] = k_BKTh
            values[:, :, start:end] = v_BKTv
        return keys[:, :, :end], values[:, :, :end]

    def extend(self, count: int = 1) -> tuple[Tensor, Tensor, int]:
        """Storage of keys and values with `count` new slots, which the caller writes, and how many are then in use."""
        end = self.length + count
        check_fit(end, self.capacity)
        if end > self.keys.shape[2]:
            self._keys, self._values = self._with_room(self.keys, end), self._with_room(self.values, end)
        self.length, self.read_by_kernel = end, True
        return self.keys, self.values, end

    def use_rows(self, keys: Tensor, values: Tensor, lengths_B: Tensor, *, length: int) -> None:
        """Use rows of the caller's memory. Row b has `lengths_B[b]` slots in use, at most `length`."""
        self._keys, self._values = _Storage(keys), _Storage(values)
        self.lengths_B, self.length = lengths_B, length

    def select_rows(self, index: Tensor, *, capacity: int | None = None, spares: Spares | None = None) -> None:
        """Row i becomes what row index[i] was, with room for `capacity` slots (None: as before)."""
        spares = Spares() if spares is None else spares
        self.capacity = self.capacity if capacity is None else capacity
        sizes = {"length": self.length, "capacity": self.capacity}
        origins_BS = None if self.origins_BC is None else self.origins_BC[index, : self.length].long()
        self._keys = spares.gather(self._keys, index, origins_BS=origins_BS, **sizes)
        self._values = spares.gather(self._values, index, origins_BS=origins_BS, **sizes)
        self.origins_BC = None

    def truncate(self, length: int) -> None:
        self._settle()
        self.length = length

    def _settle(self) -> None:
        """Gather the slots into the rows that read them."""
        if self.origins_BC is not None:
            self.select_rows(torch.arange(len(self.origins_BC)))

    def _with_room(self, old_BKCx: Tensor, end: int) -> _Storage:
        new_BKCx = old_BKCx.new_empty(*old_BKCx.shape[:2], _room(end, self.capacity), old_BKCx.shape[3])
        new_BKCx[:, :, : self.length] = old_BKCx[:, :, : self.length]
        return _Storage(new_BKCx)


class _Storage(NamedTuple):
    """Slots [B, K, room, x]. After rows were gathered they are a view of the start of the flat tensor `memory`."""

    slots: Tensor
    memory: Tensor | None = None


class Spares:
    """Spare memory for rows that move: rows are gathered into it, and the memory that they leave is the next spare.

        before      keys of layer 0 in A, keys of layer 1 in B, spare C
        layer 0     gathered from A into C                       spare A
        layer 1     gathered from B into A                       spare B

    Layers of one shape share a single spare piece, so that a reorder allocates nothing. Gathered tensors have room for
    few more slots: memory with gaps between heads is read several times more slowly.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], Tensor] = {}

    def gather(
        self, old: _Storage, index: Tensor, *, length: int, capacity: int, origins_BS: Tensor | None = None
    ) -> _Storage:
        """Rows `index` of the first `length` slots, with room for a few more; `old` is invalid afterwards.

        origins: long, the row of `old` for each slot of a new row, in place of `index`.
        """
        _, num_kv_heads, _, size = old.slots.shape
        shape = (index.shape[0], num_kv_heads, _room(length + 1, capacity), size)
        memory = self._free.pop((num_kv_heads, size), None)
        if memory is None or memory.numel() < math.prod(shape):
            memory = old.slots.new_empty(index.shape[0] * num_kv_heads * capacity * size)
        slots = memory[: math.prod(shape)].view(shape)
        if origins_BS is None:
            torch.index_select(old.slots[:, :, :length], 0, index, out=slots[:, :, :length])
        else:
            slots[:, :, :length] = old.slots[origins_BS, :, torch.arange(length)].transpose(1, 2)
        if old.memory is not None:
            self._free[num_kv_heads, size] = old.memory
        return _Storage(slots, memory)


def _room(slots: int, capacity: int) -> int:
    """Slots of the storage for `slots` in use."""
    return min(capacity, -(-slots // SLACK) * SLACK)


class CrossCache:
    """Keys and values of one cross-attention layer, computed once from the encoder's output: [B / b, K, S, h] and v.

    The first step fills it; the steps after that read it, without the encoder's output.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values

    @property
    def filled(self) -> bool:
        return self.keys is not None

    @property
    def batch_size(self) -> int:
        return self.read()[0].shape[0]

    def fill(self, k_BKSh: Tensor, v_BKSv: Tensor) -> None:
        # Views of one product: made contiguous once instead of in every step's products.
        self.keys, self.values = k_BKSh.contiguous(), v_BKSv.contiguous()

    def read(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None, "the cross-attention cache was read before fill"
        return self.keys, self.values

    def select_rows(self, index: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)


def check_fit(end: int, capacity: int) -> None:
    if end > capacity:
        raise ValueError(f"the cache holds {capacity} positions, {end} are needed")


class ModelCache:
    """Caches of all layers of a decoder, and the content of each slot.

    A pass calls `advance` once, then every layer adds as many slots.

    key_positions: long [B, C]; key_valid: bool [B, C], False for padding; length: slots in use.
    key_ids: long [B, C], the token of each slot, for a model that reads n-grams; else None.
    encoder_mask: bool [B / b, S_source] or None, kept here because it is reordered with the rows.
    beams: rows per sentence, 1 before `fan_out`. padded: whether any slot may be padding.
    kernels: those of the model; they repeat recorded steps.
    has_lengths: whether rows have lengths of their own, which kernels read in place of a mask (`RowCache`).
    """

    has_lengths = False

    def __init__(
        self,
        layers: Sequence[LayerState],
        cross: list[CrossCache] | None = None,
        *,
        batch_size: int,
        capacity: int,
        device: torch.device | str,
        keeps_ids: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self.layers, self.kernels = layers, kernels
        self.cross = cross or []
        self.capacity = capacity
        self.key_positions = torch.zeros(batch_size, capacity, dtype=torch.long, device=device)
        self.key_valid = torch.zeros(batch_size, capacity, dtype=torch.bool, device=device)
        self.key_ids: Tensor | None = torch.zeros_like(self.key_positions) if keeps_ids else None
        self.encoder_mask: Tensor | None = None
        self.length = 0
        self.beams = 1
        self.padded = False
        self._tapes: dict[tuple[int, ...], Tape | None] = {}  # by the shape of a step; None: not by the kernels alone
        self._same_positions = True  # in all rows
        self._spares = Spares()

    @property
    def batch_size(self) -> int:
        return self.key_positions.shape[0]

    @property
    def has_encoder(self) -> bool:
        """Whether cross-attention's keys and values are cached: the encoder need not run again."""
        return bool(self.cross) and all(cross.filled for cross in self.cross)

    def advance(self, positions_BT: Tensor, valid_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add T new slots with positions [B or 1, T]; valid: None if all hold tokens.

        Returns (key_positions [B, S], or [1, S] if they are the same in all rows; key_valid [B, S]) of all slots
        in use, the new ones included. Called once per forward pass, before the layers append theirs. ValueError when
        the slots do not fit.
        """
        start, end = self.length, self.length + positions_BT.shape[1]
        check_fit(end, self.capacity)
        self.key_positions[:, start:end] = positions_BT
        self.key_valid[:, start:end] = True if valid_BT is None else valid_BT
        self.length = end
        self.padded = self.padded or valid_BT is not None
        self._same_positions = self._same_positions and positions_BT.shape[0] == 1
        return self.key_positions[: 1 if self._same_positions else None, :end], self.key_valid[:, :end]

    def copy_slots(self, other: ModelCache, end: int, *, row: int = 0, first: int = 0) -> None:
        """Append positions up to `end` that `row` of another cache holds, whose slot `first` has position 0."""
        slots = slice(first + self.length, first + end)
        self.advance(torch.arange(self.length, end, device=self.key_positions.device).unsqueeze(0))
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            assert isinstance(mine, LayerCache) and isinstance(theirs, LayerCache)
            mine.append(theirs.keys[row : row + 1, :, slots], theirs.values[row : row + 1, :, slots])

    def put_ids(self, ids_BT: Tensor, *, before: int) -> Tensor:
        """Store the tokens of the next T slots; returns the tokens of the `before` slots in front (-1: none).

        Called before `advance`. ValueError when the slots do not fit.
        """
        assert self.key_ids is not None
        check_fit(self.length + ids_BT.shape[1], self.capacity)
        self.key_ids[:, self.length : self.length + ids_BT.shape[1]] = ids_BT
        near = slice(max(0, self.length - before), self.length)
        ids_BN = self.key_ids[:, near].masked_fill(~self.key_valid[:, near], -1)
        return F.pad(ids_BN, (before - ids_BN.shape[1], 0), value=-1)

    def step(self, x_B1D: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """run(), all layers of a decoding step of x; steps that the C kernels do alone are repeated without Python."""
        kernels, layers = self.kernels, [layer for layer in self.layers if isinstance(layer, LayerCache)]
        moved = any(layer.origins_BC is not None for layer in layers)
        if kernels is None or self.cross or moved or len(layers) < len(self.layers):
            return run()
        if x_B1D.shape not in self._tapes:
            out, self._tapes[x_B1D.shape] = kernels.record(x_B1D, run, lambda: [layer.keys for layer in layers])
            return out
        tape = self._tapes[x_B1D.shape]
        is_repeated = tape is not None and tape.takes(x_B1D)
        return tape(x_B1D, [layer.extend() for layer in layers]) if tape is not None and is_repeated else run()

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was; `index` long [B'] may repeat or drop rows. Not after `fan_out`."""
        assert self.beams == 1, "rows of a cache that was fanned out move within their sentence"
        self._select_rows(index)
        self._select_sentences(index)

    def compact(self, rows: Tensor) -> None:
        """Keep only `rows` (long [B'] or bool [B]), in order."""
        self.reorder(rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows)

    def expand(self, n: int) -> None:
        """Repeat each row n times in place: a, b -> a, a, b, b (several samples from one prefill)."""
        if n > 1:
            self.reorder(self._repeated(n))

    def fan_out(self, beams: int, *, capacity: int) -> None:
        """Give each row, now a sentence, `beams` rows side by side, with room for `capacity` slots: a, b -> a, a, b, b.

        Keys and values of cross-attention stay one per sentence.
        """
        assert self.beams == 1, "a cache is fanned out once"
        check_fit(self.length, capacity)
        more = max(0, capacity - self.capacity)
        self.key_positions = F.pad(self.key_positions, (0, more))[:, :capacity]
        self.key_valid = F.pad(self.key_valid, (0, more))[:, :capacity]
        self.key_ids = None if self.key_ids is None else F.pad(self.key_ids, (0, more))[:, :capacity]
        self.capacity = capacity
        self._select_rows(self._repeated(beams))
        self.beams = beams
        self._spares = Spares()  # the earlier ones are too small

    def reorder_beams(self, index: Tensor) -> None:
        """Replace row i by row index[i] of the same sentence, with equal positions and padding; index: long [B].

        If kernels read all layers, and these have one table, only the table moves.
        """
        self.key_ids = None if self.key_ids is None else self.key_ids.index_select(0, index)
        layers = [layer for layer in self.layers if isinstance(layer, LayerCache) and layer.read_by_kernel]
        tables = {id(layer.origins_BC) for layer in layers}
        if len(layers) < len(self.layers) or len(tables) != 1:
            for layer in self.layers:
                layer.select_rows(index, spares=self._spares)
            return
        origins_BC = layers[0].origins_BC
        if origins_BC is None:
            origins_BC = torch.arange(len(index), dtype=torch.int32).unsqueeze(1).repeat(1, self.capacity)
        origins_BC[:, : self.length] = origins_BC[index, : self.length]
        for layer in layers:
            layer.origins_BC = origins_BC

    def keep_sentences(self, sentences: Tensor) -> None:
        """Keep only these sentences (long), with all their rows."""
        beams = torch.arange(self.beams, device=sentences.device)
        self._select_rows((sentences.unsqueeze(1) * self.beams + beams).flatten())
        self._select_sentences(sentences)

    def truncate(self, length: int) -> None:
        """Remove the slots from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        self.length = length
        for layer in self.layers:
            layer.truncate(length)

    def _repeated(self, n: int) -> Tensor:
        return torch.arange(self.batch_size, device=self.key_positions.device).repeat_interleave(n)

    def _select_rows(self, index: Tensor) -> None:
        for layer in self.layers:
            layer.select_rows(index, capacity=self.capacity, spares=self._spares)
        self.key_positions = self.key_positions.index_select(0, index)
        self.key_valid = self.key_valid.index_select(0, index)
        self.key_ids = None if self.key_ids is None else self.key_ids.index_select(0, index)

    def _select_sentences(self, index: Tensor) -> None:
        for cross in self.cross:
            cross.select_rows(index)
        if self.encoder_mask is not None:
            self.encoder_mask = self.encoder_mask.index_select(0, index)
