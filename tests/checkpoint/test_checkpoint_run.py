"""Run directories: names, locks, refusals, records, and nothing that depends on place or clock."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.checkpoint.conftest import Disk, save, tree, umask
from tformer.checkpoint import logs
from tformer.checkpoint.logs import describe_environment
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory, list_runs, writer
from tformer.support import files
from tformer.support.errors import InputError, RunInUseError, StorageError


def create(path: Path, *, resume: bool = False) -> RunDirectory:
    return RunDirectory.create(path, arch="gpt", preset="tiny", resume=resume)


# Names and refusals


def test_default_names_count_up(tmp_path: Path) -> None:
    made = [RunDirectory.create(arch="gpt", preset=preset, runs_dir=tmp_path) for preset in ("tiny", "tiny", None)]
    assert [run.path.name for run in made] == ["gpt-tiny-1", "gpt-tiny-2", "gpt-custom-1"]
    (tmp_path / "gpt-tiny-9").mkdir()
    (tmp_path / "gpt-tiny-x").mkdir()
    assert RunDirectory.create(arch="gpt", preset="tiny", runs_dir=tmp_path).path.name == "gpt-tiny-10"


def test_default_names_are_free_of_races(tmp_path: Path) -> None:
    made: list[RunDirectory] = []
    threads = [
        threading.Thread(target=lambda: made.append(RunDirectory.create(arch="a", preset="b", runs_dir=tmp_path)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.path.name for run in made) == [f"a-b-{n}" for n in range(1, 9)]


def test_names_stay_inside_the_runs_folder(tmp_path: Path) -> None:
    run = RunDirectory.create(arch="../evil", preset="a/../b c", runs_dir=tmp_path / "runs")
    assert run.path.parent == tmp_path / "runs" and run.path.is_dir()


def test_resume_without_a_path_takes_the_last_of_that_name(tmp_path: Path) -> None:
    for _ in range(2):
        RunDirectory.create(arch="gpt", preset="tiny", runs_dir=tmp_path).close()
    resumed = RunDirectory.create(arch="gpt", preset="tiny", runs_dir=tmp_path, resume=True)
    assert resumed.path.name == "gpt-tiny-2"
    fresh = RunDirectory.create(arch="gpt", preset="small", runs_dir=tmp_path, resume=True)
    assert fresh.path.name == "gpt-small-1"


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(InputError, match=r"not empty \(it holds thesis.txt\)") as caught:
        create(tmp_path / "run")
    assert "--resume" in (caught.value.hint or "") and tree(tmp_path) == before


def test_an_earlier_run_is_refused_unless_resumed(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        save(run, 1)
    before = tree(tmp_path)
    with pytest.raises(InputError, match="not empty"):
        create(tmp_path / "run")
    assert tree(tmp_path).keys() == before.keys()
    with create(tmp_path / "run", resume=True) as run:
        assert run.latest() is not None


def test_resume_of_nothing_starts_it(tmp_path: Path) -> None:
    with create(tmp_path / "new" / "run", resume=True) as run:
        assert run.latest() is None and run.checkpoints() == [] and run.best() is None


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="is a file"):
            create(path)


def test_open_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run directory"):
        RunDirectory.open(tmp_path)
    create(tmp_path / "run").close()
    before = tree(tmp_path)
    RunDirectory.open(tmp_path / "run")
    assert tree(tmp_path) == before and list_runs(tmp_path) == [tmp_path / "run"]


# Locks


def test_a_second_writer_is_refused_and_named(tmp_path: Path) -> None:
    with create(tmp_path / "run"):
        for resume in (True, False):
            with pytest.raises(RunInUseError, match=f"in use by process {os.getpid()}") as caught:
                create(tmp_path / "run", resume=resume)
            assert caught.value.exit_code == 6
    create(tmp_path / "run", resume=True).close()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    held = multiprocessing.get_context("fork").Event()

    def hold() -> None:
        create(tmp_path / "run")
        held.set()
        threading.Event().wait(60)

    child = multiprocessing.get_context("fork").Process(target=hold)
    child.start()
    assert held.wait(30)
    with pytest.raises(RunInUseError, match=f"process {child.pid}"):
        create(tmp_path / "run", resume=True)
    child.kill()
    child.join()
    create(tmp_path / "run", resume=True).close()


def test_readers_need_no_lock(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        save(run, 1)
        assert RunDirectory.open(tmp_path / "run").latest() == run.latest()


# Storage


def test_check_writable_passes_and_leaves_nothing(run: RunDirectory) -> None:
    before = tree(run.path)
    run.check_writable(1000)
    assert tree(run.path) == before


def test_check_writable_names_bytes_and_path(run: RunDirectory) -> None:
    with pytest.raises(StorageError, match=r"1,000,000,000,000,000,000 bytes needed") as caught:
        run.check_writable(10**18)
    assert str(run.path) in caught.value.message and caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EROFS, "Read-only"), (errno.ENOSPC, "No space"), (errno.EACCES, "denied")]
)
def test_check_writable_probes_by_writing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(descriptor: int, data: bytes) -> None:
        raise OSError(number, "injected")

    before = tree(run.path)
    monkeypatch.setattr(files, "write", refuse)
    with pytest.raises(StorageError, match=f"{words}.*12,345 bytes needed") as caught:
        run.check_writable(12_345)
    assert caught.value.hint and tree(run.path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(StorageError, match="Permission denied"):
            create(tmp_path / "run")
    finally:
        tmp_path.chmod(0o755)


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path, disk: Disk) -> None:
    disk.arm(1, "enospc")
    with pytest.raises(StorageError, match="run: No space left"):
        create(tmp_path / "run")
    with pytest.raises(StorageError):
        create(Path("/proc/no-such-place/run"))
    disk.arm(0, "none")


def test_umask_is_honoured(tmp_path: Path) -> None:
    for mask, file_mode, folder_mode in ((0o022, 0o644, 0o755), (0o007, 0o660, 0o770)):
        with umask(mask), create(tmp_path / oct(mask)) as run:
            save(run, 1)
            run.write_recipe("a: 1\n")
            run.append_metrics({"step": 1})
            run.write_environment(describe_environment(device="cpu", data_fingerprint=None))
        for path in run.path.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (folder_mode if path.is_dir() else file_mode), path


def test_temporaries_are_swept_at_the_next_start(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        save(run, 1)
    (tmp_path / "run" / ".tmp-recipe.yaml").write_text("half")
    (run.checkpoints_path / ".tmp-step-00000002").mkdir()
    (run.checkpoints_path / ".tmp-step-00000002" / "model.safetensors").write_text("half")
    (run.checkpoints_path / "step-00000003").mkdir()  # its removal was cut short after the manifest
    (run.checkpoints_path / "step-00000003" / "trainer.json").write_text("{}")
    (run.checkpoints_path / "notes.txt").write_text("the user's")
    create(tmp_path / "run", resume=True).close()
    assert sorted(os.listdir(run.checkpoints_path)) == ["best", "latest", "notes.txt", "step-00000001"]
    assert not (tmp_path / "run" / ".tmp-recipe.yaml").exists()


def test_atomic_write_follows_a_link_once_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("old")
    (tmp_path / "a.txt").symlink_to(tmp_path / "real" / "a.txt")
    files.write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").is_symlink() and (tmp_path / "real" / "a.txt").read_text() == "new"


@pytest.mark.parametrize("call", range(1, 6))
def test_atomic_write_keeps_the_old_file_on_failure(tmp_path: Path, disk: Disk, call: int) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    disk.arm(call, "enospc")
    with pytest.raises(StorageError, match=r"a\.txt"):
        files.write_text(path, "new")
    assert os.listdir(tmp_path) == ["a.txt"] and path.read_text() in ("old", "new")


# Place and time


def test_a_moved_directory_resumes(tmp_path: Path) -> None:
    with create(tmp_path / "a") as run:
        save(run, 1, score=1.0)
        save(run, 2, score=2.0)
        assert str(tmp_path) not in "".join(path.read_text("latin-1") for path in run.path.rglob("*") if path.is_file())
    os.rename(tmp_path / "a", tmp_path / "b")
    with create(tmp_path / "b", resume=True) as run:
        assert run.latest() == tmp_path / "b" / "checkpoints" / "step-00000002"
        assert run.best() == tmp_path / "b" / "checkpoints" / "step-00000001"
        assert read_checkpoint(run.latest()).step == 2  # type: ignore[arg-type]


def test_a_linked_run_directory_works(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "far")
    with create(tmp_path / "run") as run:
        save(run, 1)
    assert (tmp_path / "far" / "checkpoints" / "step-00000001").is_dir() and (tmp_path / "run").is_symlink()


# Records


def test_metrics_are_one_write_a_line(run: RunDirectory, disk: Disk) -> None:
    disk.arm(0, "none")
    run.append_metrics({"step": 1, "loss": 2.5, "text": "ä\n"})
    assert [name for name, _ in disk.calls] == ["open_append", "write", "fsync_dir"]  # the file is new
    assert run.metrics_path.read_text(encoding="utf-8") == '{"step": 1, "loss": 2.5, "text": "ä\\n"}\n'
    disk.arm(0, "none")
    run.append_metrics({"step": 2})
    assert [name for name, _ in disk.calls] == ["open_append", "write"]


def test_numbers_that_json_lacks_become_null(run: RunDirectory) -> None:
    run.append_metrics({"step": 1, "loss": float("nan"), "more": [float("inf"), {"a": float("-inf")}]})
    assert json.loads(run.metrics_path.read_text(), parse_constant=pytest.fail) == {
        "step": 1, "loss": None, "more": [None, {"a": None}],
    }  # fmt: skip


def test_metrics_are_cut_back_to_a_step(run: RunDirectory) -> None:
    for step in (1, 2, 3, 4):
        run.append_metrics({"step": step})
    with open(run.metrics_path, "ab") as stream:
        stream.write(b'not json\n{"step": 2, "valid": 1}\n[1]\n{"step": 1, "lo')
    logs.cut_metrics(run.metrics_path, 2)
    assert run.metrics_path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "valid": 1}\n'
    inode = run.metrics_path.stat().st_ino
    logs.cut_metrics(run.metrics_path, 2)
    assert run.metrics_path.stat().st_ino == inode  # nothing to drop, nothing rewritten
    assert list(run.metrics()) == [{"step": 1}, {"step": 2}, {"step": 2, "valid": 1}]
    logs.cut_metrics(run.metrics_path, 0)
    assert run.metrics_path.read_text() == ""


def test_cutting_metrics_that_are_not_there(run: RunDirectory) -> None:
    logs.cut_metrics(run.metrics_path, 5)
    assert not run.metrics_path.exists() and list(run.metrics()) == []


@pytest.mark.parametrize("call", range(1, 6))
def test_cutting_metrics_is_atomic(run: RunDirectory, disk: Disk, call: int) -> None:
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
    before = run.metrics_path.read_bytes()
    disk.arm(call, "eio")
    with pytest.raises(StorageError):
        logs.cut_metrics(run.metrics_path, 1)
    assert run.metrics_path.read_bytes() in (before, b'{"step": 1}\n')


def test_a_line_cut_short_by_a_full_disk_is_taken_back(run: RunDirectory, disk: Disk) -> None:
    run.append_metrics({"step": 1})
    disk.arm(2, "full")
    with pytest.raises(StorageError, match=r"metrics\.jsonl: No space left on device \(12 bytes needed\)"):
        run.append_metrics({"step": 2})
    assert run.metrics_path.read_text() == '{"step": 1}\n'


def test_samples_are_appended_and_cut(run: RunDirectory) -> None:
    run.append_sample(1, "once\nupon")
    run.append_sample(2, "a\n=== step 1 ===\ntime")
    run.append_sample(3, "late")
    run.rewind(2)
    text = (run.path / "samples.txt").read_text()
    assert text == "=== step 1 ===\nonce\nupon\n\n=== step 2 ===\na\n === step 1 ===\ntime\n\n"


def test_rewind_drops_what_lies_beyond(run: RunDirectory) -> None:
    for step in (1, 2, 3):
        save(run, step, keep_last=5, score=float(-step))
        run.append_metrics({"step": step})
    run.rewind(2)
    assert [entry.step for entry in run.checkpoints()] == [1, 2] and list(run.metrics()) == [{"step": 1}, {"step": 2}]
    assert (run.checkpoints_path / "best").read_text() == "step-00000002\n"
    run.rewind(0)
    assert run.checkpoints() == [] and not (run.checkpoints_path / "latest").exists()


def test_environment(run: RunDirectory) -> None:
    assert run.environment() is None
    run.write_environment(
        describe_environment(device="cpu, 2 threads", data_fingerprint="abc", command=["tformer", "train"])
    )
    found = run.environment()
    assert found is not None
    assert found["device"] == "cpu, 2 threads" and found["data_fingerprint"] == "abc"
    assert found["command"] == ["tformer", "train"] and {"torch", "tformer", "numpy"} <= found["versions"].keys()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["git_commit"] is None or len(found["git_commit"]) == 40


def test_recipe_and_tokenizer_lie_at_the_root(run: RunDirectory) -> None:
    run.write_recipe("seed: 1\n")
    run.write_tokenizer("{}")
    assert (run.path / "recipe.yaml").read_text() == "seed: 1\n" and (run.path / "tokenizer.json").read_text() == "{}"


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, tformer; assert tformer.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_on_a_file_system_without_locks_is_written_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    create(tmp_path / "run").close()
    monkeypatch.setattr("fcntl.flock", refuse)
    assert writer(tmp_path / "run") is None
    with pytest.raises(StorageError, match="locks available"):
        create(tmp_path / "run", resume=True)
