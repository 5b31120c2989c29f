"""Slopes of power laws and the lengths at which they cross."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.bench.scaling import crossover, log_log_slope, slope_lengths

LENGTHS = (512, 1024, 2048, 4096)


@given(st.floats(0.1, 3.0), st.floats(1e-6, 1e3))
def test_the_slope_of_a_power_law_is_its_exponent(exponent: float, factor: float) -> None:
    costs = {length: factor * length**exponent for length in LENGTHS}
    assert log_log_slope(costs) == pytest.approx(exponent, abs=1e-6)


def test_a_slope_takes_two_lengths() -> None:
    assert log_log_slope({512: 1.0}) is None
    assert log_log_slope({}) is None
    assert log_log_slope({512: 1.0, 1024: 0.0}) is None  # no memory at all has no logarithm


def test_slopes_are_fitted_over_long_lengths_where_there_are_two() -> None:
    assert slope_lengths([512, 2048, 4096]) == [2048, 4096]
    assert slope_lengths([512, 1024, 2048]) == [512, 1024, 2048]
    assert slope_lengths([]) == []


@given(st.floats(600, 4000))
def test_linear_and_quadratic_costs_cross_where_they_are_equal(equal_at: float) -> None:
    linear = {length: length * equal_at for length in LENGTHS}
    quadratic = {length: float(length**2) for length in LENGTHS}
    assert crossover(linear, quadratic) == pytest.approx(equal_at, rel=1e-6)


def test_always_never_and_not_comparable() -> None:
    full = dict.fromkeys(LENGTHS, 2.0)
    assert crossover(dict.fromkeys(LENGTHS, 1.0), full) == 0.0
    assert crossover(dict.fromkeys(LENGTHS, 3.0), full) == math.inf
    assert crossover(full, full) == math.inf
    assert crossover({8: 1.0}, full) is None


def test_of_several_crossings_the_last_counts() -> None:
    wavering = {512: 1.0, 1024: 4.0, 2048: 1.0}
    found = crossover(wavering, dict.fromkeys(LENGTHS, 2.0))
    assert found is not None and 1024 < found < 2048
