"""Mixtures of sources in fixed shares, without counters or state: every position is a closed formula.

Draw t lies in block t // block. A keyed permutation orders the slots of a block, of which source s has exactly
quota[s]; the number of a slot within its source gives how far that source has been read. Any draw of any run can be
computed alone, and each source goes through all of its samples before it starts again.

Mixtures of pairs (T5's text-to-text mixtures, arXiv 1910.10683 section 3.5.2) need more, because batches of a number of
tokens need the length of every sample before an epoch begins, while a set that is drawn rarely should give other pairs
in each epoch. So the pairs of a set are sorted by length, and every sample has a range of that order: of n pairs and q
samples, sample j has pairs j n / q up to (j + 1) n / q. It gives one of them per epoch, each before any again, and its
length is that of the longest. If q > n, pairs occur several times in an epoch. An epoch has as many samples as the sets
have pairs; with shares in proportion to their sizes it has every pair once.
"""

# Shapes: n draws; N samples (and pairs), P sets.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tformer.data.permutation import derive_key, permute
from tformer.data.shards.pair_tokens import PairExample, PairTokens, join_pairs
from tformer.support.errors import InputError

DEFAULT_BLOCK = 1024


class Mixture:
    """Draws sources by `weights`: of every `block` draws, source s has exactly `quotas[s]`.

    Quotas are the shares, rounded by largest remainder. Raises InputError for a weight too small for one draw a block.
    """

    def __init__(self, weights: Sequence[float], *, block: int = DEFAULT_BLOCK, seed: int = 0) -> None:
        assert weights and min(weights) > 0, weights
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
        """(source [n], number of the sample within its source [n], from 0) of each draw."""
        draws = np.asarray(draws, dtype=np.int64)
        blocks, places = np.divmod(draws, self.block)
        slots = np.empty_like(places)
        for number in np.unique(blocks):
            here = blocks == number
            slots[here] = permute(places[here], size=self.block, key=derive_key("mixture", self.seed, int(number)))
        sources = np.searchsorted(self._ends, slots, side="right")
        quotas = self.quotas[sources]
        return sources, blocks * quotas + slots - (self._ends[sources] - quotas)


class Samples(Protocol):
    """Examples by number. `lengths` in tokens; None: each has `seq_len`. `examples` is a pure function."""

    @property
    def seq_len(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray | None: ...

    def __len__(self) -> int: ...
    def examples(self, epoch: int, indices: Any, /) -> Sequence[Any]: ...


class MixedWindows:
    """The samples of several sources as one, by weight. An epoch has as many draws as the sources have samples.

    Every source has its own epochs: one that is drawn often starts again, in a new order, when it is used up.
    """

    def __init__(
        self,
        sources: Sequence[Samples],
        weights: Sequence[float],
        *,
        seed: int = 0,
        block: int = DEFAULT_BLOCK,
    ) -> None:
        self.sources: list[Any] = list(sources)  # those with packing "concat" have `windows` as well
        self.seed, self.seq_len = seed, max(source.seq_len for source in sources)
        self.mixture = Mixture(weights, block=block, seed=seed)
        self.lengths = None  # they differ between epochs: batches of mixed sources are cut by examples
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
        """int64 [n, t]; every source must have packing "concat", with windows of one length t."""
        return np.stack(self._read("windows", epoch, indices))

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Any]:
        """The samples, each of its source's own kind."""
        return self._read("examples", epoch, indices)

    def _read(self, method: str, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Any]:
        """Read samples by a method of the sources; calls it once for each source and each of its epochs."""
        groups: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for place, (number, own_epoch, window) in enumerate(self.locate(epoch, indices)):
            places, windows = groups.setdefault((number, own_epoch), ([], []))
            places.append(place)
            windows.append(window)
        found: dict[int, Any] = {}
        for (number, own_epoch), (places, windows) in groups.items():
            found.update(zip(places, getattr(self.sources[number], method)(own_epoch, windows), strict=True))
        return [found[place] for place in range(len(indices))]


class MixedPairs:
    """Sets of pairs as one, by weight.

    Attributes:
        pairs: all of them, set after set.
        quotas: int64 [P]: samples of each set in an epoch.
        lengths: int64 [N]: most ids of each sample in any epoch.

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
        # Ranges begin at different places; otherwise an epoch would have the shortest pair of each.
        self._shift_N = permute(np.arange(len(set_N)), size=len(set_N), key=derive_key("pairs of stretches", seed))

    def __len__(self) -> int:
        return len(self._first_N)

    def locate(self, epoch: int, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [n]: the number in `pairs` of each sample in an epoch."""
        chosen = np.asarray(indices, dtype=np.int64)
        place = (self._shift_N[chosen] + epoch) % self._size_N[chosen]
        return self._by_length_N[self._first_N[chosen] + place]

    def examples(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[PairExample]:
        """The pairs of these samples in an epoch."""
        return self.pairs.examples(epoch, self.locate(epoch, indices))
