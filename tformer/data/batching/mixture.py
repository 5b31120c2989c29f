"""Mixtures of sources in fixed shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tformer.data.permutation import derive_key, permute
from tformer.data.shards.pair_tokens import (
    PairExample,
    PairTokens,
    join_pairs,
)
from tformer.errors import InputError

DEFAULT_BLOCK = 1024


class Mixture:
    """Draws sources by `weights`: in every block of `block` draws source s comes up exactly `quotas[s]` times.

    Quotas are the shares rounded by largest remainder. InputError when a weight is too small for one draw per block.
    """

    def __init__(self, weights: Sequence[float], *, block: int = DEFAULT_BLOCK, seed: int = 0) -> None:
        if not weights or any(weight <= 0 for weight in weights):
            raise ValueError(f"weights must be positive, found {list(weights)}")
        self.block, self.seed = block, seed
        exact = np.asarray(weights, dtype=np.float64) * block / sum(weights)
        self.quotas = np.floor(exact).astype(np.int64)
        largest_first = np.argsort(-(exact - self.quotas), kind="stable")
        self.quotas[largest_first[: block - int(self.quotas.sum())]] += 1
        if (self.quotas == 0).any():
            number = int(np.argmin(self.quotas))
            raise InputError(
                f"data: source {number} has weight {weights[number]:g} of {sum(weights):g}, "
                f"less than one draw in a block of {block}",
                hint="raise its weight, or leave the source out",
            )
        self._ends = np.cumsum(self.quotas)

    def draw(self, draws: np.ndarray | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(source [n], position [n]): which source each draw takes from, and its how-manieth sample (from 0)."""
        draws = np.asarray(draws, dtype=np.int64)
        blocks, places = np.divmod(draws, self.block)
        slots = np.empty_like(places)
        for number in np.unique(blocks):
            here = blocks == number
            slots[here] = permute(places[here], size=self.block, key=derive_key("mixture", self.seed, int(number)))
        sources = np.searchsorted(self._ends, slots, side="right")
        quotas = self.quotas[sources]
        return sources, blocks * quotas + slots - (self._ends[sources] - quotas)


class Source(Protocol):
    """What is mixed: windows of a corpus, or pairs."""

    @property
    def seq_len(self) -> int: ...
    def __len__(self) -> int: ...
    def examples(self, epoch: int, indices: list[int], /) -> Sequence[Any]: ...


class MixedWindows:
    """The samples of several sources as one, by weight. Its epoch is as many draws as they have samples.

    Sources keep epochs of their own: a source that is drawn often starts over, with a new order, when it is used up.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        *,
        seed: int = 0,
        block: int = DEFAULT_BLOCK,
    ) -> None:
        self.sources: list[Any] = list(sources)  # those packed by "concat" have `windows` as well
        self.seed, self.seq_len = seed, max(source.seq_len for source in sources)
        self.mixture = Mixture(weights, block=block, seed=seed)
        self.lengths = None  # they change from epoch to epoch: batches of mixed sources are cut by examples
        self._count = sum(len(source) for source in sources)

    def __len__(self) -> int:
        return self._count

    def locate(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[tuple[int, int, int]]:
        """(source, epoch of that source, window of that source) of each sample."""
        drawn, positions = self.mixture.draw(epoch * self._count + np.asarray(indices, dtype=np.int64))
        sizes = np.array([len(source) for source in self.sources])[drawn]
        own_epochs, places = np.divmod(positions, sizes)
        for number, own_epoch in set(zip(drawn.tolist(), own_epochs.tolist(), strict=True)):
            here = (drawn == number) & (own_epochs == own_epoch)
            key = derive_key("source order", self.seed, number, own_epoch)
            places[here] = permute(places[here], size=len(self.sources[number]), key=key)
        return list(zip(drawn.tolist(), own_epochs.tolist(), places.tolist(), strict=True))

    def windows(self, epoch: int, indices: np.ndarray | Sequence[int]) -> np.ndarray:
        """int64 [n, t]; every source must be packed by "concat", with windows of one length t."""
        rows: dict[int, np.ndarray] = {}
        for number, own, places, windows in self._grouped(epoch, indices):
            rows.update(zip(places, self.sources[number].windows(own, windows), strict=True))
        return np.stack([rows[place] for place in range(len(indices))])

    def window(self, epoch: int, index: int) -> np.ndarray:
        """The ids of one window."""
        return self.examples(epoch, [index])[0].ids

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Any]:
        """The samples, each of its source's own kind."""
        found: dict[int, Any] = {}
        for number, own, places, windows in self._grouped(epoch, indices):
            found.update(zip(places, self.sources[number].examples(own, windows), strict=True))
        return [found[place] for place in range(len(indices))]

    def _grouped(
        self, epoch: int, indices: np.ndarray | Sequence[int]
    ) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """(source, its epoch, places in `indices`, windows there): what one call to a source can answer."""
        groups: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for place, (number, own, window) in enumerate(self.locate(epoch, indices)):
            places, windows = groups.setdefault((number, own), ([], []))
            places.append(place)
            windows.append(window)
        for (number, own), (places, windows) in groups.items():
            yield number, own, places, windows


# Shapes: N samples (and pairs), P sets.


class MixedPairs:
    """Sets of pairs as one, by weight.

    Attributes:
        pairs: all of them, set after set.
        quotas: int64 [P]: samples of each set in an epoch.
        lengths: int64 [N]: the most ids that a sample has, in any epoch.

    Raises InputError for a weight that is too small for one sample an epoch.
    """

    def __init__(self, sets: Sequence[PairTokens], weights: Sequence[float], *, seed: int = 0) -> None:
        self.pairs = join_pairs(sets)
        self.seq_len = self.pairs.seq_len
        sizes = np.array([len(each) for each in sets], dtype=np.int64)
        self.quotas = Mixture(weights, block=len(self.pairs)).quotas
        set_N = np.repeat(np.arange(len(sets)), self.quotas)
        slot_N = np.arange(len(set_N)) - (np.cumsum(self.quotas) - self.quotas)[set_N]
        n, q = sizes[set_N], self.quotas[set_N]
        first_N = slot_N * n // q
        self._size_N = np.maximum(1, (slot_N + 1) * n // q - first_N)
        self._first_N = first_N + (np.cumsum(sizes) - sizes)[set_N]
        of_set = np.repeat(np.arange(len(sets)), sizes)
        self._by_length_N = np.lexsort((self.pairs.lengths, of_set))
        self.lengths = self.pairs.lengths[self._by_length_N[self._first_N + self._size_N - 1]]
        # Stretches begin at different places: else an epoch would have the shortest pair of each.
        self._shift_N = permute(np.arange(len(set_N)), size=len(set_N), key=derive_key("pairs of stretches", seed))

    def __len__(self) -> int:
        return len(self._first_N)

    def locate(self, epoch: int, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [n]: which of `pairs` each sample shows in an epoch."""
        chosen = np.asarray(indices, dtype=np.int64)
        place = (self._shift_N[chosen] + epoch) % self._size_N[chosen]
        return self._by_length_N[self._first_N[chosen] + place]

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[PairExample]:
        """The pairs that these samples show in an epoch."""
        return self.pairs.examples(epoch, self.locate(epoch, indices))
