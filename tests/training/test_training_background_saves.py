"""Checkpoints that are written in a thread: the same files, and training goes on meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.conftest import TINY_RECIPE
from tformer.checkpoint.background import Saver
from tformer.recipe import load_recipe
from tformer.support.errors import cannot_write
from tformer.training import saving
from tformer.training.loop import Trainer
from tformer.training.saving import Checkpoints
from tformer.workers.worker import Worker

Cli = Callable[..., Any]
BACKGROUND = ("--set", "training.save_in_background=true")


def content(run: str) -> dict[str, bytes]:
    """The files of every checkpoint that state the training; the recipe differs by the key itself."""
    names = ("model.safetensors", "optimizer.safetensors", "ema.safetensors")
    return {str(path.relative_to(run)): path.read_bytes() for name in names for path in Path(run).rglob(name)}


@pytest.mark.slow
def test_the_checkpoints_are_those_that_are_saved_at_once(tiny: Cli) -> None:
    """Its quick twin is `test_copies_are_of_the_moment_and_keep_what_is_shared`."""
    ema = ("--set", "training.ema_decay=0.9")
    assert tiny("--out", "a", *ema).code == 0 and tiny("--out", "b", *ema, *BACKGROUND).code == 0
    assert content("a") == content("b") and len(content("a")) >= 6


def test_a_run_that_is_interrupted_while_it_saves_resumes_with_the_same_result(
    tiny: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny("--out", "a", *BACKGROUND).code == 0
    save, step = saving.save_checkpoint, Trainer.train_step

    def slow_save(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.1)
        return save(*arguments, **named)

    def step_and_signal(self: Trainer) -> None:
        step(self)
        if self.state.step == 5:  # the checkpoint of step 4 is being written
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", slow_save)
        patch.setattr(Trainer, "train_step", step_and_signal)
        stopped = tiny("--out", "b", *BACKGROUND)
    assert stopped.code == 143 and "saved at step 5" in stopped.err
    assert Path("b/checkpoints/step-00000005/manifest.json").is_file()
    assert tiny("--out", "b", "--resume").code == 0
    last = "checkpoints/step-00000012/model.safetensors"
    assert content("a")[last] == content("b")[last]


def test_steps_go_on_while_a_checkpoint_is_written(tiny: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, save, step = Event(), saving.save_checkpoint, Trainer.train_step
    steps: list[int] = []

    def slow_save(*arguments: Any, **named: Any) -> Any:
        assert stepped.wait(60), "no step while the checkpoint waits"
        return save(*arguments, **named)

    def counted_step(self: Trainer) -> None:
        step(self)
        steps.append(self.state.step)
        if self.state.step == 6:  # the checkpoint of step 4 is not written yet
            stepped.set()

    monkeypatch.setattr(saving, "save_checkpoint", slow_save)
    monkeypatch.setattr(Trainer, "train_step", counted_step)
    outcome = tiny("--out", "a", *BACKGROUND, "--set", "training.eval_every=12", "--json")
    assert outcome.code == 0 and steps[-1] == 12, outcome.err
    assert json.loads(outcome.out)["saving_seconds"] < json.loads(outcome.out)["seconds"]
    assert Path("a/checkpoints/step-00000012/manifest.json").is_file()


def test_an_error_of_the_thread_ends_the_training_with_its_exit_code(
    tiny: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise cannot_write("a", OSError(28, "No space left on device"))

    monkeypatch.setattr(saving, "save_checkpoint", full)
    outcome = tiny("--out", "a", *BACKGROUND)
    assert outcome.code == 3 and outcome.err.count("error: ") == 1


@pytest.mark.parametrize(("processes", "background", "expected"), [(1, "null", 0), (2, "null", 1), (2, "false", 0)])
def test_several_processes_save_in_the_background_and_one_does_not(
    processes: int, background: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(base_yaml=TINY_RECIPE, sets=[f"training.save_in_background={background}"]).recipe
    training, trainer = SimpleNamespace(recipe=recipe), SimpleNamespace(shards=None)
    saver = Checkpoints(cast("Any", training), cast("Any", trainer), Worker(world_size=processes)).saver
    threads: list[str] = []
    saver.save(lambda: threads.append(current_thread().name))
    saver.finish()
    assert sum(name != main_thread().name for name in threads) == expected


def test_copies_are_of_the_moment_and_keep_what_is_shared() -> None:
    weight = torch.ones(3)
    copies = Saver(in_background=True).hold({"a": weight, "b": weight, "c": torch.ones(3)})
    weight.zero_()
    assert copies["a"] is copies["b"] and copies["a"].tolist() == [1, 1, 1] and copies["c"] is not copies["a"]


def test_a_save_waits_for_the_one_before_it_and_an_error_is_raised_once() -> None:
    saver, order = Saver(in_background=True), []
    saver.save(lambda: (time.sleep(0.05), order.append(1)))
    saver.save(lambda: order.append(2))
    saver.finish()
    assert order == [1, 2]

    def fails() -> None:
        raise ValueError("full")

    saver.save(fails)
    with pytest.raises(ValueError, match="full"):
        saver.finish()
    saver.finish()
