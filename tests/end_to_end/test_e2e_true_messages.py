"""Every message that names a file or a checkpoint names one that exists; every hint that names a command can be run.

`claims` reads both streams of a command. A checkpoint that a message names must pass the verification of
`tformer inspect --verify`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.same_commands import few_steps, write_data
from tformer.support import files
from tformer.training.loop import Trainer

Cli = Callable[..., Any]
FILE_KEYS = ("run", "checkpoint", "best_checkpoint", "out", "path", "output")
CODES = {"time": 0, "one step": 0, "interrupted": 130, "interrupted first": 130, "disk full": 3, "nothing left": 0}


def claims(outcome: Any, run: Path) -> Iterator[Path]:
    """The paths that both streams of a command name as written, kept or saved. run: the training's directory."""
    lines = [*outcome.out.splitlines(), *outcome.err.splitlines()]
    for line in lines:
        yield from map(Path, re.findall(r"^wrote (\S+)$", line))
        yield from (Path(found) for found in re.findall(r"^(\S+): \d+ examples?$", line))
        steps = re.findall(r"(?:saved at|the checkpoint of) step (\d+)", line)
        steps += re.findall(r"out of time at step (\d+) of \d+: saved", line)
        yield from (run / "checkpoints" / f"step-{int(step):08d}" for step in steps)
        yield from (run / "checkpoints" / name for name in re.findall(r"the checkpoint (step-\d+) is intact", line))
        yield from (Path(found) for found in re.findall(r"see the logs in (\S+)", line))
        for folder, names in re.findall(r"^(\S+): (table\.md.*) and curves$", line):
            yield from (Path(folder, name) for name in names.split(", "))
            assert list(Path(folder).glob("curves*")), line
        if line.startswith("{"):
            document = json.loads(line)
            yield from (Path(document[key]) for key in FILE_KEYS if isinstance(document.get(key), str))
    if len(outcome.out.splitlines()) == 1 and re.fullmatch(r"[\w./-]+", outcome.out.strip()):
        yield Path(outcome.out.strip())


def check(cli: Cli, outcome: Any, run: Path = Path("run")) -> list[Path]:
    """All claims hold: files exist, checkpoints verify, commands of hints are understood. Returns the claims."""
    found = list(claims(outcome, run))
    for path in found:
        assert path.exists(), f"{path} is named and does not exist:\n{outcome.err}"
        if (path / "manifest.json").exists() or list((path / "checkpoints").glob("step-*")):
            verified = cli("inspect", path, "--verify")
            assert verified.code == 0, verified.err
    return found


def hinted(outcome: Any) -> list[list[str]]:
    """The words of every whole command that a hint names."""
    hints = re.findall(r"^hint: .*?(tformer [a-z].*)$", outcome.err, re.M)
    return [shlex.split(each)[1:] for each in hints]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_data()


@pytest.mark.parametrize("json_", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["text", "json"])
@pytest.mark.parametrize("case", CODES)
def test_a_training_that_says_saved_has_saved(
    cli: Cli, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, case: str, json_: bool
) -> None:
    words = ["train", "--config", tiny_recipe, "--data", "text.txt", "--out", "run", *["--json"] * json_]
    with monkeypatch.context() as patch:
        if case.startswith("interrupted"):
            step, last = Trainer.train_step, 5 * (case == "interrupted")

            def signalled(trainer: Trainer) -> None:
                if trainer.state.step == last:
                    os.kill(os.getpid(), signal.SIGINT)
                step(trainer)

            patch.setattr(Trainer, "train_step", signalled)
        if case == "disk full":
            publish, published = files.publish_directory, 0

            def full(target: Path, fill: Callable[[Path], None]) -> None:
                nonlocal published
                published += 1
                if published == 2:
                    raise OSError(errno.ENOSPC, "no space")
                publish(target, fill)

            patch.setattr(files, "publish_directory", full)
        if case == "time":
            words += ["--max-minutes", 0.0001]
        if case == "one step":
            words += ["--max-steps", 1]
        outcome = cli(*words)
        if case == "nothing left":
            outcome = cli("train", "--resume", "--out", "run")
            assert "nothing to do" in outcome.err
    assert outcome.code == CODES[case], outcome.err
    found = check(cli, outcome)
    assert found or case == "interrupted first"
    for command in hinted(outcome):
        again = cli(*command)
        assert again.code == 0, again.err
        check(cli, again)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_loss_that_is_not_finite_names_a_checkpoint_only_if_there_is_one(
    cli: Cli, tiny_recipe: Path, steps: int
) -> None:
    """`the last checkpoint is intact` was said of runs without one; a sample of NaN ended with exit code 1."""
    words = ["train", "--config", tiny_recipe, "--data", "text.txt", "--out", "run"]
    wild = ["--lr", "1e30", "--set", "schedule.warmup_steps=0", "--set", "optimizer.clip_grad_norm=null"]
    if steps == 4:
        assert cli(*words, "--max-steps", 4).code == 0
        words = ["train", "--resume", "--out", "run", "--max-steps", 20]
    outcome = cli(*words, *wild)
    assert outcome.code == 4, outcome.err
    checkpoints = list(Path("run/checkpoints").glob("step-*"))
    assert ("intact" in outcome.err) == bool(checkpoints) == bool(check(cli, outcome))


