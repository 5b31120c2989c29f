"""Numbers, sizes, durations and texts as people and JSON read them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from tformer.support import formatting


def test_values_that_are_not_finite_become_none_at_any_depth() -> None:
    value = {"a": [1.5, math.nan, (math.inf, "x")], "b": {"c": -math.inf, "d": 2}}
    assert formatting.finite_or_none(value) == {"a": [1.5, None, [None, "x"]], "b": {"c": None, "d": 2}}


NUMBERS: list[tuple[Any, Any]] = [
    (np.bool_(True), True),
    (np.int64(3), 3),
    (np.float64(0.25), 0.25),
    (np.float32("nan"), None),
    (np.arange(3), [0, 1, 2]),
    (np.array([1.0, math.inf]), [1.0, None]),
    (torch.tensor(2.5), 2.5),
    (torch.tensor([True]), [True]),
]
"""Numbers and arrays of numpy and torch, with what a record holds of them."""


@pytest.mark.parametrize(("given", "expected"), NUMBERS, ids=str)
def test_numbers_of_numpy_and_torch_are_pythons_in_a_record(given: Any, expected: Any) -> None:
    found = json.loads(formatting.json_text({"a": [given], "b": {"c": (given,)}}))
    assert found == {"a": [expected], "b": {"c": [expected]}}
    assert type(found["a"][0]) is type(expected)


def test_counts_and_sizes() -> None:
    assert [formatting.short_count(count) for count in (999, 1_234_567, 2 * 10**9)] == ["999", "1.23M", "2B"]
    assert [formatting.short_rate(rate) for rate in (950.2, 12_345)] == ["950", "12.3k"]
    assert [formatting.decimal_bytes(count) for count in (89, 6700, 34_500_000, 12 * 10**8)] == [
        "89 B", "6.7 kB", "34.5 MB", "1.2 GB"
    ]  # fmt: skip
    assert [formatting.binary_bytes(count) for count in (2**19, 34.14 * 2**20, 1.25 * 2**30)] == [
        "0.500 MiB", "34.1 MiB", "1.25 GiB"
    ]  # fmt: skip
    assert formatting.mebibytes(1234.4 * 2**20) == "1,234"
    assert [formatting.ratio(value) for value in (0.0811, 11.42)] == ["0.081 x", "11.4 x"]


def test_durations() -> None:
    assert [formatting.clock(seconds) for seconds in (5.4, 185, 7385)] == ["0:05", "3:05", "2:03:05"]
    assert [formatting.duration(seconds) for seconds in (4.23, 185)] == ["4.2s", "3:05"]
    assert [formatting.minutes_and_seconds(seconds) for seconds in (5, 185)] == ["5 s", "3 min 5 s"]
    shown = {
        8.12e-5: "0.081 ms",
        0.0123: "12.3 ms",
        0.9994: "999 ms",
        0.9999: "1.00 s",
        4.561: "4.56 s",
        123.4: "123 s",
    }
    assert {seconds: formatting.short_seconds(seconds) for seconds in shown} == shown


def test_texts_are_cut_at_their_end_or_in_their_middle() -> None:
    assert formatting.shortened("abcdef", 6) == "abcdef" and formatting.shortened("abcdef", 4) == "abcd..."
    assert formatting.fitted("abcdef", 5) == "ab..." and formatting.fitted("abcdef", 5, "…") == "abcd…"
    assert formatting.without_middle("abcdefgh", 8) == "abcdefgh"
    assert formatting.without_middle("abcdefgh", 5) == "ab…gh"


def test_a_count_has_all_its_digits_and_its_noun_the_right_number() -> None:
    shown = {1: "1 text", 0: "0 texts", 1_234_567: "1,234,567 texts", 1.5: "1.5 texts"}
    assert {count: formatting.plural(count, "text") for count in shown} == shown


def test_a_cell_has_no_tabs_and_no_line_breaks() -> None:
    assert formatting.as_cell("a\tb\nc\rd") == r"a\tb\nc\rd" and formatting.as_one_line("a\tb\nc") == "a\tb\\nc"


def test_letters_of_east_asian_scripts_take_two_columns_and_combining_marks_none() -> None:
    assert [formatting.columns_of(text) for text in ("", "ab", "東a", "e\u0301", "한글")] == [0, 2, 3, 1, 4]
