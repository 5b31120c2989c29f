"""Rows as a machine might have measured them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tformer.bench import attention
from tformer.bench.attention import row_of
from tformer.bench.speed import Entry, Row, SpeedBench
from tformer.bench.workloads.attention import AttentionBench


def request(**changes: Any) -> AttentionBench:
    """Full and dense-masked attention at three lengths."""
    kinds = changes.pop("kinds", ("full", "dense-masked"))
    values: dict[str, Any] = {"lengths": (1024, 2048, 4096), "options": {kind: {} for kind in kinds}}
    return AttentionBench(kinds, **{**values, **changes})


@pytest.fixture
def make_bench() -> Callable[..., AttentionBench]:
    return request


def attention_row(
    kind: str,
    length: int,
    seconds: float = 1.0,
    peak_bytes: int = 2**20,
    spread: float = 0.01,
    *,
    ceilings: Mapping[str, Any] | None = None,
    failed: str | None = None,
    **changes: Any,
) -> Row:
    """A row of `bench attention` whose rounds had two calls, or one that failed."""
    bench = request(kinds=(kind,), **changes)
    raced: dict[str, Any] = {"seconds": 2 * seconds, "minimum": 1.8 * seconds, "spread": spread, "repeats": 5}
    raced |= {"tokens": 2 * bench.batch_size * length, "memory": {"peak_bytes": peak_bytes, "peak_rss_bytes": 2**28}}
    return row_of(bench, kind, length, raced if failed is None else {"failed": failed}, ceilings)


@pytest.fixture
def make_row() -> Callable[..., Row]:
    return attention_row


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int]]]:
    """`answers(of)`: no process is started; `of(arguments)` answers in its place. Returns the places asked for."""

    def use(of: Callable[[Mapping[str, Any]], dict[str, Any]]) -> list[tuple[str, int]]:
        asked: list[tuple[str, int]] = []

        def race(measurement: str, contenders: list[Mapping[str, Any]], **_: Any) -> list[dict[str, Any]]:
            [arguments] = contenders
            assert measurement == "attention"
            asked.append((arguments["kind"], arguments["length"]))
            found = of(arguments)
            return [found if "failed" in found else {**found, "tokens": arguments["length"]}]

        monkeypatch.setattr(attention, "race", race)
        monkeypatch.setattr(attention, "run_isolated", lambda *_, **__: {"failed": "over 3 s"})
        return asked

    return use


@pytest.fixture(params=[True])
def int8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit products are possible here, or with `False` as parameter they are not."""
    monkeypatch.setattr("tformer.decoding.inference.can_quantize", lambda *_: request.param)


@pytest.fixture
def make_speed_bench() -> Callable[..., SpeedBench]:
    """A bench of training whose recipe says nothing of interest."""

    def make(**changes: Any) -> SpeedBench:
        values: dict[str, Any] = {
            "model": "gpt/tiny",
            "recipe_yaml": "schema: 1\nmodel: {vocab_size: 9, decoder: {num_layers: 1}}\n",
            "entries": (Entry("tformer", "bf16"),),
            "batch_sizes": (2,),
            "length": 8,
            "precision": "bf16",
            "device": "cpu",
        }
        return SpeedBench("train", **{**values, **changes})

    return make
