"""The fault plan: whatever call fails or is the last, a checkpoint can be loaded, and the disk does not fill up."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.conftest import Disk, Killed, save, tree, weights_at
from tests.quick import first_is_quick
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.support import files
from tformer.support.errors import StorageError

KEEP = 2
MODES = ["kill", "kill_after", "enospc", "eio", "full"]
"""The quick tests try each of them once."""


def starting_with(*quick: str) -> Any:
    """`parametrize` by the modes, of which these are quick."""
    return first_is_quick("mode", sorted(MODES, key=lambda mode: mode not in quick), quick=len(quick))


def folders(run: RunDirectory) -> list[str]:
    """Everything on disk that may hold a checkpoint's weight, finished or not."""
    return [path.name for path in run.checkpoints_path.iterdir() if path.is_dir()]


def assert_loadable(path: Path) -> int:
    checkpoint = read_checkpoint(path)
    for name, tensor in checkpoint.weights().items():
        assert torch.equal(tensor, weights_at(checkpoint.step)[name])
    assert checkpoint.optimizer() and checkpoint.trainer == {"step": checkpoint.step}
    return checkpoint.step


def restart(run: RunDirectory) -> RunDirectory:
    """The next process: the kernel has released the dead one's lock."""
    run.close()
    return RunDirectory.create(run.path, arch="gpt", preset="tiny", resume=True)


def survive(folder: Path, disk: Disk, mode: str, *, before: list[int], step: int, **changes: Any) -> int:
    """Saves `step` after `before` with a fault at call 1, 2, … until a save is not hit; returns how many there were."""
    with RunDirectory.create(folder / "start", arch="gpt", preset="tiny") as run:
        for earlier in before:
            save(run, earlier, score=5.0 - earlier % 2, keep_last=KEEP)
    for call in range(1, 400):
        disk.arm(0, "none")
        shutil.copytree(folder / "start", folder / str(call))
        run = RunDirectory.open(folder / str(call), lock=True)
        disk.arm(call, mode)
        try:
            save(run, step, keep_last=KEEP, **changes)
        except (Killed, StorageError) as error:
            if isinstance(error, StorageError):
                assert not [name for name in folders(run) if name.startswith(".tmp-step")], "temporary left behind"
        finished = not disk.hit
        disk.arm(0, "none")

        assert len(folders(run)) <= KEEP + 2
        last = run.latest()
        found = assert_loadable(last) if last else None
        assert found in {before[-1] if before else None, step}
        assert before == [] or assert_loadable(run.best() or Path()) > 0

        run = restart(run)  # sweeps, corrects the pointers
        assert not [name for name in folders(run) if not name.startswith("step-")]
        if run.latest():
            assert (run.checkpoints_path / "latest").read_text().strip() == run.latest().name  # type: ignore[union-attr]
            assert (run.checkpoints_path / "best").read_text().strip() == run.best().name  # type: ignore[union-attr]
        assert (assert_loadable(run.latest()) if run.latest() else None) == found  # type: ignore[arg-type]
        again = save(run, step, keep_last=KEEP, **changes)
        assert assert_loadable(again) == step and run.latest() == again
        assert len(folders(run)) <= KEEP + 1
        run.close()
        if finished:
            return call - 1
    raise AssertionError("the save never finished")


@starting_with("enospc", "kill_after")
def test_first_save_survives_a_fault_at_every_call(tmp_path: Path, disk: Disk, mode: str) -> None:
    assert survive(tmp_path, disk, mode, before=[], step=1) > 20


@starting_with("kill")
def test_save_with_pruning_survives_a_fault_at_every_call(tmp_path: Path, disk: Disk, mode: str) -> None:
    assert survive(tmp_path, disk, mode, before=[1, 2, 3], step=4, score=1.0) > 30


@starting_with("eio", "full")
def test_replacing_the_same_step_survives_a_fault_at_every_call(tmp_path: Path, disk: Disk, mode: str) -> None:
    assert survive(tmp_path, disk, mode, before=[1, 3], step=3, target_tokenizer_json='{"side": "target"}') > 30


def test_two_kills_in_a_row_do_not_fill_the_disk(run: RunDirectory, disk: Disk) -> None:
    for step in (1, 2, 3):
        save(run, step, keep_last=KEEP, score=float(step))
    for step in range(4, 12):  # without a restart in between, so nothing else sweeps
        disk.arm(9 + step, "kill")
        with pytest.raises(Killed):
            save(run, step, keep_last=KEEP, score=float(step))
        assert len(folders(run)) <= KEEP + 2
    disk.arm(0, "none")
    assert_loadable(run.latest() or Path())


