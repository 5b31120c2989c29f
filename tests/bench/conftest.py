"""A benchmark, and whether the machine has 8-bit products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tformer.bench.speed import ContenderSpec, SpeedBench

TRAINING = "tformer.bench.workloads.train:TrainingSteps"


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
            "entries": (ContenderSpec("tformer", "bf16", TRAINING),),
            "batch_sizes": (2,),
            "length": 8,
            "precision": "bf16",
            "device": "cpu",
        }
        return SpeedBench("train", **{**values, **changes})

    return make
