"""What is found out about a machine: its instructions, its rate of products, and durations that are measured once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from tformer.support import device
from tformer.support.device import has_bf16_instructions, matmul_flops_per_second, measured_once


@pytest.mark.skipif(not device.CPU_INFO.exists(), reason="no /proc here")
@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="products may not use all instructions")
def test_the_instructions_for_bf16_are_those_that_the_system_lists() -> None:
    listed = device.CPU_INFO.read_text().split()
    assert has_bf16_instructions() == ("avx512_bf16" in listed or "amx_tile" in listed)


def test_a_product_has_two_operations_for_each_row_column_and_inner_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", map(float, count()).__next__)  # every product takes a second
    found = matmul_flops_per_second(torch.float32, torch.device("cpu"), rows=20, inner=8, columns=3, seconds=10.0)
    assert found == 2 * 20 * 8 * 3


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], float]:
    """The duration of one thing that is measured with this result, in an empty cache."""
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(device, "LEAST_COMPUTED", 0.0)  # this machine may be busy
    return lambda seconds: measured_once("a product", lambda: seconds)


def test_the_first_measurement_is_kept(measure: Callable[[float], float]) -> None:
    assert [measure(seconds) for seconds in (0.25, 0.5, 0.75)] == [0.25] * 3


def test_what_a_busy_machine_takes_is_not_kept(
    measure: Callable[[float], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(device, "LEAST_COMPUTED", 0.7)
        assert measured_once("a product", lambda: time.sleep(0.2) or 5.0) == 5.0
    assert measure(0.25) == measure(0.5) == 0.25


@pytest.mark.parametrize("damage", [-1.0, 0.0, float("nan"), float("inf"), 1, "0.25", None])
def test_a_damaged_measurement_is_made_again(measure: Callable[[float], float], tmp_path: Path, damage: object) -> None:
    measure(0.25)
    [file] = tmp_path.rglob("*.json")
    file.write_text(json.dumps({"seconds": damage}))
    assert measure(0.5) == measure(0.75) == 0.5
