"""The order of measuring: at each batch size the machine's ceilings, and then all contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tformer.bench import speed
from tformer.bench.speed import Entry, Row, SpeedBench, run_speed

Make = Callable[..., SpeedBench]
OURS, PLAIN, HALF = Entry("tformer", "bf16"), Entry("transformers", "fp32"), Entry("transformers", "bf16")


BOUNDS = {"ceilings": {"bytes_per_second": 1.0}, "costs": [None, {"flops": 2.0}, None]}
TIMED = {"median": 0.5, "minimum": 0.4, "spread": 0.1, "repeats": 3, "tokens": 64, "memory": {"peak_rss_bytes": 7}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """`asked(bounds, row)`: what is measured, in order; `row(entry)` answers in the place of processes."""

    def use(bounds: dict[str, Any] | None, row: Callable[[Entry], dict[str, Any] | None]) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def run(measurement: str, given: Mapping[str, Any], **_: Any) -> dict[str, Any] | None:
            calls.append((given["batch_size"], measurement))
            if bounds is None or "failed" in bounds:
                return bounds
            count = len(SpeedBench.from_json(given["bench"]).entries)
            return {**bounds, "costs": bounds["costs"][:count]}

        def race(contenders: Sequence[Mapping[str, Any]], **rules: Any) -> list[Any] | None:
            entries = [Entry(one["name"], one["precision"]) for one in contenders]
            calls.append((contenders[0]["batch_size"], *entries))
            assert (rules["repeats"], rules["max_seconds"]) == (10, 600.0)
            rows = [row(entry) for entry in entries]
            return None if None in rows else rows

        monkeypatch.setattr(speed, "run_isolated", run)
        monkeypatch.setattr(speed, "race", race)
        return calls

    return use


def run(bench: SpeedBench) -> list[Row] | None:
    return run_speed(bench, told=lambda _: None, should_stop=lambda: False)


def test_ceilings_and_then_all_in_turn_at_every_batch_size(make_speed_bench: Make, asked: Any) -> None:
    calls = asked(BOUNDS, lambda _: TIMED)
    rows = run(make_speed_bench(entries=(OURS, PLAIN), batch_sizes=(4, 8)))
    assert calls == [(4, "bounds"), (4, OURS, PLAIN), (8, "bounds"), (8, OURS, PLAIN)]
    assert rows is not None and [(row.entry, row.batch_size) for row in rows] == [
        (OURS, 4), (PLAIN, 4), (OURS, 8), (PLAIN, 8),
    ]  # fmt: skip
    assert rows[0].tokens_per_second == 128 and rows[0].memory == {"peak_rss_bytes": 7} and rows[0].is_ours
    assert rows[1].cost == {"flops": 2.0} and rows[1].ceilings == {"bytes_per_second": 1.0}


def test_what_fails_is_said_and_the_rest_goes_on(make_speed_bench: Make, asked: Any) -> None:
    asked(BOUNDS, lambda entry: {"failed": "out of memory"} if entry == PLAIN else TIMED)
    rows = run(make_speed_bench(entries=(OURS, PLAIN, HALF)))
    assert rows is not None and [row.failed for row in rows] == [None, "out of memory", None]


def test_without_ceilings_nothing_is_timed(make_speed_bench: Make, asked: Any) -> None:
    calls = asked({"failed": "over 3 s"}, lambda _: TIMED)
    assert run(make_speed_bench(entries=(OURS,))) == [Row(OURS, 2, failed="over 3 s (ceilings)")]
    assert calls == [(2, "bounds")]


@pytest.mark.parametrize("stopped", ["bounds", "race"])
def test_a_stop_gives_nothing(make_speed_bench: Make, asked: Any, stopped: str) -> None:
    asked(None if stopped == "bounds" else BOUNDS, lambda _: None)
    assert run(make_speed_bench()) is None


def test_a_bench_travels_as_json(make_speed_bench: Make) -> None:
    import json

    bench = make_speed_bench(options={"new_tokens": 3}, batch_sizes=(1, 8))
    assert SpeedBench.from_json(json.loads(json.dumps(bench.to_json()))) == bench
