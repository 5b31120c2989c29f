"""Timing: warmed up, repeated as asked, stopped in time."""

from __future__ import annotations

import pytest

from tformer.bench import timing
from tformer.bench.timing import measure, summarise


def test_summary_of_durations() -> None:
    found = summarise([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (found.median, found.minimum, found.repeats) == (3.0, 1.0, 5)
    assert found.spread == pytest.approx((4.0 - 2.0) / 3.0)


def test_one_duration_has_no_spread() -> None:
    assert summarise([2.0]).spread == 0.0


def test_work_is_warmed_up_and_then_repeated_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ENOUGH_SECONDS", 0.0)
    calls: list[str] = []
    found = measure(
        lambda: calls.append("work"),
        repeats=5,
        warm_ups=2,
        most_seconds=60,
        synchronise=lambda: calls.append("wait"),
    )
    assert found.repeats == 5
    assert calls == ["work", "work", "wait", *["work", "wait"] * 5]


def test_quick_work_goes_on_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ENOUGH_SECONDS", 0.02)
    assert measure(lambda: None, repeats=1, most_seconds=60).repeats > 10


def test_the_limit_leaves_one_repetition() -> None:
    assert measure(lambda: None, repeats=10**9, most_seconds=0.0).repeats == 1
