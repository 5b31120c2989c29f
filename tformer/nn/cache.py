"""What a decoder remembers: the caches of its layers (`nn/layer_cache.py`), and what their slots hold.

What a slot means differs per row (left padding), so each slot's position is kept, and whether it holds a token. Lengths
are Python integers: no device sync.

Beam search gives every sentence several rows, side by side (`fan_out`). The keys and values of cross-attention and the
encoder's mask then stay one per sentence, and only those of self-attention move when rows are reordered.

Shape legend: B batch (rows), C capacity in slots, S slots in use, T new slots; b beams, so that B / b sentences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.nn.layer_cache import CrossCache, LayerState, Spares, check_fit


class ModelCache:
    """The caches of all layers of a decoder, and what each slot holds.

    key_positions: long [B, C]; key_valid: bool [B, C], False for padding; length: slots in use.
    encoder_mask: bool [B / b, S_source] or None, kept here so that it follows the rows.
    beams: rows per sentence, 1 before `fan_out`. padded: whether any slot may be padding.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
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
        self.beams = 1
        self.padded = False
        self._alike = True  # the slots of all rows have the same positions
        self._spares = Spares()

    @property
    def batch_size(self) -> int:
        return self.key_positions.shape[0]

    @property
    def knows_encoder(self) -> bool:
        """Whether cross-attention's keys and values are here: the encoder need not run again."""
        return bool(self.cross) and all(cross.filled for cross in self.cross)

    def take_encoder(self, other: ModelCache) -> None:
        """Read on from what `other`, of the same rows, knows of the encoder."""
        self.cross, self.encoder_mask = other.cross, other.encoder_mask

    def advance(self, positions_BT: Tensor, valid_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Announce T new slots; positions [B or 1, T], valid None when all hold tokens.

        Returns (key_positions [B, S], or [1, S] when all rows have always had the same; key_valid [B, S]) of all slots
        in use, the new ones included. Called once per forward pass, before the layers append theirs. ValueError when
        the slots do not fit.
        """
        start, end = self.length, self.length + positions_BT.shape[1]
        check_fit(end, self.capacity)
        self.key_positions[:, start:end] = positions_BT
        self.key_valid[:, start:end] = True if valid_BT is None else valid_BT
        self.length = end
        self.padded = self.padded or valid_BT is not None
        self._alike = self._alike and positions_BT.shape[0] == 1
        return self.key_positions[: 1 if self._alike else None, :end], self.key_valid[:, :end]

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

        What belongs to the encoder stays once per sentence.
        """
        assert self.beams == 1, "a cache is fanned out once"
        check_fit(self.length, capacity)
        more = max(0, capacity - self.capacity)
        self.key_positions = F.pad(self.key_positions, (0, more))[:, :capacity]
        self.key_valid = F.pad(self.key_valid, (0, more))[:, :capacity]
        self.capacity = capacity
        self._select_rows(self._repeated(beams))
        self.beams = beams
        self._spares = Spares()  # those of before are too small

    def reorder_beams(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was, long [B], of the same sentence: its positions and padding are equal."""
        for layer in self.layers:
            layer.select_rows(index, spares=self._spares)

    def keep_sentences(self, sentences: Tensor) -> None:
        """Keep only these sentences (long), with all their rows."""
        beams = torch.arange(self.beams, device=sentences.device)
        self._select_rows((sentences.unsqueeze(1) * self.beams + beams).flatten())
        self._select_sentences(sentences)

    def truncate(self, length: int) -> None:
        """Forget every slot from `length` on."""
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

    def _select_sentences(self, index: Tensor) -> None:
        for cross in self.cross:
            cross.select_rows(index)
        if self.encoder_mask is not None:
            self.encoder_mask = self.encoder_mask.index_select(0, index)
