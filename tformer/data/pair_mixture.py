"""Several sets of pairs in fixed shares, with lengths that do not change from epoch to epoch.

T5's text-to-text mixtures (arXiv 1910.10683 section 3.5.2) in batches of so many tokens need the length of every sample
before an epoch begins, while what a sample is must change: a set that is drawn rarely shows other pairs each time. So
the pairs of a set stand in the order of their lengths, and every sample owns a stretch of that order: of n pairs and q
samples, sample j has pairs j n / q up to (j + 1) n / q. It shows one of them per epoch, each before any again, and its
length is that of the longest. Where q > n, pairs come up several times in an epoch.

An epoch is as many samples as the sets have pairs. With shares in proportion to them it is every pair once.
"""

# Shapes: N samples (and pairs), P sets.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tformer.data.mixture import Mixture
from tformer.data.pair_set import PairExample, PairTokens, join_pairs
from tformer.data.permutation import derive_key, permute


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