def test_order_of_writes_syncs_and_renames(run: RunDirectory, disk: Disk) -> None:
    """Durability is an order that kill -9 cannot test: data, then names inside, then the name of the folder."""
    save(run, 1)
    run.append_metrics({"step": 2})
    disk.arm(0, "none")
    target = save(run, 2, keep_last=1)
    calls = [call for call in disk.calls if call[0] != "write"]
    written = ["model.safetensors", "optimizer.safetensors", "recipe.yaml", "tokenizer.json", "trainer.json"]
    temporary = ".tmp-step-00000002"
    expected = [
        ("fsync", "metrics.jsonl"),
        ("mkdir", temporary),
        *[(operation, name) for name in [*written, "manifest.json"] for operation in ("create", "fsync")],
        ("fsync_dir", temporary),
        ("rename", temporary),
        ("fsync_dir", "checkpoints"),
        *[
            (operation, name)
            for pointer in ("latest", "best")
            for operation, name in [
                ("create", f".tmp-{pointer}-{os.getpid()}"),
                ("fsync", f".tmp-{pointer}-{os.getpid()}"),
                ("rename", f".tmp-{pointer}-{os.getpid()}"),
                ("fsync_dir", "checkpoints"),
            ]
        ],
        ("unlink", "manifest.json"),
        ("fsync_dir", "step-00000001"),
    ]
    assert calls[: len(expected)] == expected
    assert calls[len(expected) :] == [*[("unlink", name) for name in written], ("rmdir", "step-00000001")]
    assert target.name == "step-00000002"


def test_the_records_of_a_run_are_synced_before_its_checkpoint(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(files, "sync_file", lambda path: synced.append((path.name, bool(run.checkpoints()))))
    run.append_metrics({"step": 1})
    run.append_sample(1, "text")
    save(run, 1)
    assert synced == [("metrics.jsonl", False), ("samples.txt", False)]


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; returns its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("call", [1, 2, 6, 12, 18, 24, 30])
def test_sigkill_at_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The same with a real process and a real signal."""

    def train() -> None:
        run = RunDirectory.create(tmp_path / "run", arch="gpt", preset="tiny")
        save(run, 1)
        calls = 0

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args)

            return counted

        for name in ("mkdir", "create", "write", "fsync", "fsync_dir", "rename", "unlink"):
            monkeypatch.setattr(files, name, wrap(getattr(files, name)))
        save(run, 2)

    status = in_child(train)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    with RunDirectory.create(tmp_path / "run", arch="gpt", preset="tiny", resume=True) as run:
        assert assert_loadable(run.latest() or Path()) in (1, 2)
        assert [name for name in os.listdir(run.checkpoints_path) if name.startswith(".tmp")] == []


def test_full_disk_names_bytes_and_path_and_leaves_everything(run: RunDirectory, disk: Disk) -> None:
    save(run, 1)
    before = tree(run.path)
    disk.arm(4, "full")
    with pytest.raises(StorageError) as caught:
        save(run, 2)
    assert caught.value.exit_code == 3
    assert "bytes needed" in caught.value.message and "step-00000002" in caught.value.message
    assert "step-00000001 is intact" in (caught.value.hint or "")
    assert tree(run.path) == before


def test_too_little_space_is_refused_before_the_first_byte(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1)
    before = tree(run.path)
    monkeypatch.setattr(files, "free_bytes", lambda path: 100)
    monkeypatch.setattr(files, "create", None)
    with pytest.raises(StorageError, match=r"[\d,]+ bytes needed, 100 free"):
        save(run, 2)
    assert tree(run.path) == before


def test_no_inodes(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "has_free_inode", lambda path: False)
    with pytest.raises(StorageError, match="no free inode"):
        save(run, 1)


def test_file_size_limit(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, for real, in a process of its own."""

    def train() -> None:
        import resource

        run = RunDirectory.create(tmp_path / "run", arch="gpt", preset="tiny")
        save(run, 1)
        before = tree(run.path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            save(run, 2, optimizer={"m": torch.zeros(5000)})
        except StorageError as error:
            assert "File too large" in error.message and "bytes needed" in error.message and tree(run.path) == before
            os._exit(33)

    assert os.waitstatus_to_exitcode(in_child(train)) == 33


def test_failed_fsync_is_a_failed_save(run: RunDirectory, disk: Disk) -> None:
    save(run, 1)
    disk.arm(0, "none")
    save(run, 2)
    first = next(i for i, call in enumerate(disk.calls, 1) if call == ("fsync", "model.safetensors"))
    disk.arm(first, "eio")
    with pytest.raises(StorageError, match="Input/output error"):
        save(run, 3)
    assert [entry.step for entry in run.checkpoints()] == [1, 2]


def test_an_interrupt_while_saving_removes_the_temporary(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(run, 2)
    assert folders(run) == ["step-00000001"]
