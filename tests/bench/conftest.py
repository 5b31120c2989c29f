"""Cells as a machine might have measured them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tformer.bench import attention
from tformer.bench.attention import AttentionBench, Cell
from tformer.bench.speed import Entry, SpeedBench


def request(**changes: Any) -> AttentionBench:
    """Full and dense-masked attention at three lengths."""
    kinds = changes.pop("kinds", ("full", "dense-masked"))
    values: dict[str, Any] = {"lengths": (1024, 2048, 4096), "options": {kind: {} for kind in kinds}}
    return AttentionBench(kinds, **{**values, **changes})


@pytest.fixture
def make_bench() -> Callable[..., AttentionBench]:
    return request


@pytest.fixture
def make_cell() -> Callable[..., Cell]:
    def make(kind: str, length: int, seconds: float, peak_bytes: int = 2**20, spread: float = 0.01) -> Cell:
        return Cell(kind, length, seconds, seconds * 0.9, spread, 5, peak_bytes)

    return make


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int]]]:
    """`answers(of)`: no process is started; `of(arguments)` answers in its place. Returns the places asked for."""

    def use(of: Callable[[Mapping[str, Any]], dict[str, Any] | None]) -> list[tuple[str, int]]:
        asked: list[tuple[str, int]] = []

        def run(measurement: str, arguments: Mapping[str, Any], **_: Any) -> dict[str, Any] | None:
            assert measurement == "attention"
            asked.append((arguments["kind"], arguments["length"]))
            return of(arguments)

        monkeypatch.setattr(attention, "run_isolated", run)
        return asked

    return use


@pytest.fixture(params=[True])
def int8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit products are possible here, or with `False` as parameter they are not."""
    monkeypatch.setattr("tformer.decoding.inference.int8_is_possible", lambda _: request.param)


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
