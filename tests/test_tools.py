"""What keeps the tests short: grids whose first cases are quick, and bounds on the time of property tests."""

from __future__ import annotations

import time

import pytest

from tests.conftest import within_seconds
from tests.quick import first_is_quick


def test_all_cases_of_a_grid_but_the_first_are_slow() -> None:
    decorator = first_is_quick(("a", "b"), [(1, 2), (3, 4), pytest.param(5, 6, id="six")], quick=1)
    first, *others = decorator.args[1]
    assert first == (1, 2) and [each.values for each in others] == [(3, 4), (5, 6)] and others[1].id == "six"
    assert [[mark.name for mark in each.marks] for each in others] == [["slow"], ["slow"]]
    [_, single] = first_is_quick("a", [(1, 2), (3, 4)]).args[1]
    assert single.values == ((3, 4),)


def test_a_property_test_is_bounded_in_time_until_an_example_fails() -> None:
    tried: list[int] = []

    def test(number: int) -> None:
        tried.append(number)
        assert number != 2

    bounded = within_seconds(test, 0.05)
    bounded(1)
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    bounded(2)
    assert tried == [1]
    bounded = within_seconds(test, 0.05)
    for _ in range(2):  # an example that fails is tried again, and smaller ones after it, however long that takes
        with pytest.raises(AssertionError):
            bounded(2)
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
    assert tried == [1, 2, 2]
