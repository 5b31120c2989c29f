"""Decoding cache of fixed shape, for compiled decoding: no shape and no Python number changes between steps.

A compiled step, and a CUDA graph that replays it, is made for tensors of given shapes at given addresses. So all slots
of a bucket are returned every time, with a mask of those that hold a token; the next slot is a number on the device;
new keys and values, and rows that move, are written into the same memory. The `ModelCache` of the prompts is copied
into it. The caller counts the length.

Rows beyond those in use are computed like the others, and their results are ignored.

Shape legend: R rows, S sentences (R / S beams each), K kv heads, C slots, T source slots, h head_dim, v value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tformer.nn.cache import CrossCache, LayerCache, ModelCache


class FixedLayer:
    """Keys and values of one self-attention layer, [R, K, C, h] and [R, K, C, v]; `slot` [1] belongs to the cache."""

    def __init__(self, like: LayerCache | FixedLayer, *, rows: int, slots: int, slot: Tensor) -> None:
        # Zeros, not uninitialized memory: masked slots have the weight 0, but 0 times NaN is NaN.
        self.keys: Tensor = like.keys.new_zeros(rows, like.keys.shape[1], slots, like.keys.shape[3])
        self.values: Tensor = like.values.new_zeros(rows, like.values.shape[1], slots, like.values.shape[3])
        self.slot = slot

    def append(self, k_RK1h: Tensor, v_RK1v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the newest slot and return all slots."""
        self.keys.index_copy_(2, self.slot, k_RK1h.to(self.keys.dtype))
        self.values.index_copy_(2, self.slot, v_RK1v.to(self.values.dtype))
        return self.keys, self.values


