"""Readers, terminals and signals that go away: work goes on or ends with the right exit code, without a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quick import first_is_quick
from tformer.training.loop import Trainer
from tformer.training.reporter import RunReporter
from tformer.training.saving import Checkpoints

TRAIN = [
    "train", "--arch", "gpt", "--preset", "char-cpu", "--data", "text.txt", "--out", "run", "--max-steps", "40",
    "--batch-size", "4", "--precision", "fp32", "--device", "cpu",
    *(word for setting in (
        "model.d_model=32", "model.decoder.num_layers=1", "model.decoder.num_heads=2", "data.seq_len=32",
        "training.sample_every=0", "training.log_every=1", "training.threads=1",
    ) for word in ("--set", setting)),
]  # fmt: skip
QUICK = [["--help"], pytest.param(["config", "schema"], marks=pytest.mark.slow)]


def start(words: list[str], cwd: Path, *, ignored: int | None = None, **streams: int) -> subprocess.Popen[str]:
    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        if ignored is not None:
            signal.signal(ignored, signal.SIG_IGN)

    return subprocess.Popen(
        [sys.executable, "-m", "tformer", *words], cwd=cwd, text=True, preexec_fn=prepare, stdin=subprocess.DEVNULL,
        **streams,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.mark.slow
def test_training_goes_on_when_the_reader_of_its_messages_goes_away_and_nohup_holds(tmp_path: Path) -> None:
    """Its quick twin is `test_messages_that_no_device_takes_do_not_change_the_exit_code`."""
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    training = start(TRAIN, tmp_path, ignored=signal.SIGHUP, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert training.stderr is not None
    for _ in range(4):
        training.stderr.readline()
    training.stderr.close()
    training.send_signal(signal.SIGHUP)
    assert training.wait(timeout=120) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} >= set(range(1, 41))
    assert (tmp_path / "run" / "checkpoints" / "step-00000040" / "manifest.json").is_file()


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_a_closed_pipe_ends_a_command_like_sigpipe(tmp_path: Path, words: list[str]) -> None:
    process = start(words, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) in (0, 141)
    assert process.stderr.read() == ""
    process.stderr.close()


def test_messages_that_no_device_takes_do_not_change_the_exit_code(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        refused = start(["inspect", "no-such-run"], tmp_path, stdout=subprocess.DEVNULL, stderr=full.fileno())
        assert refused.wait(timeout=60) == 2


def test_ctrl_c_while_the_program_is_imported_is_one_line(tmp_path: Path) -> None:
    """The interpreter itself needs some 0.05 s to start, in which it reports the signal in its own way."""
    process = start(["inspect", "--arch", "gpt"], tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for _ in range(600):
        time.sleep(0.005)
        maps = Path(f"/proc/{process.pid}/maps")
        if not maps.exists() or "_json" in maps.read_text():  # the imports of the command line have begun
            break
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert messages == "error: interrupted\n"
    # A shell calls both 130: Python ends itself by the signal if that came within an `exec`, as dataclasses use it.
    assert process.returncode in (130, -signal.SIGINT)


def test_a_second_ctrl_c_ends_a_training_at_once_and_the_checkpoint_before_is_intact(
    cli: Callable[..., Any], tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one lets the step end and saves; the second one does not wait for the step."""
    step, ended = Trainer.train_step, []

    def signalled(trainer: Trainer) -> None:
        if trainer.state.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        step(trainer)
        ended.append(trainer.state.step)

    words = ("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", signalled)
        outcome = cli(*words)
    assert outcome.code == 130 and "Traceback" not in outcome.err
    assert ended == [1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert cli("inspect", tmp_path / "run", "--verify").code == 0
    assert cli("train", "--resume", "--out", tmp_path / "run").code == 0


@first_is_quick(
    ("owner", "part", "number"),
    [
        (RunReporter, "_measure", signal.SIGINT),
        (RunReporter, "_sample", signal.SIGINT),
        (Checkpoints, "save", signal.SIGINT),
        (torch, "compile", signal.SIGINT),
        (Checkpoints, "save", signal.SIGHUP),
    ],
    ids=["validation", "sample", "saving", "compilation", "the terminal hangs up"],
)
def test_a_signal_in_any_part_of_a_training_saves_once_and_the_run_resumes(
    cli: Callable[..., Any], tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch,
    owner: Any, part: str, number: signal.Signals,
) -> None:  # fmt: skip
    def signalled(work: Callable[..., Any]) -> Callable[..., Any]:
        def send(*arguments: Any, **options: Any) -> Any:
            os.kill(os.getpid(), number)
            return work(*arguments, **options)

        return send

    words = ("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        if owner is torch:  # the first step compiles the model while it computes the loss
            patch.setattr(torch, "compile", lambda model, **_: signalled(model))
        else:
            patch.setattr(owner, part, signalled(getattr(owner, part)))
        outcome = cli(*words, "--compile", "on" if owner is torch else "off")
    assert outcome.code == 128 + number and "Traceback" not in outcome.err
    assert outcome.err.count("interrupted: saved at step") == 1
    assert cli("inspect", tmp_path / "run", "--verify").code == 0
    assert cli("train", "--resume", "--out", tmp_path / "run", "--compile", "off").code == 0


@pytest.mark.slow
def test_training_goes_on_where_its_messages_find_no_room(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    with open("/dev/full", "w") as full:
        training = start(TRAIN, tmp_path, stdout=subprocess.DEVNULL, stderr=full.fileno())
        assert training.wait(timeout=120) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000040" / "manifest.json").is_file()
