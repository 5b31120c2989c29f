"""Checkpoints that several processes write in parts: every command reads them, and they are whole or not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file
from torch.distributed import HashStore

from tests.conftest import TINY_RECIPE
from tests.end_to_end.labelled_examples import sentences
from tests.faults.killing import check_runs
from tests.quick import first_is_quick
from tests.training.test_training_devices import (
    PLAIN,
    TOLERANCE,
    _all_processes_end,
    assert_same_records,
    latest,
    stored,
    train,
)
from tests.training.test_training_sharded import DDP, FSDP
from tformer.checkpoint import parts, read
from tformer.checkpoint.manifest import TENSOR_FILES, FileRecord
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.cli.app import main
from tformer.support import files
from tformer.support.errors import InputError, cannot_write
from tformer.training.loop import Trainer
from tformer.training.session import open_run
from tformer.workers.worker import Worker

__all__ = ["_all_processes_end", "train"]  # fixtures

Cli = Callable[..., Any]
EMA = ("--set", "training.ema_decay=0.9")
ROLES = ("weights", "optimizer", "ema")


SHORT = ("--max-steps", "6", "--set", "training.eval_every=4", "--set", "training.save_every=2")
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    """Every process writes, however small the model is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", 1)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of one process (`one`) and of two whose weights are spread (`two`)."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(TINY_RECIPE)
    (folder / "text.txt").write_text("\n".join(text for _, text in sentences(300, 6)) + "\n")
    common = ("--config", folder / "tiny.yaml", "--data", folder / "text.txt", *PLAIN, *EMA, *SHORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFORMER_CACHE", str(folder / "cache"))
        for name, more in (("one", ()), ("two", (*FSDP, "--devices", 2))):
            with suppress(SystemExit):
                main([str(word) for word in ("train", *common, "--out", folder / name, *more)])
    return folder


@pytest.fixture
def runs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new current folder with copies of the runs."""
    shutil.copytree(home, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


def file_names(checkpoint: Path) -> set[str]:
    return {path.name for path in checkpoint.glob("*.safetensors*")}


def in_one_file(checkpoint: Path, target: Path) -> None:
    """The same checkpoint as one process writes it."""
    read = read_checkpoint(checkpoint)
    write_checkpoint(
        target,
        read.step,
        CheckpointContents.derived(
            read,
            weights=read.weights(),
            trainer=read.trainer,
            optimizer=read.optimizer(),
            ema=read.ema(),
            score=read.manifest.score,
        ),
    )


def assert_same_state_in_parts(run: str, other: str) -> None:
    """Two processes have written this run, one file of each role each, with the state of the other run."""
    assert_same_records(run, other)
    check_runs(Path(run))
    assert file_names(latest(run)) == {
        f"{stem}{ending}"
        for stem in ("model", "optimizer", "ema")
        for ending in ("-00001-of-00002.safetensors", "-00002-of-00002.safetensors", ".safetensors.index.json")
    }
    for role in ROLES:
        own, others = stored(run, role), stored(other, role)
        assert own.keys() == others.keys()
        assert max(float((own[name] - others[name]).abs().max()) for name in own) <= TOLERANCE


def test_each_process_writes_whole_tensors_where_weights_are_spread(runs: Path) -> None:
    assert_same_state_in_parts("two", "one")
    assert json.loads((latest("one") / "manifest.json").read_text())["format"] == 2


@pytest.mark.slow
def test_each_process_writes_a_part_where_all_have_the_weights(runs: Path, cli: Cli) -> None:
    """The quick twin is `test_each_process_writes_whole_tensors_where_weights_are_spread`."""
    common = ("--config", "tiny.yaml", "--data", "text.txt", *PLAIN, *EMA, *SHORT)
    assert cli("train", *common, *DDP, "--devices", 2, "--out", "ddp").code == 0
    assert_same_state_in_parts("ddp", "one")


def test_index_and_files_have_the_layout_of_hugging_face(runs: Path) -> None:
    index = json.loads((latest("two") / "model.safetensors.index.json").read_text())
    held = {path.name: load_file(path) for path in latest("two").glob("model-*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    assert index["metadata"] == {"total_size": sum(t.nbytes for tensors in held.values() for t in tensors.values())}
    names = ("model", "optimizer", "ema")
    sizes = [
        sum((latest("two") / f"{name}-0000{part}-of-00002.safetensors").stat().st_size for name in names)
        for part in (1, 2)
    ]
    assert max(sizes) < 1.3 * min(sizes)


def test_every_command_reads_a_checkpoint_in_parts_as_one_in_single_files(runs: Path, cli: Cli) -> None:
    Path("single/checkpoints").mkdir(parents=True)
    for step in Path("two/checkpoints").glob("step-*"):
        in_one_file(step, runs / "single" / "checkpoints" / step.name)
    for words in (
        ("generate", "--prompt", "the", "--greedy", "--max-new-tokens", "8"),
        ("evaluate", "--data", "text.txt"),
        ("average", "--last", "2", "--out", "{}-average"),
        ("export", "--out", "{}-exported"),
        ("prune", "--out", "{}-pruned", "--keep", "1"),
        ("inspect",),
        ("inspect", "--verify"),
    ):
        command, *options = words
        found = []
        for run in ("two", "single"):
            outcome = cli(command, run, *(word.format(run) for word in options))
            assert outcome.code == 0, (words, outcome.err)
            found.append(re.sub(r"second \d+|\d+ seconds?", "", outcome.out))
        if command in ("generate", "evaluate"):
            assert found[0] == found[1], words
    assert cli("import", "two-exported", "--out", "two-imported").code == 0
    for name in ("average", "pruned", "exported"):
        own, others = (Path(f"{run}-{name}/model.safetensors").read_bytes() for run in ("two", "single"))
        assert own == others, name


@pytest.mark.slow
def test_the_same_number_of_processes_resumes_to_the_bit_and_reads_its_own_rows_only(
    runs: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its quick twin is `test_each_process_writes_whole_tensors_where_weights_are_spread`."""
    shutil.copytree("two", "run")
    shutil.rmtree(latest("run"))  # back to step 4

    def refused(checkpoint: Any, role: str) -> Any:
        assert role == "weights", f"all of {role} is read"
        return tensors(checkpoint, role)

    tensors = read.Checkpoint._tensors
    monkeypatch.setattr(read.Checkpoint, "_tensors", refused)
    outcome = cli("train", "--resume", "--out", "run", "--devices", 2)
    assert outcome.code == 0 and latest("run").name == "step-00000006", outcome.err
    for path in latest("two").glob("*.safetensors"):
        assert path.read_bytes() == (latest("run") / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("background", "rank"),
    [
        ("true", 1),
        pytest.param("true", 0, marks=SLOW),
        pytest.param("false", 0, marks=SLOW),
        pytest.param("false", 1, marks=SLOW),
    ],
)
def test_a_disk_that_is_full_for_one_process_ends_all_with_3_and_leaves_no_half_checkpoint(
    train: Cli, monkeypatch: pytest.MonkeyPatch, rank: int, background: str
) -> None:
    """Its quick twin is
    `checkpoint/test_checkpoint_faults.py::test_full_disk_names_bytes_and_path_and_leaves_everything`.
    """
    write = parts.write_files

    def full(folder: Path, *arguments: Any, **named: Any) -> Iterator[FileRecord]:
        if folder.name.endswith("8") and os.environ["RANK"] == str(rank):
            (folder / "part").write_bytes(b"half")
            raise cannot_write(folder, OSError(28, ""))
        return write(folder, *arguments, **named)

    monkeypatch.setattr(parts, "write_files", full)
    monkeypatch.setattr("tformer.checkpoint.save.write_files", full)
    saves = ("--set", f"training.save_in_background={background}")
    outcome = train("--out", "run", *FSDP, "--devices", 2, *saves)
    assert outcome.code == 3 and outcome.err.count("error: ") == 1, outcome.err
    assert f"error: rank {rank}: cannot write run/checkpoints/.tmp-step-00000008: No space left" in outcome.err
    assert latest("run").name == "step-00000006"
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == [
        "best", "latest", "step-00000004", "step-00000006",
    ]  # fmt: skip
    check_runs(Path("run"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_while_it_writes_leaves_the_checkpoint_before(
    train: Cli, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    words = (*FSDP, "--devices", 2, "--max-steps", 10)
    assert train("--out", "whole", *words).code == 0
    durably = files.write_durably

    def killed(path: Path, chunks: Any) -> Any:
        if path.parent.name.endswith("step-00000008") and os.environ["RANK"] == str(rank):
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return durably(path, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_durably", killed)
        began = time.monotonic()
        outcome = train("--out", "run", *words)
    assert outcome.code == 1 and f"rank {rank}: this process was killed by signal 9" in outcome.err
    assert latest("run").name == "step-00000006" and time.monotonic() - began < 30
    check_runs(Path("run"))
    assert train("--out", "run", "--resume", *words).code == 0
    for role in ("weights", "optimizer"):
        own, others = stored("run", role), stored("whole", role)
        assert all(own[name].equal(others[name]) for name in others)
    assert not [path for path in Path("run").rglob("*") if path.name.startswith((".tmp-", ".old-"))]


@pytest.mark.slow
def test_training_goes_on_while_another_process_still_writes(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quick twin is `test_each_process_writes_whole_tensors_where_weights_are_spread`."""
    write, step, marker = parts.write_files, Trainer.train_step, Path("stepped").absolute()

    def waits(folder: Path, *arguments: Any, **named: Any) -> Iterator[FileRecord]:
        while os.environ["RANK"] == "1" and not marker.exists():
            time.sleep(0.01)
        return write(folder, *arguments, **named)

    def marked_step(trainer: Trainer) -> None:
        step(trainer)
        if trainer.state.step == 6:  # the checkpoint of step 4 is not written yet
            marker.write_text("")

    monkeypatch.setattr(parts, "write_files", waits)
    monkeypatch.setattr(Trainer, "train_step", marked_step)
    words = ("--max-steps", 8, "--set", "training.eval_every=12")
    outcome = train("--out", "run", *FSDP, "--devices", 2, *words)
    assert outcome.code == 0 and Path("run/checkpoints/step-00000008/manifest.json").is_file(), outcome.err


@first_is_quick(("role", "devices"), [("optimizer", 1), ("optimizer", 2), ("weights", 2), ("ema", 2)])
def test_a_part_that_is_damaged_or_missing_is_refused_on_resume(runs: Path, cli: Cli, role: str, devices: int) -> None:
    part = latest("two") / f"{TENSOR_FILES[role].removesuffix('.safetensors')}-00002-of-00002.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    words = ("train", "--resume", "--out", "two", "--max-steps", 8, "--devices", devices)
    outcome = cli(*words)
    assert outcome.code == 2 and f"{part.name} is damaged: its sha256 is" in outcome.err, outcome.err
    assert f"remove {part.parent}, then: tformer train --resume --out two" in outcome.err, outcome.err
    assert cli("inspect", "two", "--verify").code == 2
    part.unlink()
    outcome = cli(*words)
    assert outcome.code == 2 and f"{part.name} is missing" in outcome.err, outcome.err


def test_a_run_directory_that_a_process_does_not_see_is_refused(tmp_path: Path) -> None:
    worker = Worker(rank=1, world_size=2, store=HashStore())
    worker.give("shared/1", str(tmp_path / "run"))  # which the leader has made, on another machine
    message = "run, which the process of rank 0 has made, is not visible to that of rank 1"
    with pytest.raises(InputError, match=message):
        open_run(cast("Any", None), cast("Any", None), worker, bytes_needed=0)


@pytest.mark.slow
def test_small_checkpoints_are_single_files(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick twin is `checkpoint/test_checkpoint_parts.py::test_processes_without_enough_bytes_write_nothing`."""
    monkeypatch.setattr(parts, "PART_BYTES", 16 << 20)
    assert train("--out", "run", *EMA, *FSDP, *SHORT, "--devices", 2).code == 0
    assert file_names(latest("run")) == {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}
    assert json.loads((latest("run") / "manifest.json").read_text())["format"] == 2
