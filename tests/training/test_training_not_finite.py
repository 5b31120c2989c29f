"""A loss that is NaN once, or steps in a row, and memory that runs out: what is skipped, counted, kept and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quick import first_is_quick
from tformer.training.loop import Trainer

Cli = Callable[..., Any]


def nan_at(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the loss of these steps NaN."""
    update = Trainer._update

    def spoiled(trainer: Trainer, loss: torch.Tensor) -> torch.Tensor:
        return update(trainer, loss * torch.nan if trainer.state.step + 1 in steps else loss)

    patch.setattr(Trainer, "_update", spoiled)


def checkpoint(step: int, run: str = "run") -> Path:
    return Path(run, "checkpoints", f"step-{step:08d}")


def test_one_loss_that_is_nan_is_skipped_and_counted(tiny: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also two in a row; the step leaves no trace in the weights, and the training ends as others."""
    with monkeypatch.context() as patch:
        nan_at(patch, 3, 6, 7)
        outcome = tiny("--out", "run")
    assert outcome.code == 0 and outcome.err.count("the step is skipped") == 3
    state = json.loads((checkpoint(12) / "trainer.json").read_text())
    assert state["skipped_steps"] == 3 and state["step"] == 12
    losses = [json.loads(line)["loss"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert all(isinstance(loss, float) and loss < 10 for loss in losses)


def test_three_losses_in_a_row_that_are_nan_end_the_training_with_4_and_the_checkpoint_before_goes_on(
    tiny: Cli, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated without the cause from the checkpoint before, it has the weights of a training without it."""
    rarely = ("--set", "training.eval_every=12")
    assert tiny(*rarely, "--out", "whole").code == 0
    with monkeypatch.context() as patch:
        nan_at(patch, 5, 6, 7)
        outcome = tiny(*rarely, "--out", "run")
    assert outcome.code == 4 and "not finite at step 7, 3 steps in a row" in outcome.err
    assert "the checkpoint of step 4 is intact" in outcome.err and "Traceback" not in outcome.err
    assert sorted(path.name for path in Path("run/checkpoints").glob("step-*")) == [checkpoint(4).name]
    assert cli("train", "--resume", "--out", "run").code == 0
    resumed, whole = ((checkpoint(12, run) / "model.safetensors").read_bytes() for run in ("run", "whole"))
    assert resumed == whole


@first_is_quick(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
     RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")],
    ids=["gpu", "python", "cpu"],
)  # fmt: skip
def test_memory_that_runs_out_ends_the_training_with_5_a_hint_and_an_intact_checkpoint(
    tiny: Cli, cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    step = Trainer.train_step

    def out_of_memory(trainer: Trainer) -> None:
        if trainer.state.step == 6:
            raise error
        step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", out_of_memory)
        outcome = tiny("--out", "run")
    assert outcome.code == 5 and "lower --batch-size" in outcome.err and "Traceback" not in outcome.err
    assert cli("inspect", "run", "--verify").code == 0
    assert cli("train", "--resume", "--out", "run", "--batch-size", 2, "--grad-accum", 2).code == 0
    assert checkpoint(12).is_dir()
