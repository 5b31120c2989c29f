"""Fixed shares of a set: seeded, nested, with the share of every class."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.permutation import share_of, span_of

SHARES = st.floats(0.001, 1.0)
CLASSES = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(lambda labels: np.array(labels, dtype=np.int64))


@given(CLASSES, SHARES, st.integers(0, 9))
def test_a_share_has_every_class_in_proportion(labels: np.ndarray, fraction: float, seed: int) -> None:
    chosen = share_of(len(labels), fraction=fraction, seed=seed, labels=labels)
    names, counts = np.unique(labels, return_counts=True)
    assert len(chosen) == max(len(names), round(fraction * len(labels)))
    assert (np.diff(chosen) > 0).all()
    share = len(chosen) / len(labels)
    for name, count in zip(names, counts, strict=True):
        found = int((labels[chosen] == name).sum())
        assert found >= 1 and abs(found - share * count) <= max(1, len(names) - 1)


@given(st.integers(1, 200), SHARES, SHARES, st.integers(0, 9))
def test_smaller_shares_are_parts_of_larger_ones(size: int, one: float, other: float, seed: int) -> None:
    small, large = sorted((one, other))
    scores = np.linspace(0, 1, size, dtype=np.float32)  # no classes
    parts = [set(share_of(size, fraction=part, seed=seed, labels=scores).tolist()) for part in (small, large)]
    assert parts[0] <= parts[1] and len(parts[1]) == max(1, round(large * size))
    (start, stop), (from_, to) = (span_of(size, fraction=part, seed=seed) for part in (small, large))
    assert 0 <= from_ <= start < stop <= to <= size and to - from_ == max(1, round(large * size))


def test_the_seed_decides_on_the_share() -> None:
    found = [share_of(100, fraction=0.2, seed=seed).tolist() for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    spans = [span_of(1000, fraction=0.2, seed=seed) for seed in (1, 1, 2)]
    assert spans[0] == spans[1] != spans[2]
    assert share_of(7, fraction=1.0, seed=3).tolist() == list(range(7)) and span_of(7, fraction=1.0, seed=3) == (0, 7)
