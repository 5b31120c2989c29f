"""Keyed permutation without memory, by a Feistel network with cycle walking; keys from names and numbers; fixed shares.

A balanced Feistel network over 2 * half bits is a bijection of [0, 4^half), whatever its round function is. Values
outside [0, n) are put through it again until they fall inside, which keeps it a bijection of [0, n) (cycle walking:
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So each position of an epoch's order is computed
alone, in constant time and memory, however large the corpus. Up to 16 values are shuffled, because
the network would favour some orders.

    (L, R) -> (R, L xor F(R, key))
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 6
MIN_HALF_BITS = 2  # a domain of at least 16 values: with fewer, orders of tiny sets are too similar
SHUFFLED = 16  # largest number of values that are shuffled


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from numbers and names, for example `derive_key("order", seed, epoch)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(indices: np.ndarray, *, size: int, key: int) -> np.ndarray:
    """The place of each index of [0, size) in the order of `key`: int64, the same shape as `indices`."""
    if size <= SHUFFLED:
        return np.random.default_rng(key).permutation(size)[indices]
    return permute_by_network(indices, size=size, key=key)


def permute_by_network(indices: np.ndarray, *, size: int, key: int) -> np.ndarray:
    """`permute` by the network alone. It chooses held-out parts, which must stay the same for existing runs."""
    half = max(MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    round_keys = [derive_key(key, number) for number in range(ROUNDS)]
    values = _feistel(np.asarray(indices).astype(np.uint64), half, round_keys)
    outside = values >= size
    while outside.any():
        values[outside] = _feistel(values[outside], half, round_keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: int, round_keys: list[int]) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def share_of(size: int, *, fraction: float, seed: int, labels: np.ndarray | None = None) -> np.ndarray:
    """Sorted indices of a share of `size` examples, fixed by the seed; a smaller share is a part of a larger one.

    With classes (int [size]) as `labels`, each class has its share, rounded, and one example at least.
    """
    places = permute(np.arange(size), size=size, key=derive_key("share", seed))
    groups = np.zeros(size, dtype=np.int64)
    if labels is not None and np.issubdtype(labels.dtype, np.integer):
        groups = labels
    order = np.lexsort((places, groups))
    names, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.empty(size)
    rank[order] = (np.arange(size) - np.repeat(starts, counts)) / np.repeat(counts, counts)
    return np.sort(np.lexsort((places, rank))[: max(len(names), round(fraction * size))])


def spread_evenly(total: int, count: int) -> np.ndarray:
    """`count` of the numbers below `total`, evenly spread."""
    return np.arange(count) * total // max(1, count)


def span_of(size: int, *, fraction: float, seed: int, least: int = 1) -> tuple[int, int]:
    """[start, stop) of a share of a sequence, at a place fixed by the seed; a smaller share is inside a larger one."""
    length = min(size, max(least, round(fraction * size)))
    start = int(np.random.default_rng(derive_key("share", seed)).random() * (size - length))
    return start, start + length