def test_an_interrupted_sweep_says_only_what_is_true(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that the last training had saved, also where that had not made a step."""
    from tformer.workflows.sweep.run import Stopped, Sweeper

    def stopped(sweeper: Sweeper, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise Stopped

    monkeypatch.setattr(Sweeper, "run", stopped)
    outcome = cli("sweep", "--arch", "gpt", "--data", "text.txt", "--vary", "optimizer.lr=1e-3", "--out", "swept")
    assert outcome.code == 130 and "interrupted: 0 of 1 trainings are finished" in outcome.err
    assert "saved" not in outcome.err


@pytest.mark.slow
def test_every_command_that_writes_names_what_it_has_written(cli: Cli) -> None:
    narrow = ["--set", "model.d_model=32", *few_steps()]
    decoder = ["--set", "model.decoder.num_layers=2", "--set", "model.decoder.num_heads=2"]
    gpt = ["--set", "data.seq_len=32", *narrow, *decoder]
    bert = [*narrow, "--set", "model.encoder.num_heads=4"]
    runs = [
        ("train", "--arch", "gpt", "--data", "text.txt", *gpt, "--out", "gpt"),
        ("train", "--arch", "gpt", "--data", "text.txt", *gpt),
        ("train", "--arch", "bert", "--data", "table.tsv", *bert, "--out", "bert", "--json"),
        ("train", "--resume", "--out", "gpt", "--max-steps", 3),
        ("train-tokenizer", "text.txt", "--vocab-size", 300, "--out", "tokenizer.json"),
        ("evaluate", "bert", "--mistakes", "mistakes.jsonl"),
        ("generate", "gpt", "--prompt", "the", "--max-new-tokens", 3, "--output", "text.out"),
        ("classify", "bert", "--text", "a cat", "--output", "labels.tsv"),
        ("average", "gpt", "--last", 2, "--out", "averaged"),
        ("average", "gpt", "--last", 2, "--out", "averaged-2", "--json"),
        ("prune", "gpt", "--rate", 0.5, "--out", "pruned"),
        ("prune", "gpt", "--rate", 0.5, "--out", "pruned-2", "--json"),
        ("export", "gpt", "--out", "exported"),
        ("export", "gpt", "--out", "exported-2", "--json"),
        ("import", "exported", "--out", "imported"),
        ("import", "exported", "--out", "imported-2", "--json"),
        ("viz-pe", "-o", "positions.html"),
        ("viz-attention", "gpt", "--text", "the cat", "-o", "attention.html"),
        ("plot", "gpt", "-o", "curves.svg"),
        ("inspect", "gpt", "--shapes", "-o", "shapes.html"),
        ("sweep", "--arch", "gpt", "--data", "text.txt", "--vary", "optimizer.lr=1e-3", "--max-steps", 1,
         "--out", "swept", "--", "--set", "training.threads=1"),
        ("sweep", "--arch", "gpt", "--data", "text.txt", "--vary", "optimizer.lr=1e-3", "--max-steps", 1,
         "--out", "swept", "--", "--set", "training.threads=1"),
    ]  # fmt: skip
    silent = {"generate", "classify"}  # their output file is named by the user alone
    for words in runs:
        outcome = cli(*words)
        assert outcome.code == 0, f"{words}\n{outcome.err}"
        assert check(cli, outcome, Path("gpt")) or words[0] in silent, f"{words}\n{outcome.out}{outcome.err}"
    for path in ("text.out", "labels.tsv"):
        assert Path(path).stat().st_size