class FixedCache:
    """The caches of all layers of a decoder, and the inputs of its next step.

    Attributes:
        ids, positions: long [R, 1], the newest token of each row and its position: set before a step.
        slot: long [1], where the step writes; it is incremented on the device.
        key_positions, key_valid: long and bool [R, C], content of the slots.
        key_ids: long [R, C], their tokens, where `like` keeps them; else None.
        cross: cross-attention's keys and values, [S, K, T, h] and [S, K, T, v]; none without an encoder.
        encoder_mask: bool [S, T], the real tokens of the sources; None without an encoder.
    """

    def __init__(self, like: AnyCache, *, sentences: int, beams: int, slots: int, source_slots: int) -> None:
        """Room for `slots` positions of `sentences` times `beams` rows, in the formats and on the device of `like`.

        source_slots: room for the tokens of a source; 0 without an encoder. ValueError for a layer of `like` that
        keeps something else than keys and values.
        """
        self.sentences, self.beams, self.slots, self.source_slots = sentences, beams, slots, source_slots
        rows, device = sentences * beams, like.key_positions.device
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.ids, self.positions = (torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in range(2))
        self.key_positions: Tensor = torch.zeros(rows, slots, dtype=torch.long, device=device)
        self.key_valid = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.key_ids: Tensor | None = None if like.key_ids is None else torch.zeros_like(self.key_positions)
        self.layers: list[FixedLayer] = [
            FixedLayer(_keys_and_values(layer), rows=rows, slots=slots, slot=self.slot) for layer in like.layers
        ]
        self.cross: list[CrossCache] = [
            CrossCache(*(part.new_zeros(sentences, part.shape[1], source_slots, part.shape[3]) for part in old.read()))
            for old in like.cross
        ]
        self.encoder_mask: Tensor | None = None
        if self.cross:
            self.encoder_mask = torch.zeros(sentences, source_slots, dtype=torch.bool, device=device)

    # --- called by the model, inside a graph -------------------------------------------------------------------------

    @property
    def has_encoder(self) -> bool:
        """Whether cross-attention's keys and values are cached: the encoder has always run before."""
        return len(self.cross) > 0  # not bool(): torch.compile of PyTorch 2.11 cannot follow it

    def advance(self, positions_R1: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest slot; (key_positions, key_valid) of all slots. Called before the layers append theirs."""
        self.key_positions.index_copy_(1, self.slot, positions_R1)
        self.key_valid.index_fill_(1, self.slot, True)
        return self.key_positions, self.key_valid

    def put_ids(self, ids_R1: Tensor, *, before: int) -> Tensor:
        """Store the newest token; returns the tokens of the `before` slots in front (-1: none).

        Called before `advance`.
        """
        assert self.key_ids is not None
        self.key_ids.index_copy_(1, self.slot, ids_R1)
        near = self.slot - before + torch.arange(before, device=self.slot.device)
        exists = near >= 0
        near = near.clamp(min=0)
        known = self.key_valid.index_select(1, near) & exists
        return self.key_ids.index_select(1, near).masked_fill(~known, -1)

    # --- between steps ------------------------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """All tensors of the cache; their addresses never change."""
        found = [self.slot, self.ids, self.positions, self.key_positions, self.key_valid]
        found += [] if self.key_ids is None else [self.key_ids]
        found += [part for layer in self.layers for part in (layer.keys, layer.values)]
        found += [part for cross in self.cross for part in cross.read()]
        return found if self.encoder_mask is None else [*found, self.encoder_mask]

    def fill(self, cache: ModelCache) -> None:
        """Copy the cache of a prefill: its rows are the first sentences, and all beams of a sentence are equal."""
        count, length = cache.batch_size, cache.length
        rows = slice(0, count * self.beams)
        for layer, old in zip(self.layers, map(_keys_and_values, cache.layers), strict=True):
            _put(layer.keys[rows], self._repeated(old.keys[:, :, :length]))
            _put(layer.values[rows], self._repeated(old.values[:, :, :length]))
        self.key_positions[rows, :length] = self._repeated(cache.key_positions[:, :length])
        if self.key_ids is not None and cache.key_ids is not None:
            self.key_ids[rows, :length] = self._repeated(cache.key_ids[:, :length])
        self._clear_masks(length)
        self.key_valid[rows, :length] = self._repeated(cache.key_valid[:, :length])
        width = 0
        for cross, known in zip(self.cross, cache.cross, strict=True):
            for part, old_part in zip(cross.read(), known.read(), strict=True):
                width = old_part.shape[2]
                _put(part[:count], old_part)
        if self.encoder_mask is not None:
            real = torch.ones_like(self.encoder_mask[:count, :width])
            if cache.encoder_mask is not None:  # may be a view of ours: read before it is cleared
                real = cache.encoder_mask.bool().clone()
            self.encoder_mask.zero_()
            self.encoder_mask[:count, :width] = real

    def copy_from(self, full: FixedCache, *, sentences: int, length: int) -> None:
        """Copy the first sentences and slots of a smaller cache with as many beams and source slots."""
        rows = slice(0, sentences * self.beams)
        for layer, old in zip(self.layers, full.layers, strict=True):
            _put(layer.keys[rows], old.keys[rows, :, :length])
            _put(layer.values[rows], old.values[rows, :, :length])
        self.key_positions[rows, :length] = full.key_positions[rows, :length]
        if self.key_ids is not None and full.key_ids is not None:
            self.key_ids[rows, :length] = full.key_ids[rows, :length]
        self._clear_masks(length)
        self.key_valid[rows, :length] = full.key_valid[rows, :length]
        for cross, known in zip(self.cross, full.cross, strict=True):
            for part, old_part in zip(cross.read(), known.read(), strict=True):
                part[:sentences] = old_part[:sentences]
        if self.encoder_mask is not None and full.encoder_mask is not None:
            self.encoder_mask[:sentences] = full.encoder_mask[:sentences]

    def move_rows(self, index: Tensor, *, length: int) -> None:
        """Replace row i by row index[i] of the same sentence, with equal positions and padding."""
        for layer in self.layers:
            _move(layer.keys[:, :, :length], index)
            _move(layer.values[:, :, :length], index)
        if self.key_ids is not None:
            _move(self.key_ids[:, :length], index)

    def keep_sentences(self, index: Tensor, *, length: int) -> None:
        """Sentence i becomes what sentence index[i] was, with all its rows; other rows are ignored afterwards."""
        beams = torch.arange(self.beams, device=index.device)
        rows = (index.unsqueeze(1) * self.beams + beams).flatten()
        self.move_rows(rows, length=length)
        _move(self.key_positions, rows)
        _move(self.key_valid, rows)
        self.positions.zero_()
        for cross in self.cross:
            for part in cross.read():
                _move(part, index)
        if self.encoder_mask is not None:
            _move(self.encoder_mask, index)

    def encoder_views(self, sentences: int) -> tuple[list[CrossCache], Tensor | None]:
        """Cross-attention caches and mask of the first sentences, as views, in the form of a `ModelCache`."""
        views = [CrossCache(*(part[:sentences] for part in cross.read())) for cross in self.cross]
        return views, None if self.encoder_mask is None else self.encoder_mask[:sentences]

    def _repeated(self, rows_first: Tensor) -> Tensor:
        return rows_first if self.beams == 1 else rows_first.repeat_interleave(self.beams, dim=0)

    def _clear_masks(self, length: int) -> None:
        self.key_valid.zero_()
        self.positions.zero_()  # of rows that are not in use: frequencies by length follow the last position of all
        self.slot.fill_(length)


AnyCache = ModelCache | FixedCache
"""The caches that a model accepts."""


def _keys_and_values(layer: object) -> LayerCache | FixedLayer:
    if not isinstance(layer, LayerCache | FixedLayer):
        raise ValueError(f"a fixed cache keeps keys and values, not a {type(layer).__name__}")
    return layer


def _put(storage: Tensor, first: Tensor) -> None:
    """Write the first slots and clear the others, which an earlier batch may have left with NaN."""
    used = first.shape[2]
    storage[:, :, :used] = first
    storage[:, :, used:] = 0


def _move(storage: Tensor, index: Tensor) -> None:
    """The first rows become rows `index`, in the same storage."""
    storage[: len(index)] = storage.index_select(0, index)
