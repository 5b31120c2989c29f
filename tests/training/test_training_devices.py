"""`tformer train --devices N`: the run that one process makes, and what happens when a process fails or is stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from tests.conftest import TINY_RECIPE, write_text
from tests.faults.killing import check_runs, ends_within
from tests.training.test_training_not_finite import nan_at
from tformer.checkpoint.read import read_checkpoint
from tformer.cli.app import main
from tformer.support.errors import InputError, cannot_write
from tformer.training import saving, together
from tformer.training.assemble import PlannedBatches
from tformer.training.loop import Trainer
from tformer.training.options import TrainOptions
from tformer.workers.worker import Worker

Cli = Callable[..., Any]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
TOLERANCE = 1e-5
LIMIT_SECONDS = 120
PLAIN = ("--lr", "0.003", "--set", "model.decoder.dropout=0", "--set", "model.decoder.attention_dropout=0",
         "--set", "model.embedding.dropout=0")  # fmt: skip


@pytest.fixture(autouse=True)
def _all_processes_end() -> Iterator[None]:
    """No process outlives its test, and a test that hangs ends."""
    with ends_within(LIMIT_SECONDS):
        yield


@pytest.fixture
def train(tiny: Cli) -> Cli:
    """`train("--devices", 2, ...)` in a new folder, without dropout."""
    return lambda *words: tiny(*PLAIN, *words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(TINY_RECIPE)
    write_text(folder / "text.txt")
    words = ("--config", folder / "tiny.yaml", "--data", folder / "text.txt", *PLAIN, "--out", folder / "run")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setenv("TFORMER_CACHE", str(folder / "cache"))
        main([str(word) for word in ("train", *words)])
    assert ended.value.code == 0
    return folder / "run"


def records(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def latest(run: str | Path) -> Path:
    return Path(run, "checkpoints", Path(run, "checkpoints", "latest").read_text().strip())


def assert_same_records(run: str, other: str | Path) -> None:
    """The same records, but for times, within the tolerance."""
    assert len(records(run)) == len(records(other)) > 0
    for one, two in zip(records(run), records(other), strict=True):
        assert [one[key] for key in ("split", "step")] == [two[key] for key in ("split", "step")]
        assert one.get("tokens") == two.get("tokens") and abs(one["loss"] - two["loss"]) <= TOLERANCE


def assert_same_run(run: str, other: str | Path) -> None:
    """The same records, but for times, and the same weights within the tolerance."""
    assert_same_records(run, other)
    assert latest(run).name == latest(other).name
    weights, others = stored(run, "weights"), stored(other, "weights")
    assert weights.keys() == others.keys()
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) <= TOLERANCE
    assert sorted(path.name for path in Path(run).iterdir()) == sorted(path.name for path in Path(other).iterdir())
    check_runs(Path(run))


def stored(run: str | Path, role: str) -> dict[str, Tensor]:
    """The tensors of a role in the latest checkpoint, from one file or several."""
    checkpoint = read_checkpoint(latest(run))
    return checkpoint.rows(role, dict.fromkeys(checkpoint.specs(role), slice(None)))


def at_step(patch: pytest.MonkeyPatch, step: int, rank: int, act: Callable[[], Any]) -> None:
    """Act in the process of this rank before it takes this step."""
    take = Trainer.train_step

    def disturbed(trainer: Trainer) -> None:
        if trainer.state.step + 1 == step and trainer.parallel.rank == rank:
            act()
        take(trainer)

    patch.setattr(Trainer, "train_step", disturbed)


def test_two_processes_make_the_run_of_one(train: Cli, whole: Path) -> None:
    outcome = train("--out", "two", "--devices", 2, "--json")
    assert "expected on this CPU" not in outcome.err  # how long the processes wait for each other is not known
    assert outcome.code == 0
    assert_same_run("two", whole)
    recipe = (whole / "recipe.yaml").read_text()
    assert Path("two/recipe.yaml").read_text() == recipe.replace(str(whole.parent), str(Path.cwd()))
    summary = json.loads(outcome.out)
    assert summary["run"] == "two" and summary["step"] == 12
    assert outcome.err.count("model: ") == 1 and outcome.err.count("step 12 ") == 1
    assert "2 processes" in json.loads(Path("two/environment.json").read_text())["device"]


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_run_goes_on_in_one_process(
    train: Cli, cli: Cli, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick twin is `cli/test_cli_workers.py::test_the_failure_that_ended_a_group`."""
    with monkeypatch.context() as patch:
        at_step(patch, 7, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
        outcome = train("--out", "run", "--devices", 2)
    assert outcome.code == 1 and outcome.err.count("error: ") == 1
    assert "error: rank 1: this process was killed by signal 9 (SIGKILL)" in outcome.err
    assert latest("run").name == "step-00000006"
    assert cli("train", "--resume", "--out", "run").code == 0
    assert_same_run("run", whole)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_two(
    train: Cli, cli: Cli, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick twin is `test_two_processes_make_the_run_of_one`."""
    with monkeypatch.context() as patch:
        at_step(patch, 6, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("--out", "run").code == 143
    assert cli("train", "--resume", "--out", "run", "--devices", 2).code == 0
    assert_same_run("run", whole)


@pytest.mark.slow
def test_max_restarts_goes_on_from_the_last_checkpoint(
    train: Cli, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick twin is `cli/test_cli_workers.py::test_a_failure_that_may_not_come_again_starts_the_workers_again`."""
    marker = Path("killed")

    def once() -> None:
        if not marker.exists():
            marker.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)

    at_step(monkeypatch, 8, 1, once)
    outcome = train("--out", "run", "--devices", 2, "--max-restarts", 1)
    assert outcome.code == 0 and "the processes start again" in outcome.err and "error" not in outcome.err
    assert_same_run("run", whole)


def test_fewer_than_no_restarts_are_refused(train: Cli) -> None:
    outcome = train("--out", "run", "--devices", 2, "--max-restarts", -1)
    assert outcome.code == 2 and "error: --max-restarts must be at least 0, found -1" in outcome.err
    assert not Path("run").exists()


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGINT, 1), (signal.SIGTERM, 0)])
@pytest.mark.slow
def test_a_signal_to_one_process_saves_all_together(
    number: signal.Signals, rank: int, train: Cli, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick twin is `cli/test_cli_workers.py::test_a_signal_to_the_launcher_or_to_a_worker_stops_all_together`."""
    with monkeypatch.context() as patch:
        at_step(patch, 5, rank, lambda: os.kill(os.getpid(), number))
        outcome = train("--out", "run", "--devices", 2)
    assert outcome.code == 128 + number
    assert outcome.err.count("error: ") == 1 and "error: interrupted: saved at step 5" in outcome.err
    assert "continue with: tformer train --resume --out run" in outcome.err
    assert latest("run").name == "step-00000005"


@pytest.mark.slow
def test_a_full_disk_ends_all_processes_with_3(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick twin is
    `cli/test_cli_workers.py::test_the_failure_of_a_worker_has_the_message_and_the_code_of_its_error`.
    """
    save = saving.save_checkpoint

    def full(run: Any, step: int, contents: Any, **options: Any) -> Path:
        if step == 8:
            raise cannot_write(run.path, OSError(28, ""))
        return save(run, step, contents, **options)

    monkeypatch.setattr(saving, "save_checkpoint", full)
    outcome = train("--out", "run", "--devices", 2)
    assert outcome.code == 3 and outcome.err.count("error: ") == 1
    assert "error: rank 0: cannot write run: No space left on device" in outcome.err
    assert latest("run").name == "step-00000006"


@pytest.mark.slow
def test_a_save_may_take_longer_than_the_time_limit_of_the_processes(
    train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick twin is `test_two_processes_make_the_run_of_one`."""
    save = saving.save_checkpoint

    def slowly(run: Any, step: int, contents: Any, **options: Any) -> Path:
        time.sleep(1.0 if step == 4 else 0.0)
        return save(run, step, contents, **options)

    monkeypatch.setattr(saving, "save_checkpoint", slowly)
    outcome = train("--out", "run", "--devices", 2, "--set", "training.parallel.timeout_minutes=0.01")
    assert outcome.code == 0, outcome.err


@pytest.mark.slow
def test_a_loss_that_is_nan_ends_all_processes_once_with_4(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick twin is `cli/test_cli_workers.py::test_the_failure_that_ended_a_group`."""
    nan_at(monkeypatch, 5, 6, 7)
    outcome = train("--out", "run", "--devices", 2)
    assert outcome.code == 4 and outcome.err.count("error: ") == 1 and "rank" not in outcome.err
    assert "error: the loss is not finite at step 7, 3 steps in a row" in outcome.err


@pytest.mark.slow
def test_memory_that_runs_out_in_one_process_ends_all_with_5(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick twin is
    `cli/test_cli_workers.py::test_the_failure_of_a_worker_has_the_message_and_the_code_of_its_error`.
    """

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    at_step(monkeypatch, 3, 1, out_of_memory)
    outcome = train("--out", "run", "--devices", 2)
    assert outcome.code == 5 and "error: rank 1: out of memory" in outcome.err


@pytest.mark.slow
def test_a_process_that_hangs_is_named(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the 30 seconds of torchrun's library; the quick twin is `test_the_failure_that_ended_a_group`."""
    at_step(monkeypatch, 3, 1, lambda: time.sleep(LIMIT_SECONDS))
    outcome = train("--out", "run", "--devices", 2, "--set", "training.parallel.timeout_minutes=0.02")
    assert outcome.code == 1 and "error: rank 1: this process does not answer" in outcome.err


@pytest.mark.slow
def test_data_that_one_process_cannot_read_ends_all_with_2_and_is_saved(
    train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick twin is
    `cli/test_cli_workers.py::test_the_failure_of_a_worker_has_the_message_and_the_code_of_its_error`.
    """
    read = PlannedBatches.next

    def damaged(batches: PlannedBatches) -> Any:
        if batches.cursor()["batch"] == 5 and os.environ["RANK"] == "1":
            raise InputError("tokens.bin is damaged")
        return read(batches)

    monkeypatch.setattr(PlannedBatches, "next", damaged)
    outcome = train("--out", "run", "--devices", 2)
    assert outcome.code == 2 and outcome.err.count("error: ") == 1
    assert "error: rank 1: tokens.bin is damaged" in outcome.err and latest("run").name == "step-00000005"


def test_processes_that_differ_are_refused_at_the_start(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read or written; that a refusal of one process ends all is of `test_cli_workers.py`."""
    store, options = distributed.HashStore(), TrainOptions(config=tiny_recipe)

    def compare(rank: int) -> None:
        together.require_same_command(options, Worker(rank=rank, world_size=2, store=store))

    compare(0)
    compare(1)
    for name, value, message in (
        ("__version__", "0.0", "version of tformer: found 0.0"),
        ("_digest", lambda path: "another", f"{tiny_recipe}: found another"),
    ):
        store = distributed.HashStore()
        compare(0)
        with monkeypatch.context() as patch, pytest.raises(InputError, match=message) as caught:
            patch.setattr(together, name, value)
            compare(1)
        assert "in the process of rank 1" in caught.value.message


def test_standard_input_and_several_processes_exclude_each_other(cli: Cli, tiny_recipe: Path) -> None:
    outcome = cli("train", "--config", tiny_recipe, "--data", "-", "--devices", 2)
    assert outcome.code == 2 and "standard input can be read by one process only" in outcome.err


def test_a_dry_run_starts_no_processes(train: Cli) -> None:
    assert train("--dry-run", "--devices", 64).code == 0


def test_one_process_says_that_options_of_several_have_no_effect(train: Cli) -> None:
    plain = train("--max-steps", 1, "--out", "plain")
    outcome = train("--max-steps", 1, "--out", "run", "--parallel", "fsdp", "--devices", 1, "--max-restarts", 2)
    assert outcome.code == 0
    assert "one process: --parallel fsdp, --max-restarts 2 without effect (several: --devices N)" in outcome.err
    assert "without effect" not in plain.err and "parallel:" not in plain.err + outcome.err
