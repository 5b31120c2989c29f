from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.permutation import derive_key, permute


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size=size, key=key).tolist()) == list(range(size))


def test_permutation_of_an_index_does_not_depend_on_its_company() -> None:
    whole = permute(np.arange(1000), size=1000, key=5)
    assert permute(np.array([17, 999]), size=1000, key=5).tolist() == [whole[17], whole[999]]


def test_permutation_works_beyond_memory() -> None:
    places = permute(np.arange(10), size=10**15, key=1)
    assert len(set(places.tolist())) == 10
    assert ((places >= 0) & (places < 10**15)).all()


def test_permutation_orders_differ_between_keys_and_are_well_mixed() -> None:
    size = 10_000
    first, second = (permute(np.arange(size), size=size, key=derive_key("order", 1, epoch)) for epoch in (0, 1))
    for other in (np.arange(size), second):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.05
    assert (np.abs(np.diff(first)) == 1).mean() < 0.01


@pytest.mark.parametrize("size", [2, 3, 5])
def test_permutation_reaches_every_order_of_few(size: int) -> None:
    orders = {tuple(permute(np.arange(size), size=size, key=key).tolist()) for key in range(1500)}
    assert len(orders) == {2: 2, 3: 6, 5: 120}[size]


def test_derive_key_tells_its_parts_apart() -> None:
    keys = [derive_key("a", 1), derive_key("a", 11), derive_key("a", 1, 1), derive_key("a1"), derive_key("a", "1")]
    assert len(set(keys)) == len(keys)
