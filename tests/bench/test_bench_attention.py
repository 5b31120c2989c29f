"""The course of a bench: which cells are measured, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tformer.bench.attention import Cell, bench_attention, check
from tformer.errors import InputError

Answers = Callable[..., list[tuple[str, int]]]
GOOD = {"median": 1.0, "minimum": 1.0, "spread": 0.0, "repeats": 3, "peak_bytes": 10}


def run(bench: Any) -> list[Cell]:
    seen: list[tuple[Cell, int, int]] = []
    cells = bench_attention(bench, measured=lambda *told: seen.append(told), should_stop=lambda: False)
    assert cells is not None
    assert seen == [(cell, number, len(cells)) for number, cell in enumerate(cells, 1)]
    return cells


def test_all_kinds_at_one_length_before_the_next(make_bench: Any, answers: Answers) -> None:
    asked = answers(lambda arguments: GOOD)
    cells = run(make_bench(lengths=(1024, 2048)))
    expected = [("full", 1024), ("dense-masked", 1024), ("full", 2048), ("dense-masked", 2048)]
    assert asked == expected == [(cell.kind, cell.length) for cell in cells]
    assert all(cell.failed is None and cell.median == 1.0 for cell in cells)


@pytest.mark.parametrize("failure", ["out of memory", "out of memory: the system ended the process", "over 120 s"])
def test_a_kind_that_ran_out_is_not_tried_further_and_the_rest_goes_on(
    make_bench: Any, answers: Answers, failure: str
) -> None:
    asked = answers(lambda a: {"failed": failure} if (a["kind"], a["length"]) == ("dense-masked", 2048) else GOOD)
    cells = run(make_bench())
    assert ("dense-masked", 4096) not in asked and ("full", 4096) in asked
    assert [cell.failed for cell in cells if cell.kind == "dense-masked"] == [
        None,
        failure,
        f"not tried: {failure} at 2,048",
    ]


def test_a_length_that_is_refused_does_not_end_a_kind(make_bench: Any, answers: Answers) -> None:
    answers(lambda a: {"failed": "rank: 2000 is more than the length"} if a["length"] == 1024 else GOOD)
    assert [cell.failed is None for cell in run(make_bench(kinds=("full",)))] == [False, True, True]


def test_a_stop_gives_nothing(make_bench: Any, answers: Answers) -> None:
    answers(lambda a: None if a["length"] == 2048 else GOOD)
    assert bench_attention(make_bench(), measured=lambda *told: None, should_stop=lambda: True) is None


def test_options_that_suit_no_length_are_refused_before_anything_runs(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tformer.nn.attention import ATTENTION

    def refuse(options: Any, sizes: Any) -> Any:
        assert sizes.max_seq_len == 4096
        raise ValueError("window: 100 is not a multiple of 64")

    check(make_bench())
    monkeypatch.setitem(ATTENTION, "full", refuse)
    with pytest.raises(InputError, match=r"^full\.window: 100 is not a multiple of 64$"):
        check(make_bench())
