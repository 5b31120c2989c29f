"""`--parallel auto`: the first kind that fits into the memory of a device, the same in a dry run and in a training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_training_devices import _all_processes_end, train
from tformer.support.device import device_memory, machine_memory
from tformer.training import prepare

__all__ = ["_all_processes_end", "train"]  # fixtures
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks its processes")

Cli = Callable[..., Any]
DEEP = ("--set", "model.decoder.num_layers=10", "--set", "model.d_model=32", "--max-steps", 1, "--devices", 2)


@pytest.fixture
def planned(train: Cli) -> Callable[..., dict[str, Any]]:
    """The report on two devices of a dry run."""

    def run(*words: object) -> dict[str, Any]:
        outcome = train(*DEEP, "--dry-run", "--json", *words)
        assert outcome.code == 0, outcome.err
        found: dict[str, Any] = json.loads(outcome.out)["parallel"]
        return found

    return run


def test_auto_chooses_what_fits_and_says_so_in_training_as_in_a_dry_run(
    train: Cli, planned: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "resident_bytes", lambda: 2**20)  # it grows while the tests run
    needed = {kind: planned("--parallel", kind)["memory"]["total_bytes"] for kind in ("ddp", "fsdp")}
    assert needed["fsdp"] < needed["ddp"]
    for kind, room in (("ddp", 2 * needed["ddp"]), ("fsdp", sum(needed.values()) / 2 / 0.9)):
        monkeypatch.setattr(prepare, "device_memory", lambda device, processes, room=room: int(room))
        monkeypatch.setattr(prepare, "available_cores", lambda: 2)
        found = planned()
        assert found["kind"] == kind and "fits into the" in found["reason"]
        outcome = train(*DEEP, "--out", kind)
        assert outcome.code == 0, outcome.err
        assert outcome.err.count(f"parallel: {kind}, as {found['reason']}") == 1
        assert "kind: auto" in Path(kind, "recipe.yaml").read_text()  # another number of processes chooses anew


def test_a_process_has_its_share_of_the_memory_of_the_machine() -> None:
    assert device_memory(torch.device("cpu"), processes=4) == machine_memory() // 4 > 2**20


def test_more_devices_than_processors_are_planned_for_machines_that_are_not_known(
    planned: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "available_cores", lambda: 1)
    assert "unknown" in planned()["reason"]


def test_one_process_says_that_options_of_several_have_no_effect(train: Cli) -> None:
    plain = train("--max-steps", 1, "--out", "plain")
    outcome = train("--max-steps", 1, "--out", "run", "--parallel", "fsdp", "--max-restarts", 2)
    assert outcome.code == 0
    assert "one process: --parallel fsdp, --max-restarts 2 without effect (several: --devices N)" in outcome.err
    assert "without effect" not in plain.err and "parallel:" not in plain.err + outcome.err
